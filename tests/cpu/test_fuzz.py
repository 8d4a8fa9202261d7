"""A hundred mutations of every format (`benchmarks/fuzz.py` runs ten thousand), and whether the fuzzer finds what is planted."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from random import Random

import pytest
from command import Cli
from fuzz import FORMATS
from fuzzing import limits
from fuzzing.mutations import change, mutate

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.files.given_file import read_given
from meshwright.models.source import resolve

ASSETS = Path(__file__).parent.parent / "assets"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_hundred_mutations(kind: str, cli: Cli, tmp_path: Path) -> None:
    done = cli("--mutations", 100, "--seed", 1, "--formats", kind, "--findings", tmp_path, launcher=("-m", "fuzz"))
    assert done.code == 0, done.out + done.err
    name, count, accepted, refused, *bad = done.out.splitlines()[-1].replace(",", "").split()[:7]
    assert (name, int(count)) == ("all", 100)
    assert int(accepted) > 5
    assert int(refused) > 5
    assert bad == ["0", "0", "0"]


@pytest.mark.parametrize(
    "fields", [{"max_position_embeddings": "32"}, {"max_position_embeddings": 10.5}, {"max_position_embeddings": {"a": 1}}]
)  # fmt: skip
def test_lengths_of_a_config_that_are_no_numbers(fields: dict[str, object], tmp_path: Path) -> None:
    _refuse("t5-tiny.json", fields, tmp_path)


@pytest.mark.parametrize("fields", [{"image_size": -16}, {"num_labels": 0, "id2label": {}}, {"num_channels": -3}])
def test_sizes_of_images_that_cannot_be_drawn(fields: dict[str, object], tmp_path: Path) -> None:
    _refuse("vit-tiny.json", fields, tmp_path)


def _refuse(config: str, fields: dict[str, object], folder: Path) -> None:
    found = next(path for path in Path(__file__).parent.parent.rglob(config))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(found.read_text()), **fields}))
    with pytest.raises(MeshwrightError):
        resolve(f"hf:{path}")


@pytest.mark.parametrize("blocks", ["1000000-1-1-1-1", "1-1-1-1-" + "9" * 30])
def test_blocks_of_a_stage_are_limited(blocks: str) -> None:
    with pytest.raises(MeshwrightError, match="blocks"):
        resolve(f"coatnet:blocks={blocks}")


def planted_sleep(number: int) -> None:
    if number == 1:
        time.sleep(3600)


def test_who_sleeps_is_found_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PATIENCE_SECONDS", 0.5)
    _, asleep, after = limits.read_all(range(3), lambda slot: (planted_sleep, lambda: None))
    assert (asleep.kind, after.kind) == ("hang", "accepted")
    assert "in planted_sleep" in asleep.words


def test_who_gets_no_core_is_waited_for() -> None:
    """As beside other work: it is runnable, or further than at the last look. A minute of the CPU is too long, though."""

    class Seen(limits.Life):
        looks = iter([("S", 1), ("S", 1), ("R", 1), ("S", 2), ("S", 2), ("R", 10**6)])

        def _look(self) -> tuple[str, int]:
            return next(self.looks)

    life = Seen(0)
    found = []
    for _ in range(5):
        time.sleep(0.01)
        found.append(life.silent_seconds() >= 0.01)
    assert found == [True, False, False, True, True]


def planted(number: int) -> None:
    if number == 1:
        raise InputError("as it should be")
    if number == 2:
        raise KeyError("a fault")
    if number == 3:
        while True:
            pass
    if number == 4:
        bytearray(4 << 30)
    if number == 5:
        sys.exit(3)


def test_what_is_planted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.2)
    found = list(limits.read_all(range(7), lambda slot: (planted, lambda: None)))
    assert [outcome.number for outcome in found] == list(range(7))
    kinds = [outcome.kind for outcome in found]
    assert kinds == ["accepted", "refused", "traceback", "hang", "memory", "traceback", "accepted"]
    assert "a fault" in found[2].words


def test_a_number_makes_the_same_mutation_again() -> None:
    text = json.dumps({"a": [1, 2, {"b": "text"}], "c": None}).encode()
    made = [mutate(text, ".json", Random(number)) for number in range(50)]
    assert made == [mutate(text, ".json", Random(number)) for number in range(50)]
    assert len(set(made)) > 40
    tree = {"a": [1, {"b": 2}]}
    assert any(change(tree, Random(number)) != tree for number in range(5))
    assert tree == {"a": [1, {"b": 2}]}


# Models that ask for a machine


@pytest.mark.parametrize(
    "name",
    ["gpt:hidden=1000000000000,heads=1", "gpt:layers=1000000", "gpt:seq=1000000000000", "gpt:vocab=" + "9" * 30,
     "mlp:inputs=99999999", "resnet:image=1000000"],
)  # fmt: skip
def test_names_of_models_that_nobody_can_build(name: str) -> None:
    with pytest.raises(Exception, match=r"or less|at most|not a whole number") as error:
        resolve(name)
    assert type(error.value).__module__ == "meshwright.core.errors"


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 10**12), ("num_hidden_layers", 10**6), ("num_hidden_layers", 10**400), ("vocab_size", 10**10),
     ("architectures", {"a": 1}), ("architectures", [1]), ("hidden_size", 0)],
)  # fmt: skip
def test_configs_of_models_that_nobody_can_build(key: str, value: object, tmp_path: Path) -> None:
    fields = json.loads(read_given(ASSETS / "llama-tiny.json"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {key: value}))
    with pytest.raises(InputError, match=key):
        resolve(f"hf:{path}")


def test_a_config_that_is_no_file_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="a device"):
        resolve(f"hf:{path}")
    path.unlink()
    path.write_text('{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(InputError, match="nested"):
        resolve(f"hf:{path}")
