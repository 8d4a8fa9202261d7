"""What Meshwright costs over plain torch: steps per second of the same GPT under plain DDP, plain `fully_shard`, and ours.

    python benchmarks/overhead.py [--rounds 14] [--json]

Two pinned processes, one thread each. All contestants live in one run and take turns, a few steps at a time, in an order that
rotates, so that noise of the machine hits both alike. A ratio is that of the medians; the quartiles of the rounds' own ratios
show the noise.
Also: how long `import meshwright` and `meshwright --help` take.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from turns import HEADER, STEPS_PER_TURN, add_to_path, ratio, row, take_turns

MODEL = "gpt:layers=6,hidden=256,heads=8,seq=128,vocab=256"
SAMPLES_PER_RANK = 8
PAIRS = (
    ("plain DDP", "ours, replicated"),
    ("plain fully_shard", "ours, ZeRO 3"),
    ("plain fully_shard, kept gathered", "ours, ZeRO 2"),
)


def run_rank(payload: dict[str, Any]) -> dict[str, list[float]]:
    """Every contestant's seconds per turn, on rank 0."""
    import torch

    from meshwright.runtime.ranks import joined

    with joined("cpu"):
        return take_turns(contestants(torch), payload["rounds"])


def contestants(torch: Any) -> dict[str, Callable[[], Any]]:
    from torch.distributed.fsdp import fully_shard

    from meshwright.capturing.capture import capture_source
    from meshwright.core.request import PlanRequest
    from meshwright.models.objective import slice_batch
    from meshwright.models.source import resolve
    from meshwright.rules.plain_plan import plain_plan
    from meshwright.runtime.apply import apply

    source = resolve(MODEL)
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    graph = capture_source(source)
    batch = slice_batch(
        source.example(world * SAMPLES_PER_RANK), rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK
    )
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)

    def plain(module: Any) -> Callable[[], None]:
        optimizer = adamw(module.parameters())

        def step() -> None:
            logits = module(batch["input_ids"])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def sharded(reshard: bool) -> Any:
        module = source.build()
        for block in module.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        return fully_shard(module, reshard_after_forward=False)

    def ours(zero: int) -> Callable[[], Any]:
        request = PlanRequest(zero=zero, global_batch=world * SAMPLES_PER_RANK)
        program = apply(source.build(), plain_plan(request, graph, world, ""), optimizer=adamw)
        return lambda: program.step(batch).loss

    replica = torch.nn.parallel.DistributedDataParallel(source.build(), gradient_as_bucket_view=True)
    return {
        "plain DDP": plain(replica),
        "ours, replicated": ours(0),
        "plain fully_shard": plain(sharded(True)),
        "ours, ZeRO 3": ours(3),
        "plain fully_shard, kept gathered": plain(sharded(False)),
        "ours, ZeRO 2": ours(2),
    }


def start_seconds(arguments: list[str]) -> float:
    """Best of seven runs of a fresh Python."""
    return min(_timed(arguments) for _ in range(7))


def _timed(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    from meshwright.runtime.launch import launch

    bare = start_seconds(["-c", ""])
    imported = start_seconds(["-c", "import meshwright"]) - bare
    helped = start_seconds(["-m", "meshwright", "--help"])
    add_to_path()
    seconds = launch("overhead:run_rank", {"rounds": options.rounds}, 2)
    print(f"{MODEL}, {SAMPLES_PER_RANK} samples a rank, 2 ranks, {options.rounds} rounds of {STEPS_PER_TURN} steps")
    print(HEADER)
    ratios = {}
    for plain, ours in PAIRS:
        ratios[ours] = ratio(seconds, plain, ours)
        print(row(seconds, plain, ours))
    print(f"import meshwright: {imported * 1e3:.0f} ms beyond Python's own {bare * 1e3:.0f} ms")
    print(f"meshwright --help: {helped * 1e3:.0f} ms")
    if options.json:
        print(json.dumps({"ratios": ratios, "import_seconds": imported, "help_seconds": helped}))


if __name__ == "__main__":
    main()
