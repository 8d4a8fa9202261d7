"""What a check found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from meshwright.core.codec import Value

Status = Literal["ok", "warning", "problem"]


class Finding(Value, kw_only=True):
    """warning: something will be slow, or fail in some cases. problem: runs will fail."""

    check: str
    status: Status
    found: str
    fix: str = ""
    """What to do; empty where nothing is to be done."""
    host: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check=check, status="ok", found=found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check=check, status="warning", found=found, fix=fix)


def problem(check: str, found: str, fix: str) -> Finding:
    return Finding(check=check, status="problem", found=found, fix=fix)


def made(name: str, check: Callable[[], Finding]) -> Finding:
    """A check that itself fails is a problem of the machine, not the end of the checkup."""
    try:
        return check()
    except Exception as error:
        return problem(name, f"the check itself failed: {type(error).__name__}: {error}", "see the message")
