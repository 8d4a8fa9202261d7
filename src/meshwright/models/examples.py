"""What samples of a model look like, and batches of them with random content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from meshwright.core.bounds import MOST_SAMPLE_NUMBERS
from meshwright.core.errors import ModelError
from meshwright.models.audio import AudioShape, SpeechShape, random_audio, random_speech
from meshwright.models.image_text import ImageTextShape, random_image_text
from meshwright.models.objective import IGNORED_LABEL, Batch, map_batch, num_samples

MASKED_SHARE = 0.15
"""Of the tokens, in a model that fills in: BERT's."""

Task = Literal["next", "masked", "decode", "classify"]


@dataclass(frozen=True)
class TextShape:
    """Samples are `seq` tokens below `vocab`."""

    seq: int
    vocab: int
    task: Task = "next"
    """next: the token that follows. masked: the tokens hidden behind the last of the vocabulary. decode: the tokens that
    follow, by a decoder that sees those before. classify: one class for the whole."""
    classes: int = 2
    """Of the task classify."""


@dataclass(frozen=True)
class ImageShape:
    size: int
    classes: int
    channels: int = 3


@dataclass(frozen=True)
class VectorShape:
    """Samples are `width` numbers."""

    width: int
    classes: int


Shape = TextShape | ImageShape | VectorShape | AudioShape | SpeechShape | ImageTextShape
Example = Callable[[int], Batch]
"""n samples with random content, the same at every call."""


def random_examples(shape: Shape) -> Example:
    _check_counts(shape)
    numbers = sample_numbers(shape)
    if numbers > MOST_SAMPLE_NUMBERS:
        raise ModelError(
            f"one sample of this model is {numbers} numbers, and {MOST_SAMPLE_NUMBERS} at most are drawn for an example: lower the "
            "length of its text or sound, or the size of its images"
        )
    if isinstance(shape, TextShape):
        return random_text(shape)
    if isinstance(shape, AudioShape | SpeechShape):
        return random_audio(shape) if isinstance(shape, AudioShape) else random_speech(shape)
    if isinstance(shape, ImageTextShape):
        return random_image_text(shape)
    return random_images(shape) if isinstance(shape, ImageShape) else random_vectors(shape)


def _check_counts(shape: Shape) -> None:
    """Before tensors of these sizes are drawn."""
    drawn: dict[str, object] = {}
    if isinstance(shape, TextShape):
        drawn = {"length": shape.seq, "vocabulary": shape.vocab}
        drawn |= {"number of classes": shape.classes} if shape.task == "classify" else {}
    elif isinstance(shape, ImageShape):
        drawn = {"image size": shape.size, "number of channels": shape.channels, "number of classes": shape.classes}
    for name, value in drawn.items():
        if not isinstance(value, int) or value < 1:
            raise ModelError(
                f"this model's {name} is {value}, and no example can be drawn: give a whole number above 0"
            )


def sample_numbers(shape: Shape) -> int:
    """How many numbers one sample has, and with it the memory of an example."""
    if isinstance(shape, TextShape):
        return shape.seq
    if isinstance(shape, ImageShape):
        return shape.channels * shape.size**2
    if isinstance(shape, AudioShape):
        return prod(shape.size)
    if isinstance(shape, SpeechShape):
        return prod(shape.sound.size) + shape.seq
    if isinstance(shape, ImageTextShape):
        return prod(shape.pixels) + shape.seq
    return shape.width


def random_text(shape: TextShape) -> Example:
    def example(samples: int) -> Batch:
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(shape.vocab, (samples, shape.seq + 1), generator=random)
        if shape.task == "classify":
            classes = torch.randint(shape.classes, (samples,), generator=random)
            return {"input_ids": tokens[:, :-1].contiguous(), "labels": classes}
        return text_batch(tokens, range(samples), shape)

    return example


def random_images(shape: ImageShape) -> Example:
    def example(samples: int) -> Batch:
        random = torch.Generator().manual_seed(0)
        pixels = torch.randn(samples, shape.channels, shape.size, shape.size, generator=random)
        return {"pixel_values": pixels, "labels": torch.randint(shape.classes, (samples,), generator=random)}

    return example


def random_vectors(shape: VectorShape) -> Example:
    def example(samples: int) -> Batch:
        random = torch.Generator().manual_seed(0)
        features = torch.randn(samples, shape.width, generator=random)
        return {"features": features, "labels": torch.randint(shape.classes, (samples,), generator=random)}

    return example


def repeat_samples(batch: Batch) -> Example:
    """As many samples as asked for, made of the ones there are: these in order, then some drawn again and again, so that ranks and
    microbatches differ in what they see."""

    def example(samples: int) -> Batch:
        given = num_samples(batch)
        drawn = torch.randint(given, (max(samples - given, 0),), generator=torch.Generator().manual_seed(0))
        numbers = torch.cat([torch.arange(min(given, samples)), drawn])
        return map_batch(lambda tensor: tensor[numbers.to(tensor.device)], batch)

    return example


def text_batch(windows: Tensor, numbers: Sequence[int], shape: TextShape) -> dict[str, Tensor]:
    """Windows of seq + 1 tokens → inputs and labels of the task. `numbers` are the samples' own: what is hidden depends
    on them, not on who asks."""
    if shape.task == "masked":
        return masked(windows[:, :-1], numbers, mask_token=shape.vocab - 1)
    batch = {"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}
    return shifted(batch) if shape.task == "decode" else batch


def masked(tokens: Tensor, numbers: Sequence[int], mask_token: int) -> dict[str, Tensor]:
    """The same number of tokens is hidden in every sample; the others have no label."""
    seq = tokens.shape[1]
    count = max(1, round(MASKED_SHARE * seq))
    hidden = torch.zeros_like(tokens, dtype=torch.bool)
    for row, number in enumerate(numbers):
        hidden[row, torch.randperm(seq, generator=torch.Generator().manual_seed(number))[:count]] = True
    return {
        "input_ids": tokens.masked_fill(hidden, mask_token),
        "labels": tokens.masked_fill(~hidden, IGNORED_LABEL),
    }


def shifted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a decoder sees: the labels, one place later."""
    labels = batch["labels"].clamp(min=0)
    start = torch.zeros_like(labels[:, :1])
    return {**batch, "decoder_input_ids": torch.cat([start, labels[:, :-1]], dim=1)}
