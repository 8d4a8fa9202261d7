"""Any Hugging Face config as a model with random weights, unchanged."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.core.errors import InputError, MeshwrightError, ModelError, nearest
from meshwright.core.files.given_file import read_given
from meshwright.core.model_name import config_file, config_sequence
from meshwright.models.audio import WAVE, AudioShape, short_wave, small_sounds
from meshwright.models.examples import TextShape, random_examples
from meshwright.models.faked.running import runs
from meshwright.models.hf.fields import check_sizes, parse_config
from meshwright.models.hf.images import compares_images, has_image_tokens
from meshwright.models.hf.shapes import LONGEST_EXAMPLE, check_sequence, shape_of, unused_positions
from meshwright.models.image_text import CONTRAST
from meshwright.models.objective import DEFAULT
from meshwright.models.reference import SMALL_DEPTH
from meshwright.models.source import ModelSource

SMALL_SEQ = 16
SMALL_GRID, LARGER_GRID = 4, 16
"""Patches along one side of a shrunk image; the larger for models that halve it several times."""
DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
)
RANDOM = ("drop", "jitter")
"""Words in the names of settings that make a forward random."""


def from_config(name: str) -> ModelSource:
    """`hf:CONFIG.json` → a source; needs `pip install meshwright[hf]`."""
    config, seq = _read(config_file(name)), config_sequence(name)
    check_sequence(config, seq)
    return dataclasses.replace(_source(name, config, seq or LONGEST_EXAMPLE), shrink=lambda: _shrunk(name, config))


def _source(name: str, config: Any, seq: int = LONGEST_EXAMPLE) -> ModelSource:
    shape = shape_of(config, lambda: _build(config), seq)
    objective = CONTRAST if compares_images(config) else DEFAULT
    return ModelSource(name, lambda: _build(config), random_examples(shape), shape, objective)


def _shrunk(name: str, config: Any) -> ModelSource:
    """The smallest that its own code takes: a small image may vanish in the strides of a model, a depth be given twice."""
    depth = dict.fromkeys(DEPTHS, SMALL_DEPTH)
    for limits in (depth | _length(config, SMALL_GRID), depth | _length(config, LARGER_GRID), depth, {}):
        with suppress(Exception):  # each model has its own reasons
            source = _source(f"{name} (shrunk)", _small(config, limits), SMALL_SEQ if limits else LONGEST_EXAMPLE)
            source = _with_short_samples(source, config) if limits else source
            if source.example is not None and runs(source.build, source.example(2)):
                return source
    return _source(f"{name} (shrunk)", _small(config, {}))


def _small(config: Any, limits: dict[str, int]) -> Any:
    """Fewer blocks, a shorter sequence or a smaller image, no randomness; widths stay, since heads and groups depend on them."""
    small = type(config).from_dict(config.to_dict())
    for one in (small, *_parts(small)):
        _make_small(one, limits)
    return small


def _parts(config: Any) -> list[Any]:
    """The configs of a text and of a vision model, where one is made of several."""
    return [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]


def _make_small(small: Any, limits: dict[str, int]) -> None:
    for key, limit in limits.items():
        value = getattr(small, key, None)
        if isinstance(value, int) and value > limit:
            setattr(small, key, limit)
    for key, value in small.to_dict().items():
        if isinstance(value, float) and any(word in key for word in RANDOM):
            setattr(small, key, 0.0)
    if hasattr(small, "apply_spec_augment"):
        small.apply_spec_augment = False  # hides frames that numpy draws
    small._experts_implementation = "eager"  # one expert after another: torch's grouped product knows no float64


def _length(config: Any, grid: int) -> dict[str, int]:
    """The most a shrunk config may have of what makes its samples long. grid: patches along one side of an image."""
    length = dict.fromkeys(("max_position_embeddings", "n_positions"), SMALL_SEQ + unused_positions(config))
    if hasattr(config, "vision_config") and not compares_images(config):
        length = {}  # tokens that stand for an image need places too
    patch = getattr(getattr(config, "vision_config", config), "patch_size", None)
    image = {"image_size": grid * patch} if isinstance(patch, int) else {}
    return length | image | small_sounds(config, SMALL_SEQ)


def _with_short_samples(source: ModelSource, config: Any) -> ModelSource:
    """Lengths that no config limits."""
    shape = source.shape
    if isinstance(shape, TextShape) and shape.seq > SMALL_SEQ:
        shape = dataclasses.replace(shape, seq=SMALL_SEQ)
    if isinstance(shape, AudioShape) and shape.name == WAVE and len(shape.size) == 1:
        shape = dataclasses.replace(shape, size=(short_wave(config, SMALL_SEQ),))
    return source if shape is None else dataclasses.replace(source, shape=shape, example=random_examples(shape))


def _read(path: Path) -> Any:
    if path.is_dir():
        raise InputError(f"{path}: is a folder: name the config.json in it")
    if not path.exists():
        raise InputError(f"{path}: no such file (a Hugging Face config.json is expected)")
    fields = parse_config(read_given(path), str(path))
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError:
        raise ModelError(f"hf:{path} needs transformers: pip install 'meshwright[hf]'") from None
    kind = str(fields["model_type"])
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{path}: transformers knows no model_type '{kind}': {nearest(kind, CONFIG_MAPPING)}")
    check_sizes(fields, str(path))
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:  # each version of transformers has its own
        raise InputError(f"{path}: not a config of '{kind}': {' '.join(str(error).split())}") from error


def _build(config: Any) -> nn.Module:
    """What the config names, or else what its kind is mostly trained as."""
    for one in (config, *_parts(config)):
        one.use_cache = False  # keys and values of past tokens are for generation
    named = (config.architectures or [None])[0]
    try:
        return _make(config, named)
    except MeshwrightError:
        raise
    except Exception as error:
        # a constructor of transformers answers a field that does not suit it with whatever Python raises
        what = f"'{named}' of this config" if named else f"a model of type '{config.model_type}'"
        raise ModelError(f"transformers cannot build {what}: {type(error).__name__}: {error}") from error


def _make(config: Any, named: str | None) -> nn.Module:
    import transformers

    if named is not None and hasattr(transformers, named):
        if not any(word in named for word in ("For", "Head", "MTModel")) and not compares_images(config):
            raise ModelError(
                f"the config's architecture '{named}' has no head to train: name one that has, as in 'LlamaForCausalLM'"
            )
        return getattr(transformers, named)(config)
    if compares_images(config):
        return transformers.AutoModel.from_config(config)
    if has_image_tokens(config):
        return transformers.AutoModelForImageTextToText.from_config(config)
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM.from_config(config)
    if hasattr(config, "num_channels"):
        return transformers.AutoModelForImageClassification.from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)
