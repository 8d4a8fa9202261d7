"""Room for checkpoints: looked at before a run, so that it is not refused its last one after days."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from meshwright.core.graph import Graph
    from meshwright.core.plan import Plan
    from meshwright.core.recipe import Recipe
    from meshwright.training.settings import Settings


def checkpoint_bytes(graph: Graph, plan: Plan, recipe: Recipe) -> int:
    """Parameters, and what the optimizer keeps for those that are trained; all ranks together."""
    from meshwright.cost.memory.local_parameters import items_of, total_elements

    items, parameters = items_of(plan, recipe), graph.own_parameters
    trained = total_elements(parameters, trainable_only=True)
    return total_elements(parameters) * items.parameter + trained * items.state


def check_room(settings: Settings, needed: int, console: Console) -> None:
    """A disk without room for one checkpoint is refused; where it is short of all that will be kept, that is said."""
    from pathlib import Path

    from meshwright.core.errors import InputError
    from meshwright.core.units import format_bytes
    from meshwright.training.saver import FARE_BYTES

    folder, elsewhere = Path(settings.folder), settings.checkpoint.elsewhere
    places = [folder] if elsewhere is None else [folder, Path(elsewhere)]
    free = max(_free(place) for place in places)
    count = settings.checkpoint.keep + 1 if settings.checkpoint.every else 1
    one = needed + FARE_BYTES
    if free < one:
        raise InputError(
            f"a checkpoint of this run needs {format_bytes(one)}, but the disk of {folder.absolute()} has {format_bytes(free)} "
            "free: make room, or choose another disk with --out or checkpoint.elsewhere"
        )
    if free < count * one:
        console.print(
            f"warning: {count} checkpoints (keep = {settings.checkpoint.keep}, and the one being written) need "
            f"{format_bytes(count * one)}, but the disk of {folder.absolute()} has {format_bytes(free)} free",
            highlight=False,
        )


def _free(place: Path) -> int:
    """Bytes on the disk of a folder, which may not be there yet."""
    import shutil

    return shutil.disk_usage(next(one for one in (place.absolute(), *place.absolute().parents) if one.exists())).free
