"""Plans and requests: contradictions are refused with what to do; plain defaults fill what a request leaves open."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import degrees, hand_graph, hand_plan, plans, quick, requests

from meshwright.core.axes import AXES
from meshwright.core.errors import InputError, PlanError
from meshwright.core.names import expand_names
from meshwright.core.plan import BlockSharding, Mesh, Offload, Plan, Recompute, Stage, TensorSharding
from meshwright.core.request import PlanRequest, parse_recompute
from meshwright.planner.flags import SweptFlags
from meshwright.rules.plain_plan import count_microbatches, plain_mesh, plain_plan, recompute_rules, share_of_batch

TWO_ON_ONE = (Stage(coordinate=0, blocks=("blocks.0-3",)), Stage(coordinate=0, blocks=("blocks.4-7",)))


def four_stages(*coordinates: int) -> tuple[Stage, ...]:
    return tuple(Stage(coordinate=c, blocks=(f"blocks.{number}",)) for number, c in enumerate(coordinates))


def test_ranks_are_numbered_with_tp_innermost_and_ep_inside_dp() -> None:
    mesh = Mesh(pp=2, dp=6, cp=3, tp=5, ep=2)
    assert mesh.world == 180
    assert {axis: mesh.stride(axis) for axis in AXES} == {"tp": 1, "cp": 5, "dp": 15, "ep": 15, "pp": 90}
    assert Mesh(dp=2, ep=2).used == {"dp": 2, "ep": 2}
    assert (Mesh(dp=2).divides_model, Mesh(dp=2, ep=2).divides_model) == (False, True)


def test_every_axis_is_a_flag_and_a_field_of_a_request() -> None:
    assert set(AXES) <= set(PlanRequest.__struct_fields__)
    assert set(AXES) <= set(SweptFlags.__annotations__)


TENSOR = TensorSharding(tensor="weight", dims=("", "tp"))

CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"global_batch": 15}, "microbatch 2 × num_microbatches 4 × dp 2 = 16, but global_batch is 15"),
    "stages": ({"mesh": Mesh(pp=3, dp=2)}, "plan has 2 stages but mesh axis 'pp' has degree 3"),
    "coordinate": (
        {"stages": (Stage(coordinate=0, blocks=("a",)), Stage(coordinate=2, blocks=("b",)))},
        "pp coordinate 2, but pp=2",
    ),
    "idle coordinate": ({"stages": TWO_ON_ONE}, "coordinate"),
    "block twice": (
        {"stages": (Stage(coordinate=0, blocks=("blocks.0-3",)), Stage(coordinate=1, blocks=("blocks.2",)))},
        "block 'blocks.2' is in more than one stage",
    ),
    "virtual": (
        {"mesh": Mesh(dp=2), "virtual": 2, "stages": TWO_ON_ONE},
        "'1f1b' runs one stage per coordinate, but virtual=2",
    ),
    "one stage in a V": ({"schedule": "zbv"}, "'zbv' runs two stages per coordinate, but virtual=1"),
    "one stage interleaved": ({"schedule": "interleaved"}, "several stages per coordinate, but virtual=1"),
    "loop": ({"schedule": "interleaved", "virtual": 2, "stages": four_stages(0, 1, 1, 0)}, "stage 2 is on .* a loop"),
    "v": (
        {"schedule": "zbv", "virtual": 2, "stages": four_stages(0, 1, 0, 1)},
        "stage 2 is on pp coordinate 0, .* a V",
    ),
    "row": (
        {"stages": (Stage(coordinate=1, blocks=("a",)), Stage(coordinate=0, blocks=("b",)))},
        "stage 0 is on pp coordinate 1, but schedule '1f1b' places stages in a loop",
    ),
    "hybrid without ZeRO": ({"hybrid": 2}, "hybrid=2 without ZeRO"),
    "hybrid": ({"hybrid": 3, "zero": 2}, "hybrid=3 does not divide dp=2"),
    "recompute": ({"recompute": (Recompute(mode="full", blocks=("blocks.0-8",)),)}, "recompute names block 'blocks.8'"),
    "recompute twice": (
        {
            "recompute": (
                Recompute(mode="full", blocks=("blocks.1",)),
                Recompute(mode="selective", blocks=("blocks.0-2",)),
            )
        },
        "'blocks.1'",
    ),
    "sharded block": ({"sharding": (BlockSharding(for_blocks=("blocks.9",), tensors=(TENSOR,)),)}, "'blocks.9'"),
    "sharded axis": (
        {"sharding": (BlockSharding(for_kind="Block", tensors=(TensorSharding(tensor="w", dims=("xp",)),)),)},
        "'xp'",
    ),
}


WHAT_TO_DO = "(give|make|set|use|choose|place|leave|name|did you mean|valid here)"


@pytest.mark.parametrize(("changes", "what"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_plan_that_contradicts_itself_is_refused_with_what_to_do(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=f"{what}.*: .*{WHAT_TO_DO}"):
        hand_plan(**changes)


def test_near_remedies_are_exact() -> None:
    with pytest.raises(PlanError, match="give 3 stages, one per pp coordinate"):
        hand_plan(mesh=Mesh(pp=3, dp=2))
    with pytest.raises(PlanError, match="set zero to 1, 2 or 3, or leave hybrid out"):
        hand_plan(hybrid=2)


def test_experts_need_whole_groups_of_data_parallel_ranks() -> None:
    assert Mesh(dp=4, ep=2).world == 4
    with pytest.raises(PlanError, match="ep=3 does not divide dp=4"):
        Mesh(dp=4, ep=3)


@pytest.mark.parametrize("fields", [{}, {"for_kind": "Block", "for_blocks": ("blocks.0",)}])
def test_a_sharding_is_for_a_kind_or_for_blocks(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="either for_kind or for_blocks"):
        BlockSharding(tensors=(TENSOR,), **fields)


def test_a_contradiction_in_a_file_is_refused_with_its_place() -> None:
    text = hand_plan().to_json()
    with pytest.raises(InputError, match=r"plan\.json: microbatch 2 .* but global_batch is 17"):
        Plan.from_json(text.replace('"global_batch": 16', '"global_batch": 17'), "plan.json")
    with pytest.raises(InputError, match="Plan: mesh: ep=3 does not divide dp=2"):
        Plan.from_json(text.replace('"ep": 1', '"ep": 3'))


def test_a_changed_plan_is_checked_again() -> None:
    with pytest.raises(PlanError, match="make the product equal"):
        msgspec.structs.replace(hand_plan(), num_microbatches=5)


@pytest.mark.parametrize("fields", [{"dp": 0}, {"dp": -2, "tp": -2}, {"dp": 2, "ep": 0}])
def test_a_mesh_without_ranks_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(PlanError):
        Mesh(**fields)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (Mesh, {"dp": 2.5}, "Mesh: dp=2.5: Expected `int`, got `float`"),
        (Stage, {"coordinate": -1, "blocks": ()}, "Stage: coordinate=-1: Expected `int` >= 0"),
        (Stage, {"coordinate": 0, "blocks": "blocks.0-3"}, "Stage: blocks='blocks.0-3': Expected `array`, got `str`"),
        (Recompute, {"mode": "ful", "blocks": ()}, "Recompute: mode='ful': 'ful' is not valid: did you mean 'full'?"),
        (Offload, {"share": 1.5}, "Offload: share=1.5: Expected `float` <= 1.0"),
    ],
)
def test_a_value_made_in_code_is_checked_like_its_file(kind: type, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        kind(**fields)
    assert str(caught.value) == said


@pytest.mark.parametrize("changes", [{"zero": 4}, {"microbatch": 0}, {"precision": "int4"}, {"schedule": "1f2b"}])
def test_a_plan_outside_its_bounds_is_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(PlanError, match=f"Plan: {name}="):
        hand_plan(**changes)


@quick
@given(plans())
def test_properties_of_a_plan(plan: Plan) -> None:
    assert plan.world == plan.mesh.pp * plan.mesh.dp * plan.mesh.cp * plan.mesh.tp
    assert plan.mesh.dp * plan.mesh.cp % plan.shard_degree == 0
    assert (plan.shard_degree == 1) or plan.zero > 0
    assert plan.recomputed("full") | plan.recomputed("selective") <= set(plan.blocks)


def test_blocks_are_named_in_order() -> None:
    assert hand_plan().blocks == (*(f"blocks.{i}" for i in range(8)), "head")


@pytest.mark.parametrize(("zero", "hybrid", "degree"), [(0, None, 1), (1, None, 4), (3, 2, 2), (2, 1, 1)])
def test_shard_degree(zero: int, hybrid: int | None, degree: int) -> None:
    assert hand_plan(mesh=Mesh(pp=2, dp=4), global_batch=32, zero=zero, hybrid=hybrid).shard_degree == degree


@pytest.mark.parametrize(("zero", "hybrid", "degree"), [(0, None, 1), (1, None, 6), (3, None, 6), (3, 2, 2)])
def test_zero_shards_over_cp_too(zero: int, hybrid: int | None, degree: int) -> None:
    """Ranks along cp hold the same parameters: 2 · 3 of them share the state, or as many as a hybrid group has."""
    plan = hand_plan(mesh=Mesh(pp=2, dp=2, cp=3), global_batch=16, zero=zero, hybrid=hybrid)
    assert plan.shard_degree == degree


def test_recompute_in_words() -> None:
    rules = (Recompute(mode="full", blocks=("blocks.0-3",)), Recompute(mode="selective", blocks=("blocks.4-6/2",)))
    plan = hand_plan(recompute=rules)
    assert plan.recomputed("selective") == {"blocks.4", "blocks.6"}
    assert plan.recompute_words == "full (4 blocks) + selective (2 blocks)"
    assert hand_plan().recompute_words == "none"


@pytest.mark.parametrize(
    ("schedule", "coordinates"),
    [("interleaved", (0, 1, 0, 1)), ("zbv", (0, 1, 1, 0)), ("dualpipev", (0, 1, 1, 0))],
)
def test_stages_lie_as_their_schedule_asks(schedule: str, coordinates: tuple[int, ...]) -> None:
    plan = hand_plan(schedule=schedule, virtual=2, stages=four_stages(*coordinates))
    assert plan.placement == ("loop" if schedule == "interleaved" else "v")


# Requests


def test_a_plain_plan_takes_the_plain_defaults() -> None:
    plan = plain_plan(PlanRequest(), hand_graph(), world=4, cluster="local")
    assert plan.mesh == Mesh(dp=4)
    assert plan.stages == (Stage(coordinate=0, blocks=("embed", "blocks.0-3", "head")),)
    assert (plan.microbatch, plan.num_microbatches, plan.global_batch) == (1, 1, 4)
    assert (plan.zero, plan.recompute, plan.offload.what, plan.precision) == (0, (), "none", "fp32")
    assert (plan.model, plan.graph) == ("gpt:layers=4", hand_graph().identity)


@pytest.mark.parametrize(
    ("schedule", "virtual", "coordinates"),
    [(None, 1, (0, 1)), ("zb", 1, (0, 1)), ("interleaved", 2, (0, 1, 0, 1)), ("zbv", 2, (0, 1, 1, 0))],
)
def test_a_plain_plan_is_cut_into_even_stages(schedule: Any, virtual: int, coordinates: tuple[int, ...]) -> None:
    plan = plain_plan(PlanRequest(pp=2, schedule=schedule), hand_graph(), world=4, cluster="local")
    assert (plan.mesh, plan.virtual) == (Mesh(pp=2, dp=2), virtual)
    assert tuple(stage.coordinate for stage in plan.stages) == coordinates
    assert plan.blocks == ("embed", *(f"blocks.{i}" for i in range(4)), "head")


def test_a_plain_plan_keeps_what_is_fixed() -> None:
    request = PlanRequest(
        tp=2,
        zero=3,
        hybrid=2,
        global_batch=16,
        microbatch=2,
        recompute="every:3",
        precision="bf16",
        offload="optimizer",
        compile=True,
    )
    plan = plain_plan(request, hand_graph(), world=8, cluster="local")
    assert plan.mesh == Mesh(dp=4, tp=2)
    assert (plan.zero, plan.hybrid, plan.num_microbatches, plan.global_batch) == (3, 2, 2, 16)
    assert plan.recomputed("full") == {"blocks.0", "blocks.3"}
    assert (plan.precision, plan.offload.what, plan.compile) == ("bf16", "optimizer", True)


@quick
@given(degrees, degrees, degrees, st.none() | degrees)
def test_every_plain_plan_holds_the_whole_batch(
    dp: int, tp: int, num_microbatches: int, microbatch: int | None
) -> None:
    global_batch = dp * num_microbatches * (microbatch or 1)
    request = PlanRequest(tp=tp, global_batch=global_batch, microbatch=microbatch)
    plan = plain_plan(request, hand_graph(), world=dp * tp, cluster="local")
    assert (plan.mesh.dp, plan.global_batch) == (dp, global_batch)
    assert plan.num_microbatches == (num_microbatches if microbatch else 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tp": 3}, "pp · cp · tp = 3 does not divide 8 ranks: change a degree or the number of ranks"),
        ({"dp": 2, "tp": 2}, "= 4 ranks, but there are 8: change a degree, or run 4 ranks"),
        ({"tp": 16}, "= 16 does not divide 8 ranks"),
        ({"ep": 3}, "ep=3 does not divide dp=8"),
        (
            {"pp": 8},
            "pp=8 with virtual=1 needs 8 stages, but 'gpt:layers=4' has 4 repeated blocks: set pp · virtual to 4",
        ),
        ({"schedule": "zbv", "pp": 4}, "pp=4 with virtual=2 needs 8 stages"),
        ({"virtual": 2}, "virtual=2"),
        ({"hybrid": 2}, "hybrid=2 without ZeRO"),
        ({"global_batch": 12}, "global batch 12 does not divide over dp=8 ranks: use 8 or 16$"),
        ({"global_batch": 5}, "global batch 5 does not divide over dp=8 ranks: use 8$"),
        ({"global_batch": 96, "microbatch": 5}, "12 samples .* microbatches of 5: use 4 or 6$"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plain_plan(PlanRequest(**fields), hand_graph(), world=8, cluster="local")


@pytest.mark.parametrize("fields", [{"dp": 0}, {"microbatch": 0}, {"global_batch": 0}, {"tp": -1, "dp": -1}])
def test_a_number_below_one_does_not_count_as_open(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"0|-1"):
        plain_plan(PlanRequest(**fields), hand_graph(), world=1, cluster="local")


@quick
@given(st.integers(1, 200), st.integers(1, 64))
def test_an_indivisible_batch_names_the_near_legal_ones(global_batch: int, dp: int) -> None:
    if global_batch % dp == 0:
        assert share_of_batch(global_batch, dp) * dp == global_batch
        return
    with pytest.raises(PlanError) as caught:
        share_of_batch(global_batch, dp)
    named = [int(word) for word in str(caught.value).split(": use ")[1].split(" or ")]
    legal = [batch for batch in range(1, global_batch + dp + 1) if batch % dp == 0]
    assert named == [batch for batch in legal if abs(batch - global_batch) < dp]


@quick
@given(st.integers(1, 60), degrees, st.integers(1, 60))
def test_microbatches_fill_the_share_or_the_nearest_sizes_are_named(share: int, dp: int, microbatch: int) -> None:
    if share % microbatch == 0:
        assert count_microbatches(share * dp, dp, microbatch) * microbatch == share
        return
    with pytest.raises(PlanError) as caught:
        count_microbatches(share * dp, dp, microbatch)
    named = [int(word) for word in str(caught.value).split(": use ")[1].split(" or ")]
    assert all(share % size or size in named for size in range(named[0], named[-1] + 1)), "the nearest ones"
    assert named[0] < microbatch
    assert all(count_microbatches(share * dp, dp, size) for size in named)


@quick
@given(requests(), requests())
def test_an_update_fixes_more_and_keeps_the_rest(first: PlanRequest, second: PlanRequest) -> None:
    both = first.updated(second)
    for name in PlanRequest.__struct_fields__:
        fixed = getattr(second, name)
        assert getattr(both, name) == (getattr(first, name) if fixed is None else fixed)


def test_false_is_fixed_and_not_open() -> None:
    assert PlanRequest(compile=True).updated(PlanRequest(compile=False)).compile is False


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("none", ("none", 1)), ("selective", ("selective", 1)), ("full", ("full", 1)), ("every:12", ("full", 12))],
)
def test_recompute_words(text: str, parsed: tuple[str, int]) -> None:
    assert parse_recompute(text) == parsed


@pytest.mark.parametrize("text", ["", "every", "every:0", "every:-1", "every:1.5", "Full", "every:2 "])
def test_other_recompute_words_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"recompute '{text}' is not one of none, selective, full, every:K"):
        PlanRequest(recompute=text)


@quick
@given(st.integers(1, 30), st.integers(1, 10))
def test_every_k_recomputes_blocks_0_k_2k(num_blocks: int, stride: int) -> None:
    blocks = tuple(f"blocks.{i}" for i in range(num_blocks))
    (rule,) = recompute_rules(f"every:{stride}", blocks)
    assert rule.mode == "full"
    assert expand_names(rule.blocks) == tuple(name for i, name in enumerate(blocks) if i % stride == 0)


def test_recompute_where_nothing_repeats_is_refused() -> None:
    assert recompute_rules("none", ()) == ()
    with pytest.raises(PlanError, match="is for repeated blocks, and the model has none: leave it out"):
        recompute_rules("full", ())


def test_an_unknown_offload_is_refused() -> None:
    with pytest.raises(InputError, match="offload 'optimizr' is not one of none, optimizer, parameters"):
        PlanRequest.from_toml('offload = "optimizr"')


@quick
@given(degrees, degrees, degrees, degrees)
def test_an_open_dp_takes_the_ranks_that_are_left(pp: int, dp: int, cp: int, tp: int) -> None:
    assert plain_mesh(PlanRequest(pp=pp, cp=cp, tp=tp), world=pp * dp * cp * tp) == Mesh(pp=pp, dp=dp, cp=cp, tp=tp)
