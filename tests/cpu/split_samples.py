"""Calls of every torch function that has a rule for split tensors (runtime/split/rules/table.py), on small tensors.

A sample is tried on whole tensors first: one that torch itself refuses is none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.runtime.split.rules import table

Inputs = tuple[Any, ...]
Made = Callable[[], Inputs]
RANDOM = (
    *[
        "empty_like",
        "dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "feature_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
    ],
    *["gumbel_softmax", "new_empty", "attention_dropout", "multinomial"],
    *f"{table.DRAWN_BY_VALUES} {table.DRAWN_ALIKE} {table.FILLED}".split(),
)
"""Draw values, or promise none."""


@dataclass(frozen=True)
class Sample:
    name: str
    call: Callable[..., Any]
    inputs: Inputs
    brief: bool = False
    """Whether few ways to lie are enough: others under the same rule are tried in all."""

    @property
    def random(self) -> bool:
        return self.rule in RANDOM

    @property
    def rule(self) -> str:
        """The name in the table of rules."""
        return self.name.partition("/")[0].partition("-")[0]

    def __str__(self) -> str:
        sizes = ", ".join(str(list(i.shape)) if isinstance(i, Tensor) else repr(i) for i in self.inputs)
        return f"{self.name}({sizes})"


def real(*sizes: int, seed: int = 0) -> Tensor:
    """Between 0.1 and 0.9, so that every function is defined and smooth there."""
    made = torch.rand(sizes, generator=torch.Generator().manual_seed(seed + 7 * len(sizes)), dtype=torch.float64)
    return (made * 0.8 + 0.1).requires_grad_()


def whole_number(*sizes: int, high: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(1, high, sizes, generator=torch.Generator().manual_seed(seed))


def truth(*sizes: int, seed: int = 0) -> Tensor:
    return whole_number(*sizes, high=3, seed=seed) == 1


def weight(*sizes: int, seed: int = 5) -> nn.Parameter:
    return nn.Parameter(real(*sizes, seed=seed).detach())


# ---------------------------------------------------------------- groups: the same inputs for many functions


def pointwise_inputs() -> list[Inputs]:
    x, y, z = (real(4, 4, 8, seed=n) for n in range(3))
    return [
        (x, y), (x, real(8)), (real(4, 1, 8), real(4, 8)), (real(8), x), (x, 2.0), (2.0, x), (x, real(1, 4, 1)),
        (x, weight(8)), (x, y, z), (x, real(8), 0.3), (x, 0.3, 0.8), (truth(4, 4, 8), x, y), (truth(4, 8), x, 0.0),
        (x, truth(4, 4, 8), 0.5), (x, truth(4, 1, 8), 0.5), (x, truth(8), 0.5), (truth(4, 8), truth(8, seed=1)),
        (whole_number(4, 4, 8), whole_number(4, 8, seed=1)),
    ]  # fmt: skip


def unary_inputs() -> list[Inputs]:
    x = real(4, 4, 8)
    return [(x,), (x, 0.5), (x, 0.5, 0.1), (x, torch.float32), (x, real(2)), (truth(4, 4),), (whole_number(4, 4),)]


def along_inputs() -> list[Inputs]:
    return [(real(4, 4, 8), dim) for dim in (0, 1, -1)] + [(real(4, 4, 8),)]


def reduced_inputs() -> list[Inputs]:
    x = real(4, 4, 8)
    return [
        (x,), (x, 1), (x, -1), (x, 1, True), (x, (0, 2)), (x, (0, 2), True), (x, ()), (x, 1, False), (x, 1, False, True),
        (x, False), (x, real(8)), (truth(4, 4),), (truth(4, 4), 1),
    ]  # fmt: skip


def along_dim_inputs() -> list[Inputs]:
    x = real(4, 4, 8)
    return [
        (x, 1, 1, 2), (x, -1, 2, 4), (x, 0, torch.tensor([2, 0, 1])), (x, 2, torch.tensor([1, 1])), (x, (0,)),
        (x, (1, 2)), (x, 1, 0), (x, 3, -1), (x, (1, 2), (0, 2)), (x, 5),
    ]  # fmt: skip


def by_channel_inputs() -> list[Inputs]:
    found: list[Inputs] = []
    for sizes in ((4, 4, 8), (4, 4, 8, 8), (2, 4, 4, 4, 4), (4, 8), (4, 8, 8)):
        x = real(*sizes)
        found += [
            (x,),
            (x, 2),
            (x, 2, 2),
            (x, 4),
            (x, (1, 1)),
            (x, (0, 0, 1, 1)),
            (x, (0, 0, 0, 0, 2, 0)),
            (x, None, 2),
        ]
    return found


def on_whole_inputs() -> list[Inputs]:
    x, y = real(4, 4, 8), real(4, 4, 8, seed=1)
    return [(x, y), (x, 2), (x, 2, weight(4), weight(4, seed=6))]


def same_answer_inputs() -> list[Inputs]:
    return [(real(4, 4, 8),), (real(4, 4, 8), real(4, 4, 8, seed=1))]


def drawn_inputs() -> list[Inputs]:
    return [(real(4, 4, 8),), (real(4, 4, 8), 0.5), (real(4, 4, 8), 0, 4), (real(4, 4, 8), real(4, 4, 8, seed=1))]


BRIEF = ("pointwise", "unary", "reduced", "by channel")
"""Groups of many functions under one rule: one call of each, and many of a few."""
THOROUGHLY = (
    "add", "where", "masked_fill", "clamp", "__iadd__", "type", "to", "relu_", "max", "var", "amax", "adaptive_max_pool2d",
    "max_pool2d",
)  # fmt: skip
GROUPS: dict[str, tuple[str, Callable[[], list[Inputs]]]] = {
    "pointwise": (table.POINTWISE, pointwise_inputs),
    "unary": (table.UNARY, unary_inputs),
    "along": (table.ALONG, along_inputs),
    "reduced": (table.REDUCED, reduced_inputs),
    "along dim": (table.ALONG_DIM, along_dim_inputs),
    "by channel": (table.BY_CHANNEL, by_channel_inputs),
    "on whole": (table.ON_WHOLE, on_whole_inputs),
    "drawn by values": (table.DRAWN_BY_VALUES, drawn_inputs),
    "drawn alike": (table.DRAWN_ALIKE, drawn_inputs),
    "filled": (table.FILLED, drawn_inputs),
}


def changes_input(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def group_samples(group: str) -> Iterator[Sample]:
    names, make = GROUPS[group]
    for name in names.split():
        for function in dict.fromkeys(table._objects(name)):
            spelled = getattr(function, "__name__", name)
            call = _calling(function, changes_input(spelled))
            brief = group in BRIEF and spelled not in THOROUGHLY
            samples = (Sample(f"{name}/{spelled}", call, inputs, brief) for inputs in make())
            legal = (sample for sample in samples if runs_whole(sample))
            yield from islice(legal, 1) if brief else legal


def runs_whole(sample: Sample) -> bool:
    """Whether torch itself has such a call, and its gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = sample.call(*sample.inputs)
            for item in [made] if isinstance(made, Tensor) else made:
                if isinstance(item, Tensor) and item.requires_grad:
                    item.sum().backward(retain_graph=True)
        except Exception:
            return False
    return True


def _calling(function: Any, in_place: bool) -> Callable[..., Any]:
    def call(first: Any, *others: Any) -> Any:
        if in_place:
            first = first.clone()
        return function(first, *others)

    return call


# ---------------------------------------------------------------- functions with a rule of their own


def view_samples() -> Iterator[Sample]:
    x, bias = real(4, 4, 8), real(4, 1, 8)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "view": lambda t: t.view(16, 8), "reshape": lambda t: t.reshape(4, 4, 2, 4), "reshape-1": lambda t: t.reshape(-1, 8),
        "reshape-all": lambda t: t.reshape(-1), "reshape-mix": lambda t: torch.reshape(t, (2, 8, 8)),
        "reshape-merge": lambda t: t.reshape(4, 32), "reshape-one": lambda t: t.reshape(4, 1, 4, 8, 1),
        "reshape-shape": lambda t: t.reshape(t.shape[0], t.size(1), 4, t.shape[-1] // 4),
        "view_as": lambda t: t.view_as(torch.empty(16, 8)), "reshape_as": lambda t: t.reshape_as(torch.empty(2, 2, 32)),
        "flatten": lambda t: t.flatten(), "flatten-from": lambda t: t.flatten(1), "flatten-to": lambda t: torch.flatten(t, 0, 1),
        "unflatten": lambda t: t.unflatten(-1, (2, 4)), "unflatten-1": lambda t: t.unflatten(2, (-1, 2)),
        "ravel": lambda t: t.ravel(), "transpose": lambda t: t.transpose(0, 1), "transpose-2": lambda t: t.transpose(-1, 1),
        "swapaxes": lambda t: t.swapaxes(0, 2), "swapdims": lambda t: torch.swapdims(t, 0, 1), "t": lambda t: t[0].t(),
        "permute": lambda t: t.permute(2, 0, 1), "permute-2": lambda t: torch.permute(t, (1, 0, 2)),
        "movedim": lambda t: t.movedim(0, -1), "moveaxis": lambda t: torch.moveaxis(t, (0, 1), (1, 2)),
        "unsqueeze": lambda t: t.unsqueeze(1), "unsqueeze-last": lambda t: t.unsqueeze(-1), "unsqueeze-0": lambda t: t.unsqueeze(0),
        "squeeze": lambda t: t.unsqueeze(1).squeeze(), "squeeze-dim": lambda t: t.unsqueeze(1).squeeze(1),
        "squeeze-none": lambda t: t.squeeze(0), "squeeze-negative": lambda t: t.unsqueeze(-1).squeeze(-1),
        "expand": lambda t: t.expand(3, 4, 4, 8), "expand-1": lambda t: t.unsqueeze(1).expand(-1, 3, -1, -1),
        "expand_as": lambda t: t.expand_as(torch.empty(2, 4, 4, 8)), "repeat": lambda t: t.repeat(1, 2, 1),
        "repeat-more": lambda t: t.repeat(2, 1, 1, 3), "repeat_interleave": lambda t: t.repeat_interleave(2, dim=1),
        "repeat_interleave-last": lambda t: torch.repeat_interleave(t, 3, -1), "contiguous": lambda t: t.transpose(0, 1).contiguous(),  # noqa: E501
        "T": lambda t: t[0].T, "mT": lambda t: t.mT, "data": lambda t: t.data, "shape": lambda t: t * t.shape[1] + t.size(-1),
        "numel": lambda t: t / t.numel() + t.nelement() + len(t),
    }  # fmt: skip
    for name, call in calls.items():
        yield Sample(name, call, (x,))
    yield Sample("expand_as", lambda t, o: t.expand_as(o), (bias, x))
    yield Sample("expand", lambda t: t.expand(4, 4, 8), (bias,))
    yield Sample("view_as", lambda t, o: t.view_as(o), (real(16, 8), x))
    yield Sample("transpose-bias", lambda t: t.unsqueeze(0).transpose(0, 1).sum(1), (x,))


def picking_samples() -> Iterator[Sample]:
    x, y = real(4, 4, 8), real(4, 4, 8, seed=1)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "chunk": lambda t: t.chunk(2, -1), "chunk-0": lambda t: torch.chunk(t, 2), "chunk-uneven": lambda t: t.chunk(3, -1),
        "split": lambda t: t.split(2, 1), "split-size": lambda t: torch.split(t, 4, dim=-1), "split-odd": lambda t: t.split(3, 2),
        "split-list": lambda t: t.split([2, 6], dim=2), "split_with_sizes": lambda t: t.split_with_sizes([4, 4], -1),
        "tensor_split": lambda t: t.tensor_split(2, 2), "tensor_split-odd": lambda t: t.tensor_split(3, 2),
        "tensor_split-at": lambda t: t.tensor_split((1, 3), dim=1),
        "unbind": lambda t: t.unbind(0), "unbind-last": lambda t: t.unbind(-1), "select": lambda t: t.select(1, 2),
        "getitem-number": lambda t: t[1], "getitem-last": lambda t: t[..., -1], "getitem-slice": lambda t: t[:, 1:3],
        "getitem-all": lambda t: t[:, :4, :], "getitem-long": lambda t: t[:, :100], "getitem-step": lambda t: t[:, ::2],
        "getitem-none": lambda t: t[:, None], "getitem-mixed": lambda t: t[:, None, 0, ..., 2:4],
        "getitem-negative": lambda t: t[:, -1, :], "getitem-half": lambda t: t[..., : t.shape[-1] // 2],
        "getitem-tensor": lambda t: t[torch.tensor([2, 0])], "getitem-tensor-1": lambda t: t[:, torch.tensor([2, 0, 1])],
        "getitem-tensor-2": lambda t: t[..., torch.tensor([[2, 0], [1, 1]])],
        "getitem-two": lambda t: t[torch.arange(4), torch.tensor([0, 2, 1, 3])],
        "getitem-apart": lambda t: t[torch.arange(4), :, torch.tensor([0, 2, 1, 3])],
        "getitem-list": lambda t: t[:, [1, 2]], "getitem-mask": lambda t: t[torch.tensor([True, False, True, True])],
        "getitem-mask-2": lambda t: t[torch.eye(4, dtype=torch.bool)], "getitem-slice-tensor": lambda t: t[1:3, torch.tensor([1])],
        "getitem-number-tensor": lambda t: t[torch.tensor([1, 2]), 0],
        "cat": lambda t: torch.cat((t, t * 2), -1), "cat-0": lambda t: torch.cat([t, t[:1]]), "cat-dim": lambda t: torch.cat([t, t], dim=1),  # noqa: E501
        "rotate": lambda t: torch.cat((-t[..., 4:], t[..., :4]), dim=-1),
        "stack": lambda t: torch.stack([t, t * 2], 1), "stack-last": lambda t: torch.stack((t, -t), dim=-1),
        "topk": lambda t: t.topk(2), "topk-dim": lambda t: torch.topk(t, 2, dim=1), "topk-place": lambda t: t.topk(3, 0),
        "sort": lambda t: t.sort(), "sort-dim": lambda t: t.sort(0), "sort-down": lambda t: t.sort(descending=True, dim=1),
        "argsort": lambda t: t.argsort(-1), "argsort-0": lambda t: torch.argsort(t, 0),
        "gather": lambda t: t.gather(1, torch.ones(4, 2, 8, dtype=torch.int64)),
        "gather-last": lambda t: torch.gather(t, -1, torch.zeros(4, 4, 1, dtype=torch.int64)),
        "gather-fewer": lambda t: t.gather(2, torch.zeros(2, 4, 1, dtype=torch.int64)),
        "triu": lambda t: t.triu(1), "tril": lambda t: torch.tril(t), "flip": lambda t: t.flip(1),
        "flip-two": lambda t: t.flip(0, 2), "roll-named": lambda t: t.roll(1, dims=1), "roll-two": lambda t: torch.roll(t, (1, 2), (0, 2)),  # noqa: E501
        "narrow-named": lambda t: torch.narrow(t, dim=1, start=1, length=2), "cumsum-named": lambda t: t.cumsum(dim=1),
    }  # fmt: skip
    for name, call in calls.items():
        yield Sample(name, call, (x,))
    for dim in (0, 1, -1):
        yield Sample("cat", lambda t, o, dim=dim: torch.cat([t, o], dim), (x, y))
        yield Sample("concat", lambda t, o, dim=dim: torch.concatenate([t, o], dim=dim), (x, y))
        yield Sample("stack", lambda t, o, dim=dim: torch.stack([t, o], dim), (x, y))
    yield Sample("cat-empty", lambda t: torch.cat([torch.tensor([], dtype=t.dtype), t], dim=-2), (x,))
    yield Sample("cat-sizes", lambda t, o: torch.cat([t, o], 1), (x, real(4, 2, 8)))
    yield Sample("gather", lambda t, i: t.gather(2, i), (x, whole_number(4, 4, 2, high=8)))
    yield Sample("getitem-index", lambda t, i: t[i], (x, whole_number(4, 2)))
    yield Sample("getitem-mask", lambda t, m: t[m], (x, truth(4, 4)))


def reduction_samples() -> Iterator[Sample]:
    x = real(4, 4, 8)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "sum": lambda t: t.sum(), "sum-dim": lambda t: t.sum(1), "sum-dims": lambda t: t.sum((0, -1)), "sum-keep": lambda t: t.sum(-1, True),  # noqa: E501
        "sum-named": lambda t: torch.sum(t, dim=(1, 2), keepdim=True), "sum-int": lambda t: (t > 0.5).sum(1), "sum-none": lambda t: t.sum(()),  # noqa: E501
        "sum-axis": lambda t: t.sum(axis=0), "sum-dtype": lambda t: t.sum(0, dtype=torch.float32),
        "mean": lambda t: t.mean(), "mean-dim": lambda t: torch.mean(t, 1), "mean-keep": lambda t: t.mean(dim=-1, keepdim=True),
        "mean-dims": lambda t: t.mean((0, 2)), "mean-list": lambda t: t.mean([-2, -1], keepdim=True),
        "mean-bias": lambda t: t - t.mean(-1, keepdim=True) * t.mean(0),
        "norm": lambda t: t.norm(), "norm-dim": lambda t: t.norm(2, -1), "norm-keep": lambda t: t.norm(dim=1, keepdim=True),
        "linalg.norm": lambda t: torch.linalg.norm(t, dim=-1), "norm-p": lambda t: torch.norm(t, 1, 0, True),
        "normalize": lambda t: F.normalize(t), "normalize-last": lambda t: F.normalize(t, dim=-1), "normalize-p": lambda t: F.normalize(t, 1.0, 2),  # noqa: E501
        "var": lambda t: t.var(-1, unbiased=False), "var-keep": lambda t: t.var(dim=1, keepdim=True), "var-all": lambda t: t.var(False),  # noqa: E501
        "std-place": lambda t: t.std(1, False), "std-all-places": lambda t: torch.std(t, -1, True, True), "std-correction": lambda t: t.std(0, correction=0),  # noqa: E501
        "max-keep": lambda t: t.max(1, keepdim=True), "max-all": lambda t: t.max(), "max-other": lambda t: torch.max(t, other=t * 0.5 + 0.2),  # noqa: E501
        "softmax-dtype": lambda t: F.softmax(t, -1, dtype=torch.float64), "softmax-named": lambda t: t.softmax(dim=1),
        "layer_norm": lambda t: F.layer_norm(t, (8,)), "layer_norm-two": lambda t: F.layer_norm(t, (4, 8)),
        "amax-all": lambda t: t.amax(), "amin-axis": lambda t: t.amin(axis=1), "logsumexp": lambda t: t.logsumexp((0, 1), keepdim=True),  # noqa: E501
        "any-all": lambda t: (t > 0.85).any(), "all-dim": lambda t: (t > 0.2).all(-1, keepdim=True), "argmax-keep": lambda t: t.argmax(1, True),  # noqa: E501
    }  # fmt: skip
    for name, call in calls.items():
        yield Sample(name, call, (x,))
    norm = weight(8), weight(8, seed=6)
    yield Sample("layer_norm-weight", lambda t, w, b: F.layer_norm(t, (8,), w, b), (x, *norm))
    yield Sample(
        "layer_norm-named", lambda t, w: F.layer_norm(t, normalized_shape=(8,), weight=w), (x, real(8, seed=3))
    )
    yield Sample("rms_norm", lambda t, w: F.rms_norm(t, (8,), w), (x, norm[0]))
    yield Sample("max", lambda t, o: torch.max(t, o), (x, real(4, 8, seed=3)))
    yield Sample("max-named", lambda t, o: torch.max(t, other=o), (x, real(4, 4, 8, seed=3)))
    for sizes in ((4, 4), (4, 4, 8), (2, 4, 4, 4)):
        channels = weight(4), weight(4, seed=6)
        yield Sample("batch_norm", lambda t, w, b: F.batch_norm(t, None, None, w, b, True), (real(*sizes), *channels))
        yield Sample(
            "batch_norm-eval",
            lambda t, m, w: F.batch_norm(t, m, w, None, None, False),
            (real(*sizes), real(4).detach(), real(4, seed=2).detach()),
        )
        if len(sizes) > 2:
            yield Sample(
                "instance_norm", lambda t, w, b: F.instance_norm(t, weight=w, bias=b), (real(*sizes), *channels)
            )
            yield Sample("group_norm", lambda t, w, b: F.group_norm(t, 2, w, b), (real(*sizes), *channels))
    yield Sample("prelu", F.prelu, (real(4, 4, 8), weight(4)))
    yield Sample("prelu-one", F.prelu, (real(4, 4, 8), weight(1)))


def contraction_samples() -> Iterator[Sample]:
    x = real(4, 4, 8)
    for w, b in ((weight(12, 8), weight(12)), (real(12, 8, seed=3), real(12, seed=4))):
        yield Sample("linear", F.linear, (x, w))
        yield Sample("linear-bias", F.linear, (x, w, b))
        yield Sample("linear-named", lambda t, v, c: F.linear(t, weight=v, bias=c), (real(4, 8), w, b))
        turned = (
            type(w)(w.detach().t().contiguous()) if isinstance(w, nn.Parameter) else w.detach().t().requires_grad_()
        )
        yield Sample("addmm", torch.addmm, (b, real(4, 8), turned))
        yield Sample("addmm-scaled", lambda c, t, v: torch.addmm(c, t, v, beta=0.5, alpha=2.0), (b, real(4, 8), turned))
        yield Sample("matmul-weight", torch.matmul, (x, turned))
        yield Sample("mm", torch.mm, (real(4, 8), turned))
    yield Sample("matmul", torch.matmul, (x, real(4, 8, 4, seed=2)))
    yield Sample("matmul-broadcast", torch.matmul, (real(2, 4, 4, 8), real(4, 8, 4, seed=2)))
    yield Sample("matmul-one", torch.matmul, (real(2, 1, 4, 8), real(2, 4, 8, 4, seed=2)))
    yield Sample("matmul-vector", torch.matmul, (x, real(8)))
    yield Sample("matmul-operator", lambda a, b: a @ b, (x, real(8, 4, seed=2)))
    yield Sample("rmatmul", lambda a, b: a.__rmatmul__(b), (real(4, 8, 4), real(4, 4, 8, seed=2)))
    yield Sample("bmm", torch.bmm, (x, real(4, 8, 4, seed=2)))
    yield Sample("scores", lambda q, k: q @ k.transpose(-1, -2), (real(2, 4, 4, 8), real(2, 4, 4, 8, seed=2)))
    yield Sample("baddbmm", torch.baddbmm, (real(4, 4, 4), x, real(4, 8, 4, seed=2)))
    yield Sample(
        "baddbmm-scaled",
        lambda a, b, c: torch.baddbmm(a, b, c, beta=0, alpha=0.5),
        (real(4, 4, 4), x, real(4, 8, 4, seed=2)),
    )
    yield Sample("einsum", lambda a, b: torch.einsum("bsi,oi->bso", a, b), (x, real(12, 8, seed=3)))
    yield Sample(
        "einsum-heads", lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), (real(2, 4, 4, 8), real(2, 4, 4, 8, seed=1))
    )
    yield Sample("einsum-sum", lambda a: torch.einsum("bsi->bi", a), (x,))
    yield Sample("einsum-diagonal", lambda a: torch.einsum("bss->bs", a), (real(4, 4, 4),))
    yield Sample("conv1d", lambda t, w, b: F.conv1d(t, w, b, padding=1), (real(2, 4, 8), weight(6, 4, 3), weight(6)))
    yield Sample("conv2d", lambda t, w, b: F.conv2d(t, w, b, 2, 1), (real(2, 4, 8, 8), weight(6, 4, 3, 3), weight(6)))
    yield Sample("conv2d-named", lambda t, w: F.conv2d(input=t, weight=w), (real(2, 4, 8, 8), weight(6, 4, 3, 3)))
    yield Sample(
        "conv2d-depthwise",
        lambda t, w, b: F.conv2d(t, w, b, padding=1, groups=4),
        (real(2, 4, 4, 4), weight(4, 1, 3, 3), weight(4)),
    )
    yield Sample(
        "conv2d-depthwise-more",
        lambda t, w: F.conv2d(t, w, padding=1, groups=4),
        (real(2, 4, 4, 4), weight(8, 1, 3, 3)),
    )
    yield Sample("conv2d-groups", lambda t, w: F.conv2d(t, w, groups=2), (real(2, 4, 4, 4), weight(4, 2, 3, 3)))
    yield Sample("conv3d", F.conv3d, (real(2, 4, 4, 4, 4), weight(2, 4, 2, 2, 2), weight(2)))


def attention_samples() -> Iterator[Sample]:
    q, k, v = (real(2, 4, 4, 8, seed=n) for n in range(3))
    attend = F.scaled_dot_product_attention
    yield Sample("attention", attend, (q, k, v))
    yield Sample("attention-causal", lambda a, b, c: attend(a, b, c, is_causal=True), (q, k, v))
    yield Sample("attention-scale", lambda a, b, c: attend(query=a, key=b, value=c, scale=0.3), (q, k, v))
    for sizes in ((4, 4), (2, 1, 1, 4), (2, 4, 4, 4), (1, 4, 4, 4), (2, 1, 4, 4)):
        yield Sample("attention-mask", lambda a, b, c, m: attend(a, b, c, m), (q, k, v, real(*sizes, seed=4)))
    yield Sample(
        "attention-truth", lambda a, b, c, m: attend(a, b, c, attn_mask=m), (q, k, v, torch.ones(4, 4).tril().bool())
    )
    fewer = real(2, 2, 4, 8, seed=5), real(2, 2, 4, 8, seed=6)
    yield Sample("attention-grouped", lambda a, b, c: attend(a, b, c, enable_gqa=True), (q, *fewer))
    single = real(2, 1, 4, 8, seed=5), real(2, 1, 4, 8, seed=6)
    yield Sample("attention-one-key-head", lambda a, b, c: attend(a, b, c, enable_gqa=True), (q, *single))
    yield Sample("attention-cross", attend, (q, real(2, 4, 6, 8, seed=5), real(2, 4, 6, 8, seed=6)))
    yield Sample("attention-no-heads", attend, (real(4, 4, 8), real(4, 4, 8, seed=1), real(4, 4, 8, seed=2)))


def vocabulary_samples() -> Iterator[Sample]:
    ids, table_of = whole_number(4, 4, high=8), weight(8, 6)
    yield Sample("embedding", F.embedding, (ids, table_of))
    yield Sample("embedding-padding", lambda i, t: F.embedding(i, t, padding_idx=3), (ids, table_of))
    yield Sample("embedding-positions", F.embedding, (torch.arange(4), weight(8, 6, seed=2)))
    logits, labels = real(8, 6), whole_number(8, high=6)
    ignoring = labels.clone()
    ignoring[2:4] = -100
    for reduction in ("mean", "sum", "none"):
        yield Sample(
            f"cross_entropy-{reduction}", lambda z, t, r=reduction: F.cross_entropy(z, t, reduction=r), (logits, labels)
        )
        yield Sample(
            f"cross_entropy-ignored-{reduction}",
            lambda z, t, r=reduction: F.cross_entropy(z, t, reduction=r),
            (logits, ignoring),
        )
        yield Sample(
            f"cross_entropy-classes-{reduction}",
            lambda z, t, r=reduction: F.cross_entropy(z, t, reduction=r),
            (real(4, 6, 4), whole_number(4, 4, high=6)),
        )
        yield Sample(
            f"nll_loss-{reduction}",
            lambda z, t, r=reduction: F.nll_loss(F.log_softmax(z, -1), t, reduction=r),
            (logits, ignoring),
        )
    yield Sample("cross_entropy-smoothed", lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1), (logits, labels))
    yield Sample("cross_entropy-weighted", lambda z, t, w: F.cross_entropy(z, t, w), (logits, labels, real(6).detach()))
    yield Sample("cross_entropy-soft", lambda z, t: F.cross_entropy(z, t), (logits, real(8, 6, seed=3).detach()))
    yield Sample("cross_entropy-one", lambda z, t: F.cross_entropy(z, t), (real(6), torch.tensor(2)))
    yield Sample("cross_entropy-index", lambda z, t: F.cross_entropy(z, t, ignore_index=3), (logits, labels))
    yield Sample(
        "nll_loss-weighted",
        lambda z, t, w: F.nll_loss(F.log_softmax(z, -1), t, w, reduction="sum"),
        (logits, labels, real(6).detach()),
    )
    yield Sample("dropout-none", lambda t: F.dropout(t, 0.0), (real(4, 4, 8),))
    yield Sample("dropout-eval", lambda t: F.dropout(t, 0.5, training=False), (real(4, 4, 8),))
