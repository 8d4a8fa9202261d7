"""From the names of a folder's tensors to those of a module.

A module that is not of transformers goes by its own names. One that is may have been stored under others: transformers renames
them and puts them together when it loads, and says how in a table of its own, which is followed here:

    h.0.attn.c_attn.weight                     transformer.h.0.attn.c_attn.weight      saved without its head
    …experts.0.w1.weight, …experts.0.w3.weight …    …experts.gate_up_proj              Stack of each, Join of both along dim 1

Tied parameters may be stored under any of their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from meshwright.core.errors import InputError
from meshwright.training.weights_source import Join, Source, Stack, Turn, Whole

HARMLESS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Tensors that older versions stored, and that a module makes itself."""


def name_sources(stored: Iterable[str], module: nn.Module, wanted: Mapping[str, Any]) -> dict[str, Source]:
    """The module's name → where its values come from; stored tensors that the module has no use for go by their own.

    wanted: the module's names."""
    table = _table(module)
    if table is None:
        return {_with_prefix(name, module, wanted): Whole(name) for name in stored}
    return _follow(stored, module, wanted, table)


def is_harmless(name: str, module: nn.Module) -> bool:
    """Whether a stored tensor that the module lacks may be left out: transformers lists those of each architecture."""
    known = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in (*HARMLESS, *known))


def _table(module: Any) -> list[Any] | None:
    """What transformers does to stored tensors of this module; None where it does nothing."""
    if not hasattr(module, "base_model_prefix"):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5 names are stored as they are
        return None
    found: list[Any] = get_model_conversion_mapping(module)
    return found


def _with_prefix(name: str, module: nn.Module, wanted: Mapping[str, Any]) -> str:
    """A model that was stored without its head has names without the prefix of its body, and the other way round."""
    prefix = getattr(module, "base_model_prefix", "")
    if name in wanted or not prefix:
        return name
    candidates = (f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((one for one in candidates if one in wanted), name)


def _follow(stored: Iterable[str], module: nn.Module, wanted: Mapping[str, Any], table: list[Any]) -> dict[str, Source]:
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    renamings = [entry for entry in table if not isinstance(entry, WeightConverter)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Source] = {}
    gathered: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        target = _with_prefix(target, module, wanted)
        if target not in wanted and _with_prefix(name, module, wanted) in wanted:
            target, pattern = _with_prefix(name, module, wanted), None  # stored as the module has it already
        if pattern is None or target not in wanted:
            found[target if target in wanted else name] = Whole(name)
        else:
            _, parts = gathered.setdefault(target, (by_pattern[pattern], {}))
            parts.setdefault(pattern, []).append(name)
    return found | {target: _put_together(target, *gathering) for target, gathering in gathered.items()}


def _put_together(target: str, converter: Any, parts: dict[str, list[str]]) -> Source:
    """The table's operations, one after another, on what was gathered for each of its patterns in its order."""
    lists: list[list[Source]] = [
        [Whole(name) for name in parts[pattern]] for pattern in converter.source_patterns if pattern in parts
    ]
    for operation in converter.operations:
        lists = [_operate(target, operation, lists)] if _joins(operation) else [
            _operate(target, operation, [one]) for one in lists
        ]  # fmt: skip
    if len(lists) != 1 or len(lists[0]) != 1:
        raise _unknown(target, converter.operations[-1])
    return lists[0][0]


def _joins(operation: Any) -> bool:
    return type(operation).__name__ == "Concatenate"


def _operate(target: str, operation: Any, lists: list[list[Source]]) -> list[Source]:
    kind = type(operation).__name__
    every = tuple(source for one in lists for source in one)
    if kind == "MergeModulelist" and operation.dim == 0:
        return [Stack(every)]
    if kind == "Concatenate":
        return [Join(every, operation.dim)]
    if kind == "Transpose" and not operation.check_dims:
        return [Turn(source, operation.dim0, operation.dim1) for source in every]
    raise _unknown(target, operation)


def _unknown(target: str, operation: Any) -> InputError:
    return InputError(
        f"'{target}' is stored in another form, which transformers changes by {type(operation).__name__} when it loads: that is "
        "not done here; load the model with transformers, and save it with save_pretrained(..., save_original_format=False)"
    )
