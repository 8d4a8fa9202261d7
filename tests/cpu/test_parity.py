"""Every plan the runtime can run gives the loss, gradients and parameters of one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
from cases import ASSETS, MODELS, RECOMPUTES, ZERO_STAGES, Case, plan_of, source_of
from pool import RankError, RankPool, this_rank

from meshwright.measure.parity import ParityResult, Tamper, compare
from meshwright.models.objective import Objective
from meshwright.runtime import program as program_module
from meshwright.runtime.data_parallel import prepare_microbatch
from meshwright.runtime.program import Program

Pools = Callable[[int], RankPool]

PARITY_MODELS = ("gpt", "tied", "resnet", "frozen", "llama", "gpt2")
TABLE = [
    Case(model, zero, recompute, microbatches)
    for model, zero, recompute, microbatches in product(PARITY_MODELS, ZERO_STAGES, RECOMPUTES, (1, 2))
]
PAIRS = [
    Case("gpt", 0, "none", 1),
    Case("gpt", 1, "full", 2),
    Case("tied", 2, "full", 1),
    Case("tied", 3, "none", 2),
    Case("resnet", 0, "full", 2),
    Case("frozen", 1, "none", 1),
    Case("frozen", 3, "full", 1),
    Case("llama", 2, "none", 2),
    Case("gpt2", 0, "full", 1),
    Case("odd", 3, "full", 2),
    Case("odd", 1, "none", 2),
]
"""Every pair of (zero, recompute, microbatches) and every model of the table above is in some row."""
OTHER_MODELS = {
    "bert": 0, "padded": 3, "t5": 1, "vit": 2, "coatnet": 3, "mlp": 0, "hf_bert": 1, "hf_t5": 3, "hf_vit": 2, "mixtral": 0,
}  # fmt: skip
"""Two rows for each: with this ZeRO stage and one microbatch, and with the next stage and two."""
OTHERS = [
    Case(model, (first + row) % 4, RECOMPUTES[(number + row) % 2], 1 + row)
    for number, (model, first) in enumerate(OTHER_MODELS.items())
    for row in range(2)
]


def compare_on_rank(case: Case, num_steps: int, tamper: Tamper | None = None) -> ParityResult:
    return compare(source_of(case.model).small(), plan_of(case), num_steps, this_rank(), tamper)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_two_ranks_agree_with_one_process(pool: Pools, case: Case) -> None:
    check(pool(2).run(compare_on_rank, case, 2))


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_four_ranks_agree_with_one_process(pool: Pools, case: Case) -> None:
    check(pool(4).run(compare_on_rank, case, 2))


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_models_agree_with_one_process(pool: Pools, case: Case) -> None:
    check(pool(2).run(compare_on_rank, case, 2))


def test_other_models_meet_every_pair() -> None:
    for pair in product(ZERO_STAGES, RECOMPUTES):
        assert any((case.zero, case.recompute) == pair for case in OTHERS), pair
    for pair in product(ZERO_STAGES, (1, 2)):
        assert any((case.zero, case.num_microbatches) == pair for case in OTHERS), pair


def test_parity_holds_over_many_steps(pool: Pools) -> None:
    check(pool(2).run(compare_on_rank, Case("gpt", 3, "full", 2), 8))


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_a_layer_that_no_forward_uses(pool: Pools, zero: int) -> None:
    """Its parameters get no gradient in one process, and none on two ranks."""
    check(pool(2).run(compare_on_rank, Case("unused", zero), 2))


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_experts_that_only_some_samples_use(pool: Pools, zero: int, num_microbatches: int) -> None:
    """Ranks use other ones, and one that no rank uses in the first step is trained in the second."""
    check(
        pool(2).run(compare_on_rank, Case(f"{ASSETS}/models.py:choosing", zero, num_microbatches=num_microbatches), 3)
    )


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_blocks_that_only_some_samples_use(pool: Pools, zero: int) -> None:
    """A rank gathers the blocks that another one calls."""
    check(pool(2).run(compare_on_rank, Case(f"{ASSETS}/models.py:choosing_blocks", zero), 3))


def test_blocks_that_only_some_samples_use_several_times(pool: Pools) -> None:
    """Replicas hold all blocks; sharded ones would be gathered by some ranks only."""
    check(pool(2).run(compare_on_rank, Case(f"{ASSETS}/models.py:choosing_twice", 0), 3))
    with pytest.raises(RankError, match=r"block 'layers.0.experts.\d' is called for some batches and not for others"):
        pool(2).run(compare_on_rank, Case(f"{ASSETS}/models.py:choosing_twice", 3), 3)


def test_one_rank_is_one_process(pool: Pools) -> None:
    check(pool(1).run(compare_on_rank, Case("gpt", 0, "none", 2), 2))
    check(pool(1).run(compare_on_rank, Case("gpt", 3, "full", 2), 2))


def check(results: list[ParityResult]) -> None:
    for result in results:
        assert result.first_difference is None
        assert result.ok
        assert result.max_loss_difference <= 1e-14
        assert result.max_gradient_difference <= result.bound
        assert result.max_parameter_difference <= result.bound
        assert result.num_tensors > 0
        assert len({found for found, _ in result.losses}) == len(result.losses), "no step changed the loss"
    assert len({result.losses for result in results}) == 1, "ranks report different losses"


# Planted errors: parity that cannot fail proves nothing.


def scale_one_gradient(program: Program) -> None:
    """One gradient is averaged over ranks once too often."""
    name, parameter = next((n, p) for n, p in program.module.named_parameters() if p.requires_grad)
    degree = program.plan.mesh.dp

    def spoil(*_: Any) -> None:
        assert parameter.grad is not None, name
        parameter.grad.div_(degree)

    program.optimizer.register_step_pre_hook(spoil)


def scale_the_loss(program: Program) -> None:
    """Every gradient is averaged over ranks once too often; the loss shown is right."""
    backward = program._backward
    program._backward = lambda loss, scale: backward(loss, scale / program.plan.mesh.dp)  # type: ignore[method-assign]


def normalise_by_microbatch(program: Program) -> None:
    """A mean of means: microbatches count alike, whatever they hold."""
    program.objective = Objective(loss=program.objective.loss, count=lambda batch: 1)


@pytest.mark.parametrize("zero", ZERO_STAGES)
@pytest.mark.parametrize("tamper", [scale_one_gradient, scale_the_loss], ids=lambda tamper: tamper.__name__)
def test_a_scaled_gradient_is_found(pool: Pools, zero: int, tamper: Tamper) -> None:
    for result in pool(2).run(compare_on_rank, Case("gpt", zero, "none", 2), 1, tamper):
        assert not result.ok
        assert result.first_difference is not None
        assert result.first_difference.startswith("step 0: gradient of token_embedding.weight differs by 0.5 ")
        assert result.max_gradient_difference == pytest.approx(0.5, abs=1e-9)
        assert result.max_loss_difference <= 1e-14


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_a_mean_of_means_is_found(pool: Pools, zero: int) -> None:
    for result in pool(2).run(compare_on_rank, Case("gpt", zero, "none", 2), 1, normalise_by_microbatch):
        assert not result.ok
        assert result.first_difference is not None
        assert result.first_difference.startswith("step 0: loss differs by")


def compare_without_last_sync(case: Case) -> ParityResult:
    """The last microbatch is run as if another one followed."""

    def never_last(module: Any, plan: Any, is_last: bool) -> None:
        prepare_microbatch(module, plan, is_last=False)
        if plan.zero:
            module.set_requires_gradient_sync(not is_last and plan.zero >= 2)

    with mock.patch.object(program_module, "prepare_microbatch", never_last):
        return compare_on_rank(case, 1)


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_a_microbatch_that_is_not_reduced_is_found(pool: Pools, zero: int) -> None:
    for result in pool(2).run(compare_without_last_sync, Case("gpt", zero, "none", 2)):
        assert not result.ok
        assert result.first_difference is not None
        assert result.first_difference.startswith("step 0: gradient of ")


def test_every_model_of_the_table_is_small() -> None:
    """Parity of a shrunk model stays a matter of seconds, and keeps what matters: blocks, ties, frozen parameters."""
    from cases import graph_of

    for model in (*PARITY_MODELS, *OTHER_MODELS):
        graph = graph_of(model)
        assert graph.num_parameters < 2e6, model
        assert len(graph.repeated_blocks) >= 2, model
    assert any(parameter.tied_to for parameter in graph_of("tied").parameters)
    assert any(parameter.tied_to for parameter in graph_of("gpt2").parameters)
    assert not all(parameter.trainable for parameter in graph_of("frozen").parameters)
    assert {*PARITY_MODELS, *OTHER_MODELS} <= set(MODELS)
