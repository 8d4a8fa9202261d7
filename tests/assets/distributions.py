"""Losses that look at values: distributions check their arguments, CTC reads lengths, packed sequences too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence

INPUTS, WIDTH, CLASSES = 6, 16, 8
Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def follow(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Policy(Body):
    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        chosen = Categorical(logits=self.follow(x))
        return -chosen.log_prob(action).mean() - 0.01 * chosen.entropy().mean()


class Latent(Body):
    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        mean, spread = self.follow(x).chunk(2, -1)
        found = Normal(mean, spread.exp())
        return kl_divergence(found, Normal(torch.zeros_like(mean), 1.0)).mean() + found.rsample().pow(2).mean()


class Speech(Body):
    def forward(self, frames: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
        scores = self.follow(frames).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, lengths, target_lengths, zero_infinity=True)


class Packed(Body):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(INPUTS, INPUTS, batch_first=True)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.rnn(packed)
        return self.follow(last[0])


def itself(output: Tensor, batch: Batch) -> Tensor:
    return output


def _steps() -> Batch:
    drawn = torch.Generator().manual_seed(0)
    return {"x": torch.randn(4, INPUTS, generator=drawn), "action": torch.randint(CLASSES, (4,), generator=drawn)}


def policy() -> Any:
    return Policy(), _steps(), itself


def latent() -> Any:
    return Latent(), _steps(), itself


def speech() -> Any:
    drawn = torch.Generator().manual_seed(0)
    batch = {
        "frames": torch.randn(4, 12, INPUTS, generator=drawn),
        "targets": torch.randint(1, CLASSES, (4, 5), generator=drawn),
        "lengths": torch.tensor([12, 11, 12, 10]),
        "target_lengths": torch.tensor([5, 4, 5, 3]),
    }
    return Speech(), batch, itself


def packed() -> Any:
    return Packed(), {
        "frames": torch.randn(4, 7, INPUTS),
        "lengths": torch.tensor([7, 5, 6, 7]),
        "labels": torch.zeros(4).long(),
    }
