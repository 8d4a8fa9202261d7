"""Any Hugging Face config as a model with random weights, unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.core.errors import InputError, ModelError
from meshwright.models.source import ImageShape, ModelSource, TextShape, random_images, random_text

USUAL_IMAGE = 224
"""Height and width of images where the config names none: a convolutional model takes any."""
LONGEST_EXAMPLE = 2048
"""Sequence length of examples, unless the config's own limit is shorter."""


def from_config(name: str) -> ModelSource:
    """`hf:CONFIG.json` → a source; needs `pip install meshwright[hf]`."""
    config = _read(name.removeprefix("hf:"))
    shape = _shape(config)
    example = random_images(shape) if isinstance(shape, ImageShape) else random_text(shape)
    return ModelSource(name, lambda: _build(config), example, shape, shrink=lambda: _shrunk(name, config))


def _shrunk(name: str, config: Any) -> ModelSource:
    """Fewer blocks, a shorter sequence, no dropout; widths stay, since heads and groups depend on them."""
    small = type(config).from_dict(config.to_dict())
    limits = {
        "num_hidden_layers": 2, "num_layers": 2, "num_decoder_layers": 2, "n_layer": 2,
        "max_position_embeddings": 16, "n_positions": 16,
    }  # fmt: skip
    for key, limit in limits.items():
        value = getattr(small, key, None)
        if isinstance(value, int):
            setattr(small, key, min(value, limit))
    for key, value in config.to_dict().items():
        if isinstance(value, float) and any(word in key for word in ("dropout", "pdrop", "drop_rate")):
            setattr(small, key, 0.0)
    small._experts_implementation = "eager"  # one expert after another: torch's grouped product knows no float64
    shape = _shape(small)
    if isinstance(shape, TextShape):
        shape = TextShape(min(shape.seq, 16), shape.vocab, shape.encoder_decoder)
    example = random_images(shape) if isinstance(shape, ImageShape) else random_text(shape)
    return ModelSource(f"{name} (shrunk)", lambda: _build(small), example, shape)


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
        seq=min(longest, LONGEST_EXAMPLE), vocab=config.vocab_size, encoder_decoder=bool(config.is_encoder_decoder)
    )
