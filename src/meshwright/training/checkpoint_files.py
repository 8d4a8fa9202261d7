"""torch's distributed checkpoint on our own files: its planner decides which rank writes and reads what; nothing is pickled.

saving    a rank takes over its share of the tensors (`dividing.py`), and holds them until they are written (`saver.py`): the ranks
          talk to each other before that, and never while training goes on
loading   every rank reads the boxes of the files that its own tensors need
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from meshwright.core.errors import CheckpointError
from meshwright.training.contents import Box, Contents, SavedTensor, file_of, key_of
from meshwright.training.dividing import Offer, piece_of
from meshwright.training.plain_values import like, to_plain
from meshwright.training.staging import Staging
from meshwright.training.tensors_file import Entry, check_dtype

Flat = dict[str, Any]
ALL = "state"
"""What torch is handed: one entry, of which our planners take the inside. It would look at every entry by itself, at length."""


class ValuesPlanner(DefaultSavePlanner):
    """What is no tensor is handed on as it is: torch would pickle it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(
        self, state_dict: Flat, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[ALL], storage_meta, is_coordinator)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


class FileWriter:
    """Takes over this rank's share of a state.

    staging: for copies; None where tensors are to be written from where they are.
    """

    def __init__(self, rank: int, staging: Staging | None) -> None:
        self.rank, self.staging = rank, staging
        self.entries: list[Entry] = []
        self.values: Flat = {}
        """This rank's part of what is no tensor."""
        self.tensors: dict[str, SavedTensor] = {}
        """On the first rank: what lies where, of all ranks."""
        self.copied = False

    @property
    def file(self) -> str:
        return file_of(self.rank)

    def offer(self, state: Flat) -> tuple[list[WriteItem], Offer]:
        """What this rank holds of a state."""
        items = planner_of(state).create_local_plan().items
        room = self.staging.available_bytes() if self.staging is not None else None
        return items, Offer(pieces=tuple(map(piece_of, items)), copies=self.staging is not None, host_bytes=room)

    def take(self, plan: SavePlan, state: Flat) -> None:
        """What the plan names, of a state of the form that the plan was made for."""
        planner = planner_of(state)
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self.copied = plan.storage_data and self.staging is not None
        if self.copied and self.staging is not None:
            self.staging.begin(sum(piece_of(item).num_bytes for item in tensors))
        for item in tensors:
            self._take(item, planner)
        if self.copied and self.staging is not None:
            self.staging.finish()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                self.values[item.index.fqn] = to_plain(item.index.fqn, planner.resolve_data(item))

    def _take(self, item: WriteItem, planner: SavePlanner) -> None:
        assert item.tensor_data is not None
        found: Any = planner.resolve_data(item)
        data, chunk = item.tensor_data, item.tensor_data.chunk
        key = key_of(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes) == tuple(data.size))
        check_dtype(key, found.dtype)
        kept = self.staging.copy(found) if self.copied and self.staging is not None else found.detach()
        self.entries.append(Entry(key, kept))


def planner_of(state: Flat) -> ValuesPlanner:
    planner = ValuesPlanner()
    planner.set_up_planner({ALL: state})
    return planner


class PartsPlanner(DefaultLoadPlanner):
    """Into tensors that are there already. What is no tensor is JSON, and kept in `values`."""

    def __init__(self) -> None:
        # a parameter that never got a gradient has optimizer state here, but had none when it was saved
        super().__init__(flatten_state_dict=False, allow_partial_load=True)
        self.values: Flat = {}

    def set_up_planner(self, state_dict: Flat, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict[ALL], metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = json.loads(value.getvalue())


class FileReader:
    def __init__(self, folder: Path, contents: Contents) -> None:
        self.folder, self.contents = folder, contents
        self.boxes = {(name, box.offsets): box for name, tensor in contents.tensors.items() for box in tensor.boxes}

    def load(self, state: Flat) -> Flat:
        """Into the tensors of a state; returns what is no tensor. A rank asks no other: torch would have them exchange pickles."""
        planner = PartsPlanner()
        planner.set_up_planner({ALL: state}, self.contents.metadata(), is_coordinator=True)
        self._read(planner.finish_plan(planner.create_local_plan()), planner)
        return planner.values

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[str, list[tuple[ReadItem, Box]]] = defaultdict(list)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                text = json.dumps(self.contents.values[item.storage_index.fqn])
                planner.load_bytes(item, io.BytesIO(text.encode()))
            else:
                box = self.boxes[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                by_file[box.file].append((item, box))
        for file, wanted in by_file.items():
            self._read_file(self.folder / file, wanted, planner)

    def _read_file(self, path: Path, wanted: list[tuple[ReadItem, Box]], planner: LoadPlanner) -> None:
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                for item, box in wanted:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_cut(file, item, box))
                    planner.commit_tensor(item, target)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def flatten(nest: Mapping[str, Any], prefix: str = "") -> Flat:
    """Names joined by dots; what is no mapping is a leaf."""
    found: Flat = {}
    for key, item in nest.items():
        found |= flatten(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return found


def with_values(nest: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nest with the leaves that were loaded in place of its own; tensors were loaded where they are."""
    return {
        key: with_values(item, values, f"{prefix}{key}.")
        if isinstance(item, Mapping)
        else like(item, values[f"{prefix}{key}"])
        if f"{prefix}{key}" in values
        else item
        for key, item in nest.items()
    }


def _cut(file: Any, item: ReadItem, box: Box) -> Tensor:
    """What one read asks for, of one box."""
    lengths = tuple(item.lengths)
    view = file.get_slice(box.key)
    if tuple(view.get_shape()) != box.sizes:
        raise CheckpointError(f"'{box.key}' in {box.file} is of shape {view.get_shape()}, not {list(box.sizes)}")
    if lengths == box.sizes:
        whole: Tensor = file.get_tensor(box.key)
        return whole
    starts = tuple(item.storage_offsets)
    part: Tensor = view[tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))]
    return part
