"""Data: the same global batches whatever the number of ranks, a cursor that survives, splits that do not mix, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ASSETS, ROOT, source_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwright.core.errors import InputError, MeshwrightError, ModelError
from meshwright.models.examples import ImageShape, TextShape, random_text
from meshwright.models.objective import IGNORED_LABEL
from meshwright.models.source import ModelSource, resolve
from meshwright.training.corpus import read_corpus
from meshwright.training.data import check_data, default_source, open_streams
from meshwright.training.positions import find_positions, within_positions
from meshwright.training.samples import SyntheticImages, TextWindows
from meshwright.training.settings import DataSettings
from meshwright.training.stream import IndexedStream, IterableStream, Slice, Stream

quick = settings()

TEXT = TextShape(seq=8, vocab=256)
IMAGES = ImageShape(size=8, classes=4)
ALONE = Slice(0, 1)


class Numbers:
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def batch(self, numbers: Any) -> Tensor:
        return torch.tensor(list(numbers))


def text_model(seq: int = 8, vocab: int = 256) -> ModelSource:
    shape = TextShape(seq=seq, vocab=vocab)
    return ModelSource("text", torch.nn.Identity, random_text(shape), shape)


def opened(name: str, source: ModelSource, part: Slice = ALONE, *, seed: int = 0, shuffle: bool = True) -> Stream:
    """The training stream of global batches of four."""
    return open_streams(DataSettings(source=name, shuffle=shuffle), source, 4, part, seed)[0]


def joined(streams: list[Stream]) -> dict[str, Tensor]:
    """The next global batch, put together from the ranks' shares."""
    shares: list[Any] = [stream.next() for stream in streams]
    return {name: torch.cat([share[name] for share in shares]) for name in shares[0]}


# Which samples a global batch holds.


@quick
@given(st.integers(1, 30), st.integers(0, 2**31 - 1), st.booleans(), st.sampled_from([2, 4]))
def test_global_batches_do_not_depend_on_the_degree(length: int, seed: int, shuffle: bool, degree: int) -> None:
    alone = IndexedStream(Numbers(length), 8, ALONE, seed, shuffle)
    ranks = [IndexedStream(Numbers(length), 8, Slice(rank, degree), seed, shuffle) for rank in range(degree)]
    for _ in range(6):
        assert torch.equal(alone.next(), torch.cat([rank.next() for rank in ranks]))  # type: ignore[arg-type]
        assert {rank.cursor for rank in ranks} == {alone.cursor}


@quick
@given(st.integers(1, 30), st.integers(0, 2**31 - 1), st.integers(1, 7), st.integers(1, 7))
def test_the_sequence_does_not_depend_on_the_batch_size(length: int, seed: int, one: int, other: int) -> None:
    """A run may go on with another batch size: the cursor counts samples."""
    streams = [IndexedStream(Numbers(length), size, ALONE, seed, shuffle=True) for size in (one, other)]
    first, second = (torch.cat([stream.next() for _ in range(40)])[:40].tolist() for stream in streams)
    assert first == second


@quick
@given(st.integers(1, 30), st.integers(0, 2**31 - 1))
def test_an_epoch_holds_every_sample_once(length: int, seed: int) -> None:
    stream = IndexedStream(Numbers(length), length, ALONE, seed, shuffle=True)
    epochs = [stream.next().tolist() for _ in range(3)]  # type: ignore[union-attr]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length > 12:
        assert epochs[0] != epochs[1] != epochs[2], "every epoch has the same order"


def test_another_seed_gives_another_order() -> None:
    streams = (IndexedStream(Numbers(100), 100, ALONE, seed, shuffle=True) for seed in range(5))
    assert len({tuple(stream.next().tolist()) for stream in streams}) == 5  # type: ignore[union-attr]


def test_without_shuffle_samples_come_in_order() -> None:
    stream = IndexedStream(Numbers(6), 4, ALONE, seed=3, shuffle=False)
    assert [stream.next().tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]  # type: ignore[union-attr]


@quick
@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 2**31 - 1))
def test_a_cursor_survives(length: int, consumed: int, seed: int) -> None:
    """A new stream that seeks goes on as the old one would have."""
    old = IndexedStream(Numbers(length), 4, ALONE, seed, shuffle=True)
    for _ in range(consumed):
        old.next()
    new = IndexedStream(Numbers(length), 4, ALONE, seed, shuffle=True)
    new.seek(old.cursor)
    assert new.cursor == old.cursor == 4 * consumed
    for _ in range(3):
        assert torch.equal(new.next(), old.next())  # type: ignore[arg-type]


SOURCES = {
    "text": (f"text:{ROOT}/src", lambda: text_model()),
    "images": ("images", lambda: source_of("resnet")),
    "example": ("example", lambda: resolve(f"{ASSETS}/models.py:own_loss")),
    "dataset": (f"{ASSETS}/datasets.py:dataset", lambda: text_model()),
    "iterable": (f"{ASSETS}/datasets.py:iterable", lambda: text_model()),
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_global_batch(kind: str, degree: int) -> None:
    name, make = SOURCES[kind]
    alone = opened(name, make())
    ranks = [opened(name, make(), Slice(rank, degree)) for rank in range(degree)]
    for _ in range(4):
        whole: Any = alone.next()
        shared = joined(ranks)
        assert whole.keys() == shared.keys()
        assert all(torch.equal(whole[key], shared[key]) for key in whole)


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_can_seek(kind: str) -> None:
    name, make = SOURCES[kind]
    old, new = opened(name, make()), opened(name, make())
    for _ in range(4):
        old.next()
    new.seek(old.cursor)
    before, after = old.next(), new.next()
    assert all(torch.equal(before[key], after[key]) for key in before)  # type: ignore[index,call-overload]


# Text.


def test_the_standard_library_is_the_same_every_time() -> None:
    first, again = (read_corpus("stdlib", "train") for _ in range(2))
    assert torch.equal(first, again)
    assert len(first) > 5e6
    assert 1e5 < len(read_corpus("stdlib", "validation")) < len(first) / 5


def write_files(folder: Path, count: int) -> None:
    for number in range(count):
        folder.joinpath(f"file{number}.txt").write_text(f"<{number}>" * 20)


def numbers_in(tokens: Tensor) -> set[str]:
    return set(bytes(tokens.tolist()).decode().replace("\n", "").strip("<>").split("><"))


def test_splits_do_not_share_a_file(tmp_path: Path) -> None:
    write_files(tmp_path, 100)
    train, validation = (numbers_in(read_corpus(f"text:{tmp_path}", split)) for split in ("train", "validation"))
    assert train.isdisjoint(validation)
    assert train | validation == {str(number) for number in range(100)}
    assert 1 <= len(validation) <= 15


def test_a_file_keeps_its_split_when_others_come(tmp_path: Path) -> None:
    write_files(tmp_path, 50)
    before = numbers_in(read_corpus(f"text:{tmp_path}", "validation"))
    write_files(tmp_path, 100)
    assert before <= numbers_in(read_corpus(f"text:{tmp_path}", "validation"))


def test_few_files_do_not_share_text_between_splits(tmp_path: Path) -> None:
    """Where no file falls into the validation split, training text is not shown as validation."""
    write_files(tmp_path, 2)
    train, validation = (bytes(read_corpus(f"text:{tmp_path}", s).tolist()) for s in ("train", "validation"))
    assert validation
    assert train != validation
    assert len(train) + len(validation) <= sum(path.stat().st_size for path in tmp_path.iterdir()) + 1


def test_a_single_file_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(100)))
    train, validation = (read_corpus(f"text:{path}", split).tolist() for split in ("train", "validation"))
    assert train + validation == list(range(100))
    assert len(validation) == 5


def test_windows_follow_each_other() -> None:
    windows = TextWindows(torch.arange(25, dtype=torch.uint8), TEXT, "t")
    assert len(windows) == 3
    batch: Any = windows.batch([2, 0])
    assert batch["input_ids"].tolist() == [list(range(16, 24)), list(range(8))]
    assert batch["labels"].tolist() == [list(range(17, 25)), list(range(1, 9))]
    assert batch["input_ids"].dtype == torch.int64


def test_an_encoder_decoder_sees_the_labels_one_place_later() -> None:
    shape = TextShape(seq=4, vocab=256, task="decode")
    batch: Any = TextWindows(torch.arange(1, 10, dtype=torch.uint8), shape, "t").batch([0])
    assert batch["labels"].tolist() == [[2, 3, 4, 5]]
    assert batch["decoder_input_ids"].tolist() == [[0, 2, 3, 4]]


def test_a_model_that_fills_in_sees_a_window_with_holes() -> None:
    shape = TextShape(seq=20, vocab=256, task="masked")
    windows = TextWindows(torch.arange(101, dtype=torch.uint8), shape, "t")
    batch: Any = windows.batch([3, 1])
    alone: Any = windows.batch([1])
    hidden = batch["input_ids"] == 255
    assert hidden.sum(dim=1).tolist() == [3, 3]
    assert torch.equal(hidden, batch["labels"] != IGNORED_LABEL)
    assert torch.equal(torch.where(hidden, batch["labels"], batch["input_ids"])[1], torch.arange(20, 40))
    assert torch.equal(alone["labels"][0], batch["labels"][1]), "a sample's holes are its own"


def test_text_does_not_tell_its_class() -> None:
    shape = TextShape(seq=4, vocab=256, task="classify")
    source = ModelSource("classifier", torch.nn.Identity, random_text(shape), shape)
    assert default_source(source) == "example"
    with pytest.raises(InputError, match="does not learn from it"):
        open_streams(DataSettings(source="stdlib"), source, 4, ALONE, 0)


# Images.


def test_images_repeat_and_splits_differ() -> None:
    train, validation = SyntheticImages(IMAGES, "train"), SyntheticImages(IMAGES, "validation")
    first, again, other = train.batch([1, 2]), train.batch([1, 2]), validation.batch([1, 2])
    assert torch.equal(first["pixel_values"], again["pixel_values"])  # type: ignore[index,call-overload]
    assert not torch.equal(first["pixel_values"], other["pixel_values"])  # type: ignore[index,call-overload]
    assert first["pixel_values"].shape == (2, 3, 8, 8)  # type: ignore[index,call-overload]


# The user's own data.


def x_of(batch: Any) -> list[float]:
    return batch["x"].flatten().tolist()


def test_a_dataset() -> None:
    stream = opened(f"{ASSETS}/datasets.py:dataset", text_model(), shuffle=False)
    assert [x_of(stream.next()) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_a_dataset_is_shuffled() -> None:
    name = f"{ASSETS}/datasets.py:dataset"
    first, again = (x_of(opened(name, text_model(), seed=5).next()) for _ in range(2))
    assert first == again
    assert first != [0, 1, 2, 3]


def test_a_loader_keeps_its_collate_function_and_order() -> None:
    """Whether it shuffles is its own."""
    stream = opened(f"{ASSETS}/datasets.py:loader", text_model(), shuffle=True)
    assert x_of(stream.next()) == [0, 2, 4, 6]
    shuffled = opened(f"{ASSETS}/datasets.py:shuffled_loader", text_model(), shuffle=False)
    drawn = [*x_of(shuffled.next()), *x_of(shuffled.next())]
    assert drawn != sorted(drawn)
    assert len(set(drawn)) == 8


LOADERS = ("loader", "shuffled_loader", "worked_loader", "weighted_loader", "replacing_loader", "dropping_loader")


@pytest.mark.parametrize("function", LOADERS)
def test_ranks_with_random_states_of_their_own_share_a_loaders_batches(function: str) -> None:
    name = f"{ASSETS}/datasets.py:{function}"
    torch.manual_seed(1)
    alone = opened(name, text_model(), seed=3)
    ranks = []
    for rank in range(2):
        torch.manual_seed(10 + rank)
        ranks.append(opened(name, text_model(), Slice(rank, 2), seed=3))
    before = torch.get_rng_state()
    for _ in range(5):
        assert x_of(alone.next()) == x_of(joined(ranks))
    assert torch.equal(torch.get_rng_state(), before), "a model's dropout does not depend on how data is loaded"
    again = opened(name, text_model(), seed=3)
    again.seek(alone.cursor)
    assert x_of(again.next()) == x_of(alone.next())


def test_a_loaders_workers_load() -> None:
    batch: Any = opened(f"{ASSETS}/datasets.py:worked_loader", text_model()).next()
    assert set(batch["worker"].tolist()) <= {0, 1}, "in a process of its own, after its init function"


def test_a_loader_drops_the_last_batch_where_it_says_so() -> None:
    stream = opened(f"{ASSETS}/datasets.py:dropping_loader", text_model())
    assert [x_of(stream.next())[0] for _ in range(3)] == [0, 4, 0]


def test_a_loaders_generator_decides_its_order() -> None:
    orders = [x_of(opened(f"{ASSETS}/datasets.py:seeded_loader", text_model(), seed=seed).next()) for seed in (1, 2)]
    assert orders[0] == orders[1] != x_of(opened(f"{ASSETS}/datasets.py:shuffled_loader", text_model()).next())


def test_a_trained_model_needs_data_that_somebody_named() -> None:
    with pytest.raises(InputError, match="weights names a trained model, but no data"):
        check_data(DataSettings(), text_model(), has_weights=True)
    check_data(DataSettings(), text_model())
    check_data(DataSettings(source="stdlib"), text_model(), has_weights=True)


def test_training_and_validation_data() -> None:
    settings_ = DataSettings(source=f"{ASSETS}/datasets.py:both", shuffle=False)
    train, validation = open_streams(settings_, text_model(), 4, Slice(1, 2), seed=0)
    assert validation is not None
    assert x_of(train.next()) == [2, 3]
    assert x_of(validation.next()) == [102, 103]
    assert open_streams(DataSettings(source=f"{ASSETS}/datasets.py:dataset"), text_model(), 4, ALONE, 0)[1] is None


def test_an_iterable_starts_again_when_it_ends() -> None:
    stream = opened(f"{ASSETS}/datasets.py:iterable", text_model())
    assert [x_of(stream.next())[0] for _ in range(5)] == [0, 4, 8, 0, 4]
    assert stream.cursor == 20
    stream.seek(8)
    assert x_of(stream.next()) == [8, 9, 10, 11]


# Tables of positions.


class Padded(nn.Embedding):
    """As in RoBERTa: positions begin behind the one of padding."""

    def __init__(self) -> None:
        super().__init__(12, 4, padding_idx=1)


@pytest.mark.parametrize(
    ("module", "length"),
    [
        ({"wpe": nn.Embedding(12, 4)}, 12),
        ({"position_embeddings": Padded(), "word_embeddings": nn.Embedding(99, 4)}, 10),
        ({"position_embedding": nn.Embedding(5, 4), "text_position_embedding": nn.Embedding(7, 4)}, 7),
        ({"relative_position_bias": nn.Embedding(5, 4), "tokens": nn.Embedding(5, 4)}, None),
    ],
)
def test_samples_longer_than_the_table_of_positions_are_refused(module: Any, length: int | None) -> None:
    table = find_positions(nn.ModuleDict(module))
    assert (table and table.length) == length
    for extra in (0, 1):
        ids = torch.zeros(4, (length or 20) + extra, dtype=torch.long)
        stream = within_positions(IterableStream([{"input_ids": ids}], 4, ALONE), table)
        if length and extra:
            with pytest.raises(InputError, match=rf"{length + 1} tokens.*max_length={length}"):
                stream.next()
        else:
            stream.next()
            assert stream.cursor == 4


# Choices and errors.


def test_the_source_follows_the_model() -> None:
    assert default_source(source_of("gpt")) == "stdlib"
    assert default_source(source_of("resnet")) == "images"
    assert default_source(source_of("odd")) == "example"


@pytest.mark.parametrize(
    ("name", "model", "error", "said"),
    [
        (
            f"text:{ASSETS}",
            lambda: source_of("gpt"),
            InputError,
            "the model knows 61 tokens, but text as bytes needs 256",
        ),
        ("stdlib", lambda: source_of("resnet"), InputError, "is text, but resnet:"),
        ("images", lambda: text_model(), InputError, "data source 'images' does not suit text, which takes no images"),
        ("sdtlib", lambda: text_model(), InputError, "unknown data source 'sdtlib': use stdlib, text:PATH"),
        ("text:/nowhere", lambda: text_model(), InputError, "no such file or folder: /nowhere"),
        (f"text:{ASSETS}/llama-tiny.json", lambda: text_model(seq=4096), InputError, "fewer than one sample of 4096"),
        (f"{ASSETS}/datasets.py:odd_loader", lambda: text_model(), InputError, "batch_size=3, but the plan's global"),
        (f"{ASSETS}/datasets.py:distributed_loader", lambda: text_model(), InputError, "a DistributedSampler"),
        (
            f"{ASSETS}/datasets.py:small_loader",
            lambda: text_model(),
            InputError,
            "3 samples, fewer than a global batch",
        ),
        (f"{ASSETS}/datasets.py:no_samples", lambda: text_model(), InputError, "has no samples"),
        (f"{ASSETS}/datasets.py:number", lambda: text_model(), InputError, "returned int: return a DataLoader"),
        (
            f"{ASSETS}/datasets.py:numbr",
            lambda: text_model(),
            InputError,
            "no function 'numbr': did you mean 'number'?",
        ),
        (f"{ASSETS}/datasets.py:fails", lambda: text_model(), ModelError, "raised OSError: the shelf is empty (line"),
        ("/nowhere/data.py:load", lambda: text_model(), InputError, "/nowhere/data.py: no such file"),
    ],
)
def test_wrong_sources(name: str, model: Any, error: type[MeshwrightError], said: str) -> None:
    with pytest.raises(error) as caught:
        opened(name, model())
    assert said in str(caught.value)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("picture.png").write_bytes(b"x")
    with pytest.raises(InputError, match="no text files in"):
        opened(f"text:{tmp_path}", text_model())


def test_an_iterable_without_a_batch_is_refused() -> None:
    with pytest.raises(InputError, match="the data function yields no batch"):
        opened(f"{ASSETS}/datasets.py:nothing", text_model()).next()


def test_an_iterator_is_refused() -> None:
    """It could not be read again for the next epoch, nor after a resume."""
    with pytest.raises(InputError, match="an iterator, which can be read only once"):
        opened(f"{ASSETS}/datasets.py:read_once", text_model())


def test_an_iterable_of_other_batches_is_refused() -> None:
    settings_ = DataSettings(source=f"{ASSETS}/datasets.py:iterable")
    stream, _ = open_streams(settings_, text_model(), 8, Slice(0, 2), seed=0)
    with pytest.raises(InputError, match="yields batches of 4 samples, but the global batch is 8"):
        stream.next()
