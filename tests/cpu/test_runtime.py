"""`apply` and `wrap`: what they refuse, and that own loops, optimizers, clipping and evaluation give one process's result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from cases import ZERO_STAGES, Case, graph_of, plan_of, source_of
from pool import RankError, RankPool, this_rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshwright
from meshwright.core.graph import Precision
from meshwright.core.plan import Mesh, Offload, Plan, Recompute, Stage
from meshwright.models.objective import DEFAULT, call, default_loss
from meshwright.runtime.apply import apply, wrap
from meshwright.runtime.program import Program

Pools = Callable[[int], RankPool]

SEED = 7
GPT = Case("gpt", precision="fp64")


def build(case: Case, seed: int = SEED) -> nn.Module:
    torch.manual_seed(seed)
    return source_of(case.model).build().double()


def example(case: Case, samples: int) -> Any:
    make = source_of(case.model).example
    assert make is not None
    return make(samples)


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, under the name the user gave it."""
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in module.named_parameters()
    }


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# What is refused, on every rank, before anything is trained.


def apply_on_rank(model: str, plan: Plan) -> None:
    apply(build(Case(model)), plan, optimizer=sgd, device=this_rank().device)


def refusal(ranks: RankPool, model: str, plan: Plan) -> str:
    """What `apply` says, the same on all ranks."""
    with pytest.raises(RankError) as caught:
        ranks.run(apply_on_rank, model, plan)
    assert sorted(caught.value.errors) == list(range(ranks.num_ranks))
    (said,) = set(caught.value.errors.values())
    return said


def test_a_plan_for_another_model_is_refused(pool: Pools) -> None:
    said = refusal(pool(2), "tied", plan_of(GPT, 2))
    assert said.startswith("PlanError: the plan was made for another model (gpt:layers=2")
    assert graph_of("gpt").identity in said
    assert graph_of("tied").identity in said


def test_a_plan_that_names_unknown_blocks_is_refused(pool: Pools) -> None:
    plan = msgspec.structs.replace(plan_of(GPT, 2), stages=(Stage(coordinate=0, blocks=("blocks.0-2",)),), graph="")
    said = refusal(pool(2), "gpt", plan)
    assert said.startswith("PlanError: the plan names block 'blocks.2', which this model does not have: did you mean")


def test_a_plan_for_any_model_is_taken(pool: Pools) -> None:
    plan = Plan(
        stages=(Stage(coordinate=0, blocks=()),), mesh=Mesh(dp=2), microbatch=1, num_microbatches=1, global_batch=2
    )
    pool(2).run(apply_on_rank, "gpt", plan)


@pytest.mark.parametrize(("planned", "running"), [(4, 2), (1, 2), (2, 1)])
def test_a_plan_for_another_number_of_ranks_is_refused(pool: Pools, planned: int, running: int) -> None:
    said = refusal(pool(running), "gpt", plan_of(GPT, planned))
    assert said == (
        f"PlanError: the plan is for {planned} ranks, but {running} are running: start {planned}, or plan for {running}"
    )


def test_the_rank_with_another_plan_is_named(pool: Pools) -> None:
    usual, odd = plan_of(GPT, 4), plan_of(Case("gpt", zero=2), 4)
    with pytest.raises(RankError) as caught:
        pool(4).run_each(apply_on_rank, [("gpt", odd if rank == 2 else usual) for rank in range(4)])
    said = "PlanError: ranks hold different plans: rank 2 differs from the others; give all the same file"
    assert caught.value.errors == dict.fromkeys(range(4), said)


PLAIN = {"mesh": Mesh(dp=2), "stages": (Stage(coordinate=0, blocks=("blocks.0-1",)),), "microbatch": 2,
         "num_microbatches": 1, "global_batch": 4}  # fmt: skip
TWO_STAGES = tuple(Stage(coordinate=c, blocks=(f"blocks.{c}",)) for c in (0, 1))
NOT_YET = {
    "ZeRO 3 with schedule zb": {
        "mesh": Mesh(pp=2), "global_batch": 2, "stages": TWO_STAGES, "zero": 3, "schedule": "zb",
    },
    "selective recompute of compiled blocks": {
        "recompute": (Recompute(mode="selective", blocks=("blocks.0",)),),
        "compile": True,
    },
    "compile with tp or cp": {"mesh": Mesh(tp=2), "global_batch": 2, "compile": True},
    "offload to disk": {"offload": Offload(what="optimizer", where="disk")},
    "schedule gpipe without pp": {"schedule": "gpipe"},
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_YET)
def test_what_cannot_run_yet_is_refused(pool: Pools, what: str) -> None:
    said = refusal(pool(2), "gpt", Plan(**{**PLAIN, **NOT_YET[what]}))
    assert said.startswith(f"PlanError: this version cannot yet run {what}")
    assert said.count(": ") == 2, "what to do instead"


def step_with(samples: int) -> None:
    program = apply(build(GPT), plan_of(GPT), optimizer=sgd, device=this_rank().device)
    program.step(example(GPT, samples))


def test_a_batch_of_another_size_is_refused(pool: Pools) -> None:
    with pytest.raises(RankError, match=r"the batch has 5 samples: give this rank's 4, or the global batch of 8"):
        pool(2).run(step_with, 5)


def with_wrong_optimizer(kind: str) -> None:
    module = build(GPT)
    optimizer = torch.optim.AdamW(build(GPT).parameters() if kind == "other" else module.parameters())
    if kind == "stepped":
        call(module, example(GPT, 1)).sum().backward()
        optimizer.step()
    wrap(module, optimizer, plan_of(Case("gpt", zero=2)), this_rank().device)


def test_an_optimizer_of_other_parameters_is_refused(pool: Pools) -> None:
    with pytest.raises(RankError, match="that is not the model's: make the optimizer from this model's parameters"):
        pool(2).run(with_wrong_optimizer, "other")


def test_an_optimizer_that_has_stepped_is_refused(pool: Pools) -> None:
    with pytest.raises(RankError, match="the optimizer has already stepped: apply or wrap the plan before"):
        pool(2).run(with_wrong_optimizer, "stepped")


# Own loops.


def own_loop_on_rank(case: Case) -> float:
    """A user's loop over microbatches, on two ranks and in one process; how far their parameters lie apart."""
    rank = this_rank()
    plan = plan_of(case)
    reference = build(case)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    module = build(case, seed=SEED + rank.number)  # ranks start apart: the first one's weights count
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer = wrap(module, optimizer, plan, rank.device)
    share = plan.microbatch * plan.num_microbatches
    for step in range(3):
        batch = example(case, 3 * plan.global_batch)
        batch = {name: tensor[step * plan.global_batch :][: plan.global_batch] for name, tensor in batch.items()}
        for index in range(plan.num_microbatches):
            start = rank.number * share + index * plan.microbatch
            part = {name: tensor[start : start + plan.microbatch] for name, tensor in batch.items()}
            (default_loss(model(input_ids=part["input_ids"]), part) / plan.num_microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        default_loss(call(reference, batch), batch).backward()
        expected.step()
        expected.zero_grad()
    return largest_difference(whole(model), whole(reference))


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_an_own_loop_gives_the_parameters_of_one_process(pool: Pools, zero: int, num_microbatches: int) -> None:
    for difference in pool(2).run(own_loop_on_rank, Case("gpt", zero, "full", num_microbatches)):
        assert difference < 1e-10


def step_too_early(zero: int) -> str:
    """After one of two microbatches, then after both."""
    case = Case("gpt", zero, num_microbatches=2)
    module = build(case)
    model, optimizer = wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), plan_of(case), this_rank().device)
    batch = example(case, 2)
    default_loss(model(batch["input_ids"]), batch).backward()
    before = whole(model)
    try:
        optimizer.step()
    except meshwright.MeshwrightError as error:
        said = str(error)
    assert largest_difference(whole(model), before) == 0, "the refused step changed parameters"
    default_loss(model(batch["input_ids"]), batch).backward()
    optimizer.step()
    return said


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_between_microbatches_is_refused(pool: Pools, zero: int) -> None:
    for said in pool(2).run(step_too_early, zero):
        assert said.startswith("optimizer.step() after 1 of 2 microbatches: their gradients are not reduced yet")


def forwards_that_do_not_train(zero: int, after_microbatch: int) -> tuple[float, float]:
    """Validation after one of two microbatches: how far parameters, and the next loss, are from one process."""
    case = Case("gpt", zero, num_microbatches=2)
    reference = build(case)
    module = build(case)
    model, optimizer = wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), plan_of(case), this_rank().device)
    batch = example(case, 2)
    for index in range(2):
        default_loss(model(batch["input_ids"]), batch).backward()
        if index == after_microbatch:
            validate(model, batch)
    optimizer.step()
    (2 * default_loss(call(reference, batch), batch)).backward()
    sgd(reference.parameters()).step()
    loss, expected = (default_loss(call(m, batch), batch).item() for m in (model, reference))
    return largest_difference(whole(model), whole(reference)), abs(loss - expected)


def validate(model: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model(batch["input_ids"])
    model.eval()
    model(batch["input_ids"])
    model.train()


@pytest.mark.parametrize("after_microbatch", [0, 1])
@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_forwards_that_do_not_train_are_not_counted(pool: Pools, zero: int, after_microbatch: int) -> None:
    """Neither between two microbatches nor right before the update."""
    for parameters, loss in pool(2).run(forwards_that_do_not_train, zero, after_microbatch):
        assert loss < 1e-12
        assert parameters < 1e-12


# Optimizers.


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups with settings of their own, in another order than the module's."""
    vectors = [p for p in module.parameters() if p.dim() == 1]
    matrices = [p for p in module.parameters() if p.dim() > 1]
    groups = [{"params": vectors, "lr": 0.5, "weight_decay": 0.0}, {"params": matrices, "momentum": 0.9}]
    return torch.optim.SGD(groups, lr=0.01, weight_decay=0.3)


def train_with_groups(case: Case) -> tuple[float, list[dict[str, Any]], bool]:
    """Difference to one process; the groups' settings; whether the optimizer is the user's own and holds live parameters."""
    reference = build(case)
    expected = grouped(reference)
    module = build(case)
    given = grouped(module)
    plan = plan_of(case)
    program = apply(module, plan, optimizer=given, device=this_rank().device)
    for _ in range(2):
        batch = example(case, plan.global_batch)
        program.step(batch)
        default_loss(call(reference, batch), batch).backward()
        expected.step()
        expected.zero_grad()
    held = [id(p) for group in program.optimizer.param_groups for p in group["params"]]
    live = sorted(held) == sorted(id(p) for p in program.module.parameters())
    settings = [{k: v for k, v in group.items() if k != "params"} for group in program.optimizer.param_groups]
    return largest_difference(whole(program.module), whole(reference)), settings, live and program.optimizer is given


@pytest.mark.parametrize("zero", [0, 3])
def test_an_optimizer_with_groups_keeps_them(pool: Pools, zero: int) -> None:
    for difference, settings, live in pool(2).run(train_with_groups, Case("gpt", zero)):
        assert difference < 1e-12
        assert [(group["lr"], group["weight_decay"], group["momentum"]) for group in settings] == [
            (0.5, 0.0, 0),
            (0.01, 0.3, 0.9),
        ]
        assert live


# Clipping.


def clipped_on_rank(case: Case, max_norm: float) -> tuple[float, float, float]:
    """Norm found, norm of one process, and how far the parameters lie apart after a clipped step."""
    reference = build(case)
    plan = plan_of(case)
    program = apply(build(case), plan, optimizer=sgd, max_norm=max_norm, device=this_rank().device)
    batch = example(case, plan.global_batch)
    found = program.step(batch).gradient_norm
    assert found is not None
    default_loss(call(reference, batch), batch).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm))
    sgd(reference.parameters()).step()
    return found, expected, largest_difference(whole(program.module), whole(reference))


@pytest.mark.parametrize("max_norm", [0.01, 1e9])
@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_clipping_is_that_of_one_process(pool: Pools, zero: int, max_norm: float) -> None:
    """Below the norm it scales, above it does nothing; the norm returned is the one before clipping."""
    for found, expected, difference in pool(2).run(clipped_on_rank, Case("gpt", zero, "none", 2), max_norm):
        assert expected > 0.05
        assert found == pytest.approx(expected, rel=1e-12)
        assert difference < 1e-13


def gradient_norm_without_clipping() -> float | None:
    program = apply(build(GPT), plan_of(GPT), optimizer=sgd, device=this_rank().device)
    return program.step(example(GPT, 8)).gradient_norm


def test_without_clipping_no_norm_is_made_up(pool: Pools) -> None:
    assert pool(2).run(gradient_norm_without_clipping) == [None, None]


# Precision.


def losses_on_rank(case: Case) -> tuple[list[float], set[str], set[str]]:
    """Losses of six AdamW steps; dtypes of the parameters and of the optimizer's state."""
    torch.manual_seed(SEED)
    module = source_of(case.model).build()
    plan = plan_of(case)
    factory = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    program = apply(module, plan, optimizer=factory, device=this_rank().device)
    losses = [program.step(example(case, plan.global_batch)).loss for _ in range(6)]
    state = {str(s["exp_avg"].dtype) for s in program.optimizer.state.values()}
    return losses, {str(p.dtype) for p in program.module.parameters()}, state


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_bf16_trains_close_to_fp32(pool: Pools, zero: int) -> None:
    full, *_ = pool(2).run(losses_on_rank, Case("gpt", zero, "full", 2, "fp32"))
    half, *_ = pool(2).run(losses_on_rank, Case("gpt", zero, "full", 2, "bf16"))
    assert half[0] != full[0], "bf16 computed in fp32"
    assert half[0] == pytest.approx(full[0], rel=2e-2)
    assert half[0][-1] < half[0][0] - 0.1, "bf16 does not learn"
    assert half[1] == full[1] == {"torch.float32"}
    assert half[2] == {"torch.float32"}


def wrapped_loss_on_rank(zero: int, precision: Precision) -> tuple[float, bool]:
    """The loss of an own loop's first step, and whether every parameter got a finite fp32 gradient."""
    case = Case("gpt", zero, "full", 1, precision)
    torch.manual_seed(SEED)
    module = source_of("gpt").build()
    model, optimizer = wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), plan_of(case), this_rank().device)
    batch = example(case, 4)
    loss = default_loss(model(batch["input_ids"]), batch)
    loss.backward()
    optimizer.step()
    fine = all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    return loss.item(), fine and all(bool(tensor.isfinite().all()) for tensor in whole(model).values())


@pytest.mark.parametrize("zero", [0, 3])
def test_an_own_loop_in_bf16(pool: Pools, zero: int) -> None:
    (full, _), _ = pool(2).run(wrapped_loss_on_rank, zero, "fp32")
    for half, fine in pool(2).run(wrapped_loss_on_rank, zero, "bf16"):
        assert half != full
        assert half == pytest.approx(full, rel=1e-2)
        assert fine


# Evaluation.


def evaluated_on_rank(case: Case) -> tuple[float, float, float, bool]:
    """Mean loss over three unevenly masked batches, that of a plain loop, the next step's loss, back in training mode."""
    plan = plan_of(case)
    reference = build(case).eval()
    program = apply(build(case), plan, optimizer=sgd, device=this_rank().device)
    batches = [masked(example(case, plan.global_batch), ignored) for ignored in (0, 3, 11)]
    found = program.evaluate(batches)
    with torch.no_grad():
        sums = [float(default_loss(call(reference, b), b)) * DEFAULT.count(b) for b in batches]
    expected = sum(sums) / sum(map(DEFAULT.count, batches))
    return found, expected, program.step(batches[0]).loss, program.module.training


def masked(batch: dict[str, Tensor], ignored: int) -> dict[str, Tensor]:
    """Rank 1's samples count fewer labels."""
    labels = batch["labels"].clone()
    labels[len(labels) // 2 :, :ignored] = -100
    return {**batch, "labels": labels}


@pytest.mark.parametrize("zero", [0, 3])
def test_evaluation_is_that_of_a_plain_loop(pool: Pools, zero: int) -> None:
    for found, expected, _, training in pool(2).run(evaluated_on_rank, Case("gpt", zero)):
        assert found == pytest.approx(expected, rel=1e-13)
        assert training


def test_evaluation_leaves_training_alone(pool: Pools) -> None:
    evaluated = [answer[2] for answer in pool(2).run(evaluated_on_rank, GPT)]
    assert evaluated == pool(2).run(first_loss_on_rank)


def first_loss_on_rank() -> float:
    program = apply(build(GPT), plan_of(GPT), optimizer=sgd, device=this_rank().device)
    return program.step(masked(example(GPT, program.plan.global_batch), 0)).loss


# Batches, losses and the public functions.


def step_outputs(case: Case) -> tuple[float, float, int, float]:
    """Loss of a step given the global batch, and given this rank's share; tokens; signal."""
    plan, rank = plan_of(case), this_rank()
    batch = example(case, plan.global_batch)
    own = plan.microbatch * plan.num_microbatches
    share = {name: tensor[rank.number * own : (rank.number + 1) * own] for name, tensor in batch.items()}
    losses = []
    for given in (batch, share):
        program = apply(build(case), plan, optimizer=sgd, device=rank.device)
        output = program.step(given, signal=float(rank.number + 1))
        losses.append(output.loss)
    return losses[0], losses[1], output.tokens, output.signal


def test_a_step_takes_the_global_batch_or_the_share(pool: Pools) -> None:
    for whole_loss, share_loss, tokens, signal in pool(2).run(step_outputs, Case("gpt", 2, num_microbatches=2)):
        assert whole_loss == share_loss
        assert tokens == 8 * 16
        assert signal == 1 + 2


def empty_share_on_rank() -> tuple[float, float, int]:
    """All labels of rank 1 are masked: its mean is of nothing, and must weigh nothing."""
    reference = build(GPT)
    program = apply(build(GPT), plan_of(GPT), optimizer=sgd, device=this_rank().device)
    batch = masked(example(GPT, 8), 16)
    expected = default_loss(call(reference, batch), batch)
    expected.backward()
    sgd(reference.parameters()).step()
    output = program.step(batch)
    differences = largest_difference(whole(program.module), whole(reference))
    return abs(output.loss - expected.item()), differences, output.tokens


def test_a_rank_without_labels_weighs_nothing(pool: Pools) -> None:
    for loss, parameters, _ in pool(2).run(empty_share_on_rank):
        assert loss < 1e-14
        assert parameters < 1e-14


def test_tokens_are_those_of_the_global_batch(pool: Pools) -> None:
    """The same on every rank, however unevenly labels are masked: 4 samples of 16 count, the others do not."""
    assert [tokens for _, _, tokens in pool(2).run(empty_share_on_rank)] == [4 * 16, 4 * 16]


def public_apply_on_rank() -> tuple[float, float]:
    """`mw.apply` with a loss and a count of the user's own, under the launcher's environment."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean()

    reference = build(GPT)
    batch = example(GPT, 8)
    expected = loss(call(reference, batch), batch)
    program = meshwright.apply(build(GPT), plan_of(GPT), optimizer=sgd, loss=loss, count=lambda b: len(b["labels"]))
    assert isinstance(program, Program)
    return program.step(batch).loss, float(expected)


def test_the_public_apply(pool: Pools) -> None:
    for found, expected in pool(2).run(public_apply_on_rank):
        assert found == pytest.approx(expected, rel=1e-13)


def repeated_apply_on_rank() -> float:
    """Two programs side by side do not disturb each other."""
    case = Case("gpt", 3, "full", 2)
    first = apply(build(case), plan_of(case), optimizer=sgd, device=this_rank().device)
    second = apply(build(case), plan_of(Case("gpt", 0)), optimizer=sgd, device=this_rank().device)
    for _ in range(2):
        first.step(example(case, 8))
        second.step(example(case, 8))
    return largest_difference(whole(first.module), whole(second.module))


def test_programs_do_not_share_state(pool: Pools) -> None:
    assert max(pool(2).run(repeated_apply_on_rank)) < 1e-13


def ranks_start_apart_on_rank(zero: int) -> tuple[float, float]:
    """Parameters and buffers of every rank, against the first one's."""
    rank = this_rank()
    case = Case("resnet", zero)
    torch.manual_seed(SEED + rank.number)
    module = source_of("resnet").build()
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.add_(rank.number)
    first = torch.manual_seed(SEED) and source_of("resnet").build()
    expected = dict(first.named_buffers())
    program = apply(module, msgspec.structs.replace(plan_of(case), precision="fp32"), optimizer=sgd, device=rank.device)
    buffers = max(float((b - expected[name]).abs().max()) for name, b in program.module.named_buffers())
    return largest_difference(whole(program.module), whole(first)), buffers


@pytest.mark.parametrize("zero", [0, 3])
def test_the_first_ranks_weights_count(pool: Pools, zero: int) -> None:
    assert pool(2).run(ranks_start_apart_on_rank, zero) == [(0, 0), (0, 0)]


def test_a_loss_over_no_label_is_zero() -> None:
    logits = torch.zeros(2, 2, 4, dtype=torch.float64)
    one, none = ({"labels": torch.tensor(labels)} for labels in ([[1, -100], [-100, -100]], [[-100, -100]] * 2))
    assert (DEFAULT.count(one), DEFAULT.count(none)) == (1, 0)
    assert DEFAULT.loss(logits, one).item() == pytest.approx(math.log(4))
    assert DEFAULT.loss(logits, none).item() == 0.0
