"""Rules at both ends of a language model: the table of tokens, and the loss over a vocabulary that lies over ranks.

lookup      each rank looks up the tokens whose rows it has, zeros for the others; the sum is the result
loss        -log softmax(z)_t = log Σ_j exp(z_j - m) - (z_t - m)       m, Σ and z_t: an all-reduce each of one number a token
gradient    softmax(z)_j - [j = t]                                     with what forward kept: nothing is sent
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.own_backward import refuse_second_derivative
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.laying import laid
from meshwright.runtime.split.layout import Addend, Cut, Layout, cuts, lay, layout_of
from meshwright.runtime.split.rules.arguments import Args, Options, by_name
from meshwright.runtime.split.rules.whole import on_whole, without_rule
from meshwright.runtime.split.splitter import NotSplit, Splitter

TOKEN_DIMS = 2
"""Samples and tokens."""


# ---------------------------------------------------------------- lookup


def embedding(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    ids, table, *rest = by_name(args, kwargs, names)
    settings = {name: value for name, value in zip(names[2:], rest, strict=True) if value is not None}
    ids = _own_tokens(split, split.summed(ids), table)
    cut = cuts(layout_of(table)).get("tp")
    if "cp" in cuts(layout_of(table)) or settings.get("max_norm") or settings.get("scale_grad_by_freq"):
        return without_rule(split, function, args, kwargs)
    if cut is not None and cut.dim == 0 and cut.runs > 1:
        split.allow_gathering("tp", NotSplit("a table that does not lie over tp in one run"))
        table, cut = split.gather(table, "tp"), None
    if cut is not None and "tp" in cuts(layout_of(ids)):
        ids = split.gather(ids, "tp")
    layout: Layout = dict(layout_of(ids) or {})
    if cut is None:
        for axis in layout:
            table = split.lend(table, axis)
        return lay(function(ids, table, **settings), layout)
    if cut.dim == 1:
        return lay(function(ids, table, **settings), {**layout, "tp": cut.at(ids.dim())})
    return lay(_lookup(split.axes["tp"], function, ids, table, settings), {**layout, "tp": Addend()})


def _own_tokens(split: Splitter, ids: Tensor, table: Tensor) -> Tensor:
    """Tokens of the batch are cut here: along cp, and along tp where sequences are parallel and the table is whole."""
    if ids.dim() != TOKEN_DIMS or not split.is_of_batch(ids):
        return ids
    cut = Cut(ids.dim() - 1)
    if "cp" in split.axes and "cp" not in (layout_of(ids) or {}):
        ids = split.narrow(ids, "cp", cut)
    if split.sequence_parallel and "tp" in split.axes and "tp" not in cuts(layout_of(table)):
        ids = split.narrow(ids, "tp", cut)
    return ids


def _lookup(ranks: Ranks, function: Any, ids: Tensor, table: Tensor, settings: Options) -> Tensor:
    num_rows = table.shape[0]
    own = ids - ranks.rank * num_rows
    elsewhere = (own < 0) | (own >= num_rows)
    padding = settings.pop("padding_idx", None)
    if padding is not None and 0 <= padding - ranks.rank * num_rows < num_rows:
        settings["padding_idx"] = padding - ranks.rank * num_rows
    rows = function(own.masked_fill(elsewhere, 0), table, **settings)
    return torch.where(elsewhere.unsqueeze(-1), rows.new_zeros(()), rows)


# ---------------------------------------------------------------- loss


def cross_entropy(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    values = by_name(args, kwargs, names)
    logits, target, weight = split.summed(values[0]), values[1], values[2]
    ignored = -100 if values[4] is None else values[4]
    reduction, smoothing = values[6] or "mean", values[7] or 0.0
    classes = 1 if logits.dim() > 1 else 0
    plain_labels = not target.is_floating_point() and weight is None and not smoothing and logits.dim() == TOKEN_DIMS
    is_legacy = values[3] is not None or values[5] is not None
    if weight is not None or smoothing or target.is_floating_point() or is_legacy:
        return on_whole(split, function, args, kwargs)
    across = cuts(layout_of(logits)).get("tp")
    if not plain_labels or "tp" not in split.axes or across is None or across.runs > 1 or across.dim != classes:
        logits = split.gather_dims(logits, [classes])
    target = _labels_part(split, target, logits, classes)
    cut = cuts(layout_of(logits)).get("tp")
    if cut is not None and cut.dim == classes:
        losses = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
            logits, target, split.axes["tp"], ignored
        )
    else:
        losses = F.cross_entropy(logits, target, ignore_index=ignored, reduction="none")
    layout: Layout = {**cuts(layout_of(target))}
    return _reduced(split, losses, target, layout, ignored, reduction)


def _labels_part(split: Splitter, target: Tensor, logits: Tensor, classes: int) -> Tensor:
    """Labels lie as the logits do, but for the dim of the classes."""
    wanted = {
        axis: cut.at(cut.dim - (cut.dim > classes))
        for axis, cut in cuts(layout_of(logits)).items()
        if cut.dim != classes
    }
    return laid(split, split.summed(target), wanted)


def _reduced(split: Splitter, losses: Tensor, target: Tensor, layout: Layout, ignored: int, reduction: str) -> Tensor:
    if reduction == "none":
        return lay(losses, layout)
    summands: Layout = {axis: Addend() for axis in layout}
    total = lay(losses.sum(), summands)
    if reduction == "sum":
        return total
    count = split.summed(lay((target != ignored).sum().to(losses.dtype), dict(summands)))
    return split.summed(total) / count


class _VocabularyLoss(torch.autograd.Function):
    """Of every token, the loss; logits [N, C / tp], labels [N]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ranks: Ranks, ignored: int) -> Tensor:
        num_classes = logits.shape[1]
        largest = ranks.largest(logits.amax(dim=1))
        shares = (logits - largest.unsqueeze(1)).exp_()
        total = ranks.add_up(shares.sum(dim=1))
        own = labels - ranks.rank * num_classes
        counted = labels != ignored
        here = (own >= 0) & (own < num_classes) & counted
        place = own.masked_fill(~here, 0).unsqueeze(1)
        target = ranks.add_up(logits.gather(1, place).squeeze(1).masked_fill(~here, 0.0))
        shares.div_(total.unsqueeze(1))
        ctx.save_for_backward(shares, place, here, counted)
        return (total.log() + largest - target).masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative("a loss over a vocabulary that lies over tp")
        shares, place, here, counted = ctx.saved_tensors
        gradient = shares.scatter_add(1, place, -here.to(shares.dtype).unsqueeze(1))
        return gradient * (gradients[0] * counted).unsqueeze(1), None, None, None


def nll_loss(split: Splitter, function: Any, args: Args, kwargs: Options) -> Any:
    """After a log_softmax, which made its dim whole: labels follow the tokens."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    values = by_name(args, kwargs, names)
    if any(values[place] is not None for place in (2, 3, 5)):
        return on_whole(split, function, args, kwargs)
    logits, target, ignored = split.summed(values[0]), values[1], -100 if values[4] is None else values[4]
    classes = 1 if logits.dim() > 1 else 0
    logits = split.gather_dims(logits, [classes])
    target = _labels_part(split, target, logits, classes)
    losses = function(logits, target, ignore_index=ignored, reduction="none")
    return _reduced(split, losses, target, {**cuts(layout_of(target))}, ignored, values[6] or "mean")
