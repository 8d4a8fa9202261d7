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
from meshwright.runtime.split.rules import (
    attention,
    contraction,
    decomposed,
    derivatives,
    einsum,
    picking,
    pointwise,
    random,
    reductions,
    views,
    vocabulary,
    whole,
)
from meshwright.runtime.split.rules.arguments import Args, Options, changes_its_input
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
    tanhshrink logical_not bitwise_not invert isnan isinf isfinite nan_to_num clone to type type_as float double half
    bfloat16 int long bool cpu cuda detach zeros_like ones_like empty_like full_like positive square
    requires_grad_ fill_ zero_ zero conj real imag pos threshold clamp_min clamp_max __neg__ __abs__ __invert__
    conj_physical resolve_conj resolve_neg view_as_real angle sgn deg2rad rad2deg asin acos atan sinh cosh asinh acosh atanh
    erfc erfinv lgamma digamma sinc logit hardshrink softshrink short char byte cfloat cdouble chalf signbit
"""
DRAWN_BY_VALUES = "bernoulli poisson normal rrelu"
DRAWN_ALIKE = "rand_like randn_like randint_like"
FILLED = "normal_ uniform_ exponential_ bernoulli_ geometric_ log_normal_ cauchy_ random_"
ALONG = "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin"
FOLLOWED_INSIDE = "multi_head_attention_forward normalize gumbel_softmax"
REDUCED = "max min amax amin prod var std var_mean std_mean argmax argmin any all logsumexp median"
ALONG_DIM = "narrow index_select flip roll"
BY_CHANNEL = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d interpolate
    _max_pool2d max_pool2d_with_indices
"""
ON_WHOLE = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
SAME_ANSWER = """
    register_post_accumulate_grad_hook record_stream backward __repr__ __format__
    dim ndimension is_floating_point is_complex is_contiguous get_device element_size retain_grad untyped_storage
    data_ptr storage_offset stride is_tensor __hash__ is_signed dense_dim has_names is_inference is_pinned is_neg is_conj
    _is_view is_distributed
"""
SINGLE: dict[str, Rule] = {
    "view": views.reshape, "reshape": views.reshape, "view_as": views.reshape_as, "reshape_as": views.reshape_as,
    "flatten": views.flatten, "unflatten": views.unflatten, "ravel": views.flatten,
    "transpose": views.transpose, "swapaxes": views.transpose, "swapdims": views.transpose, "t": views.turn_last_two,
    "permute": views.permute, "movedim": views.movedim, "moveaxis": views.movedim,
    "adjoint": views.adjoint, "view_as_complex": views.as_complex, "broadcast_to": views.expand,
    "unsqueeze": views.unsqueeze, "squeeze": views.squeeze, "expand": views.expand, "expand_as": views.expand_as,
    "repeat": views.repeat, "repeat_interleave": views.repeat_interleave,
    "contiguous": pointwise.as_it_is,
    "chunk": picking.chunk, "split": picking.split_by_size, "split_with_sizes": picking.split_by_size,
    "tensor_split": picking.chunk, "unbind": picking.unbind, "select": picking.select, "gather": picking.gather_by_index,
    "__getitem__": picking.getitem, "__setitem__": picking.setitem, "__iter__": picking.iterate, "glu": picking.glu,
    "cat": picking.cat, "concat": picking.cat, "concatenate": picking.cat,
    "stack": picking.stack, "topk": picking.pick_along_dim, "sort": picking.pick_along_dim,
    "argsort": picking.pick_along_dim,
    "linear": contraction.linear, "matmul": contraction.matmul, "__matmul__": contraction.matmul,
    "__rmatmul__": contraction.matmul, "bmm": contraction.matmul, "mm": contraction.matmul, "addmm": contraction.addmm,
    "mv": contraction.matmul, "dot": contraction.matmul, "outer": contraction.outer, "ger": contraction.outer,
    "baddbmm": contraction.baddbmm, "einsum": einsum.einsum,
    "conv1d": contraction.convolution, "conv2d": contraction.convolution, "conv3d": contraction.convolution,
    "sum": reductions.sum_or_mean, "mean": reductions.sum_or_mean, "norm": reductions.norm,
    "layer_norm": reductions.layer_norm, "rms_norm": reductions.layer_norm, "batch_norm": reductions.batch_norm,
    "group_norm": reductions.group_norm, "instance_norm": reductions.batch_norm, "pad": reductions.pad, "prelu": reductions.prelu,
    "triu": reductions.last_two, "tril": reductions.last_two,
    "scaled_dot_product_attention": attention.attention,
    "embedding": vocabulary.embedding, "cross_entropy": vocabulary.cross_entropy, "nll_loss": vocabulary.nll_loss,
    "dropout": random.dropout, "alpha_dropout": random.dropout, "feature_dropout": random.dropout_of_channels,
    "dropout1d": random.dropout_of_channels, "dropout2d": random.dropout_of_channels,
    "dropout3d": random.dropout_of_channels, "feature_alpha_dropout": random.dropout_of_channels,
    "polar": pointwise.pointwise, "complex": pointwise.pointwise, "is_same_size": pointwise.same_size,
    "new_tensor": pointwise.plain,
    "new_zeros": pointwise.plain, "new_ones": pointwise.plain, "new_empty": pointwise.plain, "new_full": pointwise.plain,
    "one_hot": pointwise.one_hot, "register_hook": derivatives.register_hook,
    "size": pointwise.shape, "numel": pointwise.numel, "nelement": pointwise.numel, "__len__": pointwise.length,
}  # fmt: skip
"""Functions with a rule of their own."""
NODE = "grad_fn"
GETTERS: dict[str, Rule] = {
    "shape": pointwise.shape, "data": pointwise.unary, "T": views.turn_last_two, "mT": views.turn_last_two,
    "H": views.adjoint, "mH": views.adjoint, "real": pointwise.unary, "imag": pointwise.unary, "nbytes": pointwise.nbytes,
    "grad": pointwise.question, "_grad": pointwise.question, NODE: derivatives.node, "_grad_fn": derivatives.node,
}  # fmt: skip
"""Attributes that depend on sizes or values."""
ALIKE = """
    dtype device ndim requires_grad is_leaf layout itemsize output_nr retains_grad is_cpu is_cuda is_ipu is_maia
    is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu names name _version
    _backward_hooks _post_accumulate_grad_hooks _python_dispatch _base volatile grad_dtype _has_symbolic_sizes_strides
"""
"""Attributes that are the same for a part and for the whole; all others are refused."""
SETTERS: dict[str, Rule] = {
    "requires_grad": pointwise.plain, "data": whole.set_data, "_backward_hooks": pointwise.plain,
    "_post_accumulate_grad_hooks": pointwise.plain,
}  # fmt: skip

GROUPS: tuple[tuple[str, Rule], ...] = (
    (POINTWISE, pointwise.pointwise),
    (UNARY, pointwise.unary),
    (ALONG, reductions.along),
    (REDUCED, reductions.reduce_whole),
    (ALONG_DIM, picking.along_dim),
    (BY_CHANNEL, reductions.by_channel),
    (ON_WHOLE, whole.on_whole),
    (DRAWN_BY_VALUES, random.drawn_by_values),
    (DRAWN_ALIKE, random.drawn_alike),
    (FILLED, random.filled),
    (FOLLOWED_INSIDE, decomposed.follow_inside),
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
    for name in ALIKE.split():
        rules.update({found.__get__: pointwise.plain for found in [getattr(Tensor, name, None)] if found is not None})
    for name, rule in GETTERS.items():
        rules[getattr(Tensor, name).__get__] = rule
    for name, rule in SETTERS.items():
        rules[getattr(Tensor, name).__set__] = rule
    rules[normalised] = reductions.batch_norm
    rules[torch.autograd.grad] = derivatives.gradients
    return rules


RULES = _rules()
WRITING: frozenset[Rule] = frozenset(
    {
        pointwise.pointwise, pointwise.unary, pointwise.plain, random.dropout, random.dropout_of_channels,
        random.drawn_by_values, random.filled, picking.setitem,
    }
)  # fmt: skip
"""Rules that can change a tensor in place; under others such a function runs on the whole tensor."""


def rule_of(function: Any, args: Args, kwargs: Options) -> Rule:
    rule = RULES.get(function, whole.without_rule)
    if kwargs.get("out") is not None or (rule not in WRITING and changes_its_input(function, args, kwargs)):
        return whole.without_rule
    return rule


ALWAYS = frozenset((*_objects("embedding"), Tensor.register_hook, torch.autograd.grad, getattr(Tensor, NODE).__get__))
"""Asked about whole tensors too: tokens of the batch are cut where they are looked up, and along cp gradients of whole tensors
are summands."""
