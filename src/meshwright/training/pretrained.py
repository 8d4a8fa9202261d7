"""Trained weights from a folder of safetensors into a program that is already spread: every rank reads its own part.

Names and shapes are checked against the whole module before it is divided (`match`); after `apply`, each parameter's place in
the whole says which bytes are this rank's (`fill`). No rank ever holds more than it trains, and one tensor's part beside it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import InputError, nearest
from meshwright.core.units import format_bytes
from meshwright.models.source import ModelSource
from meshwright.runtime.addresses import Addresses
from meshwright.runtime.clip import local
from meshwright.runtime.deferred import deferred
from meshwright.runtime.extent import Extent, extent_of, whole_extent
from meshwright.runtime.offload.saved import masters_of
from meshwright.runtime.offload.streamed_program import StreamedProgram
from meshwright.runtime.program import Program
from meshwright.runtime.undrawn import undrawn
from meshwright.training.settings import Settings
from meshwright.training.weights_folder import DTYPES, WeightsFolder
from meshwright.training.weights_names import is_harmless, name_sources
from meshwright.training.weights_source import Source

SAME_FOLDER = "take the config.json of the same folder"
SHOWN = 5
"""Names an error lists."""


@dataclass(frozen=True)
class Matched:
    """A folder that has all a module needs, and nothing it does not know."""

    folder: WeightsFolder
    sources: dict[str, tuple[Source, ...]]
    """Any name of a parameter or buffer → where its values come from; several where tied ones are stored one by one."""


@dataclass
class Imported:
    """What one rank read."""

    num_bytes: int = 0
    conversions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(stored, held) dtype → tensors."""

    def describe(self, matched: Matched) -> str:
        rounded = [words for words in self._words() if words.endswith("rounded")]
        said = f"; {', '.join(self._words())}" if self._words() else ""
        warning = "" if not rounded else ": what is trained is not exactly what was stored"
        return (
            f"weights of {matched.folder.path}: {len(matched.folder.tensors)} tensors, this rank read "
            f"{format_bytes(self.num_bytes)} of them{said}{warning}"
        )

    def _words(self) -> list[str]:
        words = []
        for (stored, held), number in sorted(self.conversions.items()):
            exact = _holds(stored, held)
            words.append(f"{number} stored as {stored} and held as {held}{', exactly' if exact else ', rounded'}")
        return words


def _holds(stored: str, held: str) -> bool:
    """Whether every number of one dtype is one of the other."""
    narrow, wide = torch.finfo(getattr(torch, stored)), torch.finfo(getattr(torch, held))
    return wide.eps <= narrow.eps and wide.max >= narrow.max


def check_weights(settings: Settings, source: ModelSource) -> None:
    """Before any rank starts: whether the weights a run names are those of its model. Takes no memory for either."""
    if settings.weights is None:
        return
    with deferred(), undrawn():
        module = source.build()
    match(WeightsFolder(settings.weights), module)


def match(folder: WeightsFolder, module: nn.Module) -> Matched:
    """Refuses a folder that lacks a tensor, has one too many, or one of another shape. The module is still whole."""
    wanted = module.state_dict()
    found = name_sources(folder.tensors, module, wanted)
    ties = _ties(module)
    sources: dict[str, tuple[Source, ...]] = {}
    missing = []
    for name in wanted:
        stored = tuple(found[alias] for alias in ties.get(name, (name,)) if alias in found)
        if stored:
            sources[name] = stored
        else:
            missing.append(name)
    unexpected = [name for name in found if name not in wanted and not is_harmless(name, module)]
    _check_names(folder, missing, unexpected)
    for name, stored in sources.items():
        _check_shapes(folder, name, wanted[name], stored)
    return Matched(folder, sources)


def fill(program: Program, matched: Matched) -> Imported:
    """Every parameter and stored buffer of this rank gets its part; masters on the host get it unrounded."""
    imported, folder = Imported(), matched.folder
    before = folder.bytes_read
    addresses = Addresses(program.module, program.mesh)
    masters = {} if program.host is None else masters_of(program.host)
    for name, parameter in program.module.named_parameters():
        part = _read(matched, name, extent_of(addresses, name))
        held = local(masters.get(id(parameter), parameter)).detach()
        _put(part, held, imported)
        if id(parameter) in masters:
            local(parameter.detach()).copy_(held)
    for name, buffer in program.module.named_buffers():
        if name in matched.sources:
            _put(_read(matched, name, whole_extent(buffer.shape)), buffer, imported)
    if isinstance(program, StreamedProgram):
        program.streams.streaming.refresh()
    imported.num_bytes = folder.bytes_read - before
    return imported


@torch.no_grad()
def _put(part: Tensor, held: Tensor, imported: Imported) -> None:
    if part.dtype != held.dtype and part.is_floating_point():
        imported.conversions[(_word(part), _word(held))] += 1
    held.copy_(part)


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _read(matched: Matched, name: str, extent: Extent) -> Tensor:
    """Tied parameters that were stored one by one must be the same."""
    first, *others = (source.read(matched.folder, extent) for source in matched.sources[name])
    for source, other in zip(matched.sources[name][1:], others, strict=True):
        if not torch.equal(first, other):
            names = f"'{next(source.names())}' and '{next(matched.sources[name][0].names())}'"
            raise InputError(
                f"{matched.folder.path}: {names} differ, but are one tensor in this model: its config says that they are tied, and "
                "these weights are of one where they are not"
            )
    return first


def _ties(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name → all names of its tensor, the first first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def _check_names(folder: WeightsFolder, missing: list[str], unexpected: list[str]) -> None:
    if missing:
        close = f" ({nearest(missing[0], unexpected)})" if unexpected else ""
        raise InputError(
            f"{folder.path}: {_listed(missing)} of this model {_are(missing)} not there{close}: {SAME_FOLDER}"
        )
    if unexpected:
        raise InputError(
            f"{folder.path}: {_listed(unexpected)} {_are(unexpected)} there, but not in this model: {SAME_FOLDER}, so that no "
            "weights are lost"
        )


def _check_shapes(folder: WeightsFolder, name: str, tensor: Any, stored: tuple[Source, ...]) -> None:
    for source in stored:
        shape = source.shape(folder)
        if shape != tuple(tensor.shape):
            raise InputError(
                f"{folder.path}: '{name}' is {list(tensor.shape)} in this model and {list(shape)} there: {SAME_FOLDER}"
            )
        for part in source.names() if tensor.is_floating_point() else ():
            if folder.tensors[part].dtype not in DTYPES:
                raise InputError(
                    f"{folder.path}: '{part}' is stored as {folder.tensors[part].dtype}: weights that were quantised cannot be "
                    "trained; take the folder they were made of"
                )


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
