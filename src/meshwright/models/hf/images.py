"""What samples of Hugging Face models look like that take an image and a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from meshwright.core.errors import InputError
from meshwright.models.faked.running import call_on_fakes
from meshwright.models.follow import tensors_in
from meshwright.models.image_text import ImageTextShape

IMAGE_TOKENS = ("image_token_id", "image_token_index")
TYPES = {"gemma3": (1, 0), "paligemma": (0, 1)}
"""Of image and text; PaliGemma's are of a prefix, in which all see all, and of what follows."""
SMALLEST_PART = 16
"""Tokens of a text beside an image, at least; lengths divide by it."""


def has_image_tokens(config: Any) -> bool:
    """Whether a text holds tokens that stand for an image's features."""
    return _has_parts(config) and _image_token(config) is not None


def compares_images(config: Any) -> bool:
    """Whether a model gives each pair of an image and a text a number."""
    return _has_parts(config) and not has_image_tokens(config) and hasattr(config, "logit_scale_init_value")


def _has_parts(config: Any) -> bool:
    text = getattr(config, "text_config", None)
    return hasattr(text, "vocab_size") and getattr(config, "vision_config", None) is not None


def _image_token(config: Any) -> int | None:
    return next((found for name in IMAGE_TOKENS if (found := getattr(config, name, None)) is not None), None)


def image_text_shape(config: Any, build: Callable[[], nn.Module], seq: int) -> ImageTextShape | None:
    """seq: the longest text of a sample. None for configs of other models; images of a form that we do not know are refused."""
    if compares_images(config):
        return _compared(config, seq)
    token = _image_token(config)
    if token is None or not _has_parts(config):
        return None
    pixels, count = _features(config, build)
    return ImageTextShape(
        seq=_length(config, count, seq),
        vocab=config.text_config.vocab_size,
        pixels=pixels,
        image_token=token,
        image_tokens=count,
        reserved=tuple(sorted({token, *_special(config)})),
        types=TYPES.get(config.model_type),
    )


def _length(config: Any, count: int, seq: int) -> int:
    """Of image and text: as many tokens as a text has, or more where the image needs them."""
    longest = getattr(config.text_config, "max_position_embeddings", None) or count + seq
    if count + 2 > longest:
        raise InputError(
            f"an image takes {count} tokens of this '{config.model_type}', whose text_config has max_position_embeddings "
            f"{longest}: give a longer text, or smaller images (vision_config's image_size)"
        )
    return int(min(longest, max(seq, -(-count // SMALLEST_PART) * SMALLEST_PART + SMALLEST_PART)))


def _compared(config: Any, seq: int) -> ImageTextShape:
    text = config.text_config
    longest = min(getattr(text, "max_position_embeddings", None) or seq, seq)
    return ImageTextShape(longest, text.vocab_size, _pixels(config), reserved=_special(config))


def _features(config: Any, build: Callable[[], nn.Module]) -> tuple[tuple[int, ...], int]:
    """Dims of a sample's image, and how many tokens its features take: what the model's own vision part makes of two of them."""
    reasons = []
    pixels = _pixels(config)
    for dims in (pixels, (1, *pixels)):
        try:
            return dims, _count(config, build, dims)
        except Exception as error:  # each model has its own form of images
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    raise InputError(
        f"no example batch can be made for a config of type '{config.model_type}': its images are of a form of their own "
        f"(images of {list(pixels)} fail with {reasons[0][:200]}): write path/to/file.py:function that returns (module, batch)"
    )


def _count(config: Any, build: Callable[[], nn.Module], dims: tuple[int, ...]) -> int:
    width, samples = config.text_config.hidden_size, 2
    returned = call_on_fakes(build, _image_features, (samples, *dims))
    found = getattr(returned, "pooler_output", returned)
    features = tensors_in(found)
    if not features or any(one.shape[-1] != width for one in features):
        raise ValueError(f"features of an image are not of the text's width {width}")
    count, rest = divmod(sum(one.numel() for one in features), samples * width)
    if rest or not count:
        raise ValueError("images of one size have features of several")
    return count


def _image_features(model: Any, pixels: Tensor) -> Any:
    return model.get_image_features(pixel_values=pixels)


def _pixels(config: Any) -> tuple[int, int, int]:
    vision = config.vision_config
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise InputError(
            f"vision_config of this '{config.model_type}' names no image_size: write path/to/file.py:function that returns "
            "(module, batch)"
        )
    return getattr(vision, "num_channels", 3), *sides


def _special(config: Any) -> tuple[int, ...]:
    """Tokens that mean something to the model: starts and ends, padding, images, videos."""
    return tuple(sorted({value for one in (config, config.text_config) for value in _ids(one)}))


def _ids(config: Any) -> Iterator[int]:
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")) and type(value) is int and value >= 0:
            yield value
