"""Stretches of dims: what ranks hold of a tensor, and reading that much of one that is stored in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from meshwright.runtime.extent import Stretch, Stretches, between, cut_runs, shard, whole_extent
from meshwright.training.weights_folder import ONE_FILE, WeightsFolder
from meshwright.training.weights_source import Join, Source, Stack, Turn, Whole


def positions(stretches: Stretches) -> list[int]:
    return [place for stretch in stretches for place in range(stretch.start, stretch.stop)]


@settings(max_examples=60)
@given(size=st.integers(0, 40), ranks=st.integers(1, 6), runs=st.integers(1, 4), part=st.integers(1, 3))
def test_ranks_together_hold_all(size: int, ranks: int, runs: int, part: int) -> None:
    """Shards need not be even, as torch's are; cuts are, of every run."""
    shards = [positions(shard((Stretch(0, size),), ranks, rank)) for rank in range(ranks)]
    assert [place for one in shards for place in one] == list(range(size))
    assert [len(one) for one in shards] == [len(one) for one in _chunks(size, ranks)]
    length = runs * ranks * part
    cuts = [positions(cut_runs((Stretch(0, length),), runs, ranks, rank)) for rank in range(ranks)]
    whole = torch.arange(length).view(runs, ranks, part)
    assert cuts == [whole[:, rank].flatten().tolist() for rank in range(ranks)]
    again = [positions(shard(cut_runs((Stretch(0, length),), runs, ranks, 0), 2, half)) for half in (0, 1)]
    assert again[0] + again[1] == cuts[0], "ZeRO shards what a cut left"


def _chunks(size: int, ranks: int) -> list[torch.Tensor]:
    found = list(torch.arange(size).chunk(ranks)) if size else []
    return found + [torch.empty(0)] * (ranks - len(found))


SOURCES: dict[str, Source] = {
    "whole": Whole("a"),
    "joined": Join((Whole("a"), Whole("b"), Whole("a")), 1),
    "turned": Turn(Join((Whole("a"), Whole("c")), 0), 0, 1),
    "stacked": Join((Stack((Whole("a"), Whole("c"), Whole("a"))), Stack((Whole("c"), Whole("a"), Whole("c")))), 1),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_any_part_of_any_source(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(4, 6), "b": torch.randn(4, 3), "c": torch.randn(4, 6)}
    save_file(tensors, tmp_path / ONE_FILE)
    folder, source = WeightsFolder(tmp_path), SOURCES[kind]
    shape = source.shape(folder)
    whole = source.read(folder, whole_extent(shape))
    assert tuple(whole.shape) == shape
    expected = {
        "whole": lambda: tensors["a"],
        "joined": lambda: torch.cat([tensors["a"], tensors["b"], tensors["a"]], 1),
        "turned": lambda: torch.cat([tensors["a"], tensors["c"]]).T,
        "stacked": lambda: torch.cat([torch.stack([tensors[name] for name in names]) for names in ("aca", "cac")], 1),
    }[kind]()
    assert torch.equal(whole, expected)
    for _ in range(30):
        extent = tuple(_some(size) for size in shape)
        before = folder.bytes_read
        part = source.read(folder, extent)
        wanted = expected
        for dim, stretches in enumerate(extent):
            wanted = wanted.index_select(dim, torch.tensor(positions(stretches), dtype=torch.long))
        assert torch.equal(part, wanted)
        assert folder.bytes_read - before == 4 * part.numel(), "nothing else is read"


def _some(size: int) -> Stretches:
    """One or two stretches of a dim, or nothing of it."""
    cuts = sorted(torch.randint(0, size + 1, (4,)).tolist())
    return (
        *between((Stretch(0, size),), cuts[0], cuts[1]),
        *between((Stretch(0, size),), cuts[2], cuts[3]),
    )
