"""Predicted against measured on one H200: four GPTs, with and without recompute, eager and compiled, two microbatch sizes.

    python benchmarks/h200.py measure OUT.json [--only 350M]     # on the GPU: rows that OUT.json already holds are kept
    python benchmarks/h200.py table OUT.json                     # anywhere: predicts each row and prints Markdown

`measure` runs Meshwright's own steps from plans written by hand, in bf16 with fused AdamW, and needs no estimate; `table`
captures and estimates. Both write into OUT.json: `measure` after every row, `table` the predictions beside the figures.
`--tiny --device cpu` tries the whole of it on a small model, without memory figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

Row = dict[str, Any]

MODELS = {
    "350M": "gpt:layers=24,hidden=1024,heads=16,seq=1024,vocab=50304",
    "1.3B": "gpt:layers=24,hidden=2048,heads=16,seq=2048,vocab=50304",
    "2.7B": "gpt:layers=32,hidden=2560,heads=32,seq=2048,vocab=50304",
    "6.7B": "gpt:layers=32,hidden=4096,heads=32,seq=2048,vocab=50304",
}
TINY = {"tiny": "gpt:layers=2,hidden=32,heads=2,seq=16,vocab=61"}
MICROBATCHES = {
    "tiny": {"none": (2,), "full": (2,)},
    "350M": {"none": (16, 32), "full": (16, 32)},
    "1.3B": {"none": (4, 8), "full": (8, 16)},
    "2.7B": {"none": (4, 8), "full": (8, 16)},
    "6.7B": {"none": (1, 2), "full": (2, 4)},
}
"""By model and recompute; enough to keep the GPU busy, and where possible no more than fits."""
CLUSTER = "h200-single"
WARMUP_STEPS, TIMED_STEPS = 3, 5
FIGURES = ("name", "recompute", "compile", "microbatch")
"""What tells a row from the others."""


def rows_of(models: dict[str, str], only: str | None) -> list[Row]:
    """What to measure: model by model, eager rows before compiled ones."""
    return [
        {"name": name, "model": model, "recompute": recompute, "compile": compiled, "microbatch": microbatch}
        for name, model in models.items()
        if only is None or name == only
        for compiled, recompute in product((False, True), ("none", "full"))
        for microbatch in MICROBATCHES[name][recompute]
    ]


# --- Measuring -------------------------------------------------------------------------------------------------------


def measure(rows: list[Row], path: Path, device: str, most_seconds: float) -> None:
    """Each row that is not in the file yet, as long as there is time."""
    from meshwright.runtime.environment import describe_environment
    from meshwright.runtime.ranks import joined

    found = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {key(row) for row in found}
    began = time.perf_counter()
    with joined(device) as rank:  # type: ignore[arg-type]
        for row in rows:
            if key(row) in done:
                continue
            if time.perf_counter() - began > most_seconds:
                print(f"{most_seconds:.0f} s are over: run it again for the rest", flush=True)
                break
            found.append({**row, **measure_row(row, rank.device)})
            path.write_text(json.dumps({"environment": describe_environment(rank.device), "rows": found}, indent=1))
            print(json.dumps(found[-1]), flush=True)


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in FIGURES)


def measure_row(row: Row, device: Any) -> Row:
    """The row's figures, or that it ran out of memory. Nothing of it is left on the device."""
    import torch

    began = time.perf_counter()
    try:
        figures = run_steps(row, device)
    except torch.OutOfMemoryError:
        figures = {"error": "out of memory"}
    except Exception as error:
        figures = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    torch.compiler.reset()  # graphs of one row must not count against the next one's
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {**figures, "row_seconds": time.perf_counter() - began}


def run_steps(row: Row, device: Any) -> Row:
    import torch

    from meshwright.models.parameters import list_parameters
    from meshwright.models.source import resolve
    from meshwright.runtime.apply import apply

    source = resolve(row["model"])
    torch.manual_seed(0)
    with device:
        module = source.build()  # on the device: the host would take minutes to draw the weights
    num_parameters = sum(parameter.num_elements for parameter in list_parameters(module) if not parameter.tied_to)
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    plan = plan_of(row, len(module.blocks))  # type: ignore[arg-type]
    program = apply(module, plan, optimizer=adamw, device=device)
    assert source.example is not None
    batch = source.example(plan.global_batch)
    began = time.perf_counter()
    first_loss = program.step(batch).loss
    first_seconds = time.perf_counter() - began
    for _ in range(WARMUP_STEPS - 1):
        program.step(batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    outputs = [program.step(batch) for _ in range(TIMED_STEPS)]
    records = [output.record(index) for index, output in enumerate(outputs)]
    names = ("forward", "backward", "update")
    return {
        "num_parameters": num_parameters,
        "first_step_seconds": first_seconds,
        "first_loss": first_loss,
        "last_loss": records[-1].loss,
        "measured_seconds": statistics.median(record.seconds for record in records),
        "all_seconds": [record.seconds for record in records],
        "parts": {name: statistics.median(getattr(record.time_seconds, name) for record in records) for name in names},
        "measured_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
    }


def plan_of(row: Row, num_blocks: int) -> Any:
    """One device; one microbatch, or as many as the row's global batch has."""
    from meshwright.core.plan import Plan, Recompute, Stage

    blocks = (f"blocks.0-{num_blocks - 1}",)
    global_batch = row.get("global_batch", row["microbatch"])
    return Plan(
        model=row["model"],
        stages=(Stage(coordinate=0, blocks=blocks),),
        recompute=(Recompute(mode="full", blocks=blocks),) if row["recompute"] == "full" else (),
        microbatch=row["microbatch"],
        num_microbatches=global_batch // row["microbatch"],
        global_batch=global_batch,
        precision="bf16",
        compile=row["compile"],
    )


# --- Predicting ------------------------------------------------------------------------------------------------------


def predict(rows: list[Row], cluster: Any) -> list[Row]:
    """Every row with what the cost model says; each model is captured once."""
    from meshwright.capturing.capture import capture_source
    from meshwright.core.recipe import Recipe
    from meshwright.core.request import PlanRequest
    from meshwright.cost.estimate import estimate
    from meshwright.models.source import resolve
    from meshwright.rules.plain_plan import plain_plan

    graphs = {model: capture_source(resolve(model), "bf16") for model in dict.fromkeys(row["model"] for row in rows)}
    predicted = []
    for row in rows:
        request = PlanRequest(microbatch=row["microbatch"], recompute=row["recompute"], compile=row["compile"])
        plan = plain_plan(request, graphs[row["model"]], 1, cluster.hash)
        found = estimate(graphs[row["model"]], plan, cluster, Recipe())
        predicted.append({**row, "predicted_seconds": found.step_seconds, "predicted_bytes": found.peak_bytes})
    return predicted


def show(rows: list[Row]) -> None:
    print("| model | parameters | recompute | mode | microbatch | step, predicted | measured | error ", end="")
    print("| peak, predicted | measured | error |")
    print("|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {' | '.join(cells(row))} |")
    for words, name in (("time", "seconds"), ("memory", "bytes")):
        errors = [abs(error) for row in rows if (error := error_of(row, name)) is not None]
        if errors:
            print(f"\n{words}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def cells(row: Row) -> list[str]:
    from meshwright.core.units import format_bytes, format_seconds

    parameters = f"{row['num_parameters'] / 1e9:.2f}e9" if "num_parameters" in row else ""
    figures = []
    for name, words in (("seconds", format_seconds), ("bytes", format_bytes)):
        measured, error = row.get(f"measured_{name}"), error_of(row, name)
        figures += [
            words(row[f"predicted_{name}"]),
            row.get("error", "") if measured is None else words(measured),
            "" if error is None else f"{error:+.1%}",
        ]
    mode = "compiled" if row["compile"] else "eager"
    return [row["name"], parameters, row["recompute"], mode, str(row["microbatch"]), *figures]


def error_of(row: Row, name: str) -> float | None:
    """Predicted over measured, less one; None where nothing was measured."""
    measured = row.get(f"measured_{name}")
    return row[f"predicted_{name}"] / measured - 1 if measured else None


def table(path: Path, cluster: str) -> None:
    from meshwright.core.cluster import Cluster

    result = json.loads(path.read_text())
    result["rows"] = predict(
        result["rows"], Cluster.load(cluster) if Path(cluster).exists() else Cluster.named(cluster)
    )
    path.write_text(json.dumps(result, indent=1))
    show(result["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("file", type=Path, metavar="OUT.json")
    parser.add_argument("--only", choices=MODELS, help="measure this model alone")
    parser.add_argument("--seconds", type=float, default=520, help="begin no row after this time")
    parser.add_argument("--cluster", default=CLUSTER, help="a name or file, for the predictions")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script itself")
    options = parser.parse_args()
    if options.what == "measure":
        rows = rows_of(TINY if options.tiny else MODELS, options.only)
        measure(rows, options.file, options.device, options.seconds)
    else:
        table(options.file, options.cluster)


if __name__ == "__main__":
    main()
