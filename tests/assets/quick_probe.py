"""`meshwright`, with a probe of few and small sizes: for runs in which the machine's figures do not matter."""

from __future__ import annotations

from meshwright.cli import main
from meshwright.measure import kernels, links, stopwatch

kernels.CPU_LAYERS, kernels.CPU_ELEMENTS = kernels.CPU_LAYERS[:2], kernels.CPU_ELEMENTS[:2]
links.CPU_SIZES, links.OVERLAP_BYTES = links.CPU_SIZES[:3], 2**16
stopwatch.LEAST_SECONDS = 0.001

main()
