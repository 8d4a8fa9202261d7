"""From a data source's name to streams of batches for training and validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from meshwright.core.errors import InputError
from meshwright.core.units import ceil_div
from meshwright.models.examples import ImageShape, TextShape
from meshwright.models.objective import Batch, map_batch
from meshwright.models.seeded import seeded
from meshwright.models.source import ModelSource
from meshwright.models.userfile import call_function, split_name
from meshwright.training.corpus import Split
from meshwright.training.loaders import loader_stream
from meshwright.training.pictures import FolderImages, check_pictures
from meshwright.training.samples import DatasetSamples, Samples, SyntheticImages, make_text
from meshwright.training.settings import DataSettings
from meshwright.training.stream import IndexedStream, IterableStream, Slice, Stream

EXAMPLE_SAMPLES = 64


def open_streams(
    settings: DataSettings, source: ModelSource, global_batch: int, part: Slice, seed: int
) -> tuple[Stream, Stream | None]:
    """The training stream, and the validation stream where the source has one."""
    name = settings.source if settings.source != "auto" else default_source(source)
    if ".py:" in name:
        return _from_function(name, settings, global_batch, part, seed)
    train, validation = (_samples(name, source, split) for split in ("train", "validation"))
    return (
        IndexedStream(train, global_batch, part, seed, settings.shuffle),
        IndexedStream(validation, global_batch, part, seed, shuffle=False),
    )


def steps_per_epoch(settings: DataSettings, source: ModelSource, global_batch: int, seed: int) -> int | None:
    """Steps that see every sample once; None where nobody knows how many samples there are."""
    train, _ = open_streams(settings, source, global_batch, Slice(0, 1), seed)
    return ceil_div(len(train.samples), global_batch) if isinstance(train, IndexedStream) else None


def check_data(settings: DataSettings, source: ModelSource, has_weights: bool = False) -> None:
    """A source that is not there is refused before any rank starts; nothing is read yet. has_weights: the model was trained."""
    if has_weights and settings.source == "auto":
        raise InputError(
            "weights names a trained model, but no data to train it on: set source under [data] to path/to/file.py:function, which "
            "gives batches of its own tokenizer's tokens (or, to try it on bytes, to text:PATH or stdlib)"
        )
    name = settings.source if settings.source != "auto" else default_source(source)
    if ".py:" in name:
        split_name(name)
    elif name.startswith("text:") and not Path(name.removeprefix("text:")).exists():
        raise InputError(f"data source '{name}': no such file or folder: {name.removeprefix('text:')}")
    elif name.startswith("images:"):
        check_pictures(Path(name.removeprefix("images:")))
    elif name not in ("stdlib", "images", "example") and not name.startswith("text:"):
        raise _unknown(name)


def _unknown(name: str) -> InputError:
    return InputError(
        f"unknown data source '{name}': use stdlib, text:PATH, images, images:PATH, example, or path/to/file.py:function"
    )


def default_source(source: ModelSource) -> str:
    if takes_text(source):
        return "stdlib"
    if isinstance(source.shape, ImageShape):
        return "images"
    return "example"


def takes_text(source: ModelSource) -> bool:
    """Whether text alone is enough to train: classes of texts are not in it."""
    return isinstance(source.shape, TextShape) and source.shape.task != "classify"


def _samples(name: str, source: ModelSource, split: Split) -> Samples:
    if name == "stdlib" or name.startswith("text:"):
        if not isinstance(source.shape, TextShape) or not takes_text(source):
            raise InputError(f"data source '{name}' is text, but {source.name} does not learn from it: set data.source")
        return make_text(name, source.shape, split)
    if name == "images" or name.startswith("images:"):
        if not isinstance(source.shape, ImageShape):
            raise InputError(
                f"data source '{name}' does not suit {source.name}, which takes no images: set data.source"
            )
        if name == "images":
            return SyntheticImages(source.shape, split)
        return FolderImages(Path(name.removeprefix("images:")), source.shape, split)
    if name == "example" and source.example is not None:
        return _Example(source)
    raise _unknown(name)


class _Example:
    """The user's own example batch, again and again: a model without data can still be tried."""

    def __init__(self, source: ModelSource) -> None:
        assert source.example is not None
        self.samples = source.example(EXAMPLE_SAMPLES)

    def __len__(self) -> int:
        return EXAMPLE_SAMPLES

    def batch(self, numbers: Sequence[int]) -> Batch:
        return map_batch(lambda tensor: tensor[list(numbers)], self.samples)


def _from_function(
    name: str, settings: DataSettings, global_batch: int, part: Slice, seed: int
) -> tuple[Stream, Stream | None]:
    """The function returns a DataLoader, a dataset or an iterable of global batches, alone or as (train, validation)."""
    with seeded(seed):  # the same data on every rank, where the function draws it
        result = call_function(name)
    train, validation = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    opened = _stream(name, train, settings.shuffle, global_batch, part, seed)
    return opened, None if validation is None else _stream(name, validation, False, global_batch, part, seed)


def _stream(name: str, data: Any, shuffle: bool, global_batch: int, part: Slice, seed: int) -> Stream:
    if isinstance(data, DataLoader):
        return loader_stream(name, data, global_batch, part, seed)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return IndexedStream(DatasetSamples(data), global_batch, part, seed, shuffle)
    if isinstance(data, Iterable) and not isinstance(data, Iterator):
        return IterableStream(data, global_batch, part, seed)
    if isinstance(data, Iterator):
        raise InputError(f"{name} returned an iterator, which can be read only once: return what it was made from")
    raise InputError(
        f"{name} returned {type(data).__name__}: return a DataLoader, a dataset or an iterable of global batches"
    )
