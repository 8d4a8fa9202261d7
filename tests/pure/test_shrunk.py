"""A plan laid on fewer blocks keeps what it does to them, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import plan_for
from msgspec.structs import replace
from strategies import quick
from transformer import transformer_graph

from meshwright.core.errors import PlanError
from meshwright.core.names import expand_names
from meshwright.core.plan import BlockSharding, Plan, Recompute, Stage
from meshwright.planner.shrunk import shrunk_plan

WHOLE, SMALL = transformer_graph(layers=12), transformer_graph(layers=4)


def plan_of(**request: Any) -> Plan:
    return plan_for(WHOLE, **{"microbatch": 2, "global_batch": 8, **request})


def stages_of(plan: Plan) -> list[tuple[str, ...]]:
    return [expand_names(stage.blocks) for stage in plan.stages]


def recomputed(plan: Plan) -> set[str]:
    return set(plan.recomputed("full") | plan.recomputed("selective"))


@quick
@given(
    st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]), st.sampled_from(["none", "full", "every:2", "selective"])
)
def test_blocks_that_stay_are_treated_as_they_were(pp: int, tp: int, recompute: str) -> None:
    plan = plan_of(pp=pp, tp=tp, recompute=recompute)
    found = shrunk_plan(plan, WHOLE, SMALL)
    assert found.graph == SMALL.identity
    assert (found.mesh, found.microbatch, found.schedule) == (plan.mesh, plan.microbatch, plan.schedule)
    assert set(found.blocks) == {block.name for block in SMALL.blocks if block.name}
    assert all(any(name.startswith("blocks.") for name in stage) for stage in stages_of(found))
    assert [rule.tensors for rule in found.sharding] == [rule.tensors for rule in plan.sharding]
    assert {rule.mode for rule in found.recompute} == {rule.mode for rule in plan.recompute}
    if recompute == "every:2":
        assert 0 < len(recomputed(found)) < 4, "some are redone, some are not"


@quick
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["none", "full", "every:2"]))
def test_a_model_that_is_small_already_keeps_its_plan(pp: int, tp: int, recompute: str) -> None:
    plan = plan_of(pp=pp, tp=tp, recompute=recompute)
    assert shrunk_plan(plan, WHOLE, WHOLE) == plan


def test_an_uneven_cut_stays_uneven() -> None:
    plan = plan_of(pp=2)
    first, second = stages_of(plan)
    uneven = replace(
        plan,
        stages=(Stage(coordinate=0, blocks=first[:3]), Stage(coordinate=1, blocks=(*first[3:], *second))),
    )
    found = stages_of(shrunk_plan(uneven, WHOLE, SMALL))
    assert found[0] == ("token_embedding", "position_embedding", "blocks.0")
    assert found[1] == ("blocks.1", "blocks.2", "blocks.3", "norm", "head")


def test_two_shardings_are_both_there() -> None:
    plan = plan_of(tp=2)
    (rule,) = [rule for rule in plan.sharding if "blocks.0-11" in rule.for_blocks]
    fewer = replace(rule, for_blocks=("blocks.9-11",), tensors=rule.tensors[:1])
    others = tuple(other for other in plan.sharding if other is not rule)
    plan = replace(plan, sharding=(replace(rule, for_blocks=("blocks.0-8",)), fewer, *others))
    found = shrunk_plan(plan, WHOLE, SMALL)
    by_block = {name: one.tensors for one in found.sharding for name in expand_names(one.for_blocks)}
    assert {by_block[f"blocks.{number}"] for number in range(4)} == {rule.tensors, fewer.tensors}


def test_a_sharding_for_a_kind_is_written_for_its_blocks() -> None:
    plan = plan_of(tp=2)
    (rule,) = [rule for rule in plan.sharding if "blocks.0-11" in rule.for_blocks]
    by_kind = replace(plan, sharding=(BlockSharding(for_kind="Block", tensors=rule.tensors),))
    (found,) = shrunk_plan(by_kind, WHOLE, SMALL).sharding
    assert (found.for_blocks, found.tensors) == (("blocks.0-3",), rule.tensors)


def test_more_stages_than_blocks_are_refused() -> None:
    said = r"shrunk model of 8 blocks, too few for the plan's 6 stages: stage 1 would be empty; compare a plan with fewer stages"
    with pytest.raises(PlanError, match=said):
        shrunk_plan(plan_of(pp=6), WHOLE, SMALL)


def test_more_treatments_than_blocks_are_refused() -> None:
    modes = (Recompute(mode="full", blocks=("blocks.0",)), Recompute(mode="selective", blocks=("blocks.1",)))
    said = "with 2 of the 12 blocks of 'blocks', too few for every way .* 'blocks.2' would be left out"
    with pytest.raises(PlanError, match=said):
        shrunk_plan(replace(plan_of(), recompute=modes), WHOLE, transformer_graph(layers=2))


def test_a_block_the_plan_does_not_name_is_refused() -> None:
    renamed = replace(SMALL, blocks=tuple(replace(b, name=b.name.replace("norm", "scale")) for b in SMALL.blocks))
    with pytest.raises(PlanError, match="has 'scale', which the plan does not name"):
        shrunk_plan(plan_of(), WHOLE, renamed)
