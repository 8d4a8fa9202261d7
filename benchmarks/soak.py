"""Does a long run stay what it was at its beginning: its memory, its open files, the time of a step?

    python benchmarks/soak.py --steps 20000

Two ranks train a tiny model and save every 200 steps; every 50 steps each looks at itself. The first fifth of the run warms up.
After it, from the mean of the next fifth to the mean of the last:

    host memory      growth of resident memory, below 1 %
    descriptors      the most that are open, no more in the end
    step time        drift of a window's median step, below 5 %

Other work on the machine shows in step times: `--steps` long enough, and a machine of its own. The processor time of a step, which
others change less, is printed beside them.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshwright.runtime.launch import launch

MODEL = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=256"
NUM_RANKS, SAVE_EVERY, LOOK_EVERY = 2, 200, 50
MEMORY_GROWTH, TIME_DRIFT = 0.01, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="meshwright-soak-") as folder:
        ranks = launch("soak:soak_rank", {"folder": folder, "steps": arguments.steps}, NUM_RANKS)
    passed = [show(number, looks, arguments.steps) for number, looks in enumerate(ranks)]
    sys.exit(not all(passed))


def soak_rank(payload: dict[str, Any]) -> list[list[dict[str, float]]]:
    """What every rank saw of itself."""
    from rich.console import Console

    from meshwright.capturing.capture import capture_source
    from meshwright.core.request import PlanRequest
    from meshwright.models.source import resolve
    from meshwright.rules.plain_plan import plain_plan
    from meshwright.runtime.gather import all_ranks
    from meshwright.runtime.program import Program
    from meshwright.runtime.ranks import joined
    from meshwright.training.folder import RunFolder
    from meshwright.training.job import Job
    from meshwright.training.run import run
    from meshwright.training.settings import CheckpointSettings, DataSettings, Settings

    settings = Settings(
        model=MODEL, steps=payload["steps"], tensorboard=False, checkpoint=CheckpointSettings(every=SAVE_EVERY),
        data=DataSettings(validation_every=0),
    )  # fmt: skip
    plan = plain_plan(PlanRequest(global_batch=4), capture_source(resolve(MODEL)), NUM_RANKS, "soak")
    folder = RunFolder(Path(payload["folder"], "run"))
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    looks: list[dict[str, float]] = []
    window: list[float] = []
    step = Program.step

    def watched(self: Program, *arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        output = step(self, *arguments, **options)
        window.append(time.perf_counter() - begun)
        if len(window) == LOOK_EVERY:
            looks.append(look(statistics.median(window)))
            window.clear()
        return output

    Program.step = watched  # type: ignore[method-assign]
    with joined("cpu") as rank:
        run(Job(settings, plan, folder), rank, None, Console(quiet=True))
        return all_ranks(looks)


def look(step_seconds: float) -> dict[str, float]:
    """At this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "resident_bytes": pages * resource.getpagesize(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "step_seconds": step_seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
    }


def show(number: int, looks: list[dict[str, float]], num_steps: int) -> bool:
    fifth = len(looks) // 5
    if not fifth:
        raise SystemExit(f"{num_steps} steps are too few to compare: give at least {5 * LOOK_EVERY}")
    early, late = looks[fifth : 2 * fifth], looks[-fifth:]

    def mean(part: list[dict[str, float]], name: str) -> float:
        return statistics.fmean(one[name] for one in part)

    first, last = mean(early, "resident_bytes"), mean(late, "resident_bytes")
    growth = last / first - 1
    drift = median_step(late) / median_step(early) - 1
    opened, open_now = max(one["descriptors"] for one in early), max(one["descriptors"] for one in late)
    busy = [_processor_seconds_a_step(part) for part in (early, late)]
    print(f"rank {number}, {num_steps} steps, a checkpoint every {SAVE_EVERY}")
    print(f"  host memory   {first / 2**20:.1f} → {last / 2**20:.1f} MiB ({growth:+.2%})")
    print(f"  descriptors   {opened:.0f} → {open_now:.0f} at most")
    print(f"  step time     {1e3 * late[-1]['step_seconds']:.2f} ms at the end, drift {drift:+.1%}")
    print(
        f"  processor     {1e3 * busy[0]:.2f} → {1e3 * busy[1]:.2f} ms a step, saves included ({busy[1] / busy[0] - 1:+.1%})"
    )
    return growth < MEMORY_GROWTH and open_now <= opened and drift < TIME_DRIFT


def median_step(part: list[dict[str, float]]) -> float:
    return statistics.median(one["step_seconds"] for one in part)


def _processor_seconds_a_step(part: list[dict[str, float]]) -> float:
    return (part[-1]["processor_seconds"] - part[0]["processor_seconds"]) / max(1, LOOK_EVERY * (len(part) - 1))


if __name__ == "__main__":
    main()
