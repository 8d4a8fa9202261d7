"""`meshwright compare` as people use it: plans and a peer on the same data; pictures from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import hand_cluster
from command import Cli

from meshwright.core.errors import InputError
from meshwright.models.examples import ImageShape
from meshwright.training.peers import check_peer, peers_named
from meshwright.training.pictures import FolderImages, check_pictures
from meshwright.training.settings import Settings

SETTINGS = """
name = "tiny"
model = "mlp:layers=2,inputs=16,hidden=16"
device = "cpu"
steps = 4
[plan]
global_batch = 8
[data]
source = "example"
validation_every = 0
"""


def study(folder: Path) -> Path:
    """A settings file, on a cluster that need not be measured."""
    cluster = hand_cluster(2).save(folder / "cluster.json")
    path = folder / "study.toml"
    path.write_text(f'cluster = "{cluster}"\n' + SETTINGS.replace("example", "auto"))
    return path


@pytest.mark.slow
def test_plans_and_a_peer_side_by_side(cli: Cli, here: Cli, tmp_path: Path) -> None:
    """Losses agree, all repeats count, and a folder that holds a comparison is left alone."""
    asked = ("--plans", "one,zero3", "--nproc", "1,2", "--with", "torch-ddp", "--repeat", 2)
    ended = cli("compare", study(tmp_path), *asked, "--out", "all", "--json")
    assert ended.code == 0, ended.err
    found = ended.json
    rows = {row["name"]: row for row in found["runs"]}
    assert set(rows) == {"one on 1", "zero3 on 2", "torch-ddp on 2"}
    assert all(row["max_loss_difference"] < 1e-4 for row in rows.values())
    assert all(len(row["step_seconds"]["all"]) >= 4 for row in rows.values())
    assert rows["zero3 on 2"]["memory_bytes"]["optimizer_state"] < rows["one on 1"]["memory_bytes"]["optimizer_state"]
    assert rows["torch-ddp on 2"]["peak_bytes"] is None
    assert found["winner"] in rows
    assert (tmp_path / "all" / "report.html").stat().st_size > 50_000
    assert not list((tmp_path / "all").rglob("checkpoints"))
    again = here("compare", study(tmp_path), "--nproc", "1,2", "--out", tmp_path / "all")
    assert "holds an earlier comparison" in again.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plans", "ddp,zero9"], "unknown word 'zero9'"),
        (["--nproc", "1,x"], "'x' is not a number of ranks"),
        (["--plans", "tp2", "--nproc", "3"], "fewer than two plans are left"),
        (["--with", "deepsped"], "--with deepsped: did you mean 'deepspeed'?"),
    ],
)
def test_wrong_questions(here: Cli, tmp_path: Path, arguments: list[str], said: str) -> None:
    ended = here("compare", study(tmp_path), *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_peers_by_name() -> None:
    assert peers_named("torch,torch-ddp") == ["torch-ddp", "torch-fsdp"]
    with pytest.raises(InputError, match="did you mean"):
        peers_named("acelerate")


def test_what_a_peer_cannot_do(tmp_path: Path) -> None:
    settings = Settings.from_toml(SETTINGS)
    check_peer("torch-ddp", settings, 4)
    with pytest.raises(InputError, match="does not divide over the ranks"):
        check_peer("torch-ddp", settings, 3)
    for line, said in (("microbatch = 1", "in one piece"), ('precision = "bf16"', "compared in fp32")):
        other = Settings.from_toml(SETTINGS.replace("global_batch = 8", f"global_batch = 8\n{line}"))
        with pytest.raises(InputError, match=said):
            check_peer("torch-ddp", other, 2)


# Pictures


def picture_folder(folder: Path, classes: int = 2, count: int = 10) -> Path:
    image = pytest.importorskip("PIL.Image")
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(count):
            image.new("RGB", (20, 12), (255 * label, 0, 0)).save(folder / f"class{label}" / f"{number}.png")
    return folder


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "pictures")
    check_pictures(folder)
    shape = ImageShape(size=8, classes=2)
    train, held = (FolderImages(folder, shape, split) for split in ("train", "validation"))  # type: ignore[arg-type]
    assert (len(train), len(held)) == (18, 2)
    batch = train.batch([0, 17])
    assert batch["pixel_values"].shape == (2, 3, 8, 8)
    assert batch["labels"].tolist() == [0, 1]
    assert torch.equal(batch["pixel_values"][1, 0], torch.ones(8, 8))
    assert torch.equal(batch["pixel_values"][0, 0], -torch.ones(8, 8))


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        check_pictures(tmp_path / "nowhere")
    with pytest.raises(InputError, match="has no pictures"):
        check_pictures(tmp_path)
    folder = picture_folder(tmp_path / "pictures", classes=3)
    with pytest.raises(InputError, match="set classes=3"):
        FolderImages(folder, ImageShape(size=8, classes=2), "train")
    (folder / "class0" / "0.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="not a picture that can be read"):
        FolderImages(folder, ImageShape(size=8, classes=3), "train").batch([0])


def test_an_earlier_comparison_is_moved_aside_where_nobody_chose_the_folder(tmp_path: Path) -> None:
    from meshwright.core.errors import InputError
    from meshwright.jobs.comparison import make_room
    from meshwright.jobs.output import make_console

    folder = tmp_path / "study-compare"
    (folder / "one-on-1").mkdir(parents=True)
    with pytest.raises(InputError, match="holds an earlier comparison"):
        make_room(folder, is_chosen=True, console=make_console(as_json=True))
    make_room(folder, is_chosen=False, console=make_console(as_json=True))
    assert not folder.exists()
    assert (tmp_path / "study-compare.1" / "one-on-1").is_dir()
