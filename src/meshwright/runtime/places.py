"""Where parameters are cut: for every parameter of a spread module, the axes it lies over and the dim each one cuts.

Noted on the module when its parameters become this rank's parts (tp, ep), in the order they were cut. Whoever needs the
whole again (parity, checkpoints) or must know what is whole (clipping) reads it here. ZeRO is not among them: its shards
are DTensors and know it themselves; it shards what is left after these cuts.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from meshwright.core.axes import Axis

NOTE = "_meshwright_places"


class Place(NamedTuple):
    axis: Axis
    dim: int
    runs: int = 1
    """The dim is that many runs laid in a row, each of them cut."""


Places = dict[str, tuple[Place, ...]]
"""Name of a parameter, as `named_parameters()` gives it → its cuts, the first made first."""


def places_of(module: nn.Module) -> Places:
    found: Places = vars(module).setdefault(NOTE, {})
    return found


def note_place(module: nn.Module, name: str, place: Place) -> None:
    places = places_of(module)
    places[name] = (*places.get(name, ()), place)
