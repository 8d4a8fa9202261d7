"""Optimizer state on the host: the same result as on the device, whatever leaves, arrives late or is shared.

Device and host are both the CPU here, with a link between them that is as slow as a test wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from cases import Case, graph_of, hand_cluster, plan_of, source_of
from pool import RankError, RankPool, this_rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.capturing.capture import capture_source
from meshwright.core.cluster import Link
from meshwright.core.plan import Offload, Plan
from meshwright.core.request import PlanRequest
from meshwright.cost.estimate import estimate
from meshwright.measure.parity import compare
from meshwright.models.objective import call, default_loss
from meshwright.rules.groups import num_kept, order_of_need
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply, wrap
from meshwright.runtime.held import held_bytes
from meshwright.runtime.offload import host as host_memory
from meshwright.runtime.offload import kernel, pieces
from meshwright.runtime.program import Program

Pools = Callable[[int], RankPool]

SLOW_LINK = 4e6
"""Bytes a second: a microbatch's gradients take longer than its backward."""
NUM_STEPS = 4


def build(case: Case) -> nn.Module:
    torch.manual_seed(7)
    module = source_of(case.model).build()
    return module.double() if case.precision == "fp64" else module


def batches(case: Case, num_ranks: int, num_steps: int = NUM_STEPS) -> list[Any]:
    make = source_of(case.model).example
    assert make is not None
    torch.manual_seed(11)
    return [make(case.samples * num_ranks) for _ in range(num_steps)]


def plan_with(case: Case, **offload: Any) -> Plan:
    return msgspec.structs.replace(plan_of(case), offload=Offload(**{"what": "optimizer", **offload}))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def trained(
    case: Case, plan: Plan, optimizer: Any, max_norm: float | None, **options: Any
) -> tuple[list[float], Program]:
    program = apply(
        build(case), plan, optimizer=optimizer, objective=source_of(case.model).objective, max_norm=max_norm, **options
    )
    losses = [program.step(batch).loss for batch in batches(case, plan.mesh.dp)]
    if program.host is not None:
        program.host.settle()
    return losses, program


def tensors_of(program: Program) -> dict[str, Tensor]:
    named = program.module.named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named}


def differences_on_rank(
    case: Case,
    offload: dict[str, Any],
    optimizer: Any = adamw,
    max_norm: float | None = None,
    link: float | None = None,
) -> tuple[float, float]:
    """Largest difference of losses, and of parameters after the last step, between offloaded and in memory."""
    losses, program = trained(case, plan_with(case, **offload), optimizer, max_norm, host_link=link)
    found = tensors_of(program)
    assert program.host is not None
    program.host.close()
    expected_losses, plain = trained(case, plan_of(case), optimizer, max_norm)
    expected = tensors_of(plain)
    assert found.keys() == expected.keys()
    largest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    return max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)), largest


EXACT = [
    (Case("gpt", precision="fp32"), {}, adamw, None),
    (Case("gpt", precision="fp64"), {}, adamw, None),
    (Case("tied", precision="fp32"), {}, adamw, None),
    (Case("tied", precision="fp32", recompute="full"), {"share": 0.4}, adamw, None),
    (Case("gpt", precision="fp32", num_microbatches=2), {}, adamw, None),
    (Case("gpt", precision="fp32", num_microbatches=4), {"share": 0.6}, adamw, None),
    (Case("gpt", precision="fp64"), {"share": 0.3}, sgd, None),
    (Case("gpt", precision="fp64"), {}, adafactor, None),
    (Case("frozen", precision="fp32"), {}, adamw, None),
    (Case("unused", precision="fp64"), {}, adamw, None),
    (Case("resnet", precision="fp64"), {"share": 0.5}, sgd, None),
    (Case("llama", precision="fp32"), {}, adamw, None),
    (Case("mixtral", precision="fp32", num_microbatches=4), {"share": 0.7}, sgd, None),
]


@pytest.mark.parametrize(
    ("case", "offload", "optimizer", "max_norm"), EXACT, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_one_rank_to_the_last_bit(
    pool: Pools, case: Case, offload: dict[str, Any], optimizer: Any, max_norm: float | None
) -> None:
    """Same operations in the same order: nothing differs, though copies overlap and arrive late."""
    loss, parameter = pool(1).run(differences_on_rank, case, offload, optimizer, max_norm, SLOW_LINK)[0]
    assert loss == 0
    assert parameter <= (
        1e-7 if case.precision == "fp32" else 0
    )  # entries beyond the last full vector may round otherwise


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("max_norm", [1e-2, 1e6])
def test_clipping(pool: Pools, num_microbatches: int, share: float, max_norm: float) -> None:
    case = Case("gpt", precision="fp64", num_microbatches=num_microbatches)
    loss, parameter = pool(1).run(differences_on_rank, case, {"share": share}, adamw, max_norm)[0]
    assert loss < 1e-12
    assert parameter < 1e-12


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", precision="fp64"),
        Case("gpt", 1, "full", 2),
        Case("odd", 2),
        Case("tied", 3, "none", 2),
        Case("gpt", 3, hybrid=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("offload", [{}, {"share": 0.5}], ids=str)
def test_two_ranks(pool: Pools, case: Case, offload: dict[str, Any]) -> None:
    """Each rank updates what it holds: its shards under ZeRO."""
    for loss, parameter in pool(2).run(differences_on_rank, case, offload, adamw, 0.1):
        assert loss < 1e-12
        assert parameter < 1e-11


def test_without_a_compiler(pool: Pools) -> None:
    loss, parameter = pool(1).run(differences_without_kernel, Case("gpt", precision="fp32", num_microbatches=2))[0]
    assert loss == 0
    assert parameter == 0


def differences_without_kernel(case: Case) -> tuple[float, float]:
    kernel.try_kernel.cache_clear()
    kept, kernel.shutil.which = kernel.shutil.which, lambda _: None  # type: ignore[assignment]
    try:
        return differences_on_rank(case, {"share": 0.7})
    finally:
        kernel.shutil.which = kept
        kernel.try_kernel.cache_clear()


def test_parameters_in_many_pieces(pool: Pools) -> None:
    loss, parameter = pool(1).run(differences_in_small_pieces, Case("gpt", precision="fp32", num_microbatches=2))[0]
    assert loss == 0
    assert parameter < 1e-7


def differences_in_small_pieces(case: Case) -> tuple[float, float]:
    kept, pieces.PIECE_ELEMENTS = pieces.PIECE_ELEMENTS, 96
    try:
        return differences_on_rank(case, {}, adamw, 1.0, SLOW_LINK)
    finally:
        pieces.PIECE_ELEMENTS = kept


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=str)
def test_with_other_axes(pool: Pools, mesh: dict[str, int]) -> None:
    for difference in pool(2).run(parity_on_rank, mesh):
        assert difference < 1e-12


def parity_on_rank(mesh: dict[str, int]) -> float:
    """Largest difference from one process, by the comparison that all plans go through."""
    source = source_of("gpt")
    request = PlanRequest(
        precision="fp64", offload="optimizer", offload_share=0.8, global_batch=4, microbatch=2, **mesh
    )
    plan = plain_plan(request, graph_of("gpt", "fp64"), 2, "tests")
    found = compare(source, plan, 2, this_rank())
    assert found.ok, found.first_difference
    return max(found.max_loss_difference, found.max_gradient_difference)


def test_gradients_and_parameters_agree_with_one_process(pool: Pools) -> None:
    assert pool(1).run(parity_of_one_rank, 2)[0] < 1e-12


def parity_of_one_rank(num_microbatches: int) -> float:
    request = PlanRequest(
        precision="fp64", offload="optimizer", offload_share=0.8, global_batch=4, microbatch=4 // num_microbatches
    )
    found = compare(source_of("gpt"), plain_plan(request, graph_of("gpt", "fp64"), 1, "tests"), 2, this_rank())
    assert found.ok, found.first_difference
    return found.max_gradient_difference


def test_sixteen_bits_on_the_device(pool: Pools) -> None:
    """The device computes with bf16 parameters, the host updates fp32 ones: as ZeRO does in memory."""
    for share in (1.0, 0.5):
        losses, expected, dtypes = pool(1).run(bf16_on_rank, share)[0]
        assert dtypes == {torch.bfloat16}
        assert losses == pytest.approx(expected, abs=2e-3)
        assert losses[-1] < losses[0]


def bf16_on_rank(share: float) -> tuple[list[float], list[float], set[torch.dtype]]:
    case = Case("gpt", precision="bf16")
    losses, program = trained(case, plan_with(case, share=share), adamw, None)
    dtypes = {parameter.dtype for parameter in program.module.parameters()}
    assert program.host is not None
    program.host.close()
    expected, _ = trained(case, msgspec.structs.replace(plan_of(case), zero=1), adamw, None)
    return losses, expected, dtypes


def test_what_is_held_on_the_device(pool: Pools) -> None:
    """Two moments and a master of what stays; of what leaves, nothing. And what is promised of it."""
    for share in (1.0, 0.5, 0.0):
        held, promised, kept = pool(1).run(held_on_rank, share)[0]
        assert held == pytest.approx(12 * kept, abs=200)  # a count of steps a tensor
        assert promised == pytest.approx(12 * kept, rel=0.01, abs=1000)


def held_on_rank(share: float) -> tuple[int, int, int]:
    case = Case("gpt", precision="bf16")
    _, program = trained(case, plan_with(case, share=share), adamw, None)
    assert program.host is not None
    kept = sum(one.parameter.numel() for one in program.host.state.kept)
    held = held_bytes(program, batches(case, 1)[0]).optimizer_state
    program.host.close()
    graph = capture_source(source_of("gpt"), "bf16", "parameters")
    cluster = msgspec.structs.replace(hand_cluster(1), host_link=Link(bytes_per_second=1e9, origin="assumed"))
    promised = estimate(graph, program.plan, cluster).memory_bytes.optimizer_state
    return held, promised, kept


def test_delayed_updates_converge(pool: Pools) -> None:
    """One step late, and as good in the end: the same loss within a hundredth of what was learnt."""
    exact, late = pool(1).run(learn_on_rank, False)[0], pool(1).run(learn_on_rank, True)[0]
    assert late[:4] == exact[:4], "the first steps are exact"
    assert late[5:10] != exact[5:10], "then updates are late"
    learnt = exact[0] - exact[-1]
    assert learnt > 1
    assert abs(late[-1] - exact[-1]) < 0.05 * learnt


def learn_on_rank(delayed: bool) -> list[float]:
    case = Case("gpt", precision="fp32")
    plan = plan_with(case, delayed=delayed, warmup_steps=3)
    program = apply(
        build(case), plan, optimizer=lambda ps: torch.optim.AdamW(ps, lr=3e-3, fused=True),
        objective=source_of(case.model).objective, host_link=SLOW_LINK,
    )  # fmt: skip
    (batch,) = batches(case, 1, num_steps=1)
    losses = [program.step(batch).loss for _ in range(60)]
    assert program.host is not None
    program.host.settle()
    program.host.close()
    return losses


def test_a_loop_of_ones_own(pool: Pools) -> None:
    assert pool(1).run(own_loop_on_rank)[0] < 1e-12


def own_loop_on_rank() -> float:
    """`wrap`: clipping between backward and step sees the gradients."""
    case = Case("gpt", precision="fp64")
    results = []
    for plan in (plan_with(case), plan_of(case)):
        module = build(case)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        module, optimizer = wrap(module, optimizer, plan, device=this_rank().device)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for batch in batches(case, 1):
            default_loss(call(module, batch), batch).backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            assert float(norm) > 0.1
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        module(batches(case, 1)[0]["input_ids"])  # a forward waits for the last update
        results.append([parameter.detach().clone() for parameter in module.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def test_too_little_host_memory_is_refused_before_anything_is_taken(pool: Pools) -> None:
    with pytest.raises(RankError) as said:
        pool(1).run(refused_on_rank)
    words = next(iter(said.value.errors.values()))
    assert "offload of the optimizer state of" in words
    assert "of host memory, but 1.00 KiB are available" in words


def refused_on_rank() -> None:
    kept, host_memory.available_bytes = host_memory.available_bytes, lambda: 1024
    try:
        trained(Case("gpt"), plan_with(Case("gpt")), adamw, None)
    finally:
        host_memory.available_bytes = kept


def test_what_fails_on_the_host_is_told_in_the_step(pool: Pools) -> None:
    assert pool(1).run(failure_on_rank)[0] == "the disk of the host is on fire"


def failure_on_rank() -> str:
    case = Case("gpt")
    _, program = trained(case, plan_with(case), adamw, None)
    host = program.host
    assert host is not None

    def fail(tasks: Any) -> None:
        raise RuntimeError("the disk of the host is on fire")

    host.state.rule.begin = fail  # type: ignore[method-assign]
    try:
        for batch in batches(case, 1):
            program.step(batch)
    except RuntimeError as error:
        return str(error)
    finally:
        host.close()
    return "nothing was said"


def test_what_stays_is_what_forward_needs_first() -> None:
    named = [("blocks.1.w", 3), ("blocks.0.w", 3), ("head.w", 2), ("blocks.10.w", 3), ("wte", 2)]
    blocks = ["blocks.0", "blocks.1", "blocks.10"]
    order = order_of_need(named, blocks)
    assert [name for name, _ in order] == ["head.w", "wte", "blocks.0.w", "blocks.1.w", "blocks.10.w"]
    sizes = [size for _, size in order]
    assert [num_kept(sizes, share) for share in (1.0, 0.9, 0.5, 0.0)] == [0, 0, 2, 5]
