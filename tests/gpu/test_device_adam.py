"""Updates of masters on a GPU in one pass: bit by bit those of the host, so that a share of the state may lie on either side."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from meshwright.capturing.capture import capture_source
from meshwright.core.plan import Offload, Precision
from meshwright.core.request import PlanRequest
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.offload import saved
from meshwright.runtime.offload.kernel import find_kernel
from meshwright.runtime.offload.pieces import MOMENTS
from meshwright.runtime.offload.rules import AdamRule, Rule, Task, TorchRule, find_device_rule
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import joined

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GPU, NUM_STEPS = torch.device("cuda", 0), 4
MODEL = "gpt:layers=3,hidden=64,heads=4,seq=32,vocab=128"
KINDS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "Adam without decay": partial(torch.optim.Adam, lr=1e-2),
    "forgetful": partial(torch.optim.AdamW, lr=1e-2, betas=(0.3, 0.5)),
}


def optimizer_of(kind: str) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = KINDS[kind]([nn.Parameter(torch.zeros(1, device=GPU))])
    return found


def updated(rule: Rule, kind: str, shape: tuple[int, ...], dtype: torch.dtype, scale: float, at: torch.device) -> Any:
    """Master, moments and the parameter in 16 bits after some steps."""
    group = optimizer_of(kind).param_groups[0]
    torch.manual_seed(3)
    master, gradients = torch.randn(shape), torch.randn(NUM_STEPS, *shape) * 1e-3
    master = master.to(at)
    narrow = master.bfloat16()
    state: dict[str, Any] = {}
    if isinstance(rule, AdamRule):
        state = {"step": 0, **{key: torch.zeros_like(master) for key in MOMENTS}}
    for gradient in gradients.to(at, dtype):
        rule.update([Task(master, state, gradient.clone(), narrow, group, scale)])
    return [master, *(state[key] for key in MOMENTS), narrow]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.bfloat16, 0.37), (torch.float32, 0.37)])
def test_every_bit_is_that_of_the_host(kind: str, dtype: torch.dtype, scale: float) -> None:
    kernel = find_kernel()
    assert kernel is not None
    there, here = (
        find_device_rule(optimizer_of(kind), True, GPU),
        AdamRule(kernel, "AdamW" in kind or kind == "forgetful", 2),
    )
    for shape in ((1,), (5,), (1023,), (3, 1024), (317, 331)):
        found = updated(there, kind, shape, dtype, scale, GPU)
        expected = updated(here, kind, shape, dtype, scale, torch.device("cpu"))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other), (shape, (one.cpu() - other).abs().max())
    here.close()


def test_it_is_near_that_of_torch() -> None:
    optimizer = optimizer_of("AdamW")
    rules = find_device_rule(optimizer, True, GPU), TorchRule(optimizer)
    found, expected = (updated(rule, "AdamW", (317, 331), torch.bfloat16, 1.0, GPU) for rule in rules)
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_parameter_whose_entries_lie_in_another_order() -> None:
    rule = find_device_rule(optimizer_of("AdamW"), True, GPU)
    group = optimizer_of("AdamW").param_groups[0]
    torch.manual_seed(3)
    master, gradient = torch.randn(33, 65, device=GPU), torch.randn(33, 65, device=GPU).bfloat16()
    turned = master.t().contiguous().t()
    for one, own in ((master, gradient), (turned, gradient.t().contiguous().t())):
        for _ in range(2):
            rule.update([Task(one, {}, own, torch.empty_like(one, dtype=torch.bfloat16), group, 1.0)])
    assert turned.stride() != master.stride()
    assert torch.equal(turned, master)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch calls its products not deterministic
    torch.use_deterministic_algorithms(True)
    with joined("cuda") as rank:
        yield rank.device
    torch.use_deterministic_algorithms(False)


def program_of(share: float, precision: Precision, device: torch.device) -> Program:
    source = resolve(MODEL)
    graph = capture_source(source, precision, "parameters" if precision == "bf16" else "autocast")
    plan = plain_plan(PlanRequest(precision=precision, global_batch=4), graph, 1, "")
    plan = msgspec.structs.replace(plan, offload=Offload(what="optimizer", share=share))
    torch.manual_seed(0)
    return apply(
        source.build(), plan, optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True), objective=source.objective,
        device=device,
    )  # fmt: skip


def stepped(program: Program, num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    source = resolve(MODEL)
    assert source.example is not None
    torch.manual_seed(1)
    batch = source.example(4)
    for _ in range(num_steps):
        program.step(batch)
    assert program.host is not None
    program.host.settle()
    masters = saved.masters_of(program.host)
    return {one.name: masters[id(one.parameter)].cpu().clone() for one in program.host.state.holders}


def test_where_the_state_lies_changes_no_bit(one_rank: torch.device) -> None:
    found = [stepped(program_of(share, "bf16", one_rank)) for share in (1.0, 0.5, 0.0)]
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_it_goes_on_where_it_was_saved(precision: Precision, one_rank: torch.device) -> None:
    whole = stepped(program_of(0.5, precision, one_rank), 2 * NUM_STEPS)
    first = program_of(0.5, precision, one_rank)
    masters = stepped(first)
    assert first.host is not None
    states = {
        name: {key: item.cpu().clone() for key, item in state.items()}
        for name, state in saved.states_of(first.host).items()
    }
    second = program_of(0.5, precision, one_rank)
    assert second.host is not None
    saved.load(second.host, masters, states)
    found = stepped(second)
    assert all(torch.equal(found[name], value) for name, value in whole.items())
