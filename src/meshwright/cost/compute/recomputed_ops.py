"""The recompute plan of a block: the forward ops that backward runs again, and the results that forward need not keep.

full             every op; or every op before the last that backward needs (`last_needed`), unless `TrainingSystem.whole_recompute`
selective        the ops of the attention core that the dropped results are computed from. Dropped are results of core ops that
                 backward needs; a result that an op after the core reads is kept anyway   -> dropped_ops
selective core   every op of the attention core
selective ops    every op but attention and every second matmul
"""

from __future__ import annotations

from typing import Literal

from meshwright.core.cluster import FLOP_KINDS
from meshwright.core.graph import Kind, Source
from meshwright.core.names import expand_names
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.rules.kinds import cached_in_value, reached

ActivationMode = Literal["none", "selective", "selective core", "selective ops", "full", "offloaded"]
"""How a block keeps its activations. offloaded: nothing is recomputed; activations come back from the host for backward."""


def recompute_modes(plan: Plan, recipe: Recipe) -> dict[str, ActivationMode]:
    """Block → how it is recomputed. Blocks that keep all their activations are left out."""
    return {
        **dict.fromkeys(plan.recomputed("selective"), recipe.system.selective),
        **dict.fromkeys(plan.recomputed("full"), "full"),
    }


def activation_modes(plan: Plan, recipe: Recipe) -> dict[str, ActivationMode]:
    """Block → how it keeps its activations: recomputed blocks, and blocks whose activations are offloaded. Like a block under full
    recompute, an offloaded block keeps only its output on the device."""
    return {**recompute_modes(plan, recipe), **dict.fromkeys(expand_names(plan.offload.activations), "offloaded")}


@cached_in_value
def recomputed_ops(kind: Kind, mode: ActivationMode) -> frozenset[int]:
    """Numbers of the forward ops that backward runs again."""
    if mode == "full":
        return frozenset(number for number, _ in kind.forward_ops)
    if mode == "selective":
        return _recomputed_for(kind, dropped_ops(kind))
    if mode == "selective core":
        return core_ops(kind)
    if mode == "selective ops":
        attention = {number for number, op in kind.forward_ops if op.kind == "attention"}
        matmuls = [number for number, op in kind.forward_ops if op.kind in FLOP_KINDS and number not in attention]
        return recomputed_ops(kind, "full") - attention - set(matmuls[::2])
    return frozenset()


@cached_in_value
def core_ops(kind: Kind) -> frozenset[int]:
    """Numbers of the forward ops of the attention core."""
    return frozenset(number for number, op in kind.forward_ops if op.region == "attention")


@cached_in_value
def dropped_ops(kind: Kind) -> frozenset[int]:
    """Core ops whose results selective recompute drops; none where dropping them would free nothing."""
    found = frozenset(
        number for number in core_ops(kind) - read_after_core(kind) if kind.ops[number].saved_bytes.at(1) > 0
    )
    freed = sum(kind.ops[number].saved_bytes.at(1) for number in found)
    kept = sum(kind.ops[number].written_bytes.at(1) for number in _read_by(kind, found))
    return found if freed > kept else frozenset()


@cached_in_value
def kept_for_core(kind: Kind) -> frozenset[int]:
    """Ops outside the core whose results are kept only because recomputed ops read them."""
    return _read_by(kind, dropped_ops(kind))


def _read_by(kind: Kind, dropped: frozenset[int]) -> frozenset[int]:
    recomputed = _recomputed_for(kind, dropped)
    read = {source for number in recomputed for source in kind.ops[number].inputs if isinstance(source, int)}
    return frozenset(number for number in read - recomputed if not kind.ops[number].saved_bytes.at(1))


@cached_in_value
def read_after_core(kind: Kind) -> frozenset[int]:
    """Ops whose results are read in forward outside the attention core; ops there (the projection) need them in backward too."""
    core = core_ops(kind)
    outside = (op for number, op in kind.forward_ops if number not in core)
    return frozenset(source for op in outside for source in op.inputs if isinstance(source, int))


def _recomputed_for(kind: Kind, wanted: frozenset[int]) -> frozenset[int]:
    """Core ops that compute these results from kept results and from tensors outside the core."""
    made = core_ops(kind) - read_after_core(kind)
    return frozenset(reached(wanted, lambda number: made.intersection(kind.ops[number].inputs)))


SAVE_NO_INPUT = ("add", "sub", "clone", "_to_copy", "sum", "mean", "cat", "stack")
"""Ops whose backward needs none of their inputs."""


@cached_in_value
def readers_of(kind: Kind) -> dict[Source, dict[int, int]]:
    """Source → the forward ops that read it, each with how often."""
    found: dict[Source, dict[int, int]] = {}
    for number, op in kind.forward_ops:
        for source in op.inputs:
            times = found.setdefault(source, {})
            times[number] = times.get(number, 0) + 1
    return found


@cached_in_value
def last_needed(kind: Kind) -> int:
    """The last forward op that backward needs: an op that reads a kept tensor and needs it in backward, or the op that made it.

    A result that only the next block reads does not count: it is the input of that block, which keeps it.
    """
    last = -1
    readers = readers_of(kind)
    for number, op in kind.forward_ops:
        if op.is_saved and number in readers:
            keepers = [reader for reader in readers[number] if kind.ops[reader].name not in SAVE_NO_INPUT]
            last = max(last, *(keepers or [number]))
    return last
