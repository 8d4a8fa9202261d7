"""The schedules by name: what a plan can ask for, and what each kind asks of the stages."""

from __future__ import annotations

from typing import Literal

from meshwright.core.pipeline.placement import Placement

ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]

MULTI_STAGE_SCHEDULES = ("interleaved", "zbv", "dualpipev")
V_SCHEDULES = ("zbv", "dualpipev")
SPLIT_SCHEDULES = ("zb", "zbv", "dualpipev")
"""Those that make gradients of weights apart from those of inputs."""


def placement_of(kind: ScheduleKind) -> Placement:
    return "v" if kind in V_SCHEDULES else "loop"


def check_virtual(kind: ScheduleKind, virtual: int, error: type[ValueError]) -> None:
    """Which schedule runs how many stages a coordinate."""
    if virtual > 1 and kind not in MULTI_STAGE_SCHEDULES:
        raise error(
            f"schedule '{kind}' runs one stage per coordinate, but virtual={virtual}: "
            f"set virtual to 1, or use one of {', '.join(MULTI_STAGE_SCHEDULES)}"
        )
    if virtual != 2 and kind in V_SCHEDULES:
        raise error(f"schedule '{kind}' runs two stages per coordinate, but virtual={virtual}: set virtual to 2")
    if virtual == 1 and kind == "interleaved":
        raise error(
            "schedule 'interleaved' runs several stages per coordinate, but virtual=1: "
            "set virtual to 2 or more, or use 1f1b"
        )
