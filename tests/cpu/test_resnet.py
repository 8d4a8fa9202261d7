"""A ResNet whose stages are blocks, and one that begins as its shortcuts."""

from __future__ import annotations

import torch

from meshwright.capturing.blocks import find_blocks
from meshwright.models.resnet import Bottleneck, ResNet, ResNetOptions

SMALL = {"depth": 26, "image": 32, "classes": 10, "channels": 8}


def test_stages_as_blocks_are_the_same_network() -> None:
    """Four segments to recompute, under the names of its tensors that it has without."""
    plain, whole = (ResNet(ResNetOptions(**SMALL, stage_blocks=blocks)) for blocks in (False, True))
    repeated = [name for name, is_repeated in find_blocks(whole).items() if is_repeated]
    assert repeated == [f"stages.{stage}" for stage in range(4)]
    assert len([name for name, is_repeated in find_blocks(plain).items() if is_repeated]) == 8
    whole.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(plain(images), whole(images))


def test_a_calm_bottleneck_begins_as_its_shortcut() -> None:
    for calm in (False, True):
        network = ResNet(ResNetOptions(**SMALL, calm=calm))
        bottleneck = next(part for part in network.modules() if isinstance(part, Bottleneck))
        x = torch.randn(4, 8, 8, 8)
        assert torch.equal(bottleneck(x), bottleneck.shortcut(x).relu()) == calm


def test_a_calm_network_does_not_amplify_rounding() -> None:
    """The gradient's norm at a deep stage and at the first one: where it grows on the way back, so does any difference."""
    growth = {}
    for calm in (False, True):
        torch.manual_seed(0)
        network = ResNet(ResNetOptions(**{**SMALL, "depth": 101}, calm=calm))
        loss = torch.nn.functional.cross_entropy(network(torch.randn(8, 3, 32, 32)), torch.arange(8))
        loss.backward()
        first, last = network.stem[0].weight.grad, network.head.weight.grad
        assert first is not None
        assert last is not None
        growth[calm] = float(first.norm() / last.norm())
    assert growth[True] < growth[False] / 10
