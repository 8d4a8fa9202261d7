"""Small language models whose forwards leave more behind than what they return."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D, S, B = 48, 16, 8, 4
Made = tuple[nn.Module, dict[str, Tensor], Any]


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous().float()}


def loss(output: Any, given: dict[str, Tensor]) -> Tensor:
    """The second of two outputs is a loss of its own."""
    logits, extra = output if isinstance(output, tuple) else (output, 0.0)
    return F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten().long()) + 0.1 * extra


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class LM(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList([block() for _ in range(num_blocks)])
        self.head = nn.Linear(D, V)

    def trunk(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor) -> Any:
        return self.head(self.trunk(input_ids))


# ---------------------------------------------------------------- buffers


class Counting(Block):
    """A buffer and a plain number, both of which the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.count + 0.02 * self.calls)


def counting() -> Made:
    return LM(Counting), batch(), loss


class Averaging(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("slow", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean((0, 1))
        self.mean.data.lerp_(now, 0.1)
        self.slow = 0.9 * self.slow + 0.1 * now
        return super().forward(x - self.mean - self.slow)


def averaging() -> Made:
    module = LM(Averaging)
    module.depends_on_batch = True  # type: ignore[assignment]
    return module, batch(), loss


def spectral() -> Made:
    module = LM()
    for block in module.blocks:
        block.mlp.up = nn.utils.spectral_norm(block.mlp.up)
    return module, batch(), loss


# ---------------------------------------------------------------- attributes, lists and dicts


class Auxiliary(Block):
    """Sets a loss deep inside, and on itself something that the next block reads."""

    before: list[nn.Module] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        past = self.before[0].memory if self.before else 0.0
        hidden = F.gelu(self.mlp.up(self.norm(x + past)))
        self.mlp.aux_loss = hidden.square().mean() + self.mlp.up.weight.square().mean()
        out = x + self.mlp.down(hidden)
        self.memory = out.mean(-1, keepdim=True)
        self.noted = {"mean": [out.mean()]}
        return out


class AuxiliaryLM(LM):
    def __init__(self) -> None:
        super().__init__(Auxiliary)
        for block, before in zip(self.blocks[1:], self.blocks, strict=False):
            block.before = [before]

    def forward(self, input_ids: Tensor) -> Any:
        x = self.trunk(input_ids)
        extra = sum(part.aux_loss for part in self.modules() if hasattr(part, "aux_loss"))
        return self.head(x), extra + sum(block.noted["mean"][0] for block in self.blocks)


def auxiliary() -> Made:
    return AuxiliaryLM(), batch(), loss


class Appending(Block):
    """Appends to a list that all blocks share, and to one it is called with."""

    def forward(self, x: Tensor, given: list[Tensor]) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        self.shared.append(out.square().mean())
        given.append(out.mean())
        return out


class AppendingLM(LM):
    def __init__(self) -> None:
        super().__init__(Appending)
        self.shared: list[Tensor] = []
        for block in self.blocks:
            block.shared = self.shared

    def forward(self, input_ids: Tensor) -> Any:
        self.shared.clear()
        x, given = self.embedding(input_ids), []
        for block in self.blocks:
            x = block(x, given)
        return self.head(x), torch.stack(self.shared).sum() + torch.stack(given).sum()


def appending() -> Made:
    return AppendingLM(), batch(), loss


FOUND: list[Tensor] = []


class Hiding(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        FOUND.append(out.square().mean())
        return out


class HidingLM(LM):
    def forward(self, input_ids: Tensor) -> Any:
        FOUND.clear()
        x = self.trunk(input_ids)
        return self.head(x), torch.stack(FOUND).sum()


def hiding() -> Made:
    return HidingLM(Hiding), batch(), loss


class HookedLM(LM):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            block.register_forward_hook(lambda m, a, out, number=number: self.seen.__setitem__(number, out))

    def forward(self, input_ids: Tensor) -> Any:
        x = self.trunk(input_ids)
        return self.head(x), sum(seen.square().mean() for seen in self.seen.values())


def hooked() -> Made:
    return HookedLM(), batch(), loss


# ---------------------------------------------------------------- parameters


class Gated(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.3))
        self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.mlp(self.fixed * x)


class GatedLM(LM):
    def __init__(self) -> None:
        super().__init__(Gated)
        self.temperature = nn.Parameter(torch.tensor(0.2))

    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) * self.temperature.exp()


def gated() -> Made:
    return GatedLM(), batch(), loss


class Teaching(nn.Module):
    """A teacher that follows its student, and in each block of the student a slow copy of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = LM(Following, 2), LM(Following, 2)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Any:
        with torch.no_grad():
            for fast, slow in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            wanted = self.teacher(input_ids)
        output = self.student(input_ids)
        return output, (output - wanted).square().mean()


class Following(Block):
    def __init__(self) -> None:
        super().__init__()
        self.slow, self.fast = nn.Linear(D, D), nn.Linear(D, D)
        self.slow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return super().forward(x) + self.fast(x) + self.slow(x.detach())


def teaching() -> Made:
    return Teaching(), batch(), loss


class FirstBatch(nn.Module):
    """Initialised by the first samples it sees."""

    depends_on_batch = True

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(D))
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.shift.data.copy_(-x.mean((0, 1)))
            self.is_ready.fill_(True)
        return x + self.shift


class FirstBatchLM(LM):
    def __init__(self) -> None:
        super().__init__()
        self.first = FirstBatch()

    def forward(self, input_ids: Tensor) -> Any:
        return self.head(self.first(self.trunk(input_ids)))


def first_batch() -> Made:
    return FirstBatchLM(), batch(), loss


def sharing() -> Made:
    """One MLP for all blocks."""
    module = LM()
    for block in module.blocks[1:]:
        block.mlp = module.blocks[0].mlp
    return module, batch(), loss


class Boxed(Block):
    """The first block leaves something in a box of the class, which the others read."""

    box: dict[str, Tensor] = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mlp.up(self.norm(x))
        self.box.setdefault("first", hidden)
        return x + self.mlp.down(F.gelu(hidden + self.box["first"]))


class BoxedLM(LM):
    def forward(self, input_ids: Tensor) -> Any:
        Boxed.box.clear()
        return super().forward(input_ids)


def boxed() -> Made:
    return BoxedLM(Boxed), batch(), loss


class PenalisedLM(LM):
    """A penalty on the weights of all blocks, which are read outside of them, and on a factor of each kind."""

    def forward(self, input_ids: Tensor) -> Any:
        x = self.head(self.trunk(input_ids))
        return x, sum((1 + place % 3) * weight.abs().mean() for place, weight in enumerate(self.blocks.parameters()))


def penalised() -> Made:
    return PenalisedLM(), batch(), loss


class OutsideLM(LM):
    """A teacher follows its student in code of the model's own, between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList([Block() for _ in range(4)]).requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Any:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            taught = self.embedding(input_ids)
            for block in self.teacher:
                taught = block(taught)
        x = self.trunk(input_ids)
        return self.head(x), F.mse_loss(x, taught)


def outside() -> Made:
    return OutsideLM(), batch(), loss
