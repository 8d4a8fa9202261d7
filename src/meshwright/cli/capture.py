"""`meshwright capture`: what a model computes and keeps."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from importlib import import_module
from typing import Annotated, Any, get_args

from typer import Argument, Option

from meshwright.cli.options import JsonFlag
from meshwright.core.errors import GuessWarning, check_choice
from meshwright.core.graph import Graph, Precision
from meshwright.cost.memory.activations import activations_by_block, total_activations
from meshwright.jobs.output import make_console, print_json
from meshwright.planner.graphs import capture_now
from meshwright.report.tables import graph_table, guesses_table


def capture(
    model: Annotated[str, Argument(metavar="MODEL")],
    samples: Annotated[int, Option(help="Samples that flops and bytes in --json are for.")] = 1,
    precision: Annotated[str, Option(help="fp64, fp32, bf16 or fp16.")] = "fp32",
    output: Annotated[str | None, Option("-o", "--output", help="Save the graph, .json or .toml.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Follow a model's forward and backward on fake tensors: parameters, flops and activations by block."""
    check_choice("--precision", precision, get_args(Precision))
    console = make_console(as_json)
    import_module("meshwright.capturing.capture")  # torch's own import is not the capture's time
    started = time.perf_counter()
    with warnings.catch_warnings(action="ignore", category=GuessWarning):  # they are listed below the table
        graph = capture_now(model, precision)  # type: ignore[arg-type]
    seconds = time.perf_counter() - started
    console.print(graph_table(graph, seconds))
    if graph.guesses:
        console.print(guesses_table(graph))
    if output is not None:
        console.print(f"saved as {graph.save(output)}")
    if as_json:
        print_json(_facts(graph, samples) | {"capture_seconds": seconds, "peak_host_bytes": _peak_host_bytes()})


def _facts(graph: Graph, samples: int) -> dict[str, Any]:
    parameters = graph.num_parameters_by_block
    kinds, kept = graph.kind_by_block, activations_by_block(graph, samples)
    total = total_activations(graph, samples)
    return {
        "num_parameters": graph.num_parameters,
        "flops": graph.flops(samples),
        "activation_bytes": round(total.none),
        "activation_bytes_by_recompute": total,
        "blocks": [
            {
                "name": block.name,
                "kind": block.kind,
                "repeated": block.repeated,
                "num_parameters": parameters[block.name],
                "flops": kinds[block.name].flops(samples),
                "activation_bytes": round(kept[block.name].none),
                "activation_bytes_by_recompute": kept[block.name],
            }
            for block in graph.blocks
        ],
        "guesses": graph.guesses,
    }


def _peak_host_bytes() -> int:
    """The most memory this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
