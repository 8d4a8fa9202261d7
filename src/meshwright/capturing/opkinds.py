"""Which kind of work an aten op is, and how many flops it takes."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from meshwright.core.graph import OpKind
from meshwright.rules.attention import FUSED_ATTENTION

GROUPED = "_grouped_mm"
"""One product per expert, over rows that lie together."""
_CONVOLUTIONS = ("convolution", "convolution_backward", "_slow_conv2d_forward", "mkldnn_convolution")
_COPIES = (
    "clone", "copy_", "_to_copy", "cat", "stack", "repeat", "embedding", "embedding_dense_backward", "index", "index_put",
    "index_put_", "_index_put_impl_", "index_select", "index_add", "index_add_", "scatter_", "scatter_add", "scatter_add_",
    "gather", "scatter", "new_zeros", "zeros", "zeros_like", "ones", "ones_like", "full", "fill_", "zero_", "arange",
    "slice_backward", "select_backward", "nll_loss_forward", "nll_loss_backward",
)  # fmt: skip
_REDUCTIONS = (
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "any",
    "all",
    "prod",
    "topk",
    "cumsum",
    "_adaptive_avg_pool2d",
)
_NORMALISATIONS = (
    "var_mean", "native_layer_norm", "native_layer_norm_backward", "native_batch_norm", "native_batch_norm_backward",
    "_native_batch_norm_legit", "cudnn_batch_norm", "native_group_norm", "native_group_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
)  # fmt: skip
_TRANSCENDENTAL = (
    "gelu", "gelu_backward", "tanh", "tanh_backward", "silu", "silu_backward", "sigmoid", "sigmoid_backward", "exp", "log",
    "erf", "pow", "sin", "cos", "rsqrt", "softplus", "softplus_backward", "mish", "mish_backward",
)  # fmt: skip
_FREE = (
    "detach",
    "lift_fresh",
    "_unsafe_view",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
)


@cache
def moves_data(op: Any) -> bool:
    """Views, questions about a tensor and bare allocations cost nothing worth counting."""
    return op.namespace != "prim" and not op.is_view and base_name(op) not in _FREE


@cache
def kind_of(op: Any) -> OpKind:
    """By the op's name; whatever is not listed touches each element once."""
    name = base_name(op)
    if name.startswith(FUSED_ATTENTION):
        return "attention"
    if name in _CONVOLUTIONS:
        return "convolution"
    if op.overloadpacket in flop_registry or name == GROUPED:
        return "matmul"
    if name in _COPIES:
        return "copy"
    if name in _TRANSCENDENTAL:
        return "transcendental"
    if name in _NORMALISATIONS:
        return "normalisation"
    return "reduction" if name in _REDUCTIONS else "elementwise"


def is_causal(op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether an attention op was told that no token looks ahead."""
    if not base_name(op).startswith(FUSED_ATTENTION):
        return False
    names = [argument.name for argument in op._schema.arguments]
    return bool({**dict(zip(names, arguments, strict=False)), **options}.get("is_causal", False))


@cache
def base_name(op: Any) -> str:
    """aten.native_layer_norm.default → native_layer_norm"""
    return str(op.overloadpacket).rpartition(".")[2]


def flops_of(op: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> float:
    """torch's own formulas, and ours for the CPU attention it has none for."""
    name = base_name(op)
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return 2 * _attention_product(arguments[0], arguments[1])
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return 5 * _attention_product(arguments[1], arguments[2])
    if name == GROUPED:
        return float(2 * prod(arguments[0].shape) * arguments[1].shape[-1])
    formula = flop_registry.get(op.overloadpacket)
    if name == "convolution_backward":
        return _convolution_backward_flops(formula, arguments, result)
    return float(formula(*arguments, **options, out_val=result)) if formula else 0.0


def _convolution_backward_flops(formula: Any, arguments: tuple[Any, ...], result: Any) -> float:
    """torch's formula takes the gradient of a grouped filter as if every group saw all channels."""
    *shapes, groups, (wants_input, wants_weight, _) = arguments
    for_input = formula(*shapes, groups, [wants_input, False, False], out_val=result)
    return float(for_input + formula(*shapes, groups, [False, wants_weight, False], out_val=result) / groups)


def _attention_product(query: Tensor, key: Tensor) -> float:
    """One of the products of attention: 2 · batch · heads · queries · keys · width."""
    return 2.0 * prod(query.shape) * key.shape[-2]


def grouped_product(left: Tensor, right: Tensor, ends: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """What a grouped product returns. torch's own fake of it refuses all but bf16, the real one does not."""
    if left.dim() == 2 and right.dim() == 2 and ends is not None:
        return left.new_empty(ends.shape[0], left.shape[0], right.shape[1])
    rows = left.shape[-2]
    return left.new_empty(*(left.shape[:1] if left.dim() == right.dim() == 3 else ()), rows, right.shape[-1])
