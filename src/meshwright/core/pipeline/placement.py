"""Where stages lie: v · p stages over p pp coordinates, in a loop or a V.

    loop   stage s on coordinate s mod p                                   0 1 2 0 1 2
    v      every second turn comes back: 2p-1-s for p ≤ s < 2p             0 1 2 2 1 0

A coordinate has one stage of every turn: turn 0 is its first. Where a V turns, two stages in a row share a coordinate and
send each other nothing.
"""

from __future__ import annotations

from typing import Literal

Placement = Literal["loop", "v"]


def coordinate_of(stage: int, num_coordinates: int, placement: Placement) -> int:
    turn, place = divmod(stage, num_coordinates)
    return _mirrored(turn, place, num_coordinates, placement)


def stage_at(coordinate: int, turn: int, num_coordinates: int, placement: Placement) -> int:
    """The stage a coordinate has of one turn: `coordinate_of`, the other way round."""
    return turn * num_coordinates + _mirrored(turn, coordinate, num_coordinates, placement)


def _mirrored(turn: int, place: int, num_coordinates: int, placement: Placement) -> int:
    return num_coordinates - 1 - place if placement == "v" and turn % 2 else place
