"""Tensors in a safetensors file, written one after the other: there is never a second copy of them all.

    [8 bytes: length of the header] [header, JSON: key → dtype, shape, place] [the tensors, largest items first]

Reading is left to the safetensors library, which checks the header against the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.core.errors import CheckpointError
from meshwright.core.files.disk import FileFacts, write_file

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""As the format spells them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    key: str
    tensor: Tensor
    """On any device."""

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def write_tensors(path: Path, entries: Sequence[Entry]) -> FileFacts:
    ordered = sorted(entries, key=lambda entry: (-entry.tensor.element_size(), entry.key))
    return write_file(path, _parts(ordered))


def check_dtype(key: str, dtype: torch.dtype) -> None:
    if dtype not in NAMES:
        raise CheckpointError(f"'{key}' is of {dtype}, which a safetensors file cannot hold")


def bytes_of(tensor: Tensor) -> memoryview:
    """Of a tensor on the host; the same memory where it is in one piece."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _parts(ordered: Iterable[Entry]) -> Iterator[bytes | memoryview]:
    header, place = {}, 0
    for entry in ordered:
        header[entry.key] = {
            "dtype": NAMES[entry.tensor.dtype],
            "shape": list(entry.tensor.shape),
            "data_offsets": [place, place + entry.num_bytes],
        }
        place += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin on a multiple of their items' size
    yield struct.pack("<Q", len(text)) + text
    for entry in ordered:
        yield bytes_of(entry.tensor.to("cpu"))
