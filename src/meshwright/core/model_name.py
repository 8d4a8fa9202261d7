"""The part of a model's name that names a file: `hf:CONFIG.json`, or `hf:CONFIG.json,seq=8192` with the tokens of a sample."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.bounds import MOST_WIDTH
from meshwright.core.errors import InputError, shortened

HUGGING_FACE = "hf:"
SEQUENCE = ",seq="


def is_config(model: str) -> bool:
    return model.startswith(HUGGING_FACE)


def config_file(model: str) -> Path:
    """The file of `hf:CONFIG.json`, with or without its option."""
    return Path(model.removeprefix(HUGGING_FACE).partition(SEQUENCE)[0])


def config_sequence(model: str) -> int | None:
    """Tokens of a sample, where the name says how many."""
    _, given, text = model.partition(SEQUENCE)
    if not given:
        return None
    if not text.isdecimal() or len(text) > len(str(MOST_WIDTH)) or not 1 <= int(text) <= MOST_WIDTH:
        raise InputError(
            f"model '{shortened(model)}': seq={shortened(text)} is not a whole number from 1 to {MOST_WIDTH}"
        )
    return int(text)
