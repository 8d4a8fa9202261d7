"""From a model's name to something that can be built, called and trained.

gpt:layers=12,hidden=768       a reference model, with options
path/to/file.py:function       the user's own: returns a module, (module, batch) or (module, batch, loss)
hf:CONFIG.json                 a Hugging Face config, random weights
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import ModelError, nearest
from meshwright.models.gpt import GPT, GPTOptions
from meshwright.models.llama import Llama, LlamaOptions
from meshwright.models.moe import BALANCED, MoEGPT, MoEOptions
from meshwright.models.objective import DEFAULT, Batch, Objective, map_batch, num_samples
from meshwright.models.resnet import ResNet, ResNetOptions
from meshwright.models.userfile import call_function


@dataclass(frozen=True)
class TextShape:
    """Samples are `seq` tokens below `vocab`. Encoder-decoder models also take the shifted labels."""

    seq: int
    vocab: int
    encoder_decoder: bool = False


@dataclass(frozen=True)
class ImageShape:
    size: int
    classes: int
    channels: int = 3


@dataclass(frozen=True)
class ModelSource:
    """What a model's name stands for."""

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[int], Batch] | None
    """n samples with random content, the same at every call."""
    shape: TextShape | ImageShape | None
    objective: Objective = DEFAULT
    shrink: Callable[[], ModelSource] | None = None
    """The same architecture, small enough to compare in float64 within seconds."""

    def small(self) -> ModelSource:
        return self.shrink() if self.shrink else self


def resolve(name: str) -> ModelSource:
    """A model's name → its source. Nothing is built yet, except for the user's own function."""
    if name.startswith("hf:"):
        from meshwright.models.huggingface import from_config

        return from_config(name)
    if ".py:" in name or name.endswith(".py"):
        return from_function(name)
    kind, _, options = name.partition(":")
    if kind not in REFERENCE:
        known = [*REFERENCE, "hf:CONFIG.json", "path/to/file.py:function"]
        raise ModelError(f"no model is called '{kind}': {nearest(kind, known)}")
    entry = REFERENCE[kind]
    return entry.source(name, parse_options(name, options, entry.options))


def parse_options(name: str, text: str, kind: type[Any]) -> Any:
    """`layers=12,tied=true` → the model's options."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in fields:
            raise ModelError(f"model '{name}' has no option '{key}': {nearest(key, fields)}")
        if not equals:
            raise ModelError(f"model '{name}': option '{key}' needs a value, like {key}={fields[key].default}")
        given[key] = _parse_option(name, key, value, fields[key].default)
    try:
        return kind(**given)
    except ValueError as error:
        raise ModelError(f"model '{name}': {error}") from error


def _parse_option(name: str, key: str, value: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        number = type(default)(value)
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
        raise ModelError(f"model '{name}': option {key}='{value}' is not {wanted}") from None
    if isinstance(default, int) and number < 1:
        raise ModelError(f"model '{name}': option {key}={value} must be at least 1")
    return number


def random_text(shape: TextShape) -> Callable[[int], Batch]:
    def example(samples: int) -> Batch:
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(shape.vocab, (samples, shape.seq + 1), generator=random)
        batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        return shifted(batch) if shape.encoder_decoder else batch

    return example


def shifted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a decoder sees: the labels, one place later."""
    labels = batch["labels"].clamp(min=0)
    start = torch.zeros_like(labels[:, :1])
    return {**batch, "decoder_input_ids": torch.cat([start, labels[:, :-1]], dim=1)}


def random_images(shape: ImageShape) -> Callable[[int], Batch]:
    def example(samples: int) -> Batch:
        random = torch.Generator().manual_seed(0)
        pixels = torch.randn(samples, shape.channels, shape.size, shape.size, generator=random)
        return {"pixel_values": pixels, "labels": torch.randint(shape.classes, (samples,), generator=random)}

    return example


@dataclass(frozen=True)
class Reference:
    """A reference model: its options, one line about it, and how it becomes a source."""

    options: type[Any]
    about: str
    source: Callable[[str, Any], ModelSource]


def _gpt(name: str, options: GPTOptions) -> ModelSource:
    shape = TextShape(seq=options.seq, vocab=options.vocab)
    small = dataclasses.replace(
        options,
        layers=min(options.layers, 3), hidden=8 * min(options.heads, 4), heads=min(options.heads, 4),
        seq=min(options.seq, 16), vocab=min(options.vocab, 61), dropout=0.0,
    )  # fmt: skip
    return ModelSource(
        name, lambda: GPT(options), random_text(shape), shape, shrink=lambda: _gpt(f"{name} (shrunk)", small)
    )


def _resnet(name: str, options: ResNetOptions) -> ModelSource:
    shape = ImageShape(size=options.image, classes=options.classes)
    small = dataclasses.replace(options, depth=26, image=64, classes=min(options.classes, 10), channels=8)
    return ModelSource(
        name, lambda: ResNet(options), random_images(shape), shape, shrink=lambda: _resnet(f"{name} (shrunk)", small)
    )


def _llama(name: str, options: LlamaOptions) -> ModelSource:
    shape = TextShape(seq=options.seq, vocab=options.vocab)
    groups = min(options.heads // options.kv_heads, 2)
    small = dataclasses.replace(
        options,
        layers=min(options.layers, 3), hidden=8 * 2 * groups, heads=2 * groups, kv_heads=2, intermediate=48,
        seq=min(options.seq, 16), vocab=min(options.vocab, 61),
    )  # fmt: skip
    return ModelSource(
        name, lambda: Llama(options), random_text(shape), shape, shrink=lambda: _llama(f"{name} (shrunk)", small)
    )


def _moe(name: str, options: MoEOptions) -> ModelSource:
    shape = TextShape(seq=options.seq, vocab=options.vocab)
    small = dataclasses.replace(
        options,
        layers=min(options.layers, 3), hidden=8 * min(options.heads, 4), heads=min(options.heads, 4),
        seq=min(options.seq, 16), vocab=min(options.vocab, 61), experts=min(options.experts, 4), dropout=0.0,
    )  # fmt: skip
    return ModelSource(
        name, lambda: MoEGPT(options), random_text(shape), shape, BALANCED, lambda: _moe(f"{name} (shrunk)", small)
    )


REFERENCE: dict[str, Reference] = {
    "gpt": Reference(GPTOptions, "decoder-only transformer, learned positions, tied or untied head", _gpt),
    "llama": Reference(LlamaOptions, "decoder-only transformer, rotary positions, grouped keys, gated MLP", _llama),
    "moe": Reference(MoEOptions, "decoder-only transformer with experts, top 1 (Switch) or 2 (GShard)", _moe),
    "resnet": Reference(ResNetOptions, "bottleneck ResNet-50/101, width=2 for Wide-ResNet", _resnet),
}


def from_function(name: str) -> ModelSource:
    """The user's function is called once to learn what it returns, and again for each build."""
    module, batch, loss = _returned(name, call_function(name))
    objective = Objective(loss=loss, count=DEFAULT.count) if loss else DEFAULT
    del module
    return ModelSource(
        name=name,
        build=lambda: _returned(name, call_function(name))[0],
        example=repeat_samples(batch) if batch is not None else None,
        shape=None,
        objective=objective,
    )


def _returned(name: str, result: Any) -> tuple[nn.Module, Batch | None, Callable[[Any, Batch], Tensor] | None]:
    parts = result if isinstance(result, tuple) else (result,)
    module, batch, loss = (*parts, None, None)[:3]
    if not isinstance(module, nn.Module) or len(parts) > 3:
        raise ModelError(
            f"{name} returned {type(result).__name__}: return a module, (module, batch) or (module, batch, loss)"
        )
    return module, batch, loss


def repeat_samples(batch: Batch) -> Callable[[int], Batch]:
    """As many samples as asked for, made of the ones there are."""

    def example(samples: int) -> Batch:
        times = -(-samples // num_samples(batch))
        return map_batch(lambda tensor: torch.cat([tensor] * times)[:samples], batch)

    return example
