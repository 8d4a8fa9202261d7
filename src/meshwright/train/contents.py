"""What lies where in a checkpoint: `contents.json`.

    tensors   name → dtype, shape, and the boxes it was written in: which file, where in the whole, how large
    values    name → what is no tensor

It says what torch's distributed checkpoint keeps in a pickled `.metadata`; as JSON it cannot do anything when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
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

from meshwright.core.codec import Value
from meshwright.core.errors import CheckpointError
from meshwright.train.tensors_file import DTYPES

FILE = "contents.json"
STATE = "optimizer.state."
Lengths = tuple[Annotated[int, Meta(ge=0)], ...]
FileName = Annotated[str, Meta(pattern=r"^rank-[0-9]+\.safetensors$")]
"""Nothing outside the checkpoint's own folder."""


class Box(Value, kw_only=True):
    """A part of a tensor, in one file."""

    offsets: Lengths
    sizes: Lengths
    file: FileName
    key: str


class SavedTensor(Value, kw_only=True):
    dtype: str
    shape: Lengths
    boxes: tuple[Box, ...]


class Contents(Value, kw_only=True):
    format: Literal[2] = 2
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    def optimizer_state(self) -> dict[str, dict[str, SavedTensor]]:
        """Parameter → key → what the optimizer kept for it."""
        found: dict[str, dict[str, SavedTensor]] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(STATE):
                parameter, _, key = name.removeprefix(STATE).rpartition(".")
                found.setdefault(parameter, {})[key] = tensor
        return found

    def metadata(self) -> Metadata:
        """As torch's planner wants it."""
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in self.values}
        found |= {name: _described(tensor) for name, tensor in self.tensors.items()}
        return Metadata(found)


def key_of(name: str, offsets: tuple[int, ...], is_whole: bool) -> str:
    """What a box is called in its file."""
    return name if is_whole else f"{name}@{','.join(map(str, offsets))}"


def read_contents(folder: Path) -> Contents:
    path = folder / FILE
    try:
        contents = msgspec.json.decode(path.read_bytes(), type=Contents)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for problem in _problems(contents):
        raise CheckpointError(f"{path}: {problem}")
    return contents


def _problems(contents: Contents) -> Iterator[str]:
    """Boxes must fill their tensor: what is not in a file would stay as it was."""
    for name, tensor in contents.tensors.items():
        if tensor.dtype not in DTYPES:
            yield f"'{name}' is of an unknown dtype, {tensor.dtype}"
        for box in tensor.boxes:
            ends = zip(box.offsets, box.sizes, tensor.shape, strict=False)
            if len(box.offsets) != len(tensor.shape) or len(box.sizes) != len(tensor.shape):
                yield f"a part of '{name}' has {len(box.sizes)} dims, the whole has {len(tensor.shape)}"
            elif any(offset + size > whole for offset, size, whole in ends):
                yield f"a part of '{name}' is outside of it"
        if sum(prod(box.sizes) for box in tensor.boxes) != prod(tensor.shape):
            yield f"the parts of '{name}' are not all of it"


def _described(tensor: SavedTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks)
