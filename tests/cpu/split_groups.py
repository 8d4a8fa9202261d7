"""Calls of torch functions that models use on split tensors: complex numbers, changes in place, functions without a rule of their own.

All samples by group are here too.
"""

# ruff: noqa: E501 - tables of one call a line
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from split_samples import (
    Sample,
    attention_samples,
    contraction_samples,
    group_samples,
    picking_samples,
    real,
    reduction_samples,
    view_samples,
    vocabulary_samples,
    weight,
)
from torch import Tensor, nn


def complex_samples() -> Iterator[Sample]:
    x, y = real(4, 4, 8), real(4, 4, 8, seed=1)

    def turned(t: Tensor, angles: Tensor) -> Tensor:
        """Rotary positions by complex numbers, as Llama first had them."""
        pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    calls: dict[str, Callable[[Tensor], Any]] = {
        "view_as_complex": lambda t: torch.view_as_complex(t.unflatten(-1, (4, 2))),
        "view_as_real": lambda t: torch.view_as_real(torch.complex(t, t * 2)), "polar": lambda t: torch.polar(t, t * 3),
        "complex": lambda t: torch.complex(t, -t), "imag": lambda t: torch.complex(t, t * 2).imag * t, "real": lambda t: torch.complex(t, t * 2).real,
        "H": lambda t: torch.complex(t, t * 2)[0].H, "mH": lambda t: torch.complex(t, t * 2).mH, "adjoint": lambda t: t.adjoint(),
        "conj": lambda t: torch.complex(t, t * 2).conj() * t, "angle": lambda t: torch.complex(t, t * 2).angle(),
        "abs": lambda t: torch.complex(t, t * 2).abs(), "fft": lambda t: torch.fft.rfft(t, dim=1).abs(),
        "sum": lambda t: torch.complex(t, t * 2).sum(1), "matmul": lambda t: torch.complex(t, t) @ torch.complex(t, -t).mT,
    }  # fmt: skip
    for name, call in calls.items():
        yield Sample(name, call, (x,))
    yield Sample("polar-rotary", turned, (x, real(4, 4, seed=3)))
    yield Sample("complex-two", torch.complex, (x, y))


def writing_samples() -> Iterator[Sample]:
    """What a model changes in place, it must find changed."""
    x, y, few = real(4, 4, 8), real(4, 4, 8, seed=1), torch.tensor([2, 0])

    def writes(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *others: Any) -> Tensor:
            held = tensor * 1.0
            change(held, *others)
            return held * 2

        return call

    changes: dict[str, Callable[..., Any]] = {
        "__setitem__": lambda h: h.__setitem__((slice(None), 1), 0.0), "__setitem__-last": lambda h: h.__setitem__((..., slice(0, 4)), 2.0),
        "__setitem__-mask": lambda h: h.__setitem__(h > 0.5, 0.0), "__setitem__-tensor": lambda h: h.__setitem__(few, 1.0),
        "iadd": lambda h: h.__iadd__(h[:1] * 2), "relu": lambda h: F.relu(h, inplace=True), "relu-place": lambda h: F.relu(h, True),
        "masked_fill": lambda h: h.masked_fill_(h > 0.5, 0.0), "zero_": lambda h: h.zero_(), "fill_": lambda h: h.fill_(0.3),
        "index_fill": lambda h: h.index_fill_(1, few, 0.0), "clamp": lambda h: h.clamp_(0.2, 0.6), "cumsum": lambda h: h.cumsum_(1),
        "tril": lambda h: h.tril_(), "leaky_relu": lambda h: F.leaky_relu(h - 0.5, 0.1, True), "squeeze": lambda h: h.squeeze_(),
        "getitem-view": lambda h: h[:, 1].zero_(),
        "view-view": lambda h: h.view(16, 8).add_(1.0), "transpose-view": lambda h: h.transpose(0, 1).relu_(),
        "select-view": lambda h: h.select(2, 3).copy_(torch.zeros(4, 4)),
        "detach-view": lambda h: h.detach().mul_(1.0),
    }  # fmt: skip
    for name, change in changes.items():
        yield Sample(name, writes(change), (x,))
    others: dict[str, Callable[..., Any]] = {
        "copy": lambda h, o: h.copy_(o), "iadd": lambda h, o: h.__iadd__(o), "imul": lambda h, o: h.__imul__(o.detach()),
        "index_add": lambda h, o: h.index_add_(0, few, o[:2]), "index_copy": lambda h, o: h.index_copy_(1, few, o[:, :2]),
        "index_put": lambda h, o: h.index_put_((few,), o[:2], accumulate=True), "masked_scatter": lambda h, o: h.masked_scatter_(h > 0.5, o),
        "scatter": lambda h, o: h.scatter_(1, torch.zeros(4, 4, 8, dtype=torch.int64), o.detach()),
        "scatter_add": lambda h, o: h.scatter_add_(2, torch.ones(4, 4, 8, dtype=torch.int64), o),
        "__setitem__-tensor": lambda h, o: h.__setitem__(few, o[:2]), "__setitem__-slice": lambda h, o: h.__setitem__((slice(None), slice(1, 3)), o[:, :2]),
        "__setitem__-broadcast": lambda h, o: h.__setitem__((slice(None), 0), o[0, 0]), "addcmul": lambda h, o: h.addcmul_(o, o),
        "where": lambda h, o: torch.where(o > 0.5),
    }  # fmt: skip
    for name, change in others.items():
        yield Sample(name, writes(change), (x, y))
    yield from _sharing_samples(x, weight(8, 8))
    yield Sample("copy-smaller", writes(lambda h, o: h.copy_(o)), (x, real(8, seed=2)))
    yield Sample("iadd-weight", writes(lambda h, o: h.__iadd__(o)), (x, weight(8)))


def _sharing_samples(x: Tensor, w: Tensor) -> Iterator[Sample]:
    """A product, whose ranks may hold summands, and a view of it: a change in place of one is a change of the other."""

    def shares(view: Callable[[Tensor], Tensor], change: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            held = F.linear(tensor, w)
            seen = view(held)
            change(held, seen)
            return held * 2, seen * 3

        return call

    views: dict[str, Callable[[Tensor], Tensor]] = {
        "view": lambda h: h.view(16, 8), "transpose": lambda h: h.transpose(0, 1), "unsqueeze": lambda h: h.unsqueeze(1),
        "getitem": lambda h: h[:, 1:3], "float": lambda h: h.double(), "detach": lambda h: h.view(-1).view(4, 32)[1:],
    }  # fmt: skip
    changes: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "base": lambda h, v: h.sub_(1.0), "view": lambda h, v: v.sub_(1.0), "tensor": lambda h, v: h.__isub__(h.detach() * 2),
        "setitem": lambda h, v: h.__setitem__((0, 1), 0.0), "copied": lambda h, v: v.copy_(v.detach() * 3),
        "twice": lambda h, v: (h.mul_(2.0), v.add_(1.0)),
    }  # fmt: skip
    for name, view in views.items():
        for other, change in changes.items():
            yield Sample(f"{name}-shared-{other}", shares(view, change), (x, w))


def other_samples() -> Iterator[Sample]:
    """Functions that run on whole tensors, and those that are followed inside."""
    x, y = real(4, 4, 8), real(4, 4, 8, seed=1)
    few = torch.tensor([2, 0])
    calls: dict[str, Callable[[Tensor], Any]] = {
        "glu": lambda t: F.glu(t), "glu-dim": lambda t: F.glu(t, 1), "glu-torch": lambda t: nn.GLU(0)(t),
        "normalize": lambda t: F.normalize(t), "normalize-last": lambda t: F.normalize(t, dim=-1), "normalize-p": lambda t: F.normalize(t, 1.0, 2),
        "gumbel_softmax": lambda t: F.gumbel_softmax(t), "gumbel_softmax-hard": lambda t: F.gumbel_softmax(t, 0.5, True, dim=1),
        "nonzero": lambda t: t[(t > 0.5).nonzero(as_tuple=True)], "masked_select": lambda t: t.masked_select(t > 0.5),
        "where-one": lambda t: t[torch.where(t[..., 0] > 0.5)], "unfold": lambda t: t.unfold(1, 2, 1), "bucketize": lambda t: torch.bucketize(t, torch.linspace(0, 1, 5)),
        "pixel_shuffle": lambda t: F.pixel_shuffle(t, 2), "kron": lambda t: torch.kron(t[0], t[1]), "tile": lambda t: t.tile(2, 1, 1),
        "outer": lambda t: torch.outer(t[0, 0], t[1, 1]), "ger": lambda t: torch.ger(t[0, 0], t[1, 1]), "mv": lambda t: torch.mv(t[0], t[1, 1]),
        "dot": lambda t: torch.dot(t[0, 0], t[1, 1]), "diagonal": lambda t: t.diagonal(0, 0, 1), "item": lambda t: t * t[0, 0, 0].item(),
        "__iter__": lambda t: [row * 2 for row in t], "broadcast_to": lambda t: torch.broadcast_to(t[:, :1], (2, 4, 4, 8)),
        "nbytes": lambda t: t * t.nbytes, "is_same_size": lambda t: t * t.is_same_size(torch.empty(4, 4, 8)), "new_tensor": lambda t: t.new_tensor([1.0]),
        "new_zeros": lambda t: t.new_zeros(t.shape), "new_ones": lambda t: t.new_ones((2, 4)), "new_full": lambda t: t.new_full((2,), 3.0),
        "new_empty": lambda t: t.new_empty(4, 2), "one_hot": lambda t: F.one_hot((t * 4).long(), 5), "size": lambda t: t * t.size(1),
        "nelement": lambda t: t * t.nelement(), "__len__": lambda t: t * len(t), "pad": lambda t: F.pad(t, (1, 2)), "pad-tokens": lambda t: F.pad(t, (0, 0, 1, 0)),
        "pad-circular": lambda t: F.pad(t, (1, 1), mode="circular"), "unique": lambda t: torch.unique((t * 4).long()),
        "sum-numpy": lambda t: t.sum(axis=1, keepdims=True), "cat-numpy": lambda t: torch.cat([t, t], axis=1), "softmax-numpy": lambda t: torch.softmax(input=t, axis=-1),
        "dropout1d": lambda t: F.dropout1d(t), "dropout2d": lambda t: F.dropout2d(t), "dropout3d": lambda t: F.dropout3d(t.unsqueeze(1)),
        "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t, 0.5, True), "alpha_dropout": lambda t: F.alpha_dropout(t, 0.5, True),
        "feature_dropout": lambda t: torch.feature_dropout(t, 0.5, True),
        "dropout": lambda t: F.dropout(t, 0.5), "attention_dropout": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None], dropout_p=0.5),
        "multinomial": lambda t: torch.multinomial(t[0], 2), "equal": lambda t: t * torch.equal(t, t), "grad": lambda t: t if t.grad is None else None,
    }  # fmt: skip
    for name, call in calls.items():
        yield Sample(name, call, (x,))
    yield Sample("cdist", torch.cdist, (x, y))
    yield Sample("bilinear", F.bilinear, (real(4, 4), real(4, 8), weight(4, 4, 8)))
    yield Sample("conv_transpose", F.conv_transpose2d, (real(2, 4, 4, 4), weight(4, 6, 3, 3), weight(6)))
    yield Sample("index_add", lambda t, o: t.index_add(1, few, o[:, :2]), (x, y))
    yield Sample("scatter_add", lambda t, o: t.scatter_add(1, torch.ones(4, 4, 8, dtype=torch.int64), o), (x, y))
    yield Sample("cosine_similarity", lambda t, o: F.cosine_similarity(t, o, dim=-1), (x, y))
    yield Sample("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (weight(4, 8), weight(4, 1)))
    yield Sample("einsum-dots", lambda a, b: torch.einsum("...i,oi->...o", a, b), (x, weight(12, 8)))
    yield Sample("einsum-one", lambda a, b: torch.einsum("bsi,bsi->bs", a, b), (x, real(4, 1, 8)))
    for transposed in (False, True):
        yield from _multihead(transposed)


def _multihead(weights: bool) -> Iterator[Sample]:
    """torch.nn.MultiheadAttention: one weight for queries, keys and values; [tokens, samples, width]."""
    inner, outer = (weight(24, 8), weight(24)), (weight(8, 8, seed=7), weight(8, seed=8))

    def attend(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor, ow: Tensor, ob: Tensor) -> Any:
        made = F.multi_head_attention_forward(
            q, k, v, 8, 2, w, b, None, None, False, 0.0, ow, ob, need_weights=weights, training=True
        )
        return made if weights else made[0]

    name = f"multi_head_attention_forward-{weights}"
    yield Sample(name, lambda t, *rest: attend(t, t, t, *rest), (real(4, 2, 8), *inner, *outer))
    yield Sample(
        f"{name}-cross",
        lambda t, o, *rest: attend(t, o, o, *rest),
        (real(4, 2, 8), real(4, 2, 8, seed=3), *inner, *outer),
    )


SINGLES: dict[str, Callable[[], Iterator[Sample]]] = {
    "views": view_samples,
    "picking": picking_samples,
    "reductions": reduction_samples,
    "contractions": contraction_samples,
    "attention": attention_samples,
    "vocabulary": vocabulary_samples,
    "complex": complex_samples,
    "writing": writing_samples,
    "others": other_samples,
}


def samples_of(group: str) -> Iterator[Sample]:
    return SINGLES[group]() if group in SINGLES else group_samples(group)
