"""The files of a checkpoint: damage is named, nothing in them is run, and a crash at any write leaves the last good one."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case
from pool import RankError, RankPool, this_rank
from safetensors.torch import load_file
from test_checkpoint import BEFORE, case_of, resume, run_and_save, start, steps, write

from meshwright.core.errors import CheckpointError, InputError
from meshwright.core.files import disk
from meshwright.core.files.disk import FileFacts, read_facts
from meshwright.runtime.program import Program
from meshwright.training import checkpoint
from meshwright.training.checkpoint import restore
from meshwright.training.contents import read_contents
from meshwright.training.manifest import Manifest, read_manifest
from meshwright.training.plain_values import like, to_plain

Pools = Callable[[int], RankPool]
CASE = case_of("odd", 3)
NEWEST = "step-00000003"


def two_checkpoints(case: Case, folder: Path) -> list[float]:
    """Of steps 2 and 3; the losses from step 2 on."""
    program = start(case)
    steps(program, case, 0, BEFORE)
    write(program, BEFORE, folder)
    found = steps(program, case, BEFORE, 1)
    write(program, BEFORE + 1, folder)
    return found + steps(program, case, BEFORE + 1, 2)


def resume_aloud(case: Case, folder: Path) -> tuple[int, list[float], list[str]]:
    said: list[str] = []
    program = start(case, seed=99)
    progress = restore(program, program.plan.graph, folder, this_rank(), said.append)
    return progress.step, steps(program, case, progress.step, 2), said


# What is in it


def test_tensors_are_safetensors_and_the_rest_is_json(pool: Pools, tmp_path: Path) -> None:
    pool(1).run(run_and_save, case_of("odd", 0, 1), tmp_path)
    folder = tmp_path / "step-00000002"
    contents = read_contents(folder, read_manifest(folder))
    tensors = load_file(folder / "rank-00000.safetensors")
    assert set(tensors) == set(contents.tensors), "one process writes whole tensors, under their own names"
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == contents.tensors[name].shape
    for name in ("manifest.json", "progress.json", "contents.json"):
        json.loads((folder / name).read_text())
    manifest = Manifest.load(folder / "manifest.json")
    assert set(manifest.files) | {"manifest.json"} == {path.name for path in folder.iterdir()}
    for name, facts in manifest.files.items():
        assert read_facts(folder / name) == facts


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.1, float("inf"), float("nan"), "text", (0.9, 0.95), [1, [2.5, None]], {"a": {"b": (1,)}}]
)
def test_values_come_back_as_they_were(value: object) -> None:
    found = like(value, json.loads(json.dumps(to_plain("name", value), allow_nan=False)))
    assert repr(found) == repr(value)


def test_a_tensor_among_settings_comes_back_as_one() -> None:
    own = torch.tensor(0.0, dtype=torch.float64)
    assert torch.equal(like(own, to_plain("lr", torch.tensor(0.25))), torch.tensor(0.25, dtype=torch.float64))


def test_what_json_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"'optimizer.settings.weight' is a set, which cannot be written as JSON"):
        to_plain("optimizer.settings.weight", [("betas", {1, 2})])


# Damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": cut, "gone": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["rank-00001.safetensors", "contents.json", "progress.json", "manifest.json"])
def test_a_damaged_one_is_named_and_the_one_before_it_taken(
    pool: Pools, tmp_path: Path, name: str, damage: str
) -> None:
    expected, _ = pool(2).run(two_checkpoints, CASE, tmp_path)
    victim = tmp_path / NEWEST / name
    before = read_facts(victim)
    DAMAGES[damage](victim)
    first, second = pool(2).run(resume_aloud, CASE, tmp_path)
    assert first[:2] == second[:2] == (BEFORE, expected[:2])
    if (name, damage) == ("manifest.json", "gone"):
        assert first[2] == [], "without its manifest it is no checkpoint"
        return
    (said,) = first[2]
    assert said.startswith(f"warning: checkpoint {NEWEST} is damaged: {victim}")
    assert said.endswith(f"it is now {NEWEST}.damaged; going on from step-00000002")
    assert (tmp_path / f"{NEWEST}.damaged").is_dir()
    if name != "manifest.json":
        assert words_of(damage, tmp_path / f"{NEWEST}.damaged" / name, before) in said


def words_of(damage: str, victim: Path, before: FileFacts) -> str:
    if damage == "gone":
        return f"{victim.name} is gone"
    if damage == "cut":
        return f"has 100 bytes, and had {before.size_bytes} when it was written"
    return f"has checksum {read_facts(victim).checksum}, and had {before.checksum} when it was written"


def refusal(pool: RankPool, case: Case, folder: Path) -> str:
    with pytest.raises(RankError) as caught:
        pool.run(resume, case, folder)
    assert len(caught.value.errors) == pool.num_ranks, "a rank was left waiting"
    assert len(set(caught.value.errors.values())) == 1
    return caught.value.errors[0]


def test_where_all_are_damaged_all_are_named(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(two_checkpoints, CASE, tmp_path)
    for path in list(tmp_path.iterdir()):
        flip(path / "rank-00000.safetensors")
    said = refusal(pool(2), CASE, tmp_path)
    assert said.startswith(f"CheckpointError: no checkpoint in {tmp_path} is whole: {tmp_path}/{NEWEST}/rank-00000")
    assert "step-00000002/rank-00000.safetensors has checksum" in said


# Other versions


def test_one_of_format_1_is_refused_by_its_version(pool: Pools, tmp_path: Path) -> None:
    """Also where an attacker pickled something: it is not looked at."""
    folder = tmp_path / "step-00000004"
    folder.mkdir()
    facts = {"format": 1, "step": 4, "cursor": 32, "plan": "x", "graph": "y", "num_ranks": 2}
    folder.joinpath("progress.json").write_text(json.dumps(facts))
    marker = tmp_path / "ran"
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        folder.joinpath(name).write_bytes(payload(marker))
    said = refusal(pool(2), CASE, tmp_path)
    assert said.startswith(
        f"CheckpointError: {folder} is of format 1, pickled by an earlier version; this version reads"
    )
    assert not marker.exists()


def test_one_of_a_later_format_is_refused_by_its_version(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(two_checkpoints, CASE, tmp_path)
    path = tmp_path / NEWEST / "manifest.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    said = refusal(pool(2), CASE, tmp_path)
    assert "this version reads format 2; the file is from another version" in said
    assert (tmp_path / NEWEST).is_dir(), "it is not damaged, and stays where it is"


# A stranger's checkpoint


class Payload:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.marker, "w")


def payload(marker: Path) -> bytes:
    """A pickle that makes a file when it is loaded."""
    return pickle.dumps(Payload(str(marker)))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """With a manifest that agrees."""
    (folder / name).write_bytes(data)
    manifest = Manifest.load(folder / "manifest.json")
    Manifest(files={**manifest.files, name: read_facts(folder / name)}).save(folder / "manifest.json")


def test_the_payload_would_run(tmp_path: Path) -> None:
    pickle.loads(payload(tmp_path / "ran")).close()
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "contents.json", "progress.json", "manifest.json"])
def test_nothing_in_a_checkpoint_is_run(pool: Pools, tmp_path: Path, name: str) -> None:
    pool(2).run(run_and_save, CASE, tmp_path)
    folder, marker = tmp_path / "step-00000002", tmp_path / "ran"
    if name == "manifest.json":
        (folder / name).write_bytes(payload(marker))
    else:
        replace_file(folder, name, payload(marker))
    said = refusal(pool(2), CASE, tmp_path)
    assert str(folder) in said
    assert not marker.exists()


def test_pickles_beside_its_files_are_not_looked_at(pool: Pools, tmp_path: Path) -> None:
    expected, _ = pool(2).run(run_and_save, CASE, tmp_path)
    folder, marker = tmp_path / "step-00000002", tmp_path / "ran"
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_bytes(payload(marker))
    for _, losses in pool(2).run(resume, CASE, tmp_path):
        assert losses == expected
    assert not marker.exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rank-00000.safetensors", "../outside.safetensors", "matching regex"),
        ("rank-00000.safetensors", "/etc/passwd", "matching regex"),
        ('"sizes":[', '"sizes":[9,', "dims, the whole has"),
        ('"offsets":[0', '"offsets":[99', "is outside of it"),
        ('"F64"', '"OBJECT"', "is of an unknown dtype, OBJECT"),
        ('"boxes":[', '"code":"x","boxes":[', "unknown field `code`"),
    ],
)
def test_contents_that_lie_are_refused(pool: Pools, tmp_path: Path, old: str, new: str, words: str) -> None:
    pool(1).run(run_and_save, case_of("odd", 0, 1), tmp_path)
    folder = tmp_path / "step-00000002"
    text = (folder / "contents.json").read_text()
    assert old in text
    replace_file(folder, "contents.json", text.replace(old, new, 1).encode())
    assert words in refusal(pool(1), case_of("odd", 0, 1), tmp_path)


# A crash at any write


OPERATIONS = ("open", "write", "fsync", "rename")


class BadDisk:
    """Takes so many operations; the next one ends the process, or fails and so do all after it. Stands in for `os`."""

    def __init__(self, num_good: int, kind: str) -> None:
        self.num_good, self.kind, self.num_done = num_good, kind, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return partial(self._call, real) if name in OPERATIONS else real

    def _call(self, real: Callable[..., Any], *arguments: Any) -> Any:
        self.num_done += 1
        if self.num_done <= self.num_good:
            return real(*arguments)
        if self.kind == "kill":
            os._exit(9)
        raise OSError(errno.ENOSPC, "No space left on device")


ONE = case_of("odd", 0, 1)


def save_with_a_bad_disk(program: Program, num_good: int, kind: str, folder: Path) -> tuple[str, int]:
    """Again a checkpoint of a step that has one; what was said, and how many operations there were."""
    bad = BadDisk(num_good, kind)
    with mock.patch.object(disk, "os", bad):
        try:
            write(program, BEFORE + 1, folder, keep=1)
        except CheckpointError as error:
            return str(error), bad.num_done
    return "", bad.num_done


def fail_everywhere(folder: Path) -> list[tuple[str, list[str], int, bool]]:
    """At each operation: what was said, what is in the folder, and what can be restored from it."""
    program, other = start(ONE), start(ONE, seed=99)
    steps(program, ONE, 0, BEFORE)
    found, said = [], "not yet"
    while said:
        write(program, BEFORE, folder)
        write(program, BEFORE + 1, folder)
        said, _ = save_with_a_bad_disk(program, len(found), "fail", folder)
        names = sorted(path.name for path in folder.iterdir())
        step = restore(other, other.plan.graph, folder, this_rank()).step
        pairs = zip(program.module.parameters(), other.module.parameters(), strict=True)
        found.append((said, names, step, all(torch.equal(one, same) for one, same in pairs)))
        shutil.rmtree(folder)
    return found


def test_a_disk_that_fails_at_any_write(pool: Pools, tmp_path: Path) -> None:
    *failed, last = pool(1).run(fail_everywhere, tmp_path / "checkpoints")[0]
    assert len(failed) > 15
    assert last == ("", [NEWEST], BEFORE + 1, True)
    for said, names, step, is_same in failed:
        assert "OSError: [Errno 28] No space left on device; the previous checkpoint, " in said
        assert not [name for name in names if name.endswith(".draft")]
        assert (step, is_same) == (BEFORE + 1, True)


def save_and_die(place: int, folder: Path) -> None:
    program = start(ONE)
    steps(program, ONE, 0, BEFORE)
    write(program, BEFORE, folder)
    write(program, BEFORE + 1, folder)
    save_with_a_bad_disk(program, place, "kill", folder)


@pytest.mark.parametrize("place", [0, 2, 4, 8, 12, 16, 17, 18, 19, 20, 21])
def test_a_process_that_is_killed_while_it_writes(pool: Pools, tmp_path: Path, place: int) -> None:
    with pytest.raises(RankError, match="ended with exit code 9"):
        pool(1).run(save_and_die, place, tmp_path)
    ((step, losses, said),) = pool(1).run(resume_aloud, ONE, tmp_path)
    assert (step, said, len(set(losses))) == (BEFORE + 1, [], 2)


def test_nothing_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no checkpoint to resume from"):
        checkpoint.check_same_model(tmp_path, "graph", dict)


def test_where_none_can_be_read_each_is_named_before_ranks_start(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(two_checkpoints, CASE, tmp_path)
    for path in tmp_path.iterdir():
        file = path / "progress.json"
        file.write_text(re.sub(r'"step": \d+', '"step": -5', file.read_text()))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_same_model(tmp_path, "graph", dict)
    for step in (NEWEST, "step-00000002"):
        assert f"{tmp_path}/{step}/progress.json" in str(caught.value)
