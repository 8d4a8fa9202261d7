"""The reference models: what each takes, its options, and the same architecture made small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from meshwright.models.bert import BERT, BERTOptions
from meshwright.models.coatnet import CoAtNet, CoAtNetOptions
from meshwright.models.examples import ImageShape, Shape, TextShape, VectorShape
from meshwright.models.gpt import GPT, GPTOptions
from meshwright.models.llama import Llama, LlamaOptions
from meshwright.models.mlp import MLP, MLPOptions
from meshwright.models.moe import BALANCED, MoEGPT, MoEOptions
from meshwright.models.objective import DEFAULT, Objective
from meshwright.models.resnet import ResNet, ResNetOptions
from meshwright.models.t5 import T5, T5Options
from meshwright.models.vit import ViT, ViTOptions
from meshwright.rules.sharding import VOCABULARY_ROWS

SMALL_DEPTH = 4
"""Blocks of a shrunk model: two stages on each of two pp coordinates."""


@dataclass(frozen=True)
class Reference:
    """A reference model, as functions of its options."""

    options: type[Any]
    about: str
    build: Callable[[Any], nn.Module]
    shape: Callable[[Any], Shape]
    shrink: Callable[[Any], Any]
    """Options of the same architecture, small enough to compare in float64 within seconds; heads stay divisible by 4."""
    objective: Callable[[Any], Objective] = lambda options: DEFAULT


def next_token(options: GPTOptions | LlamaOptions | MoEOptions) -> TextShape:
    return TextShape(seq=options.seq, vocab=options.vocab)


def masked_tokens(options: BERTOptions) -> TextShape:
    return TextShape(seq=options.seq, vocab=options.vocab, task="masked")


def decoded_tokens(options: T5Options) -> TextShape:
    return TextShape(seq=options.seq, vocab=options.vocab, task="decode")


def images(options: ResNetOptions | ViTOptions | CoAtNetOptions) -> ImageShape:
    return ImageShape(size=options.image, classes=options.classes)


def vectors(options: MLPOptions) -> VectorShape:
    return VectorShape(width=options.inputs, classes=options.classes)


def small_vocabulary(vocab: int) -> int:
    """As many rows as make a table worth splitting (rules/sharding.py), where it had as many; else a few."""
    return VOCABULARY_ROWS if vocab >= VOCABULARY_ROWS else min(vocab, 64)


Stack = TypeVar("Stack", GPTOptions, MoEOptions, BERTOptions)


def small_moe(options: MoEOptions) -> MoEOptions:
    every = min(options.every, SMALL_DEPTH)  # some block keeps its experts
    return replace(small_stack(replace(options, every=every)), experts=min(options.experts, 4))


def small_stack(options: Stack) -> Stack:
    heads = min(options.heads, 4)
    return replace(
        options, layers=min(options.layers, SMALL_DEPTH), hidden=8 * heads, heads=heads, seq=min(options.seq, 16),
        vocab=small_vocabulary(options.vocab), dropout=0.0,
    )  # fmt: skip


def small_llama(options: LlamaOptions) -> LlamaOptions:
    groups = min(options.heads // options.kv_heads, 2)
    return replace(
        options, layers=min(options.layers, SMALL_DEPTH), hidden=8 * 2 * groups, heads=2 * groups, kv_heads=2, intermediate=48,
        seq=min(options.seq, 16), vocab=small_vocabulary(options.vocab),
    )  # fmt: skip


def small_t5(options: T5Options) -> T5Options:
    heads = min(options.heads, 4)
    return replace(
        options, layers=min(options.layers, 2), hidden=8 * heads, heads=heads, head_width=8, intermediate=48,
        seq=min(options.seq, 16), vocab=small_vocabulary(options.vocab), dropout=0.0,
    )  # fmt: skip


def small_vit(options: ViTOptions) -> ViTOptions:
    heads = min(options.heads, 4)
    return replace(
        options, layers=min(options.layers, SMALL_DEPTH), hidden=8 * heads, heads=heads, image=16, patch=4,
        classes=min(options.classes, 12), dropout=0.0,
    )  # fmt: skip


def small_coatnet(options: CoAtNetOptions) -> CoAtNetOptions:
    return replace(
        options, blocks="2-2-2-2-2", channels="8-8-16-32-64", head_width=8, image=64, classes=min(options.classes, 12)
    )


def small_resnet(options: ResNetOptions) -> ResNetOptions:
    return replace(options, depth=26, image=64, classes=min(options.classes, 10), channels=8)


def small_mlp(options: MLPOptions) -> MLPOptions:
    return replace(
        options, layers=min(options.layers, SMALL_DEPTH), inputs=min(options.inputs, 24), hidden=32,
        classes=min(options.classes, 12), dropout=0.0,
    )  # fmt: skip


REFERENCE: dict[str, Reference] = {
    "gpt": Reference(
        GPTOptions, "decoder-only transformer, learned positions, tied or untied head", GPT, next_token, small_stack
    ),
    "llama": Reference(
        LlamaOptions,
        "decoder-only transformer, rotary positions, grouped keys, gated MLP",
        Llama,
        next_token,
        small_llama,
    ),
    "bert": Reference(
        BERTOptions, "encoder-only transformer that fills in masked tokens", BERT, masked_tokens, small_stack
    ),
    "t5": Reference(
        T5Options, "encoder and decoder, attention with a bias by distance", T5, decoded_tokens, small_t5
    ),
    "vit": Reference(ViTOptions, "vision transformer on patches of an image", ViT, images, small_vit),
    "coatnet": Reference(
        CoAtNetOptions, "two stages of convolution, two of attention with a bias by offset", CoAtNet, images, small_coatnet
    ),
    "moe": Reference(
        MoEOptions, "decoder-only transformer with experts, top 1 (Switch) or 2 (GShard)", MoEGPT, next_token, small_moe,
        lambda options: BALANCED,
    ),
    "resnet": Reference(
        ResNetOptions, "bottleneck ResNet-50/101, width=2 for Wide-ResNet", ResNet, images, small_resnet
    ),
    "mlp": Reference(MLPOptions, "multilayer perceptron that classifies vectors", MLP, vectors, small_mlp),
}  # fmt: skip
