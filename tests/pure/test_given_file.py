"""Small files that ask for a machine: each is refused at once, with what, where and the limit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.bounds import LARGEST_FILE_BYTES, MOST_BLOCKS, MOST_NESTED, MOST_RANKS
from meshwright.core.cluster import Cluster, load_cluster
from meshwright.core.errors import InputError
from meshwright.core.names import expand_names
from meshwright.core.plan import Mesh, Plan, Stage
from meshwright.interop.accelerate import load_accelerate
from meshwright.interop.deepspeed import load_deepspeed
from meshwright.rules.divisors import divisors, near_divisors
from meshwright.rules.plain_plan import count_microbatches
from meshwright.training.metrics import parse_line

PLAN: dict[str, Any] = {
    "stages": (Stage(coordinate=0, blocks=("blocks.0-1",)),), "microbatch": 1, "num_microbatches": 1, "global_batch": 1,
}  # fmt: skip


def refused(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as error:
        Plan.load(path)
    return str(error.value)


def edited(**changes: str) -> str:
    """A plan's TOML with values as they are written."""
    fields = {"microbatch": "1", "num_microbatches": "1", "global_batch": "1"} | changes
    return "\n".join(f"{name} = {value}" for name, value in fields.items())


# Files


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    os.mkfifo(path)
    with pytest.raises(InputError, match="a pipe"):
        Plan.load(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="a device"):
        Plan.load(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="a folder"):
        Plan.load(path)


def test_a_file_of_four_gib_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.touch()
    os.truncate(path, 4 << 30)
    with pytest.raises(InputError, match=r"4\.00 GiB.*at most 4\.00 MiB"):
        Plan.load(path)
    os.truncate(path, LARGEST_FILE_BYTES)
    with pytest.raises(InputError, match="not valid JSON"):
        Plan.load(path)


@pytest.mark.parametrize("name", ["plan\0.json", "x" * 300 + ".json"])
def test_a_name_that_no_file_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Plan.load(tmp_path / name)


# What is in them


@pytest.mark.parametrize("deep", [MOST_NESTED, 900, 100_000])
@pytest.mark.parametrize("form", [".json", ".toml"])
def test_lists_in_lists_in_lists(form: str, deep: int, tmp_path: Path) -> None:
    nest = "[" * deep + "]" * deep
    text = f'{{"mesh": {nest}}}' if form == ".json" else f"mesh = {nest}"
    assert f"nested more than {MOST_NESTED} deep" in refused(tmp_path / f"plan{form}", text)


@pytest.mark.parametrize("name", ["[x]", "a.b", "[0]", ""])
def test_keys_that_look_like_places_are_unknown_fields(name: str, tmp_path: Path) -> None:
    assert "unknown field" in refused(tmp_path / "plan.json", f'{{"{name}": "1GiB", "stages": []}}')


@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize("form", [".json", ".toml"])
def test_numbers_of_many_digits(form: str, digits: int, tmp_path: Path) -> None:
    number = "9" * digits
    text = f'{{"microbatch": {number}, "stages": []}}' if form == ".json" else f"stages = []\nmicrobatch = {number}"
    refused(tmp_path / f"plan{form}", text)


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "0", "1.5", "1e400", "2000000000"])
def test_numbers_that_count_nothing(number: str, tmp_path: Path) -> None:
    message = refused(tmp_path / "plan.toml", edited(microbatch=number) + "\nstages = []")
    assert "microbatch" in message or "not valid" in message


@pytest.mark.parametrize("names", ["blocks.0-2000000000", "blocks.0-99999999999999999999", "blocks.0-" + "9" * 5000])
def test_ranges_of_more_blocks_than_a_plan_has(names: str, tmp_path: Path) -> None:
    text = f'stages = [{{coordinate = 0, blocks = ["{names}"]}}]\n' + edited()
    message = refused(tmp_path / "plan.toml", text)
    assert "blocks.0-" in message
    assert len(message) < 400


def test_ranges_that_are_too_many_together() -> None:
    half = f"blocks.0-{MOST_BLOCKS // 2}"
    with pytest.raises(InputError, match=str(MOST_BLOCKS)):
        expand_names([half, half.replace("blocks", "others")])
    assert len(expand_names([f"blocks.0-{MOST_BLOCKS - 1}"])) == MOST_BLOCKS


def test_more_ranks_than_there_are(tmp_path: Path) -> None:
    message = refused(tmp_path / "plan.toml", edited() + "\nstages = []\n[mesh]\ndp = 1024\ntp = 1024\ncp = 2")
    assert str(MOST_RANKS) in message
    with pytest.raises(InputError, match=str(MOST_RANKS)):
        Cluster.named("a100-80g-selene", MOST_RANKS)
    with pytest.raises(InputError, match=str(MOST_RANKS)):
        Cluster.named("a100-80g-selene", 10**9)


def test_a_schedule_of_more_work_than_a_step_has() -> None:
    stages = tuple(Stage(coordinate=number, blocks=(f"blocks.{number}",)) for number in range(2))
    with pytest.raises(ValueError, match="units of work"):
        Plan(**PLAN | {"stages": stages, "mesh": Mesh(pp=2), "num_microbatches": 1 << 20, "global_batch": 1 << 20})


@pytest.mark.parametrize("number", ["nan", "inf", "-1.0", "0.0"])
def test_rates_are_positive_numbers(number: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    text = Cluster.named("a100-80g-selene").to_toml()
    path.write_text(text.replace("peak_flops_per_second = 312000000000000.0", f"peak_flops_per_second = {number}"))
    assert number in path.read_text()
    with pytest.raises(InputError, match="peak_flops_per_second"):
        load_cluster(str(path))


# Other libraries' files


def test_aliases_of_aliases_are_not_followed(tmp_path: Path) -> None:
    lines = ["debug: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match="aliases"):
        load_accelerate(str(path))


@pytest.mark.parametrize(
    "text", ["a: 2020-13-45", "a: " + "9" * 5000, "[" * 5000, "? [a]\n: b", "a: \x00", "- a", "5", ""]
)
def test_yaml_that_python_cannot_hold(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml"):
        load_accelerate(str(path))


@pytest.mark.parametrize("name", ["a" * 5000, "9" * 300, "a\x00b"])
def test_a_named_file_that_no_disk_can_have(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    lines = ["distributed_type: DEEPSPEED", "deepspeed_config:", f"  deepspeed_config_file: {json.dumps(name)}"]
    path.write_text("\n".join(lines))
    with pytest.raises(InputError):
        load_accelerate(str(path))


@pytest.mark.parametrize("number", ["1e999", "NaN", "-1", "2000000000", "[1]", "9" * 400])
def test_batches_of_another_library(number: str, tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(f'{{"train_batch_size": {number}}}')
    with pytest.raises(InputError) as error:
        load_deepspeed(str(path))
    assert len(str(error.value)) < 400


# Lines and divisors


@pytest.mark.parametrize(
    "line",
    ["5", "{}", '{"step": -1}', '{"step": true}', '{"step": 1, "loss": "x"}', '{"step": 1, "loss": [1]}', '{"step": ' + "9" * 5000,
     "[" * 100_000, '{"step": 1, "a": ' + "9" * 400 + "}", b'{"step": 1, "\xff": 1}'],
)  # fmt: skip
def test_lines_that_no_step_leaves(line: str | bytes) -> None:
    with pytest.raises(InputError):
        parse_line(line)


def test_a_line_that_a_step_leaves() -> None:
    assert parse_line('{"step": 3, "loss": NaN, "tokens": 5}')["tokens"] == 5


def test_divisors_of_large_batches() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)
    assert divisors(10**9 + 7) == (1, 10**9 + 7)
    assert near_divisors(12, 5) == (4, 6)
    with pytest.raises(ValueError, match="use 1 or 1000000007"):
        count_microbatches(10**9 + 7, 1, 2)
