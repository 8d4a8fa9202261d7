"""Convolutional classics, small."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 5


def images(size: int = 16, samples: int = 8) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(samples, 3, size, size, generator=random)
    return {"x": pixels, "labels": torch.randint(CLASSES, (samples,), generator=random)}


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Shuffle(nn.Module):
    """ShuffleNet V2's unit: half of the channels pass by, then channels are mixed across the halves."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            conv(half, half, 1),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            conv(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        y = torch.cat((first, self.branch(second)), dim=1)
        b, c, h, w = y.shape
        return y.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, squeeze: bool = False) -> None:
        super().__init__()
        inner = 2 * channels
        self.expand, self.depthwise = conv(channels, inner, 1), conv(inner, inner, 3, groups=inner)
        self.squeeze = (
            nn.Sequential(
                nn.AdaptiveAvgPool2d(1),
                nn.Conv2d(inner, channels, 1),
                nn.SiLU(),
                nn.Conv2d(channels, inner, 1),
                nn.Sigmoid(),
            )
            if squeeze
            else None
        )
        self.project = nn.Sequential(nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        if self.squeeze is not None:
            y = y * self.squeeze(y)
        return x + self.project(y)


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(features, 1))))


class DenseNet(nn.Module):
    """Every layer reads the outputs of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.layers = nn.ModuleList([DenseLayer(8 + 4 * number, 4) for number in range(4)])
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class Inception(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        part = channels // 4
        self.one = conv(channels, part, 1)
        self.three = nn.Sequential(conv(channels, part, 1), conv(part, part, 3))
        self.five = nn.Sequential(conv(channels, part, 1), conv(part, part, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(channels, part, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class Classifier(nn.Module):
    def __init__(self, units: list[nn.Module], channels: int = 16) -> None:
        super().__init__()
        self.stem, self.units = conv(3, channels, 3, 2), nn.Sequential(*units)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.units(self.stem(x))), 1))


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for outputs in (8, 16, 16):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.ReLU(True),
                nn.Conv2d(outputs, outputs, 3, padding=1),
            ]
            layers += [nn.ReLU(True), nn.MaxPool2d(2, 2)]
            inputs = outputs
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(64, 32),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(32, 32),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(32, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class UNet(nn.Module):
    """Skips from every level down to the level up; registered in another order than it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList([self._double(48, 16), self._double(24, 8)])
        self.downs = nn.ModuleList([self._double(3, 8), self._double(8, 16)])
        self.middle, self.out = self._double(16, 32), nn.Conv2d(8, CLASSES, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        return nn.Sequential(first, nn.GroupNorm(4, outputs), nn.SiLU(), second, nn.GroupNorm(4, outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = up(torch.cat([x, skips.pop()], dim=1))
        return self.out(x)


def shufflenet():
    return Classifier([Shuffle(16) for _ in range(4)]), images()


def mobilenet():
    return Classifier([InvertedResidual(16) for _ in range(4)]), images()


def efficientnet():
    return Classifier([InvertedResidual(16, squeeze=True) for _ in range(4)]), images()


def densenet():
    return DenseNet(), images()


def vgg():
    return Vgg(), images()


def inception():
    return Classifier([Inception(16) for _ in range(4)]), images()


def unet():
    batch = images(8)
    targets = torch.randn(8, CLASSES, 8, 8, generator=torch.Generator().manual_seed(1))
    return UNet(), {"x": batch["x"], "labels": targets}
