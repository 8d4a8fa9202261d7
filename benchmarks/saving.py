"""What a checkpoint costs a run: how long training stands still, as a share of a step.

    python benchmarks/saving.py [--nproc 2] [--zero 0] [--rounds 6] [--steps 6] [--model MODEL] [--folder FOLDER] [--json]

Ways, by turns in an order that rotates, on one program: asynchronous (ours), synchronous (ours), and plain `torch.save` of the
module's and the optimizer's state by the first rank while the others wait, which writes no checksum, keeps no draft and does not
wait for the disk. Each turn is a save and then some steps; one turn saves nothing.

    stands still   seconds until the next step may begin
    in all         seconds that the turn took longer than the one without a save: what the writing takes from the steps counts too
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from turns import add_to_path

MODEL = "gpt:layers=6,hidden=384,heads=8,seq=128,vocab=256"
SAMPLES_PER_RANK = 8
NOTHING = "no save"
WAYS = ("asynchronous", "synchronous", "torch.save")

Turn = tuple[float, float]
"""Seconds until steps went on, and seconds of the turn."""


class Contest:
    """One program, and the ways to save it."""

    def __init__(self, payload: dict[str, Any]) -> None:
        import torch

        from meshwright.runtime.ranks import join
        from meshwright.training.saver import Saver

        self.rank = join("auto")
        self.folder, self.num_steps = Path(payload["folder"]), payload["steps"]
        self.program, self.batch = make_program(payload, self.rank)
        self.torch = torch
        savers = {name: Saver(self.program, self.folder / name, self.rank, 1, name == WAYS[0]) for name in WAYS[:2]}
        self.beginnings: dict[str, Callable[[int], Any]] = {
            NOTHING: lambda number: None,
            WAYS[0]: lambda number: savers[WAYS[0]].begin(self.progress(number)),
            WAYS[1]: lambda number: savers[WAYS[1]].save(self.progress(number)),
            WAYS[2]: self.save_plainly,
        }
        self.ends: dict[str, Callable[[], Any]] = {WAYS[0]: savers[WAYS[0]].settle}

    def run(self, rounds: int) -> dict[str, list[Turn]]:
        found: dict[str, list[Turn]] = {name: [] for name in self.beginnings}
        names = list(found)
        for turn in range(rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                taken = self.turn(name, turn)
                if turn:  # the first warms up: memory is taken, files are made
                    found[name].append(taken)
        return found

    def turn(self, name: str, number: int) -> Turn:
        self.wait()
        started = time.perf_counter()
        self.beginnings[name](number)
        stood = time.perf_counter() - started
        for _ in range(self.num_steps):
            self.program.step(self.batch)
        self.ends.get(name, lambda: None)()
        self.wait()
        return stood, time.perf_counter() - started

    def wait(self) -> None:
        if self.rank.device.type == "cuda":
            self.torch.cuda.synchronize()
        self.torch.distributed.barrier()

    def save_plainly(self, number: int) -> None:
        if self.rank.is_first:
            (self.folder / WAYS[2]).mkdir(exist_ok=True)
            state = {
                "model": self.program.module.state_dict(),
                "optimizer": self.program.optimizer.state_dict(),
            }
            self.torch.save(state, self.folder / WAYS[2] / "state.pt")
        self.torch.distributed.barrier()

    def progress(self, number: int) -> Any:
        from meshwright.training.checkpoint import Progress

        plan = self.program.plan
        return Progress(step=number, cursor=0, plan=plan.hash, graph=plan.graph, num_ranks=plan.world)


def make_program(payload: dict[str, Any], rank: Any) -> tuple[Any, Any]:
    import torch

    from meshwright.capturing.capture import capture_source
    from meshwright.core.request import PlanRequest
    from meshwright.models.source import resolve
    from meshwright.rules.plain_plan import plain_plan
    from meshwright.runtime.apply import apply

    source = resolve(payload["model"])
    assert source.example is not None
    request = PlanRequest(global_batch=rank.num_ranks * SAMPLES_PER_RANK, zero=payload["zero"])
    plan = plain_plan(request, capture_source(source), rank.num_ranks, "")
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    program = apply(source.build(), plan, optimizer=optimizer, device=rank.device)
    return program, source.example(plan.global_batch)


def run_rank(payload: dict[str, Any]) -> dict[str, Any]:
    contest = Contest(payload)
    turns = contest.run(payload["rounds"])
    size = sum(path.stat().st_size for path in (contest.folder / WAYS[1]).rglob("*") if path.is_file())
    return {"turns": turns, "checkpoint_bytes": size}


def shares(turns: dict[str, list[Turn]], num_steps: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds."""
    bare = [whole for _, whole in turns[NOTHING]]
    step = statistics.median(bare) / num_steps
    found = {"step_seconds": {NOTHING: step}}
    for name in WAYS:
        stood = statistics.median(stood for stood, _ in turns[name])
        more = statistics.median(whole - other for (_, whole), other in zip(turns[name], bare, strict=True))
        found[name] = {"stands_still": stood / step, "in_all": more / step, "stands_still_seconds": stood}
    return found


def main() -> None:
    options = arguments()
    from meshwright.core.units import format_bytes
    from meshwright.runtime.launch import launch

    add_to_path()
    folder = Path(tempfile.mkdtemp(prefix="meshwright-saving-", dir=options.folder))
    payload = {"folder": str(folder), **{name: getattr(options, name) for name in ("model", "zero", "rounds", "steps")}}
    try:
        answer = launch("saving:run_rank", payload, options.nproc)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = shares(answer["turns"], options.steps)
    step = found["step_seconds"][NOTHING]
    print(
        f"{options.model}, {options.nproc} ranks, ZeRO {options.zero}: a checkpoint of {format_bytes(answer['checkpoint_bytes'])}, "
    )
    print(f"a step of {step * 1e3:.0f} ms, {options.rounds} rounds of {options.steps} steps; in steps:")
    print(f"{'':16} {'stands still':>14} {'in all':>10}")
    for name in WAYS:
        way = found[name]
        print(
            f"{name:16} {way['stands_still']:14.2f} {way['in_all']:10.2f}   ({way['stands_still_seconds'] * 1e3:.0f} ms)"
        )
    if options.json:
        print(json.dumps({**found, "checkpoint_bytes": answer["checkpoint_bytes"]}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1, 2, 3))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6, help="after every save")
    parser.add_argument("--folder", help="where checkpoints are written; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    return parser.parse_args()


if __name__ == "__main__":
    main()
