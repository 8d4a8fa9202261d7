"""Which rule each torch function follows when it meets a tensor that lies over ranks.

Functions are named once; every object torch has under a name (torch.x, Tensor.x, F.x, x_) gets the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.batch_norm import normalised
from meshwright.runtime.split import (
    attention,
    contraction,
    dropout,
    picking,
    pointwise,
    reductions,
    views,
    vocabulary,
)
from meshwright.runtime.split.splitter import Rule

HOMES = (torch, Tensor, F, torch.special, torch.linalg)

POINTWISE = """
    add sub mul div true_divide floor_divide remainder fmod pow rsub multiply subtract divide where maximum minimum fmax fmin
    clamp clip masked_fill lerp addcmul addcdiv atan2 hypot logaddexp xlogy eq ne lt le gt ge not_equal less greater
    less_equal greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor and or xor
    iadd isub imul itruediv floordiv truediv mod radd rmul rtruediv rpow copy
"""
UNARY = """
    abs neg exp exp2 expm1 log log1p log2 log10 sqrt rsqrt sin cos tan tanh sigmoid erf reciprocal square sign floor ceil round
    trunc frac relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus softsign logsigmoid
    tanhshrink quick_gelu logical_not bitwise_not invert isnan isinf isfinite nan_to_num clone to type type_as float double half
    bfloat16 int long bool cpu cuda detach zeros_like ones_like empty_like full_like rand_like randn_like positive square
    requires_grad_ fill_ zero_ zero conj real pos threshold clamp_min clamp_max __neg__ __abs__ __invert__ alpha_dropout
"""
ALONG = "softmax log_softmax softmin cumsum cumprod logcumsumexp normalize"
REDUCED = "max min amax amin prod var std var_mean std_mean argmax argmin any all logsumexp median"
ALONG_DIM = "narrow index_select flip roll"
BY_CHANNEL = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d interpolate
    _max_pool2d max_pool2d_with_indices boolean_dispatch
"""
ON_WHOLE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div group_norm"
)
SAME_ANSWER = """
    register_post_accumulate_grad_hook record_stream backward __repr__ __format__
    dim ndimension is_floating_point is_complex is_contiguous get_device element_size register_hook retain_grad untyped_storage
    data_ptr storage_offset stride is_tensor __hash__ is_signed dense_dim has_names is_inference is_pinned is_neg is_conj
    is_same_size _is_view is_distributed is_nonzero_type is_leaf_type
"""
SINGLE: dict[str, Rule] = {
    "view": views.reshape, "reshape": views.reshape, "view_as": views.reshape_as, "reshape_as": views.reshape_as,
    "flatten": views.flatten, "unflatten": views.unflatten, "ravel": views.flatten,
    "transpose": views.transpose, "swapaxes": views.transpose, "swapdims": views.transpose, "t": views.turn_last_two,
    "permute": views.permute, "movedim": views.movedim, "moveaxis": views.movedim,
    "unsqueeze": views.unsqueeze, "squeeze": views.squeeze, "expand": views.expand, "expand_as": views.expand_as,
    "repeat": views.repeat, "repeat_interleave": views.repeat_interleave,
    "contiguous": pointwise.as_it_is,
    "chunk": picking.chunk, "split": picking.split_by_size, "split_with_sizes": picking.split_by_size,
    "tensor_split": picking.chunk, "unbind": picking.unbind, "select": picking.select, "gather": picking.gather_by_index,
    "__getitem__": picking.getitem, "cat": picking.cat, "concat": picking.cat, "concatenate": picking.cat,
    "stack": picking.stack, "topk": picking.pick_along_dim, "sort": picking.pick_along_dim,
    "argsort": picking.pick_along_dim,
    "linear": contraction.linear, "matmul": contraction.matmul, "__matmul__": contraction.matmul,
    "__rmatmul__": contraction.matmul, "bmm": contraction.matmul, "mm": contraction.matmul, "addmm": contraction.addmm,
    "baddbmm": contraction.baddbmm, "einsum": contraction.einsum,
    "conv1d": contraction.convolution, "conv2d": contraction.convolution, "conv3d": contraction.convolution,
    "sum": reductions.sum_or_mean, "mean": reductions.sum_or_mean, "norm": reductions.norm,
    "layer_norm": reductions.layer_norm, "rms_norm": reductions.layer_norm, "batch_norm": reductions.batch_norm,
    "instance_norm": reductions.batch_norm, "pad": reductions.pad, "prelu": reductions.prelu,
    "triu": reductions.last_two, "tril": reductions.last_two,
    "scaled_dot_product_attention": attention.attention,
    "embedding": vocabulary.embedding, "cross_entropy": vocabulary.cross_entropy, "nll_loss": vocabulary.nll_loss,
    "dropout": dropout.dropout, "dropout1d": dropout.dropout, "dropout2d": dropout.dropout,
    "new_zeros": pointwise.plain, "new_ones": pointwise.plain, "new_empty": pointwise.plain, "new_full": pointwise.plain,
    "one_hot": pointwise.one_hot,
    "size": pointwise.shape, "numel": pointwise.numel, "nelement": pointwise.numel, "__len__": pointwise.length,
}  # fmt: skip
"""Functions with a rule of their own."""
GETTERS: dict[str, Rule] = {  # other attributes are the same for a part and for the whole
    "shape": pointwise.shape, "data": pointwise.unary, "T": views.turn_last_two, "mT": views.turn_last_two,
    "real": pointwise.unary,
}  # fmt: skip

GROUPS: tuple[tuple[str, Rule], ...] = (
    (POINTWISE, pointwise.pointwise),
    (UNARY, pointwise.unary),
    (ALONG, reductions.along),
    (REDUCED, reductions.reduce_whole),
    (ALONG_DIM, picking.along_dim),
    (BY_CHANNEL, reductions.by_channel),
    (ON_WHOLE, reductions.on_whole),
    (SAME_ANSWER, pointwise.plain),
)


def _objects(name: str) -> Iterator[Any]:
    """Everything torch calls so, in place too, and as an operator."""
    for home in HOMES:
        for spelled in (name, f"{name}_", f"__{name}__"):
            found = getattr(home, spelled, None)
            if callable(found) and not isinstance(found, type):
                yield found


def _rules() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for names, rule in GROUPS:
        for name in names.split():
            rules.update(dict.fromkeys(_objects(name), rule))
    for name, rule in SINGLE.items():
        rules.update(dict.fromkeys(_objects(name), rule))
    for name, rule in GETTERS.items():
        rules[getattr(Tensor, name).__get__] = rule
    rules[normalised] = reductions.batch_norm
    return rules


RULES = _rules()
ALWAYS = frozenset(_objects("embedding"))
"""Asked about whole tensors too: tokens of the batch are cut where they are looked up."""
