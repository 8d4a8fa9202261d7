"""Parts of a model that are compiled by the model itself (`torch.compile` on a function or a module).

torch's compiler follows function modes into their own code: the rules of a split model, whose work on layouts it does not model
(decision 0017), and the modes of a comparison. While such a mode is active, compiled parts run as they are written: the same
values, without the compiler's fusions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def uncompiled() -> Iterator[None]:
    """Nothing is to be done, and the compiler need not be loaded, where nobody has loaded it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
