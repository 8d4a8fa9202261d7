"""Seconds of one kernel on a device that was not probed, from its peaks and its family's constants (core/constants.py).

matmul of B × [m, k] · [k, n], P multiprocessors, tiles of a × b:                                       -> matmul_seconds
    tiles  = B ⌈m/a⌉ ⌈n/b⌉        each does 2 a b k flops at share · efficiency(a, b) · peak / P, after a ramp
    waves  = tiles / P, halfway to the next whole number: a last wave that is not full still takes its time, though a
             scheduler that splits the sum fills part of it
    t      = waves · (time of a tile)                                              the best tile counts
    widths that do not divide by 8 elements fall back to slower loads                                    -> alignment_share
    at least what reading and writing takes
fused attention over s tokens, heads d wide:  flops / (share · peak), share falls for short s and narrow d  -> attention_seconds
anything else: bytes / (share by kind · bandwidth)                                                       -> bytes_seconds
each at least the least time of a kernel.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from meshwright.core.cluster import Device
from meshwright.core.constants import Constants
from meshwright.core.graph import PRECISION_BYTES, Op, Precision

TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (192, 192, 1.0), (128, 128, 0.9), (64, 128, 0.77), (128, 64, 0.77), (64, 64, 0.73),
)  # fmt: skip
"""Rows, columns, and the share of the best tile's rate. Origin: probe of an H200, and the tiles its library chose."""
LARGE_TILE = 256 * 128
PART_OF_A_WAVE = 0.5
"""How much of a last, partly filled wave is paid. Origin: probe of an H200."""
HEAD_WIDTH = 128
"""The head width fused attention is fastest at. Origin: probe of an H200."""


class Kernels:
    """Analytical kernel times of one device."""

    def __init__(self, device: Device, constants: Constants) -> None:
        self.device = device
        self.constants = constants
        self.bytes_per_second = device.bytes_per_second or 1.0

    def peak(self, dtype: Precision) -> float:
        """fp64 runs at half the fp32 peak where the device names no fp64 peak."""
        peaks = self.device.peaks
        return peaks.get(dtype) or (peaks["fp32"] / 2 if dtype == "fp64" else peaks["fp16"])

    def matmul_seconds(self, size: MatmulSize, dtype: Precision) -> float:
        known = self.constants
        rate = self.peak(dtype) * known.matmul_share / known.num_multiprocessors
        best = min(
            self._waves(size, rows, columns)
            * (
                2 * rows * columns * size.depth / (rate * efficiency)
                + known.matmul_ramp_seconds * rows * columns / LARGE_TILE
            )
            for rows, columns, efficiency in TILES
        )
        elements = size.rows * size.depth + size.depth * size.columns + size.rows * size.columns
        moved = size.batch * elements * PRECISION_BYTES[dtype] / (self.bytes_per_second * known.elementwise_share)
        return max(best / self.alignment_share(size), moved) + known.kernel_floor_seconds

    def _waves(self, size: MatmulSize, rows: int, columns: int) -> float:
        tiles = size.batch * ceil(size.rows / rows) * ceil(size.columns / columns)
        waves = tiles / self.constants.num_multiprocessors
        return PART_OF_A_WAVE * ceil(waves) + (1 - PART_OF_A_WAVE) * waves if waves > 1 else 1.0

    def alignment_share(self, size: MatmulSize) -> float:
        known = self.constants
        for divisor, share in ((8, 1.0), (4, known.matmul_aligned_by_4_share), (2, known.matmul_aligned_by_2_share)):
            if all(width % divisor == 0 for width in size.widths):
                return share
        return known.matmul_unaligned_share

    def attention_seconds(self, op: Op, flops: float, num_tokens: float, width: float) -> float:
        known = self.constants
        share = known.attention_share if op.phase == "forward" else known.attention_backward_share
        share /= 1 + known.attention_ramp_length / max(num_tokens, 1.0)
        if width <= HEAD_WIDTH / 2:
            share *= known.narrow_head_share * min(1.0, width / (HEAD_WIDTH / 2))
        elif width % HEAD_WIDTH:
            share *= width / (ceil(width / HEAD_WIDTH) * HEAD_WIDTH)  # padded to whole tiles
        return flops / (self.peak(op.dtype) * share) + known.kernel_floor_seconds

    def bytes_seconds(self, op: Op, num_bytes: float) -> float:
        return num_bytes / (self.bytes_per_second * self.share_of(op)) + self.constants.kernel_floor_seconds

    def share_of(self, op: Op) -> float:
        known = self.constants
        match op.kind:
            case "normalisation":
                if "softmax" in op.name:
                    return known.softmax_share
                return known.normalisation_share if op.phase == "forward" else known.normalisation_backward_share
            case "transcendental":
                return known.transcendental_share
            case "reduction":
                return known.reduction_share
            case "copy":
                read, written = op.read_bytes, op.written_bytes
                is_wider = written.per_sample + written.fixed > 1.5 * (read.per_sample + read.fixed)
                return known.cast_up_share if is_wider else known.copy_share
            case _:
                return known.elementwise_share

    def copy_seconds(self, num_bytes: float, dtype: Precision) -> float:
        return num_bytes / (self.bytes_per_second * self.constants.copy_share)

    def fused_seconds(self, num_bytes: float, dtype: Precision) -> float:
        return num_bytes / (self.bytes_per_second * self.constants.fused_share) + self.constants.kernel_floor_seconds

    def update_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.bytes_per_second * self.constants.update_share)


class MatmulSize(NamedTuple):
    """B × [rows, depth] · [depth, columns]; `widths` are the sizes that count features, not tokens."""

    batch: float
    rows: float
    columns: float
    depth: float
    widths: tuple[int, ...]
