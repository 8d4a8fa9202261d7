"""From a model's name to something that can be built, called and trained.

gpt:layers=12,hidden=768       a reference model, with options
path/to/file.py:function       the user's own: returns a module, (module, batch), (module, batch, loss) or
                               (module, batch, loss, count)
hf:CONFIG.json                 a Hugging Face config, random weights; with ,seq=8192 the tokens of a sample
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.core.bounds import MOST_LAYERS, MOST_WIDTH
from meshwright.core.errors import ModelError, nearest, shortened
from meshwright.core.model_name import is_config
from meshwright.models.examples import Example, Shape, random_examples, repeat_samples
from meshwright.models.faked.copies import copy_module
from meshwright.models.loss_reads import check_loss_reads_nothing_trained
from meshwright.models.objective import DEFAULT, Batch, Objective, answered, objective_of, tensors_of
from meshwright.models.old_norms import check_can_be_built, without_computed_weights
from meshwright.models.one_process import as_one_process
from meshwright.models.reference import REFERENCE, Reference
from meshwright.models.seeded import seeded, seeded_like_torch
from meshwright.models.userfile import call_function

DEPTHS = ("layers", "depth")
"""Options that count blocks."""
SEED = 0
"""Of batches that users' functions draw."""


@dataclass(frozen=True)
class ModelSource:
    """What a model's name stands for."""

    name: str
    build: Callable[[], nn.Module]
    example: Example | None
    shape: Shape | None
    objective: Objective = DEFAULT
    shrink: Callable[[], ModelSource] | None = None
    """The same architecture, small enough to compare in float64 within seconds."""

    def small(self) -> ModelSource:
        return self.shrink() if self.shrink else self


def resolve(name: str) -> ModelSource:
    """A model's name → its source. Nothing is built yet, except for the user's own function."""
    if is_config(name):
        from meshwright.models.hf.config import from_config

        return from_config(name)
    if ".py:" in name or name.endswith(".py"):
        return from_function(name)
    kind, _, options = name.partition(":")
    if kind not in REFERENCE:
        known = [*REFERENCE, "hf:CONFIG.json", "path/to/file.py:function"]
        raise ModelError(f"no model is called '{kind}': {nearest(kind, known)}")
    entry = REFERENCE[kind]
    return from_reference(name, entry, parse_options(name, options, entry.options))


def from_reference(name: str, entry: Reference, options: Any) -> ModelSource:
    shape = entry.shape(options)
    return ModelSource(
        name=name,
        build=lambda: entry.build(options),
        example=random_examples(shape),
        shape=shape,
        objective=entry.objective(options),
        shrink=lambda: from_reference(f"{name} (shrunk)", entry, entry.shrink(options)),
    )


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
        if key in given:
            raise ModelError(f"model '{name}': option '{key}' is given twice: keep one")
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
    if isinstance(default, float) and not (math.isfinite(number) and number >= 0):
        raise ModelError(f"model '{name}': option {key}={value} must be 0 or more")
    most = MOST_LAYERS if key in DEPTHS else MOST_WIDTH
    if isinstance(default, int | float) and number > most:
        raise ModelError(f"model '{name}': option {key}={shortened(value)} is too large: give {most} or less")
    if key == "dropout" and number >= 1:
        raise ModelError(f"model '{name}': option dropout={value} is a share: give 0 or more, below 1")
    return number


def from_function(name: str) -> ModelSource:
    """The user's function is called once to learn what it returns, and again for each build. Each rank calls it: a batch that it
    draws is the same on all of them."""
    with seeded(SEED), as_one_process():
        module, batch, loss, count = _returned(name, call_function(name))
    check_can_be_built(name, module)
    check_loss_reads_nothing_trained(name, loss)
    objective = objective_of(loss, count)
    batch = None if batch is None else answered(module, batch, objective)
    first = weakref.ref(module)
    del module
    return ModelSource(
        name=name,
        build=lambda: _built(name, first()),
        example=repeat_samples(batch) if batch is not None else None,
        shape=None,
        objective=objective,
    )


def _built(name: str, first: nn.Module | None) -> nn.Module:
    """A module of its own: a file may hold one, and return it at every call."""
    with seeded_like_torch(), as_one_process():
        module = without_computed_weights(_returned(name, call_function(name))[0])
    return copy_module(module, {}) if module is first else module


Returned = tuple[nn.Module, Batch | None, Callable[[Any, Batch], Tensor] | None, Callable[[Batch], int] | None]


def _returned(name: str, result: Any) -> Returned:
    """Module, batch, loss and what its mean counts."""
    parts = result if isinstance(result, tuple) else (result,)
    module, batch, loss, count = (*parts, None, None, None)[:4]
    functions = all(one is None or callable(one) for one in (loss, count))
    if not isinstance(module, nn.Module) or len(parts) > 4 or not functions:
        raise ModelError(
            f"{name} returned {type(result).__name__}: return a module, (module, batch), (module, batch, loss) or (module, batch, "
            "loss, count), where loss and count are functions"
        )
    if batch is not None and not _is_batch(batch):
        raise ModelError(
            f"{name} returned {type(batch).__name__} as its batch: give a tensor, a dict of tensors, or a tuple or list of "
            "tensors with the labels last, and no tensors nested deeper than that"
        )
    return module, batch, loss, count


def _is_batch(value: Any) -> bool:
    """One level of tensors: samples of what lies deeper could not be shared out."""
    if not isinstance(value, Tensor | Mapping | Sequence) or not tensors_of(value):
        return False
    items = () if isinstance(value, Tensor) else value.values() if isinstance(value, Mapping) else value
    return not any(isinstance(item, Mapping | list | tuple) and _holds_tensors(item) for item in items)


def _holds_tensors(nest: Any) -> bool:
    if isinstance(nest, Mapping | list | tuple):
        return any(map(_holds_tensors, nest.values() if isinstance(nest, Mapping) else nest))
    return isinstance(nest, Tensor)
