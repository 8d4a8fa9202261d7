"""The fields of a Hugging Face config, as its file has them: read strictly, and within the bounds of what can be built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from meshwright.core.bounds import MOST_CONFIG_NUMBER, MOST_LAYERS, MOST_NESTED
from meshwright.core.errors import InputError, shortened
from meshwright.core.files.given_file import check_plain

COUNTED = {
    "num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "hidden_size", "n_embd", "d_model",
    "num_attention_heads", "num_heads", "n_head", "num_key_value_heads", "intermediate_size", "vocab_size",
}  # fmt: skip
"""Of which a config has at least one."""
DEPTH_WORDS = ("layer", "block", "depth", "expert", "stage")
"""Words in the names of settings that count modules."""
FORMULA_WORDS = ("theta", "base", "token_id", "seed", "freq")
"""Words in the names of settings that count nothing."""


def parse_config(text: str, where: str) -> dict[str, Any]:
    """JSON as Python writes it: with NaN and Infinity, which some configs have."""
    try:
        fields = json.loads(text, object_hook=_special_float)
    except RecursionError:
        raise InputError(f"{where}: lists and objects are nested more than {MOST_NESTED} deep") from None
    except (ValueError, TypeError) as error:  # TypeError: a special float that is none
        raise InputError(f"{where}: not valid JSON: {error}") from error
    check_plain(fields, where)
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise InputError(f"{where}: has no 'model_type': is it a Hugging Face config?")
    named = fields.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise InputError(f"{where}: architectures is {shortened(str(named))}: give a list of names of classes")
    return fields


def check_sizes(fields: dict[str, Any], where: str) -> None:
    """Before transformers sees them: some of its configs make a list with an entry for every layer."""
    for path, key, value in _numbers(fields, "", ""):
        if key in COUNTED and value < 1:
            raise InputError(f"{where}: {path} is {value}: give 1 or more")
        most = MOST_LAYERS if any(word in key for word in DEPTH_WORDS) else MOST_CONFIG_NUMBER
        if abs(value) > most and not any(word in key for word in FORMULA_WORDS):
            raise InputError(f"{where}: {path} is {shortened(str(value))}: give {most} or less")


def _numbers(raw: object, path: str, key: str) -> Iterator[tuple[str, str, int]]:
    """Every whole number with its path, and the name it goes by: in a list, the list's."""
    if isinstance(raw, dict):
        for name, value in raw.items():
            yield from _numbers(value, f"{path}.{name}" if path else name, name)
    elif isinstance(raw, list):
        for place, value in enumerate(raw):
            yield from _numbers(value, f"{path}[{place}]", key)
    elif isinstance(raw, int) and not isinstance(raw, bool):
        yield path, key, raw


def _special_float(fields: dict[str, Any]) -> Any:
    """transformers 5 writes `{"__float__": "Infinity"}` for a number that JSON does not have."""
    return float(fields["__float__"]) if set(fields) == {"__float__"} else fields
