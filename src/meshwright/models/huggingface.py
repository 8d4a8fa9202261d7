"""Any Hugging Face config as a model with random weights, unchanged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.core.errors import InputError, ModelError, nearest
from meshwright.models.audio import WAVE, AudioShape, audio_shape, short_wave, small_sounds
from meshwright.models.examples import ImageShape, Shape, Task, TextShape, random_examples
from meshwright.models.reference import SMALL_DEPTH
from meshwright.models.source import ModelSource

USUAL_IMAGE = 224
"""Height and width of images where the config names none: a convolutional model takes any."""
LONGEST_EXAMPLE = 2048
"""Sequence length of examples, unless the config's own limit is shorter."""
SMALL_SEQ = 16
SMALL_GRID = 4
"""Patches along one side of a shrunk image."""
COUNTED = {
    "num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "hidden_size", "n_embd", "d_model",
    "num_attention_heads", "num_heads", "n_head", "num_key_value_heads", "intermediate_size", "vocab_size",
}  # fmt: skip
"""Of which a config has at least one."""
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
    if hasattr(small, "apply_spec_augment"):
        small.apply_spec_augment = False  # hides frames that numpy draws
    small._experts_implementation = "eager"  # one expert after another: torch's grouped product knows no float64
    shape = _shape(small)
    if isinstance(shape, TextShape):
        shape = dataclasses.replace(shape, seq=min(shape.seq, SMALL_SEQ))
    if isinstance(shape, AudioShape) and shape.name == WAVE and len(shape.size) == 1:
        shape = dataclasses.replace(shape, size=(short_wave(small, SMALL_SEQ),))
    return ModelSource(f"{name} (shrunk)", lambda: _build(small), random_examples(shape), shape)


def _limits(config: Any) -> dict[str, int]:
    """The most a shrunk config may have of what makes a model deep or its samples long."""
    depth = dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"), SMALL_DEPTH)
    length = dict.fromkeys(("max_position_embeddings", "n_positions"), SMALL_SEQ)
    patch = getattr(config, "patch_size", None)
    image = {"image_size": SMALL_GRID * patch} if isinstance(patch, int) else {}
    return depth | length | image | small_sounds(config, SMALL_SEQ)


def _read(text: str) -> Any:
    path = Path(text)
    if path.is_dir():
        raise InputError(f"{path}: is a folder: name the config.json in it")
    if not path.is_file():
        raise InputError(f"{path}: no such file (a Hugging Face config.json is expected)")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise InputError(f"{path}: has no 'model_type': is it a Hugging Face config?")
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError:
        raise ModelError(f"hf:{path} needs transformers: pip install 'meshwright[hf]'") from None
    kind = str(fields["model_type"])
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{path}: transformers knows no model_type '{kind}': {nearest(kind, CONFIG_MAPPING)}")
    for key in set(fields) & COUNTED:
        if isinstance(fields[key], int) and fields[key] < 1:
            raise InputError(f"{path}: {key} is {fields[key]}: give 1 or more")
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:  # each version of transformers has its own
        raise InputError(f"{path}: not a config of '{kind}': {' '.join(str(error).split())}") from error


def _build(config: Any) -> nn.Module:
    """What the config names, or else what its kind is mostly trained as."""
    config.use_cache = False  # keys and values of past tokens are for generation
    named = (config.architectures or [None])[0]
    try:
        return _make(config, named)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"'{named}' of this config" if named else f"a model of type '{config.model_type}'"
        raise ModelError(f"transformers cannot build {what}: {type(error).__name__}: {error}") from error


def _make(config: Any, named: str | None) -> nn.Module:
    import transformers

    if named is not None and hasattr(transformers, named):
        if "For" not in named and "Head" not in named:
            raise ModelError(
                f"the config's architecture '{named}' has no head to train: name one that has, as in 'LlamaForCausalLM'"
            )
        return getattr(transformers, named)(config)
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM.from_config(config)
    if hasattr(config, "num_channels"):
        return transformers.AutoModelForImageClassification.from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _shape(config: Any) -> Shape:
    sounds = audio_shape(config, _named_class(config))
    if sounds is not None:
        return sounds
    if hasattr(config, "num_channels") and (hasattr(config, "image_size") or not hasattr(config, "vocab_size")):
        size = _side(getattr(config, "image_size", USUAL_IMAGE))
        return ImageShape(size=size, classes=config.num_labels, channels=config.num_channels)
    if not hasattr(config, "vocab_size"):
        raise InputError(
            f"no example batch can be made for a config of type '{config.model_type}', which names no vocabulary, images or "
            "sounds: write path/to/file.py:function that returns (module, batch)"
        )
    longest = (
        getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or LONGEST_EXAMPLE
    )
    return TextShape(
        seq=min(longest, LONGEST_EXAMPLE), vocab=config.vocab_size, task=_task(config), classes=config.num_labels
    )


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
