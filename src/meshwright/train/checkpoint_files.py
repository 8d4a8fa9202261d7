"""torch's distributed checkpoint on our own files: its planner decides which rank writes and reads what; nothing is pickled.

saving    (all) plan → (first) make room → (all) take the tensors over → (first) contents
          The tensors are not written here: a writer holds them until they are (`saver.py`), so that the ranks talk to each
          other only now, and never while training goes on.
loading   every rank reads the boxes of the files that its own tensors need
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
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
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.core.errors import CheckpointError
from meshwright.train.contents import Box, Contents, SavedTensor, key_of
from meshwright.train.plain_values import like, to_plain
from meshwright.train.staging import Staging
from meshwright.train.tensors_file import NAMES, Entry, check_dtype

Flat = dict[str, Any]
ALL = "state"
"""What torch is handed: one entry, of which our planners take the inside. It would look at every entry by itself, at length."""


@dataclass(frozen=True)
class Allowance:
    """What a rank says when a save is planned, and what it is told."""

    host_bytes: int | None
    """That it could take for copies; None where that is not known."""
    copies: bool = True
    """Whether tensors are copied, so that training may go on while they are written."""


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


class FileWriter(StorageWriter):
    """Takes over this rank's part of a state.

    make_room: called on the first rank with the bytes that all of it takes, before anything is copied or written.
    staging: for copies; None where tensors are to be written from where they are.
    """

    def __init__(self, rank: int, make_room: Callable[[int], None], staging: Staging | None) -> None:
        self.rank, self.make_room, self.staging = rank, make_room, staging
        self.entries: list[Entry] = []
        self.values: Flat = {}
        """This rank's part of what is no tensor."""
        self.tensors: dict[str, SavedTensor] = {}
        """On the first rank: what lies where, of all ranks."""
        self.plan: SavePlan | None = None
        self.copied = False

    @property
    def file(self) -> str:
        return f"rank-{self.rank:05d}.safetensors"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.entries, self.values, self.tensors = [], {}, {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        room = self.staging.available_bytes() if self.staging is not None else None
        return replace(plan, storage_data=Allowance(room, self.staging is not None))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        needed = [sum(_bytes(item) for item in plan.items) for plan in plans]
        self.make_room(sum(needed))
        fits = all(
            plan.storage_data.copies and (plan.storage_data.host_bytes is None or own <= plan.storage_data.host_bytes)
            for plan, own in zip(plans, needed, strict=True)
        )
        return [replace(plan, storage_data=Allowance(None, fits)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        self.plan = plan
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self.copied = plan.storage_data.copies and self.staging is not None
        if self.copied and self.staging is not None:
            self.staging.begin(sum(_bytes(item) for item in tensors))
        for item in tensors:
            results.append(self._take(item, planner))
        if self.copied and self.staging is not None:
            self.staging.finish()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                self.values[item.index.fqn] = to_plain(item.index.fqn, planner.resolve_data(item))
                results.append(WriteResult(item.index, 0, None))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: what lies where."""
        boxes: dict[str, list[Box]] = defaultdict(list)
        for result in (result for of_rank in results for result in of_rank):
            if result.storage_data is not None:
                boxes[result.index.fqn].append(result.storage_data)
        for name, found in boxes.items():
            described: Any = metadata.state_dict_metadata[name]
            dtype = NAMES[described.properties.dtype]
            self.tensors[name] = SavedTensor(dtype=dtype, shape=tuple(described.size), boxes=tuple(found))

    def take_again(self, plan: SavePlan, state: Flat) -> None:
        """A state of the same shape as the one that the plan was made for: no other rank is asked."""
        planner = ValuesPlanner()
        planner.set_up_planner({ALL: state})
        self.write_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # nobody names one: a writer is made for its draft

    def _take(self, item: WriteItem, planner: SavePlanner) -> WriteResult:
        assert item.tensor_data is not None
        found: Any = planner.resolve_data(item)
        data, chunk = item.tensor_data, item.tensor_data.chunk
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        key = key_of(item.index.fqn, offsets, sizes == tuple(data.size))
        check_dtype(key, found.dtype)
        kept = self.staging.copy(found) if self.copied and self.staging is not None else found.detach()
        self.entries.append(Entry(key, kept))
        box = Box(offsets=offsets, sizes=sizes, file=self.file, key=key)
        return WriteResult(item.index, self.entries[-1].num_bytes, box)


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


class FileReader(StorageReader):
    def __init__(self, folder: Path, contents: Contents) -> None:
        self.folder, self.contents = folder, contents
        self.boxes = {(name, box.offsets): box for name, tensor in contents.tensors.items() for box in tensor.boxes}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.contents.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
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
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

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


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
