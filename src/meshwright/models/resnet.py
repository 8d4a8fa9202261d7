"""ResNet-50 and -101 with bottleneck blocks; `width` multiplies the inner channels (Wide-ResNet: width=2).

`calm` starts every bottleneck as its shortcut: the weight of its last norm is 0 (Goyal et al., arXiv:1706.02677). Without it a
hundred layers of batch norm make a difference in the last bit grow to percents of the loss within ten steps, and runs that add
up in another order cannot be told from wrong ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

BLOCKS_PER_STAGE = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 26: (2, 2, 2, 2)}
EXPANSION = 4


@dataclass(frozen=True)
class ResNetOptions:
    depth: int = 50
    width: int = 1
    image: int = 224
    """Height and width of the image."""
    classes: int = 1000
    channels: int = 64
    """Inner channels of the first stage, before `width`."""
    stage_blocks: bool = False
    """Whether each of the four stages is one block, to recompute and to shard, instead of each bottleneck."""
    calm: bool = False

    def __post_init__(self) -> None:
        if self.depth not in BLOCKS_PER_STAGE:
            raise ValueError(f"depth={self.depth} is not one of {', '.join(map(str, sorted(BLOCKS_PER_STAGE)))}")


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, added to the input; the first block of a stage also resizes the input."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce = convolution(inputs, inner, size=1)
        self.reduce_norm = nn.BatchNorm2d(inner)
        self.spatial = convolution(inner, inner, size=3, stride=stride)
        self.spatial_norm = nn.BatchNorm2d(inner)
        self.expand = convolution(inner, outputs, size=1)
        self.expand_norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(convolution(inputs, outputs, size=1, stride=stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.reduce_norm(self.reduce(x)))
        y = self.relu(self.spatial_norm(self.spatial(y)))
        y = self.expand_norm(self.expand(y))
        return self.relu(y + self.shortcut(x))


class Stage(nn.Module):
    """Bottlenecks in a row as one block, under the names they have in an `nn.Sequential`, which would be opened."""

    def __init__(self, bottlenecks: nn.Sequential) -> None:
        super().__init__()
        for name, bottleneck in bottlenecks.named_children():
            self.add_module(name, bottleneck)

    def forward(self, x: Tensor) -> Tensor:
        for bottleneck in self.children():
            x = bottleneck(x)
        return x


class ResNet(nn.Module):
    def __init__(self, options: ResNetOptions) -> None:
        super().__init__()
        base = options.channels
        self.stem = nn.Sequential(
            convolution(3, base, size=7, stride=2),
            nn.BatchNorm2d(base),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        outputs = [base, *(base * EXPANSION * 2**stage for stage in range(4))]
        self.stages = nn.ModuleList(
            self.make_stage(stage, count, pair, options)
            for stage, (count, pair) in enumerate(
                zip(BLOCKS_PER_STAGE[options.depth], pairwise(outputs), strict=True),
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(outputs[-1], options.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and options.calm:
                nn.init.zeros_(module.expand_norm.weight)

    @staticmethod
    def make_stage(stage: int, count: int, channels: tuple[int, int], options: ResNetOptions) -> nn.Module:
        inputs, outputs = channels
        inner = outputs // EXPANSION * options.width
        first = Bottleneck(inputs, inner, outputs, stride=1 if stage == 0 else 2)
        all_of_it = nn.Sequential(first, *(Bottleneck(outputs, inner, outputs, stride=1) for _ in range(count - 1)))
        return Stage(all_of_it) if options.stage_blocks else all_of_it

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.pool(x).flatten(1))


def convolution(inputs: int, outputs: int, *, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
