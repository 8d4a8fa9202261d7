"""The parts of a step and of memory as people read them."""

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
