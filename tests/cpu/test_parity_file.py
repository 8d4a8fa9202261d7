"""`meshwright parity --plan FILE`: the file's own shardings, stages and recompute are what runs, on fewer blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import ASSETS
from pool import RankPool, this_rank

from meshwright.capturing.capture import capture_source
from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan, Recompute
from meshwright.core.request import PlanRequest
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.source import resolve
from meshwright.planner.parity import plan_of_small
from meshwright.rules.plain_plan import plain_plan

Pools = Callable[[int], RankPool]
MODEL = "gpt:layers=6,hidden=32,heads=4,seq=16,vocab=60"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Six blocks over tp: only the MLPs are sharded, and the last block is redone."""
    plan = plain_plan(
        PlanRequest(tp=2, microbatch=1, global_batch=2), capture_source(resolve(MODEL), "fp32"), 2, "by hand"
    )
    rules = tuple(
        msgspec.structs.replace(rule, tensors=tuple(t for t in rule.tensors if t.tensor.startswith("mlp.")))
        for rule in plan.sharding
    )
    redone = (Recompute(mode="full", blocks=("blocks.5",)),)
    msgspec.structs.replace(plan, sharding=rules, recompute=redone).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def compare_on_rank(plan: Plan) -> ParityResult:
    return compare(resolve(MODEL).small(), plan, 1, this_rank())


def test_what_the_file_says_runs(pool: Pools, file: Path) -> None:
    found = plan_of_small(MODEL, Plan.load(file), str(file))
    assert {tensor.tensor.partition(".")[0] for rule in found.sharding for tensor in rule.tensors} == {"mlp"}
    assert all("tp" in tensor.dims for rule in found.sharding for tensor in rule.tensors)
    assert 0 < len(found.recomputed("full")) < sum(name.startswith("blocks.") for name in found.blocks)
    assert (found.precision, found.model) == ("fp64", MODEL)
    for result in pool(2).run(compare_on_rank, found):
        assert result.ok, result.first_difference


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '"mlp.expand.weight"',
            '"mlp.expnad.weight"',
            "names tensor 'mlp.expnad.weight', which its blocks do not have",
        ),
        ('"blocks.0-5"', '"blocks.0-6"', "disagree on block 'blocks.6', which the model does not have"),
        ('"graph": "', '"graph": "0', "was made for another model"),
    ],
)
def test_a_file_of_wrong_names_is_refused(file: Path, old: str, new: str, said: str) -> None:
    text = json.dumps(json.loads(file.read_text()), indent=1)
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(PlanError, match=said):
        plan_of_small(MODEL, Plan.load(file), str(file))


def edited(file: Path, tensor: str, **changes: Any) -> Plan:
    plan = Plan.load(file)
    rules = tuple(
        msgspec.structs.replace(
            rule,
            tensors=tuple(msgspec.structs.replace(t, **changes) if t.tensor == tensor else t for t in rule.tensors),
        )
        for rule in plan.sharding
    )
    return msgspec.structs.replace(plan, sharding=rules)


def test_a_size_that_does_not_divide_is_refused(file: Path) -> None:
    said = "a dim of size 128 of 'mlp.expand.weight' of block 'blocks.0' in 3 runs, which does not divide over tp=2"
    with pytest.raises(PlanError, match=said):
        plan_of_small(MODEL, edited(file, "mlp.expand.weight", runs=3), "plan.json")


def test_a_fused_weight_that_is_not_cut_in_its_runs_is_refused(tmp_path: Path) -> None:
    """Left as it is, a rank would get queries and half of the keys where it needs half of all three."""
    model = f"hf:{ASSETS}/gpt2-tiny.json"
    graph = capture_source(resolve(model), "fp32")
    plan = plain_plan(PlanRequest(tp=2, microbatch=1, global_batch=2), graph, 2, "by hand")
    with pytest.raises(PlanError, match="in 1 runs, but the model reads it in 3: set its runs to 3"):
        plan_of_small(model, plan, "plan.json")
