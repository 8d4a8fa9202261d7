"""What lies where in a checkpoint: `contents.json`.

    tensors   name → dtype, shape, and the boxes it was written in: which file, where in the whole, how large
    values    name → what is no tensor
    stateless parameters that the optimizer kept nothing for: what it kept for all others must be there

It says what torch's distributed checkpoint keeps in a pickled `.metadata`; as JSON it cannot do anything when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from meshwright.core.bounds import CountOrZero
from meshwright.core.codec import Value
from meshwright.core.errors import CheckpointError, InputError
from meshwright.core.files.given_file import check_plain
from meshwright.training.checked.parts import fills
from meshwright.training.manifest import DamagedError, Manifest, read_listed
from meshwright.training.tensors_file import DTYPES

FILE = "contents.json"
MODEL = "model."
"""Before the names of parameters and buffers."""
STATE = "optimizer.state."
SETTINGS = "optimizer.settings."
Lengths = tuple[CountOrZero, ...]
FileName = Annotated[str, Meta(pattern=r"\Arank-[0-9]+\.safetensors\Z", max_length=64)]
"""Nothing outside the checkpoint's own folder."""


class Box(Value, kw_only=True):
    """A part of a tensor, in one file."""

    offsets: Lengths
    sizes: Lengths
    file: FileName
    key: str


class SavedTensor(Value, kw_only=True):
    """A tensor of a checkpoint, and which parts of it lie in which file."""

    dtype: str
    shape: Lengths
    boxes: tuple[Box, ...]


class Contents(Value, kw_only=True):
    """What lies where in a checkpoint: `contents.json`."""

    format: Literal[2] = 2
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    stateless: tuple[str, ...] | None = None
    """None where it was not written down, by an earlier version."""

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    def optimizer_state(self) -> dict[str, dict[str, SavedTensor]]:
        """Parameter → key → what the optimizer kept for it, as far as it is tensors."""
        found: dict[str, dict[str, SavedTensor]] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(STATE):
                parameter, key = state_key(name)
                found.setdefault(parameter, {})[key] = tensor
        return found

    def metadata(self) -> Metadata:
        """As torch's planner wants it."""
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in self.values}
        found |= {name: _described(tensor) for name, tensor in self.tensors.items()}
        return Metadata(found)


def file_of(rank: int) -> str:
    """Where a rank writes its tensors."""
    return f"rank-{rank:05d}.safetensors"


def key_of(name: str, offsets: tuple[int, ...], is_whole: bool) -> str:
    """What a box is called in its file."""
    return name if is_whole else f"{name}@{','.join(map(str, offsets))}"


def state_key(name: str) -> tuple[str, str]:
    """Parameter and key of an entry that an optimizer kept."""
    parameter, _, key = name.removeprefix(STATE).rpartition(".")
    return parameter, key


def with_settings(values: Iterable[str]) -> set[str]:
    """Parameters that an optimizer updates, by the names of the values that are saved."""
    return {name.removeprefix(SETTINGS) for name in values if name.startswith(SETTINGS)}


def with_state(names: Iterable[str]) -> set[str]:
    """Parameters that an optimizer kept something for, by the names of all that is saved."""
    return {state_key(name)[0] for name in names if name.startswith(STATE)}


def contents_of(tensors: dict[str, SavedTensor], values: dict[str, Any]) -> Contents:
    """What is to be written."""
    stateless = with_settings(values) - with_state((*tensors, *values))
    return Contents(tensors=tensors, values=values, stateless=tuple(sorted(stateless)))


def read_contents(folder: Path, manifest: Manifest) -> Contents:
    path, text = folder / FILE, read_listed(folder, manifest, FILE)
    try:
        contents = msgspec.json.decode(text, type=Contents)
        check_plain(contents.values, str(path))
    except (InputError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "$.format" in str(error):
            raise CheckpointError(f"{path}: {error}; read it with the version of Meshwright that wrote it") from error
        raise DamagedError(f"{path} cannot be read: {error}") from error
    for problem in (*_unlisted(contents, manifest), *_problems(contents)):
        raise DamagedError(f"{path}: {problem}")
    return contents


def _unlisted(contents: Contents, manifest: Manifest) -> Iterator[str]:
    files = {box.file: name for name, tensor in contents.tensors.items() for box in tensor.boxes}
    for file, name in files.items():
        if file not in manifest.files:
            yield f"'{name}' lies in {file}, which the manifest does not list"


def _problems(contents: Contents) -> Iterator[str]:
    """Boxes must fill their tensor: what is not in a file would stay as it was."""
    for name, tensor in contents.tensors.items():
        if tensor.dtype not in DTYPES:
            yield f"'{name}' is of an unknown dtype, {tensor.dtype}"
        yield from _wrong_boxes(name, tensor)


def _wrong_boxes(name: str, tensor: SavedTensor) -> Iterator[str]:
    for box in tensor.boxes:
        ends = zip(box.offsets, box.sizes, tensor.shape, strict=False)
        if len(box.offsets) != len(tensor.shape) or len(box.sizes) != len(tensor.shape):
            yield f"a part of '{name}' has {len(box.sizes)} dims, the whole has {len(tensor.shape)}"
            return
        if any(offset + size > whole for offset, size, whole in ends):
            yield f"a part of '{name}' is outside of it"
        if box.key != key_of(name, box.offsets, box.sizes == tensor.shape):
            yield f"a part of '{name}' is said to be '{box.key}', which is another one's name"
    is_whole = len(tensor.boxes) == 1 and tensor.boxes[0].sizes == tensor.shape
    if not is_whole and not fills(tensor.shape, ((box.offsets, box.sizes) for box in tensor.boxes)):
        yield f"the parts of '{name}' are not all of it, each place once"


def _described(tensor: SavedTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks)
