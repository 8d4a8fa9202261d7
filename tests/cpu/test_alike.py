"""Of blocks that are alike, one is followed; of those that are not, each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.runtime.split.alike import alike_once
from meshwright.runtime.split.layout import Cut, lay

NAMES = [f"blocks.{number}" for number in range(5)]


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + self.outer(self.inner(x)) * scale


class Model(nn.Module):
    def __init__(self, hidden: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, size) for size in hidden)

    def forward(self, x: Tensor, scales: list[float]) -> Tensor:
        for block, scale in zip(self.blocks, scales, strict=True):
            x = block(x, scale)
        return x


def followed(model: Model, x: Tensor, scales: list[float]) -> list[int]:
    """Numbers of the blocks that computed."""
    seen: list[int] = []
    for number, block in enumerate(model.blocks):
        block.inner.register_forward_hook(lambda *_, number=number: seen.append(number))  # type: ignore[misc]
    with alike_once(model, NAMES):
        model(x, scales)
    return seen


def test_of_five_alike_one_is_followed() -> None:
    assert followed(Model([8] * 5), torch.ones(2, 4, requires_grad=True), [1.0] * 5) == [0]


def test_other_shapes_are_followed() -> None:
    assert followed(Model([8, 8, 16, 8, 16]), torch.ones(2, 4, requires_grad=True), [1.0] * 5) == [0, 2]


def test_another_call_is_followed() -> None:
    assert followed(Model([8] * 5), torch.ones(2, 4, requires_grad=True), [1.0, 2.0, 1.0, 2.0, 3.0]) == [0, 1, 4]


def test_a_part_that_comes_back_whole_is_not_passed_on() -> None:
    """Parts of a tensor are laid over ranks: a block that puts them together does not return what it was given."""
    x = lay(torch.ones(2, 4, requires_grad=True), {"tp": Cut(0)})
    assert followed(Model([8] * 5), x, [1.0] * 5) == [0, 1]


def test_blocks_are_as_before_afterwards() -> None:
    model = Model([8] * 5)
    expected = model(torch.ones(2, 4), [1.0] * 5)
    with alike_once(model, NAMES):
        model(torch.ones(2, 4), [1.0] * 5)
    assert all("forward" not in vars(block) for block in model.blocks)
    torch.testing.assert_close(model(torch.ones(2, 4), [1.0] * 5), expected)
