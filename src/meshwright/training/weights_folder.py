"""A folder of safetensors as Hugging Face lays it out: one file, or several with an index.

    model.safetensors                        all tensors
    model-00001-of-00002.safetensors …       some each; model.safetensors.index.json says which file has which

Headers are read at once; of the tensors, only what is asked for. Nothing in these files is code.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.core.bounds import LARGEST_RECORD_BYTES
from meshwright.core.errors import InputError, ModelError
from meshwright.core.files.given_file import parse_json, read_given
from meshwright.runtime.extent import Extent, extent_sizes

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WHOLE_NUMBERS = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}


class Stored(NamedTuple):
    """What a header says of a tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it."""


class WeightsFolder:
    """Its tensors by name, and how many bytes of them were read so far."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        for file, names in self._files().items():
            self._read_header(file, names)

    def read(self, name: str, extent: Extent) -> Tensor:
        """A part of a tensor, in the dtype it is stored in."""
        stored = self.tensors[name]
        sizes = extent_sizes(extent)
        part = torch.empty(sizes, dtype=(DTYPES | WHOLE_NUMBERS)[stored.dtype])
        if not sizes:
            part.copy_(self._open[stored.file].get_tensor(name))
        elif part.numel():
            self._read_pieces(name, extent, part)
        self.bytes_read += part.numel() * part.element_size()
        return part

    def _read_pieces(self, name: str, extent: Extent, part: Tensor) -> None:
        view = self._open[self.tensors[name].file].get_slice(name)
        for pieces in itertools.product(*(enumerate(stretches) for stretches in extent)):
            target = part
            for dim, (number, stretch) in enumerate(pieces):
                before = sum(one.size for one in extent[dim][:number])
                target = target.narrow(dim, before, stretch.size)
            target.copy_(view[tuple(slice(stretch.start, stretch.stop) for _, stretch in pieces)])

    def _files(self) -> dict[str, list[str] | None]:
        """File → the tensors it must have; None: whatever it has."""
        if (self.path / ONE_FILE).is_file():
            return {ONE_FILE: None}
        index = self.path / INDEX
        if not index.is_file():
            raise InputError(f"{self.path}: {self._nothing_there()}")
        try:
            found = dict(parse_json(read_given(index, LARGEST_RECORD_BYTES), str(index))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{index}: not an index of safetensors with a 'weight_map': {error}") from error
        files: dict[str, list[str] | None] = {}
        for name, file in found.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise InputError(
                    f"{index}: tensor '{name}' is said to be in '{file}', which is no name of a file beside it"
                )
            files[file] = [*(files.get(file) or []), name]
        return files

    def _nothing_there(self) -> str:
        if not self.path.is_dir():
            return "no such folder (one with model.safetensors is expected)"
        if any(self.path.glob("pytorch_model*.bin")):
            return (
                f"has {PICKLED} and no safetensors: a pickle can run code when it is read; convert it first, with transformers' "
                "save_pretrained"
            )
        return f"has neither {ONE_FILE} nor {INDEX}"

    def _read_header(self, file: str, names: list[str] | None) -> None:
        path = self.path / file
        if not path.is_file():
            raise InputError(f"{path}: no such file, but {INDEX} names it: download the folder again")
        opened = _open_file(path)
        held = list(opened.keys())
        for name in held if names is None else names:
            if name not in held:
                raise InputError(f"{path}: lacks tensor '{name}', which {INDEX} says is there: download it again")
            view = opened.get_slice(name)
            self.tensors[name] = Stored(file, tuple(view.get_shape()), view.get_dtype())
        self._open[file] = opened


def _open_file(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ModelError("reading weights needs safetensors: pip install 'meshwright[hf]'") from None
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a whole safetensors file: {error}; download it again") from error
