"""Which kind of work an aten op is, and how many flops it takes."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from meshwright.core.graph import OpKind

_ATTENTION = "_scaled_dot_product"
_CONVOLUTIONS = ("convolution", "convolution_backward", "_slow_conv2d_forward", "mkldnn_convolution")
_COPIES = (
    "clone", "copy_", "_to_copy", "cat", "embedding", "embedding_dense_backward", "index", "index_put", "index_select",
    "gather", "scatter", "new_zeros", "zeros", "zeros_like", "ones_like", "full", "fill_", "zero_", "arange",
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
    "_fused_rms_norm_backward", "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
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


def moves_data(op: Any) -> bool:
    """Views, questions about a tensor and bare allocations cost nothing worth counting."""
    return op.namespace != "prim" and not op.is_view and base_name(op) not in _FREE


def kind_of(op: Any) -> OpKind:
    """By the op's name; whatever is not listed touches each element once."""
    name = base_name(op)
    if name.startswith(_ATTENTION):
        return "attention"
    if name in _CONVOLUTIONS:
        return "convolution"
    if op.overloadpacket in flop_registry:
        return "matmul"
    if name in _COPIES:
        return "copy"
    if name in _TRANSCENDENTAL:
        return "transcendental"
    if name in _NORMALISATIONS:
        return "normalisation"
    return "reduction" if name in _REDUCTIONS else "elementwise"


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
    formula = flop_registry.get(op.overloadpacket)
    return float(formula(*arguments, **options, out_val=result)) if formula else 0.0


def _attention_product(query: Tensor, key: Tensor) -> float:
    """One of the products of attention: 2 · batch · heads · queries · keys · width."""
    return 2.0 * prod(query.shape) * key.shape[-2]
