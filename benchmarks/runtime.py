"""Our runtime against plain torch and DeepSpeed on the same GPT, and the bubble of the pipeline schedules.

    python benchmarks/runtime.py [--only zero|tp|pp|bubble] [--quick] [--json]

Two processes pinned to a core each, one thread each. Contestants live in one run and take turns (`turns.py`); a ratio is that of
the medians. DeepSpeed runs where it is installed for the Python that runs this (`DS_BUILD_OPS=0 pip install deepspeed`, and
DS_ACCELERATOR=cpu).

Bubble: idle time over ideal time of a rank, from a mark after every action of our schedule. Ideal are the seconds inside
forwards and backwards, C. Idle is the rest of the step before its update: T - C, which is waiting and sending.

    bubble = (T - C) / C        expected (p-1)/m for GPipe and 1F1B with even stages; the larger of the ranks is shown

In flight: the most microbatches of which a rank holds activations at one time, counted by hooks on its last block: up by one when
its forward is done, down by one when its backward begins.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from turns import HEADER, STEPS_PER_TURN, Seconds, add_to_path, ratio, row, take_turns

MODEL = "gpt:layers=6,hidden=256,heads=8,seq=128,vocab=256"
SAMPLES_PER_RANK = 8
NUM_MICROBATCHES = 8
MICROBATCHES = (2, 4, 8, 16)
SCHEDULES = ("gpipe", "1f1b")
COLUMNS = 100
"""Width of a schedule's picture."""
DEEPSPEED = "DeepSpeed ZeRO 3"
PAIRS = {
    "zero": (("plain fully_shard", "our ZeRO 3"), (DEEPSPEED, "our ZeRO 3")),
    "tp": (("parallelize_module by hand", "our tp"),),
    "pp": (("torch's Schedule1F1B", "our 1F1B"),),
}


def run_rank(payload: dict[str, Any]) -> Any:
    """One part, on one rank."""
    from meshwright.runtime.ranks import joined

    with joined("cpu"):
        if payload["part"] == "bubble":
            return bubbles(payload["rounds"])
        return take_turns(CONTESTANTS[payload["part"]](), payload["rounds"])


def zero_contestants() -> dict[str, Callable[[], Any]]:
    import peers
    import torch.distributed as dist

    from meshwright.models.objective import slice_batch
    from meshwright.models.source import resolve

    source, rank = resolve(MODEL), dist.get_rank()
    everything = source.example(2 * SAMPLES_PER_RANK)
    share = slice_batch(everything, rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK)
    steps = {
        "plain fully_shard": peers.fully_sharded(source, share),
        "our ZeRO 3": ours(share, zero=3, global_batch=2 * SAMPLES_PER_RANK),
    }
    if peers.has_deepspeed():
        steps[DEEPSPEED] = peers.deepspeed_zero3(source, share)
    return steps


def tp_contestants() -> dict[str, Callable[[], Any]]:
    import peers

    from meshwright.models.source import resolve

    source = resolve(MODEL)
    batch = source.example(SAMPLES_PER_RANK)
    return {
        "parallelize_module by hand": peers.tensor_parallel(source, batch),
        "our tp": ours(batch, tp=2, global_batch=SAMPLES_PER_RANK),
    }


def pp_contestants() -> dict[str, Callable[[], Any]]:
    import peers

    from meshwright.models.source import resolve

    source = resolve(MODEL)
    batch = source.example(2 * NUM_MICROBATCHES)
    return {
        "torch's Schedule1F1B": peers.pipelined(source, batch, NUM_MICROBATCHES),
        "our 1F1B": ours(batch, pp=2, schedule="1f1b", microbatch=2, global_batch=2 * NUM_MICROBATCHES),
    }


CONTESTANTS = {"zero": zero_contestants, "tp": tp_contestants, "pp": pp_contestants}


def ours(batch: Any, **fixed: Any) -> Callable[[], Any]:
    program = program_of(**fixed)
    return lambda: program.step(batch).loss


def program_of(**fixed: Any) -> Any:
    """Our program for a plain plan with these parts fixed."""
    import peers

    from meshwright.capturing.capture import capture_source
    from meshwright.core.request import PlanRequest
    from meshwright.models.source import resolve
    from meshwright.rules.plain_plan import plain_plan
    from meshwright.runtime.apply import apply

    source = resolve(MODEL)
    plan = plain_plan(PlanRequest(**fixed), capture_source(source), 2, "")
    return apply(source.build(), plan, optimizer=peers.adamw)


def bubbles(rounds: int) -> list[dict[str, Any]]:
    """A row for every schedule and number of microbatches, on every rank the same."""
    from meshwright.runtime.gather import all_ranks

    return [summary(all_ranks(one_bubble(kind, m, rounds)), kind, m) for kind in SCHEDULES for m in MICROBATCHES]


def one_bubble(kind: str, num_microbatches: int, rounds: int) -> dict[str, Any]:
    """What this rank sees of a schedule: median bubble, most microbatches in flight, the actions of the median step."""
    from meshwright.models.source import resolve

    program = program_of(pp=2, schedule=kind, microbatch=2, global_batch=2 * num_microbatches)
    batch = resolve(MODEL).example(2 * num_microbatches)
    in_flight = count_in_flight(program)
    steps = [played(program, batch) for _ in range(rounds + 2)][2:]
    each = sorted(steps, key=bubble_of)
    return {"bubble": bubble_of(each[len(each) // 2]), "in_flight": in_flight(), "actions": each[len(each) // 2]}


def played(program: Any, batch: Any) -> list[tuple[str, int, float, float]]:
    """Every action of a step but the update: kind, microbatch, start and end in seconds."""
    import torch.distributed as dist

    dist.barrier()
    output = program.step(batch)
    marks = [mark for _, mark in output._marks]
    actions = program.schedule.actions[program.mesh.get_local_rank("pp")]
    times = [marks[0].seconds_until(mark) for mark in marks]
    rows = zip(actions, times, times[1:], strict=False)
    return [(action.kind, action.microbatch, start, end) for action, start, end in rows if action.kind != "update"]


def bubble_of(actions: list[tuple[str, int, float, float]]) -> float:
    ideal = sum(end - start for kind, _, start, end in actions if kind in ("forward", "backward"))
    return (actions[-1][3] - ideal) / ideal


def count_in_flight(program: Any) -> Callable[[], int]:
    """Hooks on the last block of this rank; returns how to read the most that was held."""
    coordinate = program.mesh.get_local_rank("pp")
    from meshwright.core.names import expand_names

    mine = [
        name for stage in program.plan.stages if stage.coordinate == coordinate for name in expand_names(stage.blocks)
    ]
    held, most = 0, 0

    def up(module: Any, arguments: Any, output: Any) -> None:
        nonlocal held, most
        held += 1
        most = max(most, held)
        output.register_hook(down)

    def down(gradient: Any) -> None:
        nonlocal held
        held -= 1

    dict(program.module.named_modules())[mine[-1]].register_forward_hook(up)
    return lambda: most


def summary(ranks: list[dict[str, Any]], kind: str, num_microbatches: int) -> dict[str, Any]:
    return {
        "schedule": kind,
        "num_microbatches": num_microbatches,
        "bubble": max(rank["bubble"] for rank in ranks),
        "expected": 1 / num_microbatches,
        "in_flight": [rank["in_flight"] for rank in ranks],
        "picture": [picture(rank["actions"], max(r["actions"][-1][3] for r in ranks)) for rank in ranks],
    }


def picture(actions: list[tuple[str, int, float, float]], seconds: float) -> str:
    """Time from left to right: the microbatch's last digit where a forward runs, its letter where a backward does."""
    cells = ["."] * COLUMNS
    for kind, index, start, end in actions:
        sign = {"forward": str(index % 10), "backward": chr(ord("a") + index % 26)}.get(kind)
        if sign is not None:
            for cell in range(round(start / seconds * COLUMNS), round(end / seconds * COLUMNS)):
                cells[min(cell, COLUMNS - 1)] = sign
    return "".join(cells)


def show_ratios(part: str, seconds: Seconds) -> dict[str, float]:
    found = {}
    for theirs, own in PAIRS[part]:
        if theirs not in seconds:
            print(f"{own + ' / ' + theirs:46} not installed: pip install deepspeed")
            continue
        found[f"{own} / {theirs}"] = ratio(seconds, theirs, own)
        print(row(seconds, theirs, own), flush=True)
    return found


def show_bubbles(rows: list[dict[str, Any]]) -> None:
    print("\nbubble at p = 2: idle over ideal time; microbatches in flight on each rank (1F1B at most p, GPipe m)")
    print(f"{'schedule':10} {'m':>4} {'measured':>10} {'(p-1)/m':>10} {'in flight':>12}")
    for found in rows:
        flight = ", ".join(map(str, found["in_flight"]))
        print(
            f"{found['schedule']:10} {found['num_microbatches']:4} {found['bubble']:10.3f} {found['expected']:10.3f} {flight:>12}"
        )
    for found in (one for one in rows if one["num_microbatches"] == 4):
        print(f"\n{found['schedule']}, m = 4: digits are forwards, letters backwards, dots idle or communication")
        for rank, line in enumerate(found["picture"]):
            print(f"rank {rank} |{line}|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*PAIRS, "bubble"], help="one part alone")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a figure")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    add_to_path()
    rounds = 4 if options.quick else 14
    found: dict[str, Any] = {"ratios": {}}
    parts = [part for part in (*PAIRS, "bubble") if options.only in (None, part)]
    if parts != ["bubble"]:
        print(f"{MODEL}, 2 ranks, {rounds} rounds of {STEPS_PER_TURN} steps\n{HEADER}", flush=True)
    for part in parts:
        result = run_part(part, rounds)
        if result is None:
            continue
        if part == "bubble":
            show_bubbles(result)
            found["bubbles"] = result
        else:
            found["ratios"] |= show_ratios(part, result)
    if options.json:
        print(json.dumps(found))


def run_part(part: str, rounds: int) -> Any:
    """What a part measured; a plan that this version cannot run says so, and the others go on."""
    from meshwright.core.errors import RunError
    from meshwright.runtime.launch import launch

    try:
        return launch("runtime:run_rank", {"part": part, "rounds": rounds}, 2)
    except RunError as error:
        print(f"{part}: {error}", flush=True)
        return None


if __name__ == "__main__":
    main()
