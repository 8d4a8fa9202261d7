"""A model, and the parts of a step and of memory, as people read them."""

from __future__ import annotations

from meshwright.core.graph import Graph
from meshwright.core.units import format_count

TIME_WORDS = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "exposed_gather": "waiting for gathers",
    "exposed_reduce": "waiting for reductions",
    "exposed_inner": "tp, cp and ep exchange",
    "bubble": "bubble",
    "transfer": "transfers",
    "update": "update",
    "other": "other",
}
MEMORY_WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "inputs": "inputs",
    "gathered_parameters": "gathered parameters",
    "communication_buffers": "communication buffers",
    "temporaries": "temporaries",
}


def model_size(graph: Graph) -> str:
    """`8.0B parameters, 2,048 tokens a sample`."""
    tokens = f", {graph.tokens_per_sample:,} tokens a sample" if graph.tokens_per_sample > 1 else ""
    return f"{format_count(graph.num_parameters)} parameters{tokens}"
