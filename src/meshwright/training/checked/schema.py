"""What a checkpoint must hold for one rank of a run, as a value; and in what a checkpoint differs from it.

    model        every parameter and buffer of this rank: name, shape, dtype
    state        what the optimizer keeps for each parameter; of state that the first update makes, nothing is known yet
    options      the optimizer's settings of each parameter, and of what kind each is
    generators   what this rank draws from
    scales       whether gradients are scaled (fp16)

Under the plan that wrote it, dtypes are the same. Under another plan only the kind of number must be: what was kept in 64 bits may
be gone on with in 32. A difference is no damage: the model, the optimizer or the plan are not those of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor

from meshwright.core.codec import Value
from meshwright.training.checked.whole import SCALE_NAMES, Whole
from meshwright.training.contents import MODEL, SETTINGS, STATE, Contents, state_key
from meshwright.training.tensors_file import DTYPES, NAMES

OptionKind = Literal["nothing", "flag", "number", "text", "list", "table"]
Wanted = Literal["training", "weights"]
"""All of a checkpoint, to train on; or parameters and buffers alone."""
SHOWN = 5
"""Differences that are named; the others are counted."""


class Form(Value, kw_only=True):
    """What a saved tensor must look like."""

    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it."""


class Schema(Value, kw_only=True):
    """What a checkpoint must hold for a program to take it over."""

    plan: str
    """Hash of the plan that runs now."""
    num_ranks: int
    model: dict[str, Form]
    state: dict[str, dict[str, Form]]
    is_state_known: bool
    """False where the first update makes it."""
    options: dict[str, dict[str, OptionKind]]
    generators: tuple[str, ...]
    scales: bool

    def names(self) -> set[str]:
        """Of all tensors and values that this rank knows what to do with."""
        state = {f"{STATE}{name}.{key}" for name, kept in self.state.items() for key in kept}
        return {f"{MODEL}{name}" for name in self.model} | {f"{SETTINGS}{name}" for name in self.options} | state


def schema_of(saved: Mapping[str, Any], plan: str, num_ranks: int, is_state_known: bool) -> Schema:
    """saved: a program's state as it would be saved (`SavedState.saved`)."""
    optimizer = saved["optimizer"]
    (generators,) = saved["random"].values()
    return Schema(
        plan=plan,
        num_ranks=num_ranks,
        model={name: form_of(tensor) for name, tensor in saved["model"].items()},
        state={
            name: {key: form_of(item) for key, item in kept.items() if isinstance(item, Tensor)}
            for name, kept in optimizer["state"].items()
        },
        is_state_known=is_state_known,
        options={name: {key: kind_of(value) for key, value in given} for name, given in optimizer["settings"].items()},
        generators=tuple(generators),
        scales="loss_scale" in saved,
    )


def form_of(tensor: Tensor) -> Form:
    return Form(shape=tuple(tensor.shape), dtype=NAMES.get(tensor.dtype, str(tensor.dtype)))


def kind_of(value: Any) -> OptionKind:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        return "list"
    return "table" if isinstance(value, dict) and set(value) != {"float"} else "number"


def differences(schema: Schema, whole: Whole, wanted: Wanted) -> Iterator[str]:
    """In words; nothing where the checkpoint is what this rank needs."""
    is_same_plan = whole.progress.plan == schema.plan
    for name, form in schema.model.items():
        yield from _differing(f"'{name}'", form, _found(whole.contents, f"{MODEL}{name}"), is_same_plan)
    if wanted == "weights":
        return
    yield from _state(schema, whole, is_same_plan)
    yield from _options(schema, whole.contents)
    if schema.scales and is_same_plan:
        yield from (f"it lacks '{name}'" for name in sorted(SCALE_NAMES) if name not in whole.contents.tensors)


def unknown(schema: Schema, contents: Contents, wanted: Wanted) -> list[str]:
    """Names of tensors and values that this rank has no use for; another rank may have."""
    known = schema.names()
    prefixes = (MODEL,) if wanted == "weights" else (MODEL, STATE, SETTINGS)
    return [
        name
        for name in (*contents.tensors, *contents.values)
        if name.startswith(prefixes) and name not in known and not _may_be_state(schema, contents, name)
    ]


def words(found: list[str]) -> str:
    shown = "; ".join(found[:SHOWN])
    return shown if len(found) <= SHOWN else f"{shown}; and {len(found) - SHOWN} more"


def _may_be_state(schema: Schema, contents: Contents, name: str) -> bool:
    """State that the first update makes, and what an optimizer keeps beside tensors: of parameters that it updates."""
    is_open = not schema.is_state_known or name in contents.values
    return name.startswith(STATE) and is_open and state_key(name)[0] in schema.options


def _found(contents: Contents, name: str) -> Form | None:
    tensor = contents.tensors.get(name)
    return None if tensor is None else Form(shape=tensor.shape, dtype=tensor.dtype)


def _differing(what: str, own: Form, found: Form | None, is_same_plan: bool) -> Iterator[str]:
    if found is None:
        yield f"it lacks {what}, which is {list(own.shape)} of {own.dtype} here"
    elif found.shape != own.shape:
        yield f"{what} is {list(found.shape)} there and {list(own.shape)} here"
    elif found.dtype != own.dtype and (is_same_plan or _number_kind(found.dtype) != _number_kind(own.dtype)):
        yield f"{what} is of {found.dtype} there and of {own.dtype} here"


def _number_kind(dtype: str) -> str:
    known = DTYPES.get(dtype)
    if known is None:
        return dtype
    return "real" if known.is_floating_point else "flag" if dtype == "BOOL" else "whole"


def _state(schema: Schema, whole: Whole, is_same_plan: bool) -> Iterator[str]:
    contents, found = whole.contents, whole.contents.optimizer_state()
    stateless = set(schema.state) - set(found) if contents.stateless is None else set(contents.stateless)
    has_any = bool(found) or not whole.progress.step  # after a step, something has had a gradient
    for name, kept in schema.state.items():
        if name in stateless and has_any:
            continue  # it never had a gradient, or is frozen
        for key, form in kept.items():
            there = found.get(name, {}).get(key)
            as_value = f"{STATE}{name}.{key}" in contents.values
            own = None if there is None else Form(shape=there.shape, dtype=there.dtype)
            if not as_value:
                yield from _differing(f"'{key}' of '{name}' in the optimizer's state", form, own, is_same_plan)


def _options(schema: Schema, contents: Contents) -> Iterator[str]:
    for name, own in schema.options.items():
        given = contents.values.get(f"{SETTINGS}{name}")
        if given is None:
            yield f"it lacks the optimizer's settings of '{name}'"
            continue
        for key, value in given:
            kind = kind_of(value)
            if key not in own:
                yield f"the optimizer has no setting '{key}', which '{name}' has there"
            elif "nothing" not in (kind, own[key]) and kind != own[key]:
                yield f"the setting '{key}' of '{name}' is a {kind} there and a {own[key]} here"
