"""Streamed parameters: the loss, gradients and updates of one process, in device memory that does not grow with depth."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from cases import Case, graph_of, hand_cluster, plan_of, source_of
from pool import RankError, RankPool, this_rank

from meshwright.core.cluster import Link
from meshwright.core.errors import ModelError
from meshwright.core.plan import Offload, Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.estimate import estimate
from meshwright.measure.parity import ParityResult, compare
from meshwright.measure.record import StepRecorder
from meshwright.models.objective import call
from meshwright.runtime.apply import apply
from meshwright.runtime.deferred import building
from meshwright.runtime.offload import build, host, stash
from meshwright.runtime.offload.host import padded
from meshwright.runtime.offload.link import open_link
from meshwright.runtime.offload.pieces import MOMENTS
from meshwright.runtime.offload.streamed_program import StreamedProgram, TornError
from meshwright.runtime.offload.streaming import REQUESTED_AHEAD, Holdings
from meshwright.runtime.read_outside import STREAMED, ReadOutside
from meshwright.runtime.watch import SAMPLED_STEP

Pools = Callable[[int], RankPool]
MODELS = ("gpt", "tied", "grouped", "llama", "gpt2", "t5", "frozen", "unused", "mixtral", "resnet")
SLOW_LINK = 2e7
"""Bytes a second: slow enough that copies are still on their way when they are waited for."""


def streamed(case: Case, **offload: Any) -> Plan:
    plan = plan_of(case)
    return msgspec.structs.replace(plan, offload=Offload(what="parameters", **offload))


def compare_on_rank(case: Case, num_steps: int, throttled: bool, offload: dict[str, Any]) -> ParityResult:
    rate = SLOW_LINK if throttled else None
    with mock.patch.object(build, "open_link", lambda device, _: open_link(device, rate)):
        return compare(source_of(case.model).small(), streamed(case, **offload), num_steps, this_rank())


def check(results: list[ParityResult]) -> None:
    for result in results:
        assert result.ok, result.first_difference


@pytest.mark.parametrize("stash", ["host", "device"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_agrees_with_one_process(pool: Pools, model: str, num_microbatches: int, stash: str) -> None:
    case = Case(model, 0, "full", num_microbatches)
    check(pool(1).run(compare_on_rank, case, 3, stash == "host", {"stash": stash}))


@pytest.mark.parametrize("model", ["gpt", "odd", "llama"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_over_dp_each_rank_has_its_shard(pool: Pools, model: str, num_microbatches: int) -> None:
    case = Case(model, 3, "full", num_microbatches)
    check(pool(2).run(compare_on_rank, case, 2, False, {"stash": "host"}))


def test_a_wider_window_changes_nothing(pool: Pools) -> None:
    check(pool(1).run(compare_on_rank, Case("gpt", 0, "full", 2), 2, True, {"window": 4}))


# ------------------------------------------------------------ memory


def program_of(model: str, plan: Plan, max_norm: float | None = None, **options: Any) -> StreamedProgram:
    source = source_of(model)
    torch.manual_seed(0)
    with building(plan):
        module = source.build()
    optimizer = partial(torch.optim.AdamW, lr=1e-2, **options)
    program = apply(module, plan, optimizer=optimizer, max_norm=max_norm, device=this_rank().device)
    assert isinstance(program, StreamedProgram)
    return program


def batch_of(model: str, num_samples: int) -> Any:
    example = source_of(model).example
    assert example is not None
    return example(num_samples)


def deep(layers: int) -> str:
    return f"gpt:layers={layers},hidden=32,heads=4,seq=16,vocab=61"


def holdings_on_rank(layers: int) -> tuple[Holdings, int, int]:
    plan = streamed(Case(deep(layers), 0, "full", 2, precision="fp32"), stash="host")
    program = program_of(deep(layers), plan)
    program.step(batch_of(deep(layers), 4))
    fetched = program.streams.streaming.window.num_fetched
    link, found = program.streams.streaming.link, program.holdings()
    program.close()
    return found, fetched, link.bytes_out


def test_device_memory_does_not_grow_with_depth(pool: Pools) -> None:
    (shallow, _, _), (deeper, fetched, bytes_out) = (
        pool(1).run(holdings_on_rank, 3)[0],
        pool(1).run(holdings_on_rank, 12)[0],
    )
    assert deeper.device == shallow.device
    block = 4 * (12 * 32 * 32 + 13 * 32)
    assert deeper.window == 2 * block
    inputs = 2 * 16 * 32 * 4  # of one microbatch
    assert deeper.stash_peak <= 8 * inputs
    assert deeper.host > 2 * shallow.host
    assert fetched == 12 + 10, "each block once in forward; in backward the two of the window are still there"
    assert bytes_out == 12 * (block + 2 * inputs)


def moments_on_rank(layers: int) -> tuple[int, int, bool]:
    program = program_of(deep(layers), streamed(Case(deep(layers), 0, "full", 1, precision="fp32")))
    batch, state = batch_of(deep(layers), 4), program.optimizer.state
    program.step(batch)
    streamed_ones = {id(one) for home in program.streams.streaming.homes.values() for one in home.masters}
    moments = [kept[key] for one, kept in state.items() if id(one) in streamed_ones for key in MOMENTS]
    first = min(one.data_ptr() for one in moments)
    last = max(one.data_ptr() + 4 * one.numel() for one in moments)
    state.clear()  # who trains begins anew: there is no more room of that kind, and none is needed
    program.step(batch)
    began_anew = all(float(kept["step"]) == 1 for kept in state.values())
    program.close()
    return last - first, sum(padded(4 * one.numel()) for one in moments), began_anew


def test_moments_lie_together_in_memory_of_large_pages(pool: Pools) -> None:
    stretch, needed, began_anew = pool(1).run(moments_on_rank, 12)[0]
    assert 0.9 * needed < stretch <= needed
    assert began_anew


def live_on_rank(layers: int) -> list[int]:
    """Tensors of the size of a block's input that are alive while each block runs again, the last block first."""
    plan = streamed(Case(deep(layers), 0, "full", 2, precision="fp32"), stash="host")
    program = program_of(deep(layers), plan)
    block_input, found = torch.Size((2, 16, 32)), []

    def count(*_: Any) -> None:
        if torch.is_grad_enabled():
            gc.collect()
            alive = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.shape == block_input]
            found.append(len({one.data_ptr() for one in alive}))

    for number in range(layers):
        program.module.get_submodule(f"blocks.{number}.mlp_norm").register_forward_pre_hook(count)
    program.step(batch_of(deep(layers), 4))
    program.close()
    return found


def test_activations_and_their_gradients_go_as_backward_goes_on(pool: Pools) -> None:
    shallow, deeper = max(pool(1).run(live_on_rank, 4)[0]), max(pool(1).run(live_on_rank, 12)[0])
    assert deeper == shallow


def comings_on_rank(layers: int) -> list[tuple[int, int]]:
    """As each block runs again, the last first: its number, and the lowest number of a block whose input was asked back by then."""
    plan = streamed(Case(deep(layers), 0, "full", 1, precision="fp32"), stash="host")
    program = program_of(deep(layers), plan)
    numbers: dict[int, int] = {}
    asked, found = [layers], []
    keep, request = stash.HostStash.keep, stash._Away.request

    def keep_numbered(self: Any, tensor: Any) -> Any:
        away = keep(self, tensor)
        numbers[id(away)] = len(numbers)
        return away

    def request_noted(self: Any) -> None:
        asked.append(numbers[id(self)])
        request(self)

    def note(number: int, *_: Any) -> None:
        if torch.is_grad_enabled():
            found.append((number, min(asked)))

    for number in range(layers):
        program.module.get_submodule(f"blocks.{number}.mlp_norm").register_forward_pre_hook(partial(note, number))
    with (
        mock.patch.object(stash.HostStash, "keep", keep_numbered),
        mock.patch.object(stash._Away, "request", request_noted),
    ):
        program.step(batch_of(deep(layers), 4))
    program.close()
    return found


def test_inputs_of_the_next_blocks_come_back_while_one_runs(pool: Pools) -> None:
    found = pool(1).run(comings_on_rank, 6)[0]
    assert found == [(number, max(0, number - REQUESTED_AHEAD)) for number in reversed(range(6))]


# ------------------------------------------------------------ precision, clipping, evaluation, inference


def losses_on_rank(
    precision: str, offload: bool, max_norm: float | None
) -> tuple[list[float], list[float | None], float]:
    case = Case("gpt", 0, "full", 2, precision=precision)  # type: ignore[arg-type]
    plan = streamed(case, stash="host") if offload else plan_of(case)
    torch.manual_seed(0)
    with building(plan):
        module = source_of("gpt").build()
    program = apply(
        module, plan, optimizer=partial(torch.optim.AdamW, lr=1e-2), max_norm=max_norm, device=this_rank().device
    )
    outputs = [program.step(batch_of("gpt", 4)) for _ in range(4)]
    return [one.loss for one in outputs], [one.gradient_norm for one in outputs], program.evaluate([batch_of("gpt", 4)])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5), ("bf16", 2e-2)])
def test_losses_norms_and_evaluation_are_those_in_memory(pool: Pools, precision: str, tolerance: float) -> None:
    for max_norm in (None, 0.1):
        losses, norms, evaluated = pool(1).run(losses_on_rank, precision, True, max_norm)[0]
        expected, expected_norms, expected_evaluated = pool(1).run(losses_on_rank, precision, False, max_norm)[0]
        assert losses == pytest.approx(expected, rel=tolerance)
        assert losses[-1] < losses[0]
        assert evaluated == pytest.approx(expected_evaluated, rel=tolerance)
        if max_norm is not None:
            assert norms == pytest.approx(expected_norms, rel=10 * tolerance)
            assert all(norm is not None and norm > max_norm for norm in norms), "it clips"


def clipped_on_two(offload: bool) -> list[float]:
    case, source = Case("odd", 3, "full", 2), source_of("odd")
    torch.manual_seed(0)  # when the source is known: to look at a user's function takes random numbers too
    program = apply(
        source.build().double(),
        streamed(case, stash="host") if offload else plan_of(case),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        max_norm=0.05,
        device=this_rank().device,
    )
    found = []
    for _ in range(3):
        output = program.step(batch_of("odd", 8))
        found += [output.loss, output.gradient_norm or 0.0]
    return found


def test_over_dp_gradients_are_clipped_to_one_norm(pool: Pools) -> None:
    expected, found = pool(2).run(clipped_on_two, False), pool(2).run(clipped_on_two, True)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected[0], rel=1e-10)


def inference_on_rank() -> tuple[bool, int]:
    plan = streamed(Case(deep(6), 0, "full", 1, precision="fp32"))
    torch.manual_seed(0)
    whole = source_of(deep(6)).build()
    program = program_of(deep(6), plan)
    batch = batch_of(deep(6), 4)
    with torch.no_grad(), program.streams.streaming.resident.in_place():
        found = call(program.module, batch) + 0
    return torch.equal(found, call(whole, batch)), program.streams.streaming.window.num_bytes


def test_inference_passes_through_the_window(pool: Pools) -> None:
    same, window = pool(1).run(inference_on_rank)[0]
    assert same
    assert window == 2 * 4 * (12 * 32 * 32 + 13 * 32)


def dropout_on_rank(num_microbatches: int) -> tuple[float, float]:
    """Gradients of a model with dropout: the second run must draw what the first drew, or the loss would not fall along them."""
    model = "gpt:layers=3,hidden=32,heads=4,seq=16,vocab=61,dropout=0.5"
    plan = streamed(Case(model, 0, "full", num_microbatches, precision="fp64"), stash="host")
    torch.manual_seed(0)
    with building(plan):
        module = source_of(model).build()
    rate = 1e-4
    program = apply(module, plan, optimizer=partial(torch.optim.SGD, lr=rate), device=this_rank().device)
    batch, before = batch_of(model, 4), [one.detach().clone() for one in module.parameters()]
    torch.manual_seed(1)
    first = program.step(batch).loss
    moved = sum(
        float((one.detach() - old).square().sum()) for one, old in zip(module.parameters(), before, strict=True)
    )
    torch.manual_seed(1)
    second = program.step(batch).loss
    return first - second, moved / rate


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_block_draws_the_same_numbers_when_it_runs_again(pool: Pools, num_microbatches: int) -> None:
    fallen, expected = pool(1).run(dropout_on_rank, num_microbatches)[0]
    assert fallen == pytest.approx(expected, rel=1e-2)


# ------------------------------------------------------------ faults


def refused_on_rank(case: Case, offload: dict[str, Any]) -> str:
    try:
        program_of(case.model, streamed(case, **offload))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_does_not_run_is_refused(pool: Pools) -> None:
    gpt = Case("gpt", 0, "full", 1, precision="fp32")
    assert "set recompute to full" in pool(1).run(refused_on_rank, Case("gpt", precision="fp32"), {})[0]
    assert "set share to 1" in pool(1).run(refused_on_rank, gpt, {"share": 0.5})[0]
    assert "set zero to 3" in pool(2).run(refused_on_rank, gpt, {})[0]


def host_too_small_on_rank() -> str:
    with (
        mock.patch.object(host, "available_bytes", return_value=10_000),
        mock.patch.object(host.HostMemory, "__init__") as taken,
    ):
        found = refused_on_rank(Case("gpt", 0, "full", 1, precision="fp32"), {})
        assert not taken.called
    return found


def test_too_little_host_memory_is_refused_before_it_is_taken(pool: Pools) -> None:
    found = pool(1).run(host_too_small_on_rank)[0]
    assert found.startswith("InfeasibleError: streaming the parameters of 2 blocks")
    assert "9.77 KiB are available" in found


def interrupted_on_rank(in_backward: bool) -> tuple[str, str]:
    plan = streamed(Case("gpt", 0, "full", 2, precision="fp32"))
    program = program_of("gpt", plan)
    calls = {"count": 0}
    first = program.module.get_submodule("blocks.0.mlp")
    forward = first.forward

    def failing(*arguments: Any) -> Any:
        calls["count"] += 1
        if calls["count"] == (3 if in_backward else 2):
            raise ValueError("planted")
        return forward(*arguments)

    first.forward = failing  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="planted"):
        program.step(batch_of("gpt", 4))
    on_host = all(one.data_ptr() != 0 for one in program.module.parameters())
    assert on_host
    assert program.streams.streaming.window.current == ""
    try:
        return "", f"{program.step(batch_of('gpt', 4)).loss:.3f}"
    except TornError as error:
        return str(error), ""


def test_a_step_that_fails_in_forward_can_be_repeated(pool: Pools) -> None:
    error, loss = pool(1).run(interrupted_on_rank, False)[0]
    assert not error
    assert float(loss) > 0


def test_a_step_that_fails_between_updates_ends_the_program(pool: Pools) -> None:
    error, _ = pool(1).run(interrupted_on_rank, True)[0]
    assert "start again from the last checkpoint" in error


def failing_update_on_rank() -> None:
    program = program_of("gpt", streamed(Case("gpt", 0, "full", 1, precision="fp32")))

    def fail(*_: Any) -> None:
        raise ValueError("planted in the update")

    program.optimizer.register_step_pre_hook(fail)
    program.step(batch_of("gpt", 4))


def test_an_error_in_an_update_is_raised_by_the_step(pool: Pools) -> None:
    with pytest.raises(RankError, match="planted in the update"):
        pool(1).run(failing_update_on_rank)


def changing_in_place_on_rank() -> str:
    program = program_of("gpt", streamed(Case("gpt", 0, "full", 1, precision="fp32")))
    block = program.module.get_submodule("blocks.0")
    forward = block.forward
    block.forward = lambda x: forward(x.add_(1))  # type: ignore[method-assign]
    try:
        program.step(batch_of("gpt", 4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_block_that_changes_its_input_in_place_is_named(pool: Pools) -> None:
    assert "block 'blocks.0' changes what it is given in place" in pool(1).run(changing_in_place_on_rank)[0]


def collectives_on_rank(case: Case, max_norm: float | None) -> tuple[Any, Any]:
    """Predicted, and seen in the sampled step."""
    source, plan = source_of(case.model), streamed(case)
    program = apply(
        source.build(), plan, optimizer=lambda p: torch.optim.AdamW(p), objective=source.objective, max_norm=max_norm,
        recorder=StepRecorder(), device=this_rank().device,
    )  # fmt: skip
    assert source.example is not None
    for _ in range(SAMPLED_STEP + 2):
        program.step(source.example(plan.global_batch))
    recipe = Recipe(clips=max_norm is not None)
    cluster = msgspec.structs.replace(
        hand_cluster(this_rank().num_ranks),
        host_link=Link(bytes_per_second=1e9, latency_seconds=1e-6, origin="assumed"),
        host_updates_per_second=1e9,
        host_memory_bytes=2**34,
    )
    predicted = estimate(graph_of(case.model, case.precision), plan, cluster, recipe)
    return predicted.collectives, program.trace().collectives


@pytest.mark.parametrize(("precision", "max_norm"), [("fp32", None), ("fp32", 1.0), ("bf16", None)])
@pytest.mark.parametrize("model", ["gpt", "odd", "tied", "llama", "frozen"])
def test_collectives_are_those_that_were_predicted(
    pool: Pools, model: str, precision: Any, max_norm: float | None
) -> None:
    for predicted, seen in pool(2).run(collectives_on_rank, Case(model, 3, "full", 2, precision=precision), max_norm):
        assert seen == predicted


def test_functions_without_tensors_pass_where_parameters_are_looked_at() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    with ReadOutside({id(parameter): "blocks.0.weight"}, STREAMED):
        assert torch.zeros(size=(2,)).tolist() == [0.0, 0.0]
        with pytest.raises(ModelError, match=r"blocks\.0\.weight"):
            parameter.data.add_(1.0)
