"""Convolution, then attention, in the manner of CoAtNet: a stem, two stages of inverted bottlenecks, two of transformers.

Every stage halves height and width in its first block and has more channels than the one before. Attention knows where
things are by a learned number for every head and offset between two places of the grid:

    weights = softmax(query · key / √width + table[offset(q, k), h])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.bounds import MOST_LAYERS, MOST_WIDTH
from meshwright.core.errors import shortened
from meshwright.models.bert import joined_heads, split_heads

EXPANSION = 4
"""Inner width of a bottleneck and of an MLP, in multiples of the block's channels."""
SQUEEZE = 4
"""The gate of a bottleneck sees its channels through as many times fewer."""
NUM_STAGES = 5


@dataclass(frozen=True)
class CoAtNetOptions:
    blocks: str = "2-2-3-5-2"
    """Convolutions of the stem, blocks of two convolution stages, blocks of two attention stages: CoAtNet-0."""
    channels: str = "64-96-192-384-768"
    """Of the same five."""
    head_width: int = 32
    image: int = 224
    """Height and width of the image."""
    classes: int = 1000

    def __post_init__(self) -> None:
        for name, text in (("blocks", self.blocks), ("channels", self.channels)):
            if len(text.split("-")) != NUM_STAGES or not all(part.isdigit() and int(part) for part in text.split("-")):
                raise ValueError(f"{name}='{text}' is not five whole numbers above 0, like {getattr(type(self), name)}")
        for name, most in (("blocks", MOST_LAYERS), ("channels", MOST_WIDTH)):
            if max(numbers(getattr(self, name))) > most:
                raise ValueError(f"{name}='{shortened(getattr(self, name))}' has a number above {most}: give less")
        for width in numbers(self.channels)[3:]:
            if width % self.head_width:
                raise ValueError(f"channels={self.channels}: {width} does not divide by head_width={self.head_width}")
        if self.image % 2**NUM_STAGES:
            raise ValueError(f"image={self.image} is halved {NUM_STAGES} times: use a multiple of {2**NUM_STAGES}")


class SqueezeExcite(nn.Module):
    """Channels weighted by what the whole image holds."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, channels // SQUEEZE, 1)
        self.excite = nn.Conv2d(channels // SQUEEZE, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.mean(dim=(2, 3), keepdim=True)
        return x * self.excite(F.silu(self.squeeze(seen))).sigmoid()


class ConvolutionBlock(nn.Module):
    """1×1 up, 3×3 within each channel, 1×1 down, added to the input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = EXPANSION * outputs
        self.norm = nn.BatchNorm2d(inputs)
        self.expand = nn.Conv2d(inputs, inner, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(inner)
        self.spatial = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=inner, bias=False)
        self.spatial_norm = nn.BatchNorm2d(inner)
        self.gate = SqueezeExcite(inner)
        self.contract = nn.Conv2d(inner, outputs, 1)
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.expand_norm(self.expand(self.norm(x))))
        y = F.gelu(self.spatial_norm(self.spatial(y)))
        return self.shortcut(self.pool(x)) + self.contract(self.gate(y))


class Attention(nn.Module):
    """Between all places of a square grid."""

    def __init__(self, inputs: int, outputs: int, grid: int, head_width: int) -> None:
        super().__init__()
        self.grid = grid
        self.head_width = head_width
        self.query = nn.Linear(inputs, outputs)
        self.key = nn.Linear(inputs, outputs)
        self.value = nn.Linear(inputs, outputs)
        self.output = nn.Linear(outputs, outputs)
        self.bias = nn.Embedding((2 * grid - 1) ** 2, outputs // head_width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(project(x), self.head_width) for project in (self.query, self.key, self.value))
        scores = query @ key.transpose(-2, -1) * self.head_width**-0.5
        bias = self.bias(grid_offsets(self.grid, x.device)).permute(2, 0, 1)
        mixed = (scores + bias).softmax(dim=-1) @ value
        return self.output(joined_heads(mixed))


class MLP(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand = nn.Linear(channels, EXPANSION * channels)
        self.contract = nn.Linear(EXPANSION * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(x)))


class AttentionBlock(nn.Module):
    """A transformer block on the places of an image."""

    def __init__(self, inputs: int, outputs: int, stride: int, grid: int, head_width: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(stride) if stride > 1 else nn.Identity()
        self.shortcut = nn.Linear(inputs, outputs) if inputs != outputs else nn.Identity()
        self.attention_norm = nn.LayerNorm(inputs)
        self.attention = Attention(inputs, outputs, grid, head_width)
        self.mlp_norm = nn.LayerNorm(outputs)
        self.mlp = MLP(outputs)

    def forward(self, image: Tensor) -> Tensor:
        image = self.pool(image)
        x = image.flatten(2).transpose(1, 2)
        x = self.shortcut(x) + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x.transpose(1, 2).unflatten(2, image.shape[2:])


class CoAtNet(nn.Module):
    def __init__(self, options: CoAtNetOptions) -> None:
        super().__init__()
        channels = numbers(options.channels)
        self.stem = make_stem(numbers(options.blocks)[0], channels[0])
        self.stages = nn.ModuleList(make_stage(stage, options) for stage in range(1, NUM_STAGES))
        self.norm = nn.LayerNorm(channels[-1])
        self.head = nn.Linear(channels[-1], options.classes)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x.mean(dim=(2, 3))))


def make_stem(count: int, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, stride=2, padding=1)]
    for _ in range(count - 1):
        layers += [nn.BatchNorm2d(channels), nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1)]
    return nn.Sequential(*layers)


def make_stage(stage: int, options: CoAtNetOptions) -> nn.Sequential:
    """Stages 1 and 2 convolve, 3 and 4 attend."""
    count, before, channels = numbers(options.blocks)[stage], *numbers(options.channels)[stage - 1 : stage + 1]
    grid = options.image // 2 ** (stage + 1)
    sizes = [(before, channels, 2), *[(channels, channels, 1)] * (count - 1)]
    if stage <= 2:
        return nn.Sequential(*(ConvolutionBlock(*size) for size in sizes))
    return nn.Sequential(*(AttentionBlock(*size, grid, options.head_width) for size in sizes))


def grid_offsets(grid: int, device: torch.device) -> Tensor:
    """[places, places]: the row of the table for the offset between two places of the grid."""
    line = torch.arange(grid, device=device)
    steps = line[None, :] - line[:, None] + grid - 1
    rows, columns = steps[:, None, :, None], steps[None, :, None, :]
    return (rows * (2 * grid - 1) + columns).reshape(grid * grid, grid * grid)


def numbers(text: str) -> list[int]:
    """`2-2-3-5-2` → its numbers."""
    return [int(part) for part in text.split("-")]
