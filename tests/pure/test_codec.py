"""Values survive their files; what is wrong in a file is refused with its path; a write is whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import machine
from strategies import hand_graph, hand_plan, plans, quick, values, words

from meshwright.core.cluster import Cluster
from meshwright.core.codec import Value, decode, load, stable_hash, without_none, write_whole
from meshwright.core.errors import InputError, nearest
from meshwright.core.estimate import Estimate, TimeParts
from meshwright.core.graph import Graph
from meshwright.core.pipeline.schedule import Schedule
from meshwright.core.plan import Mesh, Offload, Plan
from meshwright.core.request import PlanRequest
from meshwright.core.result import SearchResult
from meshwright.core.run.trace import Trace
from meshwright.rules.schedules import make_schedule

FILED = (Plan, PlanRequest, Graph, Cluster, Schedule, Estimate, SearchResult, Trace)


@pytest.mark.parametrize("kind", FILED)
@quick
@given(st.data())
def test_every_value_survives_json_and_toml(kind: type[Value], data: st.DataObject) -> None:
    value = data.draw(values(kind))
    assert kind.from_json(value.to_json()) == value
    assert kind.from_toml(value.to_toml()) == value


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_plan_survives_its_file(tmp_path: Path, suffix: str) -> None:
    target = tmp_path / "new" / f"plan{suffix}"
    assert hand_plan().save(target) == target
    assert Plan.load(target) == load(str(target), Plan) == hand_plan()


@pytest.mark.parametrize("name", ["plan.yaml", "plan"])
def test_a_file_that_could_not_be_read_back_is_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"\.json or \.toml"):
        hand_plan().save(tmp_path / name)


# What is wrong in a file


def places(raw: Any, path: str = "") -> list[tuple[str, dict[str, Any], str]]:
    """Every field below: its path, the dict that holds it, and its key."""
    if isinstance(raw, list):
        return [place for index, item in enumerate(raw) for place in places(item, f"{path}[{index}]")]
    if not isinstance(raw, dict):
        return []
    found = [(f"{path}.{key}".lstrip("."), raw, key) for key in raw]
    return found + [place for key, item in raw.items() for place in places(item, f"{path}.{key}")]


@quick
@given(plans(), st.data())
def test_an_unknown_field_is_refused_wherever_it_lies(plan: Plan, data: st.DataObject) -> None:
    raw = msgspec.to_builtins(plan)
    path, holder, key = data.draw(st.sampled_from(places(raw)))
    holder[f"{key}_"] = holder[key]
    with pytest.raises(InputError) as caught:
        decode(raw, Plan, "plan.json")
    assert str(caught.value) == f"plan.json: {path}_: unknown field '{key}_': did you mean '{key}'?"


@quick
@given(plans(), st.data())
def test_a_wrong_type_is_refused_wherever_it_lies(plan: Plan, data: st.DataObject) -> None:
    raw = msgspec.to_builtins(plan)
    path, holder, key = data.draw(st.sampled_from(places(raw)))
    wrong, said = (3.5, "float") if isinstance(holder[key], list | dict) else ({"nested": True}, "object")
    holder[key] = wrong
    with pytest.raises(InputError) as caught:
        decode(raw, Plan, "plan.json")
    assert str(caught.value).startswith(f"plan.json: {path}: Expected ")
    assert f"got `{said}`" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (Mesh, '{"dp": "2"}', "Mesh: dp: Expected `int`, got `str`"),
        (Mesh, '{"dp": 0}', "Mesh: dp: Expected `int` >= 1"),
        (Mesh, '{"dp": 2.5}', "Mesh: dp: Expected `int`, got `float`"),
        (Mesh, "[1]", "Mesh: Expected `object`, got `array`"),
        (Offload, '{"share": 1.5}', "Offload: share: Expected `float` <= 1.0"),
        (Offload, '{"delayed": 1}', "Offload: delayed: Expected `bool`, got `int`"),
        (Plan, "{}", "Plan: stages: this field is missing: add it"),
        (Plan, '{"model": "gpt"', "Plan: not valid JSON: "),
    ],
)
def test_what_does_not_fit_is_refused(kind: type[Value], text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        kind.from_json(text)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (PlanRequest, 'schedule = "1f1"', "schedule: '1f1' is not valid: did you mean '1f1b'?"),
        (PlanRequest, 'precision = "int4"', "precision: 'int4' is not valid: valid here: bf16, fp16, fp32, fp64"),
        (PlanRequest, "zero = 4", "zero: '4' is not valid: valid here: 0, 1, 2, 3"),
        (Offload, 'what = "optimiser"', "what: 'optimiser' is not valid: did you mean 'optimizer'?"),
    ],
)
def test_a_wrong_choice_names_the_nearest(kind: type[Value], text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        kind.from_toml(text, "plan.toml")
    assert str(caught.value) == f"plan.toml: {said}"


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('"matmul"', '"matmull"', "device.rates[0].kind: 'matmull' is not valid: did you mean 'matmul'?"),
        (
            '"latency_seconds"',
            '"latency"',
            "intra_host.latency: unknown field 'latency': did you mean 'latency_seconds'?",
        ),
        ('"kind": "cuda"', '"kind": "cudo"', "device.kind: 'cudo' is not valid: did you mean 'cuda'?"),
    ],
)
def test_a_path_leads_through_lists_and_optional_values(right: str, wrong: str, said: str) -> None:
    text = machine().to_json()
    assert right in text
    with pytest.raises(InputError) as caught:
        Cluster.from_json(text.replace(right, wrong, 1))
    assert str(caught.value) == f"Cluster: {said}"


def test_a_wrong_action_names_the_nearest() -> None:
    text = make_schedule("gpipe", 1, 1).to_json()
    with pytest.raises(InputError, match=r"actions\[0\]\[0\]\[0\]: 'forwrd' is not valid: did you mean 'forward'\?"):
        Schedule.from_json(text.replace('"forward"', '"forwrd"'))


@pytest.mark.parametrize("kind", [kind for kind in FILED if kind is not PlanRequest])
def test_another_format_is_refused(kind: type[Value]) -> None:
    (own,) = get_args(get_type_hints(kind)["format"])
    said = rf"format: .*this version reads format {own}; the file is from another version"
    with pytest.raises(InputError, match=said):
        kind.from_json(f'{{"format": {own + 1}}}')


def test_a_field_given_twice_is_refused() -> None:
    for read, text in ((Mesh.from_json, '{"dp": 1, "dp": 2}'), (Mesh.from_toml, "dp = 1\ndp = 2")):
        with pytest.raises(InputError):
            read(text)
    with pytest.raises(InputError, match=r"plan\.json: dp: the field is given twice: keep one of them"):
        Plan.from_json(hand_plan().to_json().replace('"dp": 2', '"dp": 2, "dp": 3'), "plan.json")


class Numbers(Value, kw_only=True):
    """Any, as a loss is one."""

    forward: float = 0.0
    backward: float = 0.0


def test_a_number_that_is_not_finite_is_a_word_in_json_and_only_where_a_number_belongs() -> None:
    parts = Numbers(forward=math.inf, backward=-math.inf)
    assert '"forward": "inf"' in parts.to_json()
    assert Numbers.from_json(parts.to_json()) == Numbers.from_toml(parts.to_toml()) == parts
    assert hand_plan(model="nan").hash != hand_plan(model="inf").hash
    assert Plan.from_json(hand_plan(model="nan").to_json()).model == "nan"
    with pytest.raises(InputError, match="forward: Expected `float`, got `str`"):
        Numbers.from_json('{"forward": "Infinity"}')
    with pytest.raises(InputError, match="not valid JSON"):
        Numbers.from_json('{"forward": NaN}')
    with pytest.raises(InputError, match="share: Expected `float` >= 0"):
        Offload.from_json('{"share": "nan"}')


def test_times_are_finite() -> None:
    with pytest.raises(InputError, match="forward"):
        TimeParts.from_json('{"forward": "inf"}')


def test_units_in_a_file() -> None:
    raw = msgspec.to_builtins(Cluster.named("a100-80g-selene"))
    raw["device"]["memory_bytes"] = "40 GiB"
    raw["intra_host"]["latency_seconds"] = "3us"
    read = decode(raw, Cluster, "cluster.toml")
    assert read.device.memory_bytes == 40 * 2**30
    assert read.intra_host is not None
    assert read.intra_host.latency_seconds == pytest.approx(3e-6)


@pytest.mark.parametrize(
    ("holder", "field", "wrong", "said"),
    [
        ("device", "memory_bytes", "40GiBs", "unknown unit 'GiBs': did you mean 'GiB'?"),
        ("device", "memory_bytes", "40", "'40' has no unit: write it like '72GiB'"),
        ("device", "memory_bytes", "3ms", "unknown unit 'ms'"),
        ("device", "launch_seconds", "3GiB", "unknown unit 'GiB'"),
        ("intra_host", "bytes_per_second", "3GB", "Expected `float`, got `str`"),
    ],
)
def test_a_wrong_unit_is_refused(holder: str, field: str, wrong: str, said: str) -> None:
    raw = msgspec.to_builtins(Cluster.named("a100-80g-selene"))
    raw[holder][field] = wrong
    with pytest.raises(InputError) as caught:
        decode(raw, Cluster, "cluster.toml")
    assert str(caught.value).startswith(f"cluster.toml: {holder}.{field}: ")
    assert said in str(caught.value)


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    hand_plan().save(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"plam\.json: no such file: did you mean 'plan\.json'\?"):
        Plan.load(tmp_path / "plam.json")
    with pytest.raises(InputError, match=r"the folder .*nowhere does not exist either"):
        Plan.load(tmp_path / "nowhere" / "plan.json")


def test_a_file_that_is_no_value_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("model: gpt")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    (tmp_path / "plan.toml").write_text("model = ")
    with pytest.raises(InputError, match=r"plan\.yaml: a value is read from a \.json or \.toml file, not '\.yaml'"):
        Plan.load(tmp_path / "plan.yaml")
    with pytest.raises(InputError, match=r"plan\.json: cannot be read"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"plan\.toml: not valid TOML"):
        Plan.load(tmp_path / "plan.toml")


def test_nearest() -> None:
    assert nearest("mircobatch", ["microbatch", "mesh"]) == "did you mean 'microbatch'?"
    assert nearest("x", ["mesh", "dp"]) == "valid here: dp, mesh"
    assert nearest("x", []) == "nothing is valid here"


# The hash


def test_the_hash_is_the_same_in_other_processes(tmp_path: Path) -> None:
    plan = hand_plan().save(tmp_path / "plan.toml")
    graph = hand_graph().save(tmp_path / "graph.json")
    code = """if True:
        import sys
        from meshwright.core.graph import Graph
        from meshwright.core.plan import Plan
        graph = Graph.load(sys.argv[2])
        print(Plan.load(sys.argv[1]).hash, graph.hash, graph.identity)"""
    here = f"{hand_plan().hash} {hand_graph().hash} {hand_graph().identity}"
    for seed in ("1", "2"):
        command = [sys.executable, "-c", code, str(plan), str(graph)]
        there = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here


def test_the_hash_is_over_canonical_json() -> None:
    canonical = b'{"a":[1.5,"x"],"b":null}'
    assert stable_hash({"b": None, "a": (1.5, "x")}) == hashlib.sha256(canonical).hexdigest()[:16]


@quick
@given(plans(), plans())
def test_the_hash_tells_plans_apart(one: Plan, other: Plan) -> None:
    assert (one.hash == other.hash) == (one == other)
    assert Plan.from_toml(one.to_toml()).hash == one.hash


def test_the_hash_does_not_depend_on_how_a_number_was_typed() -> None:
    assert Offload(share=1) == Offload(share=1.0)
    assert Offload(share=1).hash == Offload(share=1.0).hash
    assert TimeParts(forward=-0.0).hash == TimeParts().hash
    assert len({TimeParts(forward=seconds).hash for seconds in (0, 0.5, 1, math.nan, math.inf, -math.inf)}) == 6


# Writing


class FullDisk:
    """Stands in for a method of Path: the disk is full."""

    def __call__(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    target = write_whole(tmp_path / "plan.json", "old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, step, FullDisk())
        with pytest.raises(OSError, match="No space left"):
            write_whole(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_whole(tmp_path / "plan.json", "old")
    seen = []
    write = Path.write_text

    def watched(self: Path, text: str, **kwargs: Any) -> int:
        count = write(self, text, **kwargs)
        seen.append(target.read_text())
        return count

    monkeypatch.setattr(Path, "write_text", watched)
    write_whole(target, "new")
    assert (seen, target.read_text()) == (["old"], "new")


@quick
@given(st.recursive(st.none() | st.booleans() | words, lambda inner: st.dictionaries(words, inner, max_size=3)))
def test_unset_fields_are_left_out_at_every_depth(raw: Any) -> None:
    def has_none(item: Any) -> bool:
        return isinstance(item, dict) and any(inner is None or has_none(inner) for inner in item.values())

    assert not has_none(without_none(raw))
    assert has_none(raw) or without_none(raw) == raw
