"""Models of transformers that take sound: waves, or spectrograms of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.core.errors import InputError
from meshwright.models.objective import Batch

WAVE, FEATURES = "input_values", "input_features"
USUAL_WAVE = 16000
"""One second."""


@dataclass(frozen=True)
class AudioShape:
    """Samples are sounds of one size, each of a class."""

    name: str
    """Of the argument that the model takes them by."""
    size: tuple[int, ...]
    """Of one sample: a wave's length, or a spectrogram's dims."""
    classes: int


@dataclass(frozen=True)
class SpeechShape:
    """Sounds with the text that a decoder writes of them."""

    sound: AudioShape
    seq: int
    vocab: int


def random_audio(shape: AudioShape) -> Callable[[int], Batch]:
    def example(samples: int) -> Batch:
        random = torch.Generator().manual_seed(0)
        sounds = torch.randn(samples, *shape.size, generator=random)
        return {shape.name: sounds, "labels": torch.randint(shape.classes, (samples,), generator=random)}

    return example


def random_speech(shape: SpeechShape) -> Callable[[int], Batch]:
    def example(samples: int) -> Batch:
        random = torch.Generator().manual_seed(0)
        sounds = torch.randn(samples, *shape.sound.size, generator=random)
        tokens = torch.randint(shape.vocab, (samples, shape.seq + 1), generator=random)
        written = {"decoder_input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        return {shape.sound.name: sounds, **written}

    return example


def audio_shape(config: Any, kind: type | None) -> AudioShape | SpeechShape | None:
    """Of a model whose class takes sounds first; None for others. Sounds that we know no size of are refused."""
    name = getattr(kind, "main_input_name", None)
    if kind is None or name not in (WAVE, FEATURES):
        return None
    size = _size(config, name)
    if size is None or not (config.is_encoder_decoder or "Classification" in kind.__name__):
        raise InputError(
            f"no example batch can be made for '{kind.__name__}', which takes '{name}': write path/to/file.py:function that "
            "returns (module, batch, loss)"
        )
    sound = AudioShape(name, size, config.num_labels)
    if not config.is_encoder_decoder:
        return sound
    return SpeechShape(sound, config.max_target_positions, config.vocab_size)


def small_sounds(config: Any, num_frames: int) -> dict[str, int]:
    """The most a shrunk config may have of what makes sounds and their texts long."""
    names = ("max_source_positions", "max_target_positions")
    limits = {name: num_frames for name in names if hasattr(config, name)}
    if hasattr(config, "time_stride") and isinstance(config.patch_size, int):
        limits["max_length"] = config.patch_size * num_frames
    return limits


def short_wave(config: Any, num_frames: int) -> int:
    """Its length, so that the convolutions before the blocks leave so many frames."""
    length = num_frames
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        length = (length - 1) * stride + kernel
    return int(length)


def _size(config: Any, name: str) -> tuple[int, ...] | None:
    if name == FEATURES and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return (config.num_mel_bins, 2 * config.max_source_positions)
    if name == WAVE and hasattr(config, "time_stride"):
        return (config.max_length, config.num_mel_bins)
    if name == WAVE and hasattr(config, "conv_stride"):
        return (max(USUAL_WAVE, math.prod(config.conv_stride)),)
    return None
