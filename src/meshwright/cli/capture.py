"""`meshwright capture`: what a model computes and keeps."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import JsonFlag


def capture(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    samples: Annotated[int, typer.Option("--samples", help="Samples that flops and bytes in --json are for.")] = 1,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Save the graph, .json or .toml.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Follow a model's forward and backward on fake tensors: parameters, flops and activations by block."""
    import time

    from meshwright.capture.capture import capture_source
    from meshwright.cli.output import make_console, print_json
    from meshwright.models.source import resolve
    from meshwright.report.tables import graph_table

    console = make_console(as_json)
    started = time.perf_counter()
    graph = capture_source(resolve(model))
    seconds = time.perf_counter() - started
    console.print(graph_table(graph, seconds))
    if output is not None:
        console.print(f"saved as {graph.save(output)}")
    if as_json:
        kept = sum(s.kept_bytes.at(samples) for s in graph.timeline if s.phase == "forward")
        print_json(
            {
                "num_parameters": graph.num_parameters,
                "flops": graph.flops(samples),
                "activation_bytes": round(kept),
                "blocks": [
                    {"name": block.name, "kind": block.kind, "repeated": block.repeated} for block in graph.blocks
                ],
                "capture_seconds": seconds,
            }
        )
