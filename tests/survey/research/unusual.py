"""Unusual places for weights, losses and side channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrizations, parametrize, prune

WIDTH, INNER, VOCAB, SEQ = 16, 32, 24, 8


def _batch() -> dict[str, Tensor]:
    text = torch.randint(VOCAB, (8, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ReluInPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (y > 0)


class Dirty(Block):
    """The function changes what it is given, and the block goes on with that."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))))
        ReluInPlace.apply(h)
        return x + h


class Pair(Function):
    """Several results, one of them without a gradient."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        larger = x > y
        ctx.mark_non_differentiable(larger)
        return x + y, x * y, larger

    @staticmethod
    def backward(ctx, of_sum, of_product, _):
        x, y = ctx.saved_tensors
        return of_sum + of_product * y, of_sum + of_product * x


class SeveralResults(Block):
    def forward(self, x: Tensor) -> Tensor:
        total, product, larger = Pair.apply(x, self.down(F.relu(self.up(self.norm(x)))))
        return total + torch.where(larger, product, product * 0.5)


class ViewOfSum(Block):
    """A view of a projection, which is then changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.relu(self.up(self.norm(x))))
        rows = h.view(-1, WIDTH)
        h += x
        return torch.tanh(rows).view_as(x) + h


class Boxed(Block):
    """The first block leaves its hidden features in a box that all blocks read."""

    box: dict[str, Tensor] = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        self.box.setdefault("first", hidden)
        return x + self.down(F.relu(hidden) + 0.5 * self.box["first"])


class BoxedNet(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        Boxed.box.clear()
        return super().forward(tokens)


class Penalised(Net):
    """A penalty on the weights of all blocks."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(tokens), sum(weight.abs().mean() for weight in self.blocks.parameters())


def _with_penalty(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output[0].flatten(0, 1), batch["labels"].flatten()) + 0.1 * output[1]


class Teacher(Net):
    """Follows its student in code of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList([Block() for _ in range(4)]).requires_grad_(False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            taught = self.embed(tokens)
            for block in self.teacher:
                taught = block(taught)
        return super().forward(tokens), taught.square().mean()


class Generated(nn.Module):
    """Weights made by another network."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.maker = nn.Parameter(torch.randn(4)), nn.Linear(4, 2 * INNER * WIDTH)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, INNER, bias=False), nn.ReLU(), nn.Linear(INNER, WIDTH, bias=False)
        ).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.maker(self.code).chunk(2)
        weights = {"0.weight": up.view(INNER, WIDTH), "2.weight": down.view(WIDTH, INNER)}
        return x + 0.1 * torch.func.functional_call(self.net, weights, (x,))


class LowRank(nn.Module):
    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, inputs) * 0.1), nn.Parameter(torch.randn(outputs, 2) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


KEPT = Net()


def changed_by_function():
    return Net(Dirty), _batch()


def several_results():
    return Net(SeveralResults), _batch()


def view_of_a_sum():
    return Net(ViewOfSum), _batch()


def box_of_a_class():
    return BoxedNet(Boxed), _batch()


def weight_penalty():
    return Penalised(), _batch(), _with_penalty


def teacher_outside():
    return Teacher(), _batch(), _with_penalty


def class_weights():
    weights = torch.ones(VOCAB)
    return Net(), _batch(), lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten(), weights)


def perceptual_loss():
    net = nn.Linear(VOCAB, 8).requires_grad_(False)
    return (
        Net(),
        _batch(),
        lambda out, batch: F.mse_loss(net(out), net(F.one_hot(batch["labels"], VOCAB).to(out.dtype))),
    )


def model_of_the_file():
    return KEPT, _batch()


def generated_weights():
    return Net(Generated), _batch()


def orthogonal():
    net = Net()
    for block in net.blocks:
        parametrizations.orthogonal(block.up)
    return net, _batch()


def pruned():
    net = Net()
    for block in net.blocks:
        prune.l1_unstructured(block.up, "weight", amount=0.3)
    return net, _batch()


def adapters_by_parametrization():
    net = Net()
    for block in net.blocks:
        for part in (block.up, block.down):
            parametrize.register_parametrization(part, "weight", LowRank(*part.weight.shape))
            part.parametrizations.weight.original.requires_grad_(False)
    return net, _batch()
