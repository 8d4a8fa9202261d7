"""Deferred initialisation: built without memory, made where it is held, bit for bit what the constructor makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import MODELS, Case, plan_of, source_of
from pool import RankPool, this_rank
from test_parity import check, compare_on_rank
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.core.errors import PlanError
from meshwright.models.gpt import GPT, GPTOptions
from meshwright.models.seeded import weights_matter
from meshwright.planner.graphs import capture_now
from meshwright.runtime.apply import apply
from meshwright.runtime.deferred import (
    building,
    check_can_be_divided,
    deferred,
    deferred_tensors,
    is_deferred,
    materialise,
    materialise_hidden,
)
from meshwright.runtime.gather import whole

Pools = Callable[[int], RankPool]

SEED = 3


class Wild(nn.Module):
    """What constructors do: read values, tables, masks, slices set by hand, `.data`, draws of their own, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.embedding = nn.Embedding(9, 8, padding_idx=2)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.second.bias.data = self.first.bias.data * 2 + 1
        self.grown = nn.Parameter(torch.cat([torch.randn(3, 4), torch.zeros(1, 4)]))
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.embedding.weight, std=0.02)
        with torch.no_grad():
            self.embedding.weight[2].fill_(7)
            self.first.bias[1:3] = torch.tensor([0.5, -0.5])
            self.grown[:, 0] *= 3
        own = torch.Generator().manual_seed(5)
        self.noise = nn.Parameter(torch.rand(5, generator=own), requires_grad=False)
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("rotation", torch.polar(torch.ones(4, 4), torch.outer(torch.arange(4.0), inverse)))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril(), persistent=False)
        self.order = torch.randperm(6)
        self.half = nn.Linear(4, 4).bfloat16()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.copies = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        if self.grown.sum() > 1e6:
            raise ArithmeticError


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {**named, **plain}


def both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Built plainly, and built deferred, from the same seed; the generator ends where it would have."""
    torch.manual_seed(SEED)
    plain = build()
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    with deferred():
        module = build()
    assert torch.equal(torch.get_rng_state(), state)
    return plain, module


@pytest.mark.parametrize("model", [*MODELS, "wild"])
def test_the_same_tensors_bit_for_bit(model: str) -> None:
    plain, module = both(Wild if model == "wild" else source_of(model).build)
    assert all(map(is_deferred, module.parameters()))
    materialise(module)
    assert list(deferred_tensors(module)) == []
    expected, found = tensors_of(plain), tensors_of(module)
    assert expected.keys() == found.keys()
    assert plain.state_dict().keys() == module.state_dict().keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
        assert (tensor.dtype, tensor.stride()) == (found[name].dtype, found[name].stride()), name
        assert tensor.requires_grad == found[name].requires_grad, name
    ties = [[a is b for b in tensors.values()] for tensors in (expected, found) for a in tensors.values()]
    assert ties[: len(expected)] == ties[len(expected) :]


def test_what_is_done_to_deferred_tensors_is_done_to_the_real_ones() -> None:
    """Casts and cuts before memory is there: a rank's part of a tensor holds no more than the part."""
    plain, module = both(lambda: nn.Linear(8, 6))
    module.double()
    module.weight = nn.Parameter(module.weight.detach()[2:4])
    assert is_deferred(module.weight)
    materialise(module)
    assert torch.equal(module.weight, plain.weight.double()[2:4])
    assert module.weight.untyped_storage().nbytes() == 2 * 8 * 8


class Taught(nn.Module):
    """A teacher that torch does not know of, and a list of parts that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.shown = [self.layer]
        self.hidden = {"teacher": [nn.Linear(4, 4).requires_grad_(False)]}


LARGE_FILE = """
import torch
from torch import nn

import meshwright as mw


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1 << 14, 1 << 14) for _ in range(80))  # 21e9 parameters
        self.gates = nn.Parameter(torch.rand(4))
        assert 0 <= self.gates[0].item() <= 1  # a value that the constructor reads is there

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x * self.gates.sum()


def model():
    with mw.deferred():
        module = Model()
    return module, (torch.randn(2, 1 << 14), torch.randn(2, 1 << 14)), lambda out, batch: (out - batch[1]).square().mean()
"""


def test_no_weight_is_drawn_for_a_plan(tmp_path: Path) -> None:
    """80 layers of 0.27e9 parameters: a draw of all of them takes minutes."""
    path = tmp_path / "large.py"
    path.write_text(LARGE_FILE, encoding="utf-8")
    drawn = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            nonlocal drawn
            if torch.Tag.nondeterministic_seeded in op.tags and not is_deferred(arguments[0]):
                drawn += arguments[0].numel() if isinstance(arguments[0], Tensor) else 0
            return op(*arguments, **(options or {}))

    with Counting():
        graph = capture_now(f"{path}:model", "fp32")
    assert graph.num_parameters == 80 * ((1 << 28) + (1 << 14)) + 4
    assert drawn < 1 << 20
    assert weights_matter()


def test_modules_that_torch_does_not_know_of_have_memory() -> None:
    torch.manual_seed(0)
    expected = Taught()
    torch.manual_seed(0)
    with deferred():
        module = Taught()
    materialise_hidden(module)
    assert torch.equal(module.hidden["teacher"][0].weight, expected.hidden["teacher"][0].weight)
    assert is_deferred(module.layer.weight), "a registered part is made where it is held"
    materialise(module)
    assert torch.equal(module.shown[0].weight, expected.layer.weight)


def test_scripted_modules_cannot_be_divided() -> None:
    module = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(PlanError, match="part '1' is a scripted module"):
        check_can_be_divided(module)
    check_can_be_divided(module[0])


def test_a_learned_number_can_be_cast() -> None:
    plain, module = both(Wild)
    module.double()
    materialise(module)
    assert torch.equal(module.temperature, plain.double().temperature)


@pytest.mark.parametrize(
    "case",
    [
        Case("tied", 3, "full", 2),
        Case("gpt2", 1, "none", 1),
        Case("frozen", 2, "none", 2),
        Case("resnet", 3, "none", 1),
        Case("odd", 3, "none", 1, hybrid=1),
    ],
    ids=str,
)
def test_two_ranks_agree_with_one_process(pool: Pools, case: Case) -> None:
    """Parity builds deferred wherever a plan divides the model."""
    check(pool(2).run(compare_on_rank, case, 2))


def parameters_on_rank(case: Case, seeds: tuple[int, ...]) -> dict[str, Tensor]:
    """Ranks that start from other seeds all get the first one's weights."""
    torch.manual_seed(seeds[this_rank().number])
    with deferred():
        module = source_of(case.model).build()
    program = apply(module, plan_of(case), optimizer=torch.optim.AdamW, device=this_rank().device)
    return {name: whole(parameter) for name, parameter in program.module.named_parameters()}


@pytest.mark.parametrize("zero", [0, 3])
def test_the_first_rank_s_seed_counts(pool: Pools, zero: int) -> None:
    one, other = pool(2).run(parameters_on_rank, Case("gpt", zero, "none", 1, "fp32"), (SEED, 99))
    torch.manual_seed(SEED)
    for name, parameter in source_of("gpt").build().named_parameters():
        assert torch.equal(one[name], parameter), name
        assert torch.equal(other[name], parameter), name


LARGE = GPTOptions(layers=8, hidden=768, heads=4, seq=16, vocab=64)


def peak_on_rank(case: Case, defer: bool) -> tuple[int, int]:
    """Bytes of a model, and by how much resident memory grew at most while it was built and sharded."""
    plan = plan_of(case)
    with building(plan):  # what is imported and set up once does not count
        small = GPT(GPTOptions(layers=2, hidden=8, heads=4, seq=16, vocab=64))
    apply(small, tiny(), optimizer=torch.optim.SGD)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    if defer:
        with building(plan):
            module: nn.Module = GPT(LARGE)
    else:
        module = GPT(LARGE)
    num_bytes = sum(4 * parameter.numel() for parameter in module.parameters())
    apply(module, plan, optimizer=torch.optim.SGD, device=this_rank().device)
    return num_bytes, memory("VmHWM") - before


def tiny() -> object:
    return plan_of(Case("gpt:layers=2,hidden=8,heads=4,seq=16,vocab=64", 3, precision="fp32"))


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def test_no_rank_ever_holds_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ranks of their own, which give memory back at once: what the allocator keeps for later is not held."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    case = Case("gpt:layers=8,hidden=768,heads=4,seq=16,vocab=64", 3, "none", 1, "fp32")
    ranks = RankPool(2, "spawn")
    try:
        for num_bytes, peak in ranks.run(peak_on_rank, case, True):
            assert peak < 0.85 * num_bytes
        for num_bytes, peak in ranks.run(peak_on_rank, case, False):
            assert peak > num_bytes
    finally:
        ranks.close()
