"""What samples of a Hugging Face config look like."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.core.errors import InputError, shortened
from meshwright.models.audio import audio_shape
from meshwright.models.examples import ImageShape, Shape, Task, TextShape
from meshwright.models.hf.images import image_text_shape

USUAL_IMAGE = 224
"""Height and width of images where the config names none: a convolutional model takes any."""
LONGEST_EXAMPLE = 2048
"""Tokens of a sample, unless the model's name says another number (`hf:CONFIG.json,seq=8192`) or the config's limit is less."""
COUNTS_FROM_PADDING = "create_position_ids_from_input_ids"
"""The function by which RoBERTa and its kin number tokens: the first has the number after the padding token's."""


def shape_of(config: Any, build: Callable[[], nn.Module], seq: int) -> Shape:
    """seq: the longest text."""
    found = audio_shape(config, _named_class(config)) or image_text_shape(config, build, seq)
    if found is not None:
        return found
    if hasattr(config, "num_channels") and (hasattr(config, "image_size") or not hasattr(config, "vocab_size")):
        size = _side(getattr(config, "image_size", USUAL_IMAGE))
        return ImageShape(size=size, classes=config.num_labels, channels=config.num_channels)
    if not hasattr(config, "vocab_size"):
        raise InputError(
            f"no example batch can be made for a config of type '{config.model_type}', which names no vocabulary, images or "
            "sounds: write path/to/file.py:function that returns (module, batch)"
        )
    longest = _longest(config)
    seq = seq if not longest or longest < 1 else min(longest - unused_positions(config), seq)
    return TextShape(seq=max(seq, 1), vocab=config.vocab_size, task=_task(config), classes=config.num_labels)


def check_sequence(config: Any, asked: int | None) -> None:
    """asked: tokens of a sample, where the model's name says how many."""
    if asked is None:
        return
    if not hasattr(config, "vocab_size"):
        raise InputError(
            f"seq={asked} was asked for, but a config of type '{config.model_type}' reads no text: leave it out"
        )
    longest = _longest(config)
    most = longest - unused_positions(config) if longest else asked
    if asked > most:
        raise InputError(f"seq={asked} is longer than the {most} positions of the config: give {most} or less")


def unused_positions(config: Any) -> int:
    """Rows at the start of the table of positions that no token of a sample uses."""
    if COUNTS_FROM_PADDING not in _code_of(config):
        return 0
    padding = getattr(config, "pad_token_id", None)
    return 1 + (max(padding, 0) if isinstance(padding, int) else 1)


def _longest(config: Any) -> int | None:
    """Tokens that the table of positions has room for."""
    for name in ("max_position_embeddings", "n_positions"):
        if found := getattr(config, name, None):
            if not isinstance(found, int):
                raise InputError(f"the config's {name} is {shortened(str(found))}: give a whole number")
            return found
    return None


def _code_of(config: Any) -> str:
    """The file that defines the model of a config."""
    import transformers

    model = _named_class(config)
    if model is None:
        found = transformers.MODEL_MAPPING.get(type(config), None)
        model = found[0] if isinstance(found, tuple) else found
    module = sys.modules.get(getattr(model, "__module__", ""))
    try:
        return inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        return ""


def _named_class(config: Any) -> type | None:
    import transformers

    return getattr(transformers, str((config.architectures or [""])[0]), None)


def _side(size: Any) -> int:
    """Of square images; some configs give height and width."""
    sides = set(size) if isinstance(size, list | tuple) else {size}
    if len(sides) > 1:
        raise InputError(
            f"image_size is {list(size)}: example images are square; give one number, or write path/to/file.py:function"
        )
    return int(sides.pop())


def _task(config: Any) -> Task:
    """What the named architecture is trained for."""
    named = str((config.architectures or [""])[0])
    if named.endswith("ForSequenceClassification"):
        return "classify"
    if named.endswith("ForMaskedLM"):
        return "masked"
    return "decode" if config.is_encoder_decoder else "next"
