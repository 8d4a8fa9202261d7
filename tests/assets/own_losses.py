"""Models that compute their loss themselves, as their authors wrote them: `tests/assets/own_losses.py:nano` and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, WIDTH, SAMPLES = 24, 9, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + before + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Nano(nn.Module):
    """Called and answering as nanoGPT is: targets may be missing, and those of -1 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embedding(idx)
        for block in self.blocks:
            x = block(x)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def tokens() -> Tensor:
    return torch.randint(VOCAB, (SAMPLES, SEQ), generator=torch.Generator().manual_seed(0))


def nano() -> Any:
    drawn = tokens()
    targets = drawn[:, 1:].clone()
    targets[0], targets[3, :5] = -1, -1
    targets[0, 0] = drawn[0, 1]
    return Nano(), {"idx": drawn[:, :-1], "targets": targets}


def nano_without_targets() -> Any:
    return Nano(), {"idx": tokens()}


def nano_pair() -> Any:
    """As nanoGPT's loader gives them: nothing says that the model takes both."""
    drawn = tokens()
    return Nano(), (drawn[:, :-1], drawn[:, 1:])


def copies() -> Any:
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)), (tokens(), tokens())


class Unshifted(Nano):
    """Takes labels as Hugging Face's models do, and leaves the shift to whoever gives them."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits, loss = super().forward(input_ids, labels)
        return {"logits": logits, "loss": loss}


def unshifted() -> Any:
    drawn = tokens()
    return Unshifted(), {"input_ids": drawn, "labels": drawn}


class Labelled(Nano):
    """Returns its loss alone, with a term that no loss outside of it knows."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits, loss = super().forward(input_ids, labels)
        assert loss is not None
        return loss + 0.1 * logits.square().mean()


def labelled() -> Any:
    drawn = tokens()
    return Labelled(), {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}


class ShiftsAgain(Nano):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits, _ = super().forward(input_ids, labels)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def shifted_again() -> Any:
    drawn = tokens()
    return ShiftsAgain(), {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}


def nano_of_copies() -> Any:
    drawn = tokens()
    return Nano(), {"idx": drawn, "targets": drawn}


def collated() -> Any:
    """What the collator of Hugging Face gives a causal model: labels are the inputs, padding apart."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(Path(__file__).with_name("llama-tiny.json"))
    drawn = torch.randint(config.vocab_size, (SAMPLES, SEQ), generator=torch.Generator().manual_seed(0))
    labels = drawn.clone()
    labels[1, 4:] = -100
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config), {"input_ids": drawn, "labels": labels}


def translated() -> Any:
    """An encoder-decoder that makes its decoder's inputs of the labels."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(Path(__file__).with_name("t5-tiny.json"))
    drawn = torch.randint(2, config.vocab_size, (SAMPLES, SEQ), generator=torch.Generator().manual_seed(0))
    config.use_cache, config.dropout_rate = False, 0.1
    return AutoModelForSeq2SeqLM.from_config(config), {"input_ids": drawn, "labels": drawn.flip(1)}


class Pairs(nn.Module):
    """Two towers: sample i of the one belongs to sample i of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.second = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for block in self.blocks:
            image = block(image)
        first, second = (F.normalize(x, dim=-1) for x in (image.mean(1), self.second(text)))
        logits = self.scale * first @ second.T
        numbers = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2


def contrast() -> Any:
    draws = torch.randn(SAMPLES, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    return Pairs(), {"image": draws[:, :4], "text": draws[:, 4]}


# ---------------------------------------------------------------- losses that read more than their arguments


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def words(loss: Any) -> Any:
    text = tokens()
    return Words(), {"ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}, loss


def reads_model() -> Any:
    module, batch, _ = words(None)
    return module, batch, lambda output, batch: output.square().mean() + module.head.weight.square().sum()


CRITIC = nn.Linear(VOCAB, 1)


def _criticised(output: Tensor, batch: Any) -> Tensor:
    return CRITIC(output).mean()


def reads_critic() -> Any:
    return words(lambda output, batch: _criticised(output, batch))


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return (output - self.centres).square().mean()


def is_trained() -> Any:
    return words(Centres())


def weighs_classes() -> Any:
    weights = torch.ones(VOCAB)
    return words(lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), weights))


def reads_frozen() -> Any:
    """As a perceptual loss does; and looks labels up, so that each must be one."""
    net = nn.Linear(VOCAB, 4).requires_grad_(False)
    return words(lambda out, batch: F.mse_loss(net(out), net(F.one_hot(batch["labels"], VOCAB).to(out.dtype))))
