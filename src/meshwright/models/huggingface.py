"""Any Hugging Face config as a model with random weights, unchanged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.core.errors import InputError, ModelError
from meshwright.models.examples import ImageShape, Task, TextShape, random_examples
from meshwright.models.reference import SMALL_DEPTH
from meshwright.models.source import ModelSource

USUAL_IMAGE = 224
"""Height and width of images where the config names none: a convolutional model takes any."""
LONGEST_EXAMPLE = 2048
"""Sequence length of examples, unless the config's own limit is shorter."""
SMALL_SEQ = 16
SMALL_GRID = 4
"""Patches along one side of a shrunk image."""
RANDOM = ("drop", "jitter")
"""Words in the names of settings that make a forward random."""


def from_config(name: str) -> ModelSource:
    """`hf:CONFIG.json` → a source; needs `pip install meshwright[hf]`."""
    config = _read(name.removeprefix("hf:"))
    shape = _shape(config)
    return ModelSource(
        name, lambda: _build(config), random_examples(shape), shape, shrink=lambda: _shrunk(name, config)
    )


def _shrunk(name: str, config: Any) -> ModelSource:
    """Fewer blocks, a shorter sequence or a smaller image, no randomness; widths stay, since heads and groups depend on them."""
    small = type(config).from_dict(config.to_dict())
    for key, limit in _limits(config).items():
        value = getattr(small, key, None)
        if isinstance(value, int):
            setattr(small, key, min(value, limit))
    for key, value in config.to_dict().items():
        if isinstance(value, float) and any(word in key for word in RANDOM):
            setattr(small, key, 0.0)
    small._experts_implementation = "eager"  # one expert after another: torch's grouped product knows no float64
    shape = _shape(small)
    if isinstance(shape, TextShape):
        shape = dataclasses.replace(shape, seq=min(shape.seq, SMALL_SEQ))
    return ModelSource(f"{name} (shrunk)", lambda: _build(small), random_examples(shape), shape)


def _limits(config: Any) -> dict[str, int]:
    """The most a shrunk config may have of what makes a model deep or its samples long."""
    depth = dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"), SMALL_DEPTH)
    length = dict.fromkeys(("max_position_embeddings", "n_positions"), SMALL_SEQ)
    patch = getattr(config, "patch_size", None)
    return depth | length | ({"image_size": SMALL_GRID * patch} if isinstance(patch, int) else {})


def _read(text: str) -> Any:
    path = Path(text)
    if not path.is_file():
        raise InputError(f"{path}: no such file (a Hugging Face config.json is expected)")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if "model_type" not in fields:
        raise InputError(f"{path}: has no 'model_type': is it a Hugging Face config?")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ModelError(f"hf:{path} needs transformers: pip install 'meshwright[hf]'") from None
    return AutoConfig.for_model(**fields)


def _build(config: Any) -> nn.Module:
    import transformers

    config.use_cache = False  # keys and values of past tokens are for generation
    named = (config.architectures or [None])[0]
    if named is not None and hasattr(transformers, named):
        return getattr(transformers, named)(config)
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM.from_config(config)
    if hasattr(config, "num_channels"):
        return transformers.AutoModelForImageClassification.from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _shape(config: Any) -> TextShape | ImageShape:
    if hasattr(config, "num_channels") and (hasattr(config, "image_size") or not hasattr(config, "vocab_size")):
        size = getattr(config, "image_size", USUAL_IMAGE)
        return ImageShape(size=size, classes=config.num_labels, channels=config.num_channels)
    longest = (
        getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or LONGEST_EXAMPLE
    )
    return TextShape(
        seq=min(longest, LONGEST_EXAMPLE), vocab=config.vocab_size, task=_task(config), classes=config.num_labels
    )


def _task(config: Any) -> Task:
    """What the named architecture is trained for."""
    named = str((config.architectures or [""])[0])
    if named.endswith("ForSequenceClassification"):
        return "classify"
    if named.endswith("ForMaskedLM"):
        return "masked"
    return "decode" if config.is_encoder_decoder else "next"
