"""How fast a device runs each kind of op, at sizes from tiny to large.

Sizes are in the unit of the kind: flops for matmul, convolution and attention; bytes read plus written for the others.
On a GPU the sizes are large enough that the kernel, not its launch, is timed: launches are a figure of their own.
Backward passes are part of the figure for attention, convolution and reductions, since training runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.capturing.capture import capture_source
from meshwright.core.cluster import Rate
from meshwright.core.graph import Graph, OpKind, Phase
from meshwright.measure.stopwatch import typical_seconds
from meshwright.models.objective import call, map_batch
from meshwright.models.source import resolve

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

CPU_LAYERS = ((32, 32, 32), (128, 64, 128), (512, 128, 512), (2048, 256, 1024), (2048, 1024, 1024))
"""Tokens, and the widths a linear layer leads from and to."""
CUDA_MATMUL_EDGES = (1536, 2048, 4096, 8192)
CPU_ELEMENTS = (2**8, 2**13, 2**16, 2**19, 2**22)
CUDA_ELEMENTS = (2**23, 2**25, 2**27)
COLD_BYTES = 64 * 2**20
TINY_MODEL = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=32"


def measure_rates(device: torch.device) -> list[Rate]:
    """Rates of every kind of op, in fp32 and bf16."""
    return [rate for precision in DTYPES for rate in _rates(device, precision)]


def _rates(device: torch.device, precision: Precision) -> Iterator[Rate]:
    measures: list[tuple[OpKind, Callable[..., Iterator[tuple[float, float]]]]] = [
        ("matmul", _matmuls), ("attention", _attentions), ("convolution", _convolutions), ("elementwise", _additions),
        ("transcendental", _gelus), ("normalisation", _norms), ("reduction", _sums), ("copy", _copies),
    ]  # fmt: skip
    for kind, measure in measures:
        for size, seconds in measure(device, DTYPES[precision]):
            yield Rate(kind=kind, dtype=precision, size=size, per_second=size / seconds)


def _matmuls(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    if device.type == "cpu":
        yield from _layers(dtype)
        return
    for edge in CUDA_MATMUL_EDGES:
        one, other = (torch.randn(edge, edge, device=device, dtype=dtype) for _ in range(2))
        yield 2.0 * edge**3, typical_seconds(lambda one=one, other=other: one @ other, device)  # type: ignore[misc]


def _layers(dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """The three products of a linear layer: forward, gradient of the input, gradient of the weight. A CPU runs products of
    tall matrices, and of transposed ones, slower than square ones."""
    for tokens, width, next_width in CPU_LAYERS:
        entering = torch.randn(tokens, width).to(dtype)
        weight = torch.randn(next_width, width).to(dtype)
        gradient = torch.randn(tokens, next_width).to(dtype)

        def work(x: torch.Tensor = entering, w: torch.Tensor = weight, g: torch.Tensor = gradient) -> None:
            F.linear(x, w)
            g @ w
            g.t() @ x

        yield 2.0 * tokens * width * next_width, typical_seconds(work, torch.device("cpu")) / 3


def _attentions(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Forward: two products of 2 · b · h · s² · d flops; backward: five."""
    shapes = ((2, 4, 32, 32), (4, 8, 128, 32), (4, 8, 512, 64))
    if device.type == "cuda":
        shapes = ((4, 16, 1024, 64), (16, 16, 1024, 64), (4, 16, 2048, 128))
    for batch, heads, seq, width in shapes:
        tensors = [torch.randn(batch, heads, seq, width, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
        flops = 7 * 2.0 * batch * heads * seq * seq * width

        def work(tensors: list[torch.Tensor] = tensors) -> None:
            query, key, value = tensors
            F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

        yield flops, typical_seconds(work, device)


def _convolutions(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Forward, gradient of the input and of the weight: three times 2 · b · c² · k² · h · w flops."""
    shapes = ((2, 32, 16), (4, 64, 32)) if device.type == "cpu" else ((16, 64, 56), (64, 256, 28))
    for batch, channels, edge in shapes:
        layer = nn.Conv2d(channels, channels, 3, padding=1, device=device, dtype=dtype)
        image = torch.randn(batch, channels, edge, edge, device=device, dtype=dtype).requires_grad_()

        def work(layer: nn.Module = layer, image: torch.Tensor = image) -> None:
            layer(image).sum().backward()

        yield 3 * 2.0 * batch * channels**2 * 9 * edge**2, typical_seconds(work, device)


def _additions(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    return _elementwise(device, dtype, lambda tensor: tensor + tensor, tensors_touched=3)


def _gelus(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Forward (reads 1, writes 1) and backward (reads 2, writes 1)."""

    def both(tensor: torch.Tensor) -> None:
        F.gelu(tensor)
        torch.ops.aten.gelu_backward(tensor, tensor)

    return _elementwise(device, dtype, both, tensors_touched=5)


def _copies(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    return _elementwise(device, dtype, torch.clone, tensors_touched=2)


def _elementwise(
    device: torch.device, dtype: torch.dtype, op: Callable[[Any], Any], tensors_touched: int
) -> Iterator[tuple[float, float]]:
    for num_elements in CUDA_ELEMENTS if device.type == "cuda" else CPU_ELEMENTS:
        inputs = cold_tensors(num_elements, device, dtype)
        size = tensors_touched * num_elements * dtype.itemsize
        yield float(size), typical_seconds(lambda inputs=inputs: op(next(inputs)), device)  # type: ignore[misc]


def cold_tensors(num_elements: int, device: torch.device, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Tensors in turn, more than a CPU's caches hold: a training step comes back to a tensor long after it made it."""
    copies = 1 if device.type == "cuda" else max(1, min(256, COLD_BYTES // (num_elements * dtype.itemsize)))
    return cycle([torch.randn(num_elements, device=device).to(dtype) for _ in range(copies)])


def _sums(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Column sums, as the gradient of a bias needs them."""
    for rows, width in _row_shapes(device):
        inputs = cold_tensors(rows * width, device, dtype)

        def work(inputs: Iterator[torch.Tensor] = inputs, rows: int = rows) -> None:
            next(inputs).view(rows, -1).sum(0)

        yield float(rows * width * dtype.itemsize), typical_seconds(work, device)


def _row_shapes(device: torch.device) -> tuple[tuple[int, int], ...]:
    if device.type == "cpu":
        return ((8, 64), (512, 128), (2048, 512))
    return ((16384, 1024), (16384, 4096), (65536, 4096))


def _norms(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Layer norm, forward (reads 1, writes 1) and backward (reads 2, writes 1)."""
    for rows, width in _row_shapes(device):
        layer = nn.LayerNorm(width, device=device, dtype=dtype)
        tensor = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
        gradient = torch.ones_like(tensor)

        def work(layer: nn.Module = layer, tensor: torch.Tensor = tensor, gradient: torch.Tensor = gradient) -> None:
            layer(tensor).backward(gradient)

        yield 5.0 * tensor.numel() * tensor.element_size(), typical_seconds(work, device)


def measure_launches(device: torch.device) -> tuple[float, float]:
    """Least seconds one op costs in a real step, in forward (Python included) and in backward."""
    source = resolve(TINY_MODEL)
    graph = tiny_graph()
    counts = {phase: count_ops(graph, phase) for phase in get_args(Phase)}
    module = source.build().to(device)
    assert source.example is not None
    batch = map_batch(lambda tensor: tensor.to(device), source.example(2))

    def forward() -> torch.Tensor:
        return source.objective.loss(call(module, batch), batch)

    def both() -> None:
        forward().backward()
        module.zero_grad()

    one, two = typical_seconds(forward, device), typical_seconds(both, device)
    return one / counts["forward"], max(two - one, 0.1 * one) / counts["backward"]


@cache
def tiny_graph() -> Graph:
    """Of the model that is too small to compute anything."""
    return capture_source(resolve(TINY_MODEL))


def count_ops(graph: Graph, phase: Phase) -> int:
    """Of all blocks, in one microbatch."""
    per_kind = {kind.name: sum(op.count for op in kind.ops if op.phase == phase) for kind in graph.kinds}
    return sum(per_kind[block.kind] for block in graph.blocks)


def measure_update(device: torch.device) -> float:
    """Parameters AdamW updates per second, in tensors of a usual size."""
    edge = 512 if device.type == "cpu" else 2048
    parameters = [nn.Parameter(torch.randn(edge, edge, device=device)) for _ in range(4)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return len(parameters) * edge**2 / typical_seconds(optimizer.step, device)
