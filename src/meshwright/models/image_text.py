"""Samples of a text with an image in it: some of the tokens stand for what a vision model makes of the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.errors import ModelError
from meshwright.models.labels import IGNORED_LABEL
from meshwright.models.objective import Batch, Objective, num_samples


@dataclass(frozen=True)
class ImageTextShape:
    """Samples are `seq` tokens below `vocab` and one image; of models that compare the two, no token stands for the image."""

    seq: int
    vocab: int
    pixels: tuple[int, ...]
    """Dims of a sample's image."""
    image_token: int = -1
    """Stands in the text for one feature of the image."""
    image_tokens: int = 0
    """How many of them a sample has, after its first token."""
    reserved: tuple[int, ...] = ()
    """Tokens that no text has."""
    types: tuple[int, int] | None = None
    """`token_type_ids` of image and text, where the model tells them apart by these."""


def random_image_text(shape: ImageTextShape) -> Callable[[int], Batch]:
    def example(samples: int) -> Batch:
        random = torch.Generator().manual_seed(0)
        tokens = _text(torch.randint(shape.vocab, (samples, shape.seq + 1), generator=random), shape)
        pixels = torch.randn(samples, *shape.pixels, generator=random)
        batch = {"input_ids": tokens[:, :-1].contiguous(), "pixel_values": pixels}
        if shape.image_token < 0:
            return batch
        is_image = tokens == shape.image_token
        if shape.types is not None:
            of_image, of_text = shape.types
            batch["token_type_ids"] = torch.where(is_image[:, :-1], of_image, of_text)
        return {**batch, "labels": tokens.masked_fill(is_image, IGNORED_LABEL)[:, 1:].contiguous()}

    return example


def _text(drawn: Tensor, shape: ImageTextShape) -> Tensor:
    allowed = next(token for token in range(shape.vocab) if token not in shape.reserved)
    text = torch.where(torch.isin(drawn, torch.tensor(shape.reserved, dtype=drawn.dtype)), allowed, drawn)
    text[:, 1 : 1 + shape.image_tokens] = shape.image_token
    return text


def _contrast(output: Any, batch: Batch) -> Tensor:
    """Each text with its own image, among all images of the batch, and the other way round."""
    found = getattr(output, "logits_per_text", None)
    if not isinstance(found, Tensor):
        raise ModelError(
            f"the model returned {type(output).__name__} without 'logits_per_text': give the loss in a file"
        )
    own = torch.arange(found.shape[0], device=found.device)
    return (F.cross_entropy(found, own) + F.cross_entropy(found.T, own)) / 2


CONTRAST = Objective(loss=_contrast, count=num_samples)
