"""What a verb that starts ranks does first: load torch once, for itself and for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LOADED = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "meshwright.runtime.apply", "meshwright.runtime.rank", "meshwright.capturing.capture", "meshwright.measure.record",
)  # fmt: skip
"""What every rank needs, and no thread is started by."""
OF_TRAINING = (*LOADED, "meshwright.training.loop", "meshwright.training.checkpoint", "meshwright.jobs.rank")


@contextmanager
def ready_ranks(modules: tuple[str, ...] = LOADED, model: str = "") -> Iterator[None]:
    """While the block runs, ranks are forked from a process that has these modules loaded, where that is safe.

    To be entered before anything is computed. model: where transformers builds it, that is loaded too.
    """
    from meshwright.runtime.template import template_of

    of_model = ("transformers.modeling_utils",) if model.startswith("hf:") else ()
    with template_of((*modules, *of_model)):
        yield
