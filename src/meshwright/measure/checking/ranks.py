"""What each rank of a check runs: it finds the model by its name, or reads one that a process has in memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.plan import Plan
from meshwright.measure.parity import OneProcessFailsError, compare
from meshwright.models.shortened import shortened
from meshwright.models.source import ModelSource, resolve
from meshwright.runtime.ranks import joined


def check_rank(payload: dict[str, Any]) -> dict[str, Any]:
    plan = msgspec.convert(payload["plan"], Plan)
    with joined("cpu", "gloo", payload["timeout"]) as rank:
        try:
            return dict(msgspec.to_builtins(compare(find(payload), plan, payload["steps"], rank)))
        except OneProcessFailsError as error:
            return {"not_checked": str(error)}


def find(payload: dict[str, Any]) -> ModelSource:
    """The small model that the process has which started this rank."""
    if "model" in payload:
        small = resolve(payload["model"]).small()
        return shortened(small) if payload.get("shortened") else small
    from meshwright.measure.checking.live import LiveModel

    sys.path[:] = payload["path"]
    return LiveModel.read(Path(payload["file"])).source()
