"""How many microbatches the activations of a coordinate amount to at least, whatever the sizes of its stages.

Just before the t-th backward a coordinate holds h_t(k) microbatches of its k-th stage. If a microbatch keeps K_k bytes on stage k,
the coordinate needs max over t of Σ h_t(k) K_k. The sizes of stages are open, their sum K on the coordinate is not. So

    max_t Σ_k h_t(k) K_k ≥ G K,    G = min over shares x (x ≥ 0, Σ x = 1) of max_t Σ_k h_t(k) x_k        -> held_microbatches
    the same where no stage keeps less than r times what another does: x_j ≥ r x_k                       -> held_by_like_stages

G is the value of a matrix game, found by a linear program. With one stage a coordinate, G is the number of microbatches in flight.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from meshwright.core.pipeline.kinds import ScheduleKind, in_flight, kind_of, placement_of
from meshwright.core.pipeline.placement import coordinate_of

Held = NDArray[np.float64]
"""One row a moment, one column a stage of the coordinate."""
Counts = tuple[int, ...]
"""Microbatches that are held of each stage of a coordinate."""
MANY_COORDINATES = 8
"""Of more coordinates, about so many are looked at; those between two of them hold no less than the one that holds less."""
ROUNDING = 1e-6


def held_microbatches(name: ScheduleKind, p: int, m: int, v: int) -> tuple[float, ...]:
    """G of each of p coordinates, for m microbatches and v stages a coordinate."""
    return _held(name, p, m, v, 0.0)


def held_by_like_stages(name: ScheduleKind, p: int, m: int, v: int, ratio: float) -> tuple[float, ...]:
    """The same where stages are alike but for this ratio. The first and the last stage may be of any size."""
    alike, any_size = _held(name, p, m, v, max(0.0, round(ratio, 2) - 0.01)), _held(name, p, m, v, 0.0)
    ends = {coordinate_of(stage, p, placement_of(name)) for stage in (0, p * v - 1)}
    return tuple(any_size[place] if place in ends else held for place, held in enumerate(alike))


@lru_cache(maxsize=65536)
def most_held(name: ScheduleKind, p: int, m: int, v: int) -> tuple[float, ...]:
    """The most microbatches of one stage that each coordinate holds at any time."""
    if v == 1 or kind_of(name).keeps_all:
        return tuple(each / v for each in in_flight(name, p, m, v))
    if m > 3 * p and m % p == 0:
        return most_held(name, p, 3 * p, v)
    known = {place: float(held.max()) for place, held in _moments(name, p, m, v).items()}
    least = {place: -most for place, most in known.items()}
    return tuple(known[c] if c in known else -_between(least, c) for c in range(p))


@lru_cache(maxsize=65536)
def _held(name: ScheduleKind, p: int, m: int, v: int, ratio: float) -> tuple[float, ...]:
    kind = kind_of(name)
    if v == 1 or kind.keeps_all:
        return tuple(each / v for each in in_flight(name, p, m, v))
    if m > 3 * p and m % p == 0:  # a full pipeline repeats itself
        return _held(name, p, 3 * p, v, ratio)
    known = {place: _least_fullest(held, ratio) for place, held in _moments(name, p, m, v).items()}
    return tuple(known[c] if c in known else _between(known, c) for c in range(p))


def _between(known: dict[int, float], place: int) -> float:
    below = max(other for other in known if other < place)
    above = min(other for other in known if other > place)
    return min(known[below], known[above])


@lru_cache(maxsize=4096)
def _moments(name: ScheduleKind, p: int, m: int, v: int) -> dict[int, Held]:
    """The fullest moments of some coordinates."""
    order = kind_of(name).order
    places = sorted({*range(0, p, max(1, p // MANY_COORDINATES)), p - 1})
    return {place: _maximal(_counts(order(place, p, m, v), m, v)) for place in places}


def _counts(words: list[str], m: int, v: int) -> set[Counts]:
    """What is held just before each backward. A microbatch is held from its forward until the gradients of its weights are made."""
    found: set[Counts] = set()
    held = [0] * v
    forwards, backwards = [0] * v, [0] * v
    owed: list[int] = []
    for word in words:
        if word == "W":
            if owed:
                held[owed.pop(0)] -= 1
            continue
        turn, done = int(word[1:]), forwards if word[0] == "F" else backwards
        if done[turn] == m:
            continue
        done[turn] += 1
        if word[0] == "F":
            held[turn] += 1
            continue
        found.add(tuple(held))
        if word[0] == "B":
            held[turn] -= 1
        else:
            owed.append(turn)
    return found


def _maximal(counts: set[Counts]) -> Held:
    """Moments at which no other moment holds at least as much of every stage."""
    held: Held = np.array(sorted(counts), dtype=np.float64)
    beaten = (held[:, None, :] <= held[None, :, :]).all(axis=2).sum(axis=1) > 1  # each is beaten by itself
    return np.asarray(held[~beaten])


def _least_fullest(held: Held, ratio: float) -> float:
    """min over shares x of max over moments of the microbatches held: minimise g with H x ≤ g, Σ x = 1, x_j ≥ r x_k."""
    return (_of_two(held, ratio) if held.shape[1] == 2 else _by_program(held, ratio)) * (1 - ROUNDING)


def _of_two(held: Held, ratio: float) -> float:
    """The lowest point of the upper envelope of lines: at an end, or where two of them cross."""
    first, second = held[:, 0], held[:, 1]
    least = ratio / (1 + ratio)
    slopes = first - second
    rise = slopes[:, None] - slopes[None, :]
    crossings = np.divide(second[None, :] - second[:, None], rise, out=np.zeros_like(rise), where=rise != 0)
    shares = np.unique(np.clip(np.append(crossings.ravel(), [0.0, 1.0]), least, 1 - least))
    return float((shares[:, None] * first + (1 - shares[:, None]) * second).max(axis=1).min())


def _by_program(held: Held, ratio: float) -> float:
    num_moments, num_stages = held.shape
    rows = [np.hstack([held, -np.ones((num_moments, 1))])]
    if ratio > 0:
        pairs = [(j, k) for j in range(num_stages) for k in range(num_stages) if j != k]
        alike = np.zeros((len(pairs), num_stages + 1))
        for row, (j, k) in enumerate(pairs):
            alike[row, j], alike[row, k] = -1.0, ratio
        rows.append(alike)
    found = linprog(
        np.append(np.zeros(num_stages), 1.0),
        A_ub=np.vstack(rows),
        b_ub=np.zeros(sum(len(row) for row in rows)),
        A_eq=np.append(np.ones(num_stages), 0.0)[None, :],
        b_eq=[1.0],
        method="highs",
    )
    return float(found.fun)
