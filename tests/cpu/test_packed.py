"""Positions of packed samples: what a model makes for itself is looked at once, what samples bring is looked at every time."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.packed import NAME, Looked, nothing_packed

masking = pytest.importorskip("transformers.masking_utils")


class Sights:
    """How often somebody looked."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.own = getattr(masking, NAME)

    def find(self, position_ids: torch.Tensor) -> torch.Tensor | None:
        self.num_looks += 1
        return self.own(position_ids)  # type: ignore[no-any-return]  # transformers is not typed


@pytest.fixture
def sights(monkeypatch: pytest.MonkeyPatch) -> Sights:
    found = Sights()
    monkeypatch.setattr(masking, NAME, found.find)
    return found


def find(position_ids: torch.Tensor) -> torch.Tensor | None:
    return getattr(masking, NAME)(position_ids)  # type: ignore[no-any-return]  # transformers is not typed


def test_positions_of_the_models_own_are_looked_at_once(sights: Sights) -> None:
    looked = Looked()
    for _ in range(3):
        with looked.looked_for_once():
            assert find(torch.arange(8)[None].expand(4, -1)) is None
    assert sights.num_looks == 1
    with looked.looked_for_once():
        assert find(torch.arange(16)[None].expand(4, -1)) is None
    assert sights.num_looks == 2


def test_packed_samples_are_found_in_every_step(sights: Sights) -> None:
    plain, packed = torch.arange(8).repeat(2, 1), torch.arange(4).repeat(2, 2)
    looked = Looked()
    with looked.looked_for_once():
        assert find(plain) is None
        assert find(packed) is not None
        assert find(plain) is None
    assert sights.num_looks == 3


def test_of_a_single_sample_nothing_is_assumed(sights: Sights) -> None:
    looked = Looked()
    with looked.looked_for_once():
        assert find(torch.arange(8)[None]) is None
        found = find(torch.arange(4).repeat(2)[None])
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]


def test_forwards_that_overlap_leave_nothing_behind(sights: Sights) -> None:
    """As those of streamed microbatches do: one begins while another waits, and the first ends first."""
    looked, plain = Looked(), torch.arange(8)[None].expand(4, -1)
    one, other = looked.looked_for_once(), looked.looked_for_once()
    one.__enter__()
    other.__enter__()
    assert find(plain) is None
    assert find(plain) is None
    one.__exit__(None, None, None)
    assert find(plain) is None
    other.__exit__(None, None, None)
    assert getattr(masking, NAME) == sights.find
    assert sights.num_looks == 2


def test_what_transformers_has_is_back_afterwards(sights: Sights) -> None:
    with nothing_packed():
        assert find(torch.arange(4).repeat(2, 2)) is None
    assert find(torch.arange(4).repeat(2, 2)) is not None
    assert sights.num_looks == 1
