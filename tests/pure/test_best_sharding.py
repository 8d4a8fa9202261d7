"""Shardings that the integer program finds: the known patterns, what they cost, and that nothing legal is better."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine, named_machine, plan_for
from test_sharding import COLUMNS, ROWS
from transformer import BlockWriter, Sizes, transformer_graph
from writer import Storage, shape_of

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Affine, Block, Graph, Kind, Parameter, Segment
from meshwright.core.legal import LegalSharding
from meshwright.core.names import expand_names
from meshwright.core.plan import BlockSharding, TensorSharding
from meshwright.core.request import PlanRequest
from meshwright.cost.estimate import estimate
from meshwright.rules.labels import Way, labels_of
from meshwright.rules.sharding import block_sharding, ways_by_block
from meshwright.searching.search import search
from meshwright.searching.sharding.best_sharding import FoundSharding, best_sharding

FAST = machine(8, bytes_per_second=1e12, latency_seconds=1e-9)
SLOW = machine(8, bytes_per_second=1e3, latency_seconds=1.0)


def picked(graph: Graph, cluster: Cluster, **request: Any) -> tuple[BlockSharding, ...]:
    """The best sharding, or none."""
    found = best_sharding(graph, cluster, **request)
    return found.sharding if found else ()


def dims(sharding: tuple[BlockSharding, ...]) -> dict[str, dict[str, tuple[str, ...]]]:
    """First block → tensor → dims."""
    return {
        expand_names(rule.for_blocks)[0]: {tensor.tensor: tensor.dims for tensor in rule.tensors} for rule in sharding
    }


def seconds_of(graph: Graph, cluster: Cluster, sharding: tuple[BlockSharding, ...], **request: Any) -> float:
    """What the cost room says of one microbatch and its update."""
    plan = msgspec.structs.replace(plan_for(graph, **request), sharding=sharding)
    parts = estimate(graph, plan, cluster).time_seconds
    return parts.forward + parts.backward + parts.exposed_inner + parts.update


# The known patterns


@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize("outputs_first", [True, False])
def test_columns_then_rows_are_found_in_attention_and_mlp(attention: str, outputs_first: bool) -> None:
    """Megatron's, for Linear's [outputs, inputs] and Conv1D's [inputs, outputs]."""
    graph = transformer_graph(attention=attention, outputs_first=outputs_first)
    found = dims(picked(graph, FAST, tp=2, microbatch=2))
    by_outputs, by_inputs = (("tp", ""), ("", "tp")) if outputs_first else (("", "tp"), ("tp", ""))
    assert found["blocks.0"] == {
        **{f"{name}.weight": by_outputs for name in COLUMNS},
        **{f"{name}.bias": ("tp",) for name in COLUMNS},
        **{f"{name}.weight": by_inputs for name in ROWS},
    }
    assert found["head"] == {"weight": ("tp", "")}, "the loss reads logits split by the vocabulary"
    assert "norm" not in found


def test_blocks_of_a_kind_share_one_rule() -> None:
    rules = picked(transformer_graph(layers=48), FAST, tp=2, microbatch=1)
    assert [rule.for_blocks for rule in rules if len(rule.tensors) > 1] == [("blocks.0-47",)]


def test_a_gated_mlp_splits_both_of_its_first_weights() -> None:
    graph = stack(["gated"])
    assert dims(picked(graph, FAST, tp=2, microbatch=1))["blocks.0"] == {
        "0.gate.weight": ("tp", ""), "0.gate.bias": ("tp",), "0.up.weight": ("tp", ""), "0.up.bias": ("tp",),
        "0.down.weight": ("", "tp"),
    }  # fmt: skip


def test_a_table_is_split_where_its_memory_is_dear() -> None:
    graph, link = transformer_graph(), machine(8, bytes_per_second=1e9, latency_seconds=1e-2)
    cheap = dims(picked(graph, link, tp=2, microbatch=1))
    dear = dims(picked(graph, link, tp=2, microbatch=1, bytes_price=1e-6))
    assert "token_embedding" not in cheap
    assert dear["token_embedding"] == {"weight": ("tp", "")}


def test_tied_tables_and_heads_are_split_together() -> None:
    graph = transformer_graph(tied=True)
    for price in (0.0, 1e-6):
        for cluster in (FAST, SLOW):
            found = dims(picked(graph, cluster, tp=2, microbatch=1, bytes_price=price))
            assert ("head" in found) == ("token_embedding" in found)
    assert dims(picked(graph, FAST, tp=2, microbatch=1))["token_embedding"] == {"weight": ("tp", "")}


# Where it does not pay, or cannot be


def test_nothing_is_split_over_a_slow_link() -> None:
    assert picked(transformer_graph(), SLOW, tp=2, microbatch=1) == ()


def test_nothing_is_split_where_launches_hide_the_kernels() -> None:
    """A host that is slower than the device gains nothing by less work for the device."""
    graph = transformer_graph(vocab=64)
    slow_host = msgspec.structs.replace(FAST.device, launch_seconds=1.0, backward_launch_seconds=1.0)
    hidden = msgspec.structs.replace(FAST, device=slow_host)
    assert picked(graph, hidden, tp=2, microbatch=1, num_microbatches=10**9) == ()
    assert picked(graph, hidden, tp=2, microbatch=1, bytes_price=1.0) != ()


def test_a_lone_weight_before_a_norm_is_whole() -> None:
    assert picked(stack(["linear", "norm"]), FAST, tp=2, microbatch=1) == ()


def test_weights_that_do_not_divide_are_whole() -> None:
    assert picked(stack(["mlp"], wide=33), FAST, tp=2, microbatch=1) == ()
    assert picked(stack(["mlp"], wide=34), FAST, tp=2, microbatch=1) != ()


def test_nothing_is_split_over_one_rank() -> None:
    assert picked(transformer_graph(), FAST, tp=1, microbatch=1) == ()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_tp_that_is_asked_for_is_planned_where_no_split_is_worth_its_collective(kind: str) -> None:
    graph, cluster = stack(["mlp"]), machine(2, latency_seconds=1.0, kind=kind)
    assert picked(graph, cluster, tp=2, microbatch=1) == ()
    found = search(graph, cluster, PlanRequest(global_batch=4, tp=2, dp=1, pp=1))
    assert dims(found.plan.sharding)["blocks.0"]["0.up.weight"] == ("tp", "")


# What the runtime answered


def answered(sharding: tuple[BlockSharding, ...], tensor: str, **changes: Any) -> tuple[LegalSharding, ...]:
    """The runtime's answer, in which one tensor is not as it was proposed."""
    rules = tuple(
        msgspec.structs.replace(
            rule,
            tensors=tuple(msgspec.structs.replace(t, **changes) if t.tensor == tensor else t for t in rule.tensors),
        )
        for rule in sharding
    )
    return (LegalSharding(tp=2, sharding=rules),)


def test_what_the_runtime_left_whole_stays_whole_with_what_depends_on_it() -> None:
    graph = transformer_graph()
    first = picked(graph, FAST, tp=2, microbatch=1)
    legal = answered(first, "mlp.expand.weight", dims=("", ""), reason="'fold' has no rule")
    found = dims(picked(graph, FAST, tp=2, microbatch=1, legal=legal))
    assert set(found["blocks.0"]) == {t for t in dims(first)["blocks.0"] if t.startswith("attention")}
    assert picked(graph, FAST, tp=4, microbatch=1, legal=legal) == picked(graph, FAST, tp=4, microbatch=1)


def test_dims_the_runtime_cut_in_runs_are() -> None:
    graph = transformer_graph()
    first = picked(graph, FAST, tp=2, microbatch=1)
    legal = answered(first, "mlp.expand.weight", runs=3)
    assert picked(graph, FAST, tp=2, microbatch=1, legal=legal) == legal[0].sharding


def test_degrees_the_runtime_refused_split_nothing() -> None:
    legal = (LegalSharding(tp=2, refusal="no"),)
    assert picked(transformer_graph(), FAST, tp=2, microbatch=1, legal=legal) == ()


# What it costs

REQUESTS: list[dict[str, Any]] = [{"tp": 2}, {"tp": 4}, {"tp": 2, "cp": 2}]


@pytest.mark.parametrize("request_fields", REQUESTS, ids=str)
@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize("cluster", [FAST, machine(8, kind="cpu", bytes_per_second=1e12), named_machine()], ids=str)
def test_the_program_minimises_what_is_costed(cluster: Cluster, attention: str, request_fields: dict[str, Any]) -> None:
    graph = transformer_graph(hidden=256, heads=8, vocab=4096, attention=attention, dropout=True)
    found = found_in(graph, cluster, microbatch=4, **request_fields)
    costed = seconds_of(graph, cluster, found.sharding, microbatch=4, **request_fields)
    assert found.seconds == pytest.approx(costed, rel=1e-12)


@pytest.mark.parametrize("cluster", [FAST, named_machine()], ids=str)
def test_under_sequence_parallel_the_sum_of_whole_gradients_counts(cluster: Cluster) -> None:
    graph = transformer_graph(hidden=256, heads=8, vocab=4096)
    request = {"tp": 2, "sequence_parallel": True, "microbatch": 4}
    found = found_in(graph, cluster, **request)
    costed = seconds_of(graph, cluster, found.sharding, **request)
    assert costed < found.seconds < 1.01 * costed, "the sum is beside the parts that are compared"
    labels = labels_of(graph.kind_by_block["blocks.0"], ways(graph, found.sharding, tp=2)["blocks.0"])
    assert all(
        label == "split"
        for op, label in zip(graph.kind_by_block["blocks.0"].ops, labels.results, strict=True)
        if op.kind == "attention"
    ), "whole heads would need all tokens"


def found_in(graph: Graph, cluster: Cluster, **request: Any) -> FoundSharding:
    found = best_sharding(graph, cluster, **request)
    assert found is not None
    assert found.sharding
    return found


def ways(graph: Graph, sharding: tuple[BlockSharding, ...], tp: int) -> dict[str, dict[str, Way]]:
    return ways_by_block(msgspec.structs.replace(plan_for(graph, tp=tp), sharding=sharding), graph)


def test_the_same_input_gives_the_same_sharding() -> None:
    one, other = (
        picked(transformer_graph(hidden=128), named_machine(), tp=2, microbatch=8, num_microbatches=3) for _ in range(2)
    )
    assert one == other


# Against every assignment


def stack(parts: list[str], wide: int = 96) -> Graph:
    """Two like blocks of parts in a row, each added to the stream: mlp, gated, linear, norm."""
    writer = BlockWriter(Sizes(hidden=32, seq=8))
    kind = _written(writer, parts, wide)
    names = ("blocks.0", "blocks.1")
    parameters = tuple(
        Parameter(name=f"{block}.{name}", shape=shape, dtype="float16", block=block)
        for block in names
        for name, shape in writer.parameters.items()
    )
    return Graph(
        model="stack", precision="fp16", parameters=parameters, kinds=(Kind(name="Stack", ops=()), kind),
        blocks=(
            Block(name="", kind="Stack", repeated=False), *(Block(name=n, kind="Block", repeated=True) for n in names),
        ),
        timeline=(*(Segment(n, 0) for n in names), *(Segment(n, 1) for n in reversed(names))),
        buffer_bytes=0, batch_bytes=Affine(0.0, 64.0), tokens_per_sample=8,
    )  # fmt: skip


def _written(writer: BlockWriter, parts: list[str], wide: int) -> Kind:
    hidden, tokens = writer.sizes.hidden, ("n", writer.sizes.seq)
    x = stream = writer.outside("@input", shape_of(tokens, hidden), freed=True)
    undo: list[tuple[str, Storage, list[Storage]]] = []
    for number, part in enumerate(parts):
        entry, made = stream, list[Storage]()
        if part == "norm":
            stream = writer.norm(f"{number}", entry)
        elif part == "linear":
            stream = writer.linear(f"{number}", entry, hidden, hidden)
        else:
            first = ["gate", "up"] if part == "gated" else ["up"]
            made = [writer.linear(f"{number}.{name}", entry, hidden, wide) for name in first]
            bent = writer.op("forward", "gelu", "transcendental", [made[0]], shape_of(tokens, wide))
            if part == "gated":
                bent = writer.op("forward", "mul", "elementwise", [bent, made[1]], shape_of(tokens, wide))
            down = writer.linear(f"{number}.down", bent, wide, hidden)
            made = [*made, bent]
            stream = writer.op("forward", "add", "elementwise", [entry, down], shape_of(tokens, hidden))
        undo.append((part, entry, made))
    stream = writer.op("forward", "add", "elementwise", [x, stream], shape_of(tokens, hidden))
    writer.hand_on(stream, saved=True)
    num_forward = len(writer.ops)
    gradient = writer.outside("@input", shape_of(tokens, hidden), freed=True)
    for number, (part, entry, made) in reversed(list(enumerate(undo))):
        if part == "norm":
            gradient = writer.norm_backward(f"{number}", gradient, entry)
        elif part == "linear":
            gradient = writer.linear_backward(f"{number}", gradient, entry)
        else:
            inner = writer.linear_backward(f"{number}.down", gradient, made[-1])
            for name, one in zip(["gate", "up"] if part == "gated" else ["up"], made, strict=False):
                bent = writer.op("backward", "gelu_backward", "transcendental", [inner, one], inner.shape)
                back = writer.linear_backward(f"{number}.{name}", bent, entry)
                gradient = writer.op("backward", "add", "elementwise", [gradient, back], shape_of(tokens, hidden))
    writer.hand_on(gradient, saved=False)
    return writer.kind(("forward", num_forward), ("backward", len(writer.ops) - num_forward))


def is_legal(kind: Kind, chosen: dict[str, Way]) -> bool:
    """Told from the labels, op by op: nothing may be gathered, and what is added up is read once."""
    labels = labels_of(kind, chosen)
    forward = [(number, op) for number, op in enumerate(kind.ops) if op.phase == "forward"]
    num_readers = Counter(source for _, op in forward for source in op.inputs)
    for number, op in forward:
        names = [source for source in op.inputs if isinstance(source, str) and source.endswith("weight")]
        read = {labels.of(source) for source in op.inputs if isinstance(source, int) or source == "@input"}
        if op.kind == "matmul" and read != {"split" if chosen.get(names[0]) == "row" else "whole"}:
            return False
        if op.kind == "matmul" and chosen.get(names[0]) == "row" and num_readers[number] > 1:
            return False
        if op.kind == "normalisation" and read != {"whole"}:
            return False
        if len(read) > 1:
            return False
    return labels.results[forward[-1][0]] == "whole"


def every_choice(graph: Graph, tp: int) -> list[tuple[BlockSharding, ...]]:
    """All legal shardings of a stack's blocks."""
    kind = graph.kind_by_block["blocks.0"]
    own = {p.own_name: p for p in graph.parameters if p.block == "blocks.0"}
    weights = [name for name, parameter in own.items() if len(parameter.shape) == 2]
    found = []
    for picked in product((None, "column", "row"), repeat=len(weights)):
        chosen: dict[str, Way] = {name: way for name, way in zip(weights, picked, strict=True) if way}  # type: ignore[misc]
        cut = {name: own[name].shape[0 if way == "column" else 1] for name, way in chosen.items()}
        if is_legal(kind, chosen) and all(size % tp == 0 for size in cut.values()):
            rule = block_sharding(("blocks.0", "blocks.1"), kind, own, chosen)
            whole = TensorSharding(tensor=weights[0], dims=("", ""))
            found.append((rule or BlockSharding(for_blocks=("blocks.0", "blocks.1"), tensors=(whole,)),))
    return found


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from(["mlp", "gated", "linear", "norm"]), min_size=1, max_size=2).filter(
        lambda parts: any(part != "norm" for part in parts)
    ),
    st.sampled_from([64, 66, 63]),
    st.sampled_from([1e6, 1e8, 1e9, 1e10, 1e12]),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from([2, 4]),
)
def test_no_legal_assignment_is_better(parts: list[str], wide: int, speed: float, kind: str, tp: int) -> None:
    graph = stack(parts, wide)
    cluster = machine(4, bytes_per_second=speed, latency_seconds=1e-6, kind=kind)
    found = best_sharding(graph, cluster, tp=tp, microbatch=2)
    assert found is not None
    every = [seconds_of(graph, cluster, one, tp=tp, microbatch=2) for one in every_choice(graph, tp)]
    assert found.seconds == pytest.approx(min(every), rel=1e-9)
    if found.sharding:
        assert found.sharding in every_choice(graph, tp)
        assert seconds_of(graph, cluster, found.sharding, tp=tp, microbatch=2) == pytest.approx(min(every), rel=1e-9)
