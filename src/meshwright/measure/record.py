"""Record one step: its time by part and stream, its memory by category over time, its collectives. Run → Sample.

torch's profiler    allocations, host ops, kernels and named ranges on one clock      -> profile.py
a witness           what lies where, and which collectives are called                 -> witness.py
allocations         births paired with deaths, memory over time                       -> allocations.py, unseen.py
categories          parameters, gradients, activations and the others                 -> categories.py
intervals           compute, communication by axis, transfers; waiting                -> intervals.py, running.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.profiler import record_function

from meshwright.core.collective import total
from meshwright.measure import profile
from meshwright.measure.allocations import over_time, pair, peak
from meshwright.measure.categories import Categories
from meshwright.measure.intervals import Timeline
from meshwright.measure.unseen import end_unseen
from meshwright.measure.witness import CollectiveWatch, Witness
from meshwright.models.objective import Batch
from meshwright.rules.downsampling import downsampled
from meshwright.runtime.held import held_bytes
from meshwright.runtime.program import Program
from meshwright.runtime.step import StepOutput
from meshwright.runtime.watch import Sample, align_ranks


class StepRecorder:
    """Watches steps of a Program through torch's profiler. `runtime.watch.Watch` says which."""

    def record(self, program: Program, batch: Batch, run: Callable[[], StepOutput]) -> tuple[StepOutput, Sample | None]:
        held = held_bytes(program, batch)
        watch = CollectiveWatch(program)
        with Witness(program), profile.profiled(program.device) as profiler:
            align_ranks(program.device)
            started_at = time.time()
            with watch, record_function("meshwright/step"):
                output = run()
            output.wait()  # a collective that ends after the profiler has stopped writes into memory the profiler has freed
        seen = profile.read(profiler, program.device)
        if seen is None:
            return output, None
        allocations = end_unseen(pair(seen.changes), seen)
        categories = Categories(seen, allocations)
        points = over_time(held, [(one, categories.of(one)) for one in allocations], seen.seconds)
        timeline = Timeline(seen)
        return output, Sample(
            time_seconds=timeline.time_parts(),
            memory_bytes=peak(points).memory_bytes,
            collectives=total(watch.found),
            timeline=timeline.intervals(),
            part_seconds=timeline.part_seconds(),
            memory_over_time=downsampled(points),
            started_at=started_at,
        )
