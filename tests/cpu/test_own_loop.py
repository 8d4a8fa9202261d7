"""A user's own loop after `mw.wrap`: what it reads of gradients is what one process would read, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import graph_of, hand_cluster, source_of
from pool import RankError, RankPool, this_rank
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import utils

import meshwright as mw
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.models.objective import call, slice_batch
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import wrap

Pools = Callable[[int], RankPool]
NUM_STEPS, SAMPLES, MAX_NORM = 3, 4, 0.05
GPT, DROPLESS = "gpt", "dropless"


def plan_of(model: str, num_ranks: int, **asked: Any) -> Plan:
    request = PlanRequest(**{"microbatch": SAMPLES, "global_batch": SAMPLES, "precision": "fp64", **asked})
    return try_sharding(plain_plan(request, graph_of(model), num_ranks, "tests"), source_of(model))


def in_two_calls(model: nn.Module) -> Tensor:
    norm = utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
    return norm


def by_hand(model: nn.Module, square: Callable[[Tensor], Tensor]) -> Tensor:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum(square(gradient) for gradient in gradients) ** 0.5  # type: ignore[operator]
    for gradient in gradients:
        gradient.mul_(min(1.0, MAX_NORM / (float(norm) + 1e-6)))
    return torch.as_tensor(norm)


def by_value(model: nn.Module) -> Tensor:
    utils.clip_grad_value_(model.parameters(), 1e-3)
    return utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)


CLIPPINGS: dict[str, Callable[[nn.Module], Tensor]] = {
    "torch": lambda model: utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    "one by one": lambda model: utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=False),
    "largest": lambda model: utils.clip_grad_norm_(model.parameters(), MAX_NORM / 10, norm_type=float("inf")),
    "third order": lambda model: utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type=3.0),
    "ours": lambda model: mw.clip_grad_norm_(model, MAX_NORM),
    "in two calls": in_two_calls,
    "by value": by_value,
    "norms by hand": lambda model: by_hand(model, lambda g: g.norm() ** 2),
    "norms of data by hand": lambda model: by_hand(model, lambda g: g.data.norm(2).item() ** 2),  # type: ignore[arg-type,return-value]
    "squares by hand": lambda model: by_hand(model, lambda g: g.detach().float().double().pow(2).sum()),
}  # fmt: skip


def run_loop(model: str, plan: Plan | None, way: str) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    torch.manual_seed(3)
    source = source_of(model)
    module = source.build().double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=2.0)
    dp, own, num_microbatches = 1, 0, 1
    if plan is not None:
        dp, own = plan.mesh.dp, this_rank().number // (plan.mesh.cp * plan.mesh.tp)
        num_microbatches = plan.num_microbatches
        module, optimizer = wrap(module, optimizer, plan, this_rank().device)
    assert source.example is not None
    found = []
    for step in range(NUM_STEPS):
        batch = slice_batch(source.example(NUM_STEPS * SAMPLES), SAMPLES * step, SAMPLES * (step + 1))
        share = slice_batch(batch, own * SAMPLES // dp, (own + 1) * SAMPLES // dp)
        size, loss = SAMPLES // dp // num_microbatches, 0.0
        for index in range(num_microbatches):
            part = slice_batch(share, index * size, (index + 1) * size)
            part_loss = source.objective.loss(call(module, part), part) / num_microbatches
            part_loss.backward()
            loss += float(part_loss.detach())
        norm = float(CLIPPINGS[way](module))
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss, norm))
    return found


PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp": (GPT, 2, {"tp": 2}),
    "tp, tied": ("tied", 2, {"tp": 2}),
    "tp, sequence parallel": (GPT, 2, {"tp": 2, "sequence_parallel": True}),
    "tp, microbatches": (GPT, 2, {"tp": 2, "microbatch": 2, "sequence_parallel": True}),
    "tp, ZeRO 1": (GPT, 2, {"tp": 2, "zero": 1}),
    "tp, ZeRO 3": (GPT, 2, {"tp": 2, "zero": 3}),
    "dp": (GPT, 2, {"microbatch": 2}),
    "ZeRO 1": (GPT, 2, {"zero": 1, "microbatch": 1}),
    "ZeRO 2": (GPT, 2, {"zero": 2, "microbatch": 1}),
    "ZeRO 3": (GPT, 2, {"zero": 3, "microbatch": 2}),
    "cp": (GPT, 2, {"cp": 2}),
    "cp, ZeRO 2": (GPT, 2, {"cp": 2, "zero": 2}),
    "ep": (DROPLESS, 2, {"ep": 2, "microbatch": 2}),
    "ep, ZeRO 1": (DROPLESS, 2, {"ep": 2, "zero": 1, "microbatch": 2}),
    "tp, dp": (GPT, 4, {"tp": 2, "microbatch": 2}),
    "tp, dp, ZeRO 2": (GPT, 4, {"tp": 2, "zero": 2, "microbatch": 1, "sequence_parallel": True}),
    "tp, cp": (GPT, 4, {"tp": 2, "cp": 2}),
}


def check_loop(pool: Pools, plan: str, way: str) -> None:
    model, num_ranks, asked = PLANS[plan]
    expected = run_loop(model, None, way)
    every = pool(num_ranks).run(run_loop, model, plan_of(model, num_ranks, **asked), way)
    for step, (loss, norm) in enumerate(expected):
        assert sum(found[step][0] for found in every) / num_ranks == pytest.approx(loss, rel=1e-10)
        for found in every:
            assert found[step][1] == pytest.approx(norm, rel=1e-8 if "by hand" in way else 1e-10)
    assert expected[0][1] > MAX_NORM or way in ("largest", "by value"), "nothing was clipped"


@pytest.mark.parametrize("plan", PLANS)
def test_torch_clips_by_the_norm_of_one_process(pool: Pools, plan: str) -> None:
    check_loop(pool, plan, "torch")


@pytest.mark.parametrize("way", [way for way in CLIPPINGS if way != "torch"])
@pytest.mark.parametrize("plan", ["tp, sequence parallel", "tp, ZeRO 3"])
def test_every_way_to_clip(pool: Pools, plan: str, way: str) -> None:
    check_loop(pool, plan, way)


def two_backwards(plan: Plan | None) -> list[float]:
    """Two losses of one forward, each with its backward; a second forward whose backward comes after."""
    torch.manual_seed(3)
    source = source_of(GPT)
    module = source.build().double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=2.0)
    if plan is not None:
        module, optimizer = wrap(module, optimizer, plan, this_rank().device)
    assert source.example is not None
    batch, found = source.example(SAMPLES), []
    for _ in range(NUM_STEPS):
        output, second = call(module, batch), call(module, batch)
        source.objective.loss(output, batch).backward(retain_graph=True)
        output.square().mean().backward()
        second.abs().mean().backward()
        found.append(float(utils.clip_grad_norm_(module.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return found


def test_a_second_backward_adds_to_settled_gradients(pool: Pools) -> None:
    plan = plan_of(GPT, 2, tp=2, sequence_parallel=True)
    for found in pool(2).run(two_backwards, plan):
        assert found == pytest.approx(two_backwards(None), rel=1e-10)


READINGS: dict[str, Callable[[nn.Module], Any]] = {
    "squares": lambda model: sum(p.pow(2).sum() for p in model.parameters()),
    "norms": lambda model: sum(p.norm() for p in model.parameters()),
    "norms of data": lambda model: sum(p.data.norm(1).item() for p in model.parameters()),
    "total norm": lambda model: utils.get_total_norm(p.detach() for p in model.parameters()),
    "largest": lambda model: max(float(p.detach().abs().max()) for p in model.parameters()),
    "mean": lambda model: sum(p.mean() for p in model.parameters()),
    "count": lambda model: sum(p.numel() for p in model.parameters()),
}


def penalised(model: str, plan: Plan | None, reading: str, penalty: bool) -> list[float]:
    """What a loop reads of its parameters at every place where it may. penalty: it is part of the loss too."""
    torch.manual_seed(3)
    source = source_of(model)
    module = source.build().double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    own, dp = 0, 1
    if plan is not None:
        dp, own = plan.mesh.dp, this_rank().number // (plan.mesh.cp * plan.mesh.tp)
        module, optimizer = wrap(module, optimizer, plan, this_rank().device)
    assert source.example is not None
    batch = source.example(SAMPLES)
    share = slice_batch(batch, own * SAMPLES // dp, (own + 1) * SAMPLES // dp)
    read = READINGS[reading]
    found = [float(torch.as_tensor(read(module)).detach())]
    for _ in range(NUM_STEPS):
        loss = source.objective.loss(call(module, share), share)
        found.append(float(torch.as_tensor(read(module)).detach()))
        (loss + 0.1 * read(module) if penalty else loss).backward()
        found.append(float(torch.as_tensor(read(module)).detach()))
        optimizer.step()
        found.append(float(torch.as_tensor(read(module)).detach()))
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("plan", ["tp, sequence parallel", "ep", "tp, dp"])
def test_parameters_are_read_as_one_process_reads_them(pool: Pools, plan: str, reading: str) -> None:
    model, num_ranks, asked = PLANS[plan]
    expected = penalised(model, None, reading, False)
    for found in pool(num_ranks).run(penalised, model, plan_of(model, num_ranks, **asked), reading, False):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("reading", ["squares", "norms", "mean"])
@pytest.mark.parametrize("plan", ["tp", "tp, sequence parallel", "dp", "cp", "ep", "tp, dp", "tp, cp"])
def test_a_loss_may_hold_a_penalty_on_weights(pool: Pools, plan: str, reading: str) -> None:
    model, num_ranks, asked = PLANS[plan]
    expected = penalised(model, None, reading, True)
    for found in pool(num_ranks).run(penalised, model, plan_of(model, num_ranks, **asked), reading, True):
        assert found == pytest.approx(expected, rel=1e-9)


PENALTIES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "of the largest": (lambda model: sum(p.max() for p in model.parameters()), "is no part of a loss"),
    "of a product": (
        lambda model: sum(nn.functional.linear(p, p).sum() for p in model.parameters() if p.dim() > 1), "'linear' of a parameter",
    ),
    "of all in a row": (lambda model: utils.parameters_to_vector(model.parameters()).norm(), "'cat' of parameters"),
}  # fmt: skip


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_that_parts_cannot_give_is_refused(pool: Pools, penalty: str) -> None:
    for said in pool(2).run(refused_reading, plan_of(GPT, 2, tp=2), penalty):
        assert PENALTIES[penalty][1] in said


REFUSALS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "of parts in a row": (lambda model: utils.parameters_to_vector(p.grad for p in model.parameters()).norm(), "'cat'"),
    "of a spread": (lambda model: [p.grad.std() for p in model.parameters()], "'std' of gradients that lie over tp"),
    "along a dim": (lambda model: [p.grad.sum(0) for p in model.parameters()], "'sum' along a dim"),
    "of a matrix": (lambda model: [torch.linalg.norm(p.grad, 2) for p in model.parameters()], "'linalg_norm' with order 2"),
}  # fmt: skip


def refused_reading(plan: Plan, reading: str) -> str:
    source = source_of(GPT)
    module = source.build().double()
    model, _ = wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), plan, this_rank().device)
    assert source.example is not None
    batch = source.example(plan.microbatch)
    loss = source.objective.loss(call(model, batch), batch)
    try:
        (loss + PENALTIES[reading][0](model) if reading in PENALTIES else loss).backward()
        if reading in PENALTIES:
            return ""
        utils.clip_grad_norm_(model.parameters(), 1.0) if reading == "between" else REFUSALS[reading][0](model)
    except MeshwrightError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("reading", REFUSALS)
def test_what_parts_do_not_add_up_to_is_refused(pool: Pools, reading: str) -> None:
    for said in pool(2).run(refused_reading, plan_of(GPT, 2, tp=2), reading):
        assert REFUSALS[reading][1] in said


@pytest.mark.parametrize("asked", [{}, {"zero": 2}, {"tp": 2}])
def test_norms_between_microbatches_are_refused(pool: Pools, asked: dict[str, Any]) -> None:
    plan = plan_of(GPT, 2, microbatch=1, **asked)
    for said in pool(2).run(refused_reading, plan, "between"):
        assert f"after 1 of {plan.num_microbatches} microbatches" in said


def after_wrap(asked: dict[str, Any], doing: str) -> str:
    """What a loop is told."""
    source, plan = source_of(GPT), plan_of(GPT, 2, **asked)
    module = source.build().double()
    matrices = [p for p in module.parameters() if p.dim() > 1]
    kind = torch.optim.LBFGS if doing == "lbfgs" else torch.optim.SGD
    optimizer = kind(matrices if doing == "two optimizers" else module.parameters(), lr=0.1)
    assert source.example is not None
    batch = source.example(plan.microbatch)
    try:
        model, _ = wrap(module, optimizer, plan, this_rank().device)
        if doing == "copy":
            copy.deepcopy(model)
        loss = source.objective.loss(call(model, batch), batch)
        if doing == "autograd.grad":
            torch.autograd.grad(loss, list(model.parameters()))
        loss.backward(retain_graph=True)
        if doing == "backward again":
            loss.backward()
        if doing == "freeze":
            next(model.parameters()).requires_grad_(False)
            call(model, batch)
        if doing == "count":
            return str(sum(p.grad.numel() for p in model.parameters() if p.grad is not None))
    except MeshwrightError as error:
        return str(error)
    return "nothing"


SPLIT, REPLICAS, SHARDS = {"tp": 2}, {"microbatch": 2}, {"zero": 3, "microbatch": 2}


@pytest.mark.parametrize(
    ("asked", "doing", "said"),
    [
        (SPLIT, "two optimizers", "the optimizer that wrap was given does not hold it. Under tp=2"),
        (SHARDS, "two optimizers", "does not hold it. Under ZeRO 3"),
        (REPLICAS, "two optimizers", "nothing"),  # they are the user's own tensors still
        (SPLIT, "autograd.grad", "torch.autograd.grad with respect to parameter"),
        (REPLICAS, "autograd.grad", "torch.autograd.grad with respect to parameter"),
        (SPLIT, "copy", "cannot be copied"),
        (SHARDS, "copy", "cannot be copied"),
        (REPLICAS, "backward again", "a second backward goes through one forward"),
        (SPLIT, "backward again", "nothing"),
        (REPLICAS, "freeze", "had requires_grad=True when the model was wrapped"),
        (SPLIT, "freeze", "nothing"),
        (SHARDS, "lbfgs", "LBFGS looks at whole tensors, but with ZeRO 3"),
        (SPLIT, "count", str(sum(p.numel() for p in source_of(GPT).build().parameters()))),
    ],
)
def test_a_loop_is_told_what_it_cannot_do(pool: Pools, asked: dict[str, Any], doing: str, said: str) -> None:
    for found in pool(2).run(after_wrap, asked, doing):
        assert said in found


# Saving by oneself


def trained(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    """A model after a step of AdamW, and what trains it on."""
    torch.manual_seed(3)
    source = source_of(GPT)
    module = source.build().double()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module, optimizer = wrap(module, optimizer, plan, this_rank().device)
    assert source.example is not None
    batch = source.example(SAMPLES)

    def step() -> float:
        loss = source.objective.loss(call(module, batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step()
    return module, optimizer, step


def saved_and_loaded(plan: Plan, folder: Path, of_rank: int | None) -> tuple[list[float], list[float]]:
    """Losses of two steps, and of the same steps again after what was saved before them is loaded. of_rank: whose file."""
    module, optimizer, step = trained(plan)
    rank = this_rank().number
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{rank}.pt")
    losses = [step(), step()]
    dist.barrier()
    found = torch.load(folder / f"{rank if of_rank is None else of_rank}.pt")
    module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return losses, [step(), step()]


SAVED = {"tp": {"tp": 2}, "tp, ZeRO 3": {"tp": 2, "zero": 3}, "ZeRO 1": {"zero": 1, "microbatch": 2}}


@pytest.mark.parametrize("asked", SAVED)
def test_what_each_rank_saved_can_be_loaded(pool: Pools, asked: str, tmp_path: Path) -> None:
    for before, after in pool(2).run(saved_and_loaded, plan_of(GPT, 2, **SAVED[asked]), tmp_path, None):
        assert after == pytest.approx(before, rel=1e-12)
        assert before[0] != before[1]


@pytest.mark.parametrize("asked", SAVED)
def test_another_ranks_part_is_refused(pool: Pools, asked: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as raised:
        pool(2).run(saved_and_loaded, plan_of(GPT, 2, **SAVED[asked]), tmp_path, 0)
    assert "CheckpointError" in raised.value.errors[1]
    assert "part of the rank at [0" in raised.value.errors[1]


def whole_state(plan: Plan) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """All of it in whole tensors, loaded again after two steps; and the same of halves that nobody marked."""
    module, _, step = trained(plan)
    options = StateDictOptions(full_state_dict=True)
    state = {name: tensor.clone() for name, tensor in get_model_state_dict(module, options=options).items()}
    plain = source_of(GPT).build().double()
    plain.load_state_dict(state)
    source = source_of(GPT)
    assert source.example is not None
    batch = source.example(SAMPLES)
    expected = float(source.objective.loss(call(plain, batch), batch).detach())
    found = [step()]
    step()
    module.load_state_dict(state)
    found.append(step())
    return state, [expected] * 2, found


@pytest.mark.parametrize("asked", ["tp", "tp, ZeRO 3"])
def test_whole_tensors_are_given_and_taken(pool: Pools, asked: str) -> None:
    for _, expected, found in pool(2).run(whole_state, plan_of(GPT, 2, **SAVED[asked])):
        assert found == pytest.approx(expected, rel=1e-12)


def load_halves(plan: Plan) -> None:
    module, _, _ = trained(plan)
    module.load_state_dict({name: parameter.detach() for name, parameter in module.named_parameters()}, strict=False)


def test_halves_that_nobody_marked_are_refused(pool: Pools) -> None:
    with pytest.raises(RankError, match="one rank's part, and nothing says which rank's"):
        pool(2).run(load_halves, plan_of(GPT, 2, tp=2))


# Plans of a graph


class Fused(nn.Module):
    """Query, key and value in one projection, taken apart by code."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)]
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class FusedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fused() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def fused_losses(num_ranks: int, how: str) -> list[float]:
    torch.manual_seed(3)
    model: nn.Module = FusedModel().double()
    batch = (torch.randn(4, 8, 32).double(), torch.randn(4, 8, 32).double())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if num_ranks > 1:
        graph = mw.capture(
            model, batch, loss=lambda output, given: (output - given[1]).square().mean(), precision="fp64"
        )
        asked: dict[str, Any] = {"tp": 2, "global_batch": 4, "microbatch": 4, "precision": "fp64"}
        if how == "search":
            plan = mw.search(graph, hand_cluster(2), world=2, **asked).plan
        else:
            plan = mw.plain_plan(mw.PlanRequest(**asked), graph, 2, "tests")
        assert any(tensor.runs == 3 for rule in plan.sharding for tensor in rule.tensors)
        model, optimizer = wrap(model, optimizer, plan, this_rank().device)
    losses = []
    for _ in range(3):
        loss = (model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("how", ["search", "plain_plan"])
def test_a_plan_of_a_captured_model_cuts_fused_projections(pool: Pools, how: str) -> None:
    for found in pool(2).run(fused_losses, 2, how):
        assert found == pytest.approx(fused_losses(1, how), rel=1e-11)


# Losses inside forward, in 16 bits


class OwnLoss(nn.Module):
    """Its loss is its own; what it was computed in is left on it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2))
        self.head = nn.Linear(16, 50)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits, labels), nn.functional.mse_loss(logits, logits.detach() + 1)


def dtypes_of_losses(zero: int) -> tuple[list[str], float]:
    torch.manual_seed(3)
    module = OwnLoss()
    batch = (torch.randn(4, 16), torch.randint(50, (4,)))
    graph = mw.capture(module, (*batch, batch[1]), loss=lambda output, _: output[1])
    request = mw.PlanRequest(zero=zero, microbatch=2, global_batch=4, precision="bf16")
    model, _ = wrap(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        mw.plain_plan(request, graph, 2, "tests"),
        this_rank().device,
    )
    logits, *losses = model(*(tensor[:2] for tensor in batch))
    losses[0].backward()
    return [str(logits.dtype), *(str(loss.dtype) for loss in losses)], float(losses[0].detach())


def test_a_models_own_loss_is_computed_in_fp32_whatever_zero(pool: Pools) -> None:
    found = [pool(2).run(dtypes_of_losses, zero)[0] for zero in (0, 1, 3)]
    for dtypes, loss in found:
        assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32"]
        assert loss == pytest.approx(found[0][1], rel=1e-2)
