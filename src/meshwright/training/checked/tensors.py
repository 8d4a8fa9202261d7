"""The tensors of a checkpoint, file by file: each is where `contents.json` says, and its numbers can be gone on with.

    header       the keys of a file are the boxes that lie in it, each of its shape and dtype
    trained      parameters that an optimizer updates, and what it keeps for them, hold no NaN
    in range     squares are not negative, counts of steps are whole and not negative, a loss scale is above zero
    random       a generator takes the state

Buffers and frozen parameters may hold anything: they are the user's. A NaN in what is trained spreads in one step to everything;
such a checkpoint is of no use, and the one before it may be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from meshwright.training.contents import MODEL, STATE, Box, Contents, SavedTensor, state_key, with_settings
from meshwright.training.manifest import DamagedError

SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
"""Averages of squares in torch's Adam and its kin: their root is taken."""
COUNT = "step"
RANDOM, SCALE, DELAYED = "random.", "loss_scale.", "delayed."
DELAYED_PARAMETERS = f"{DELAYED}parameters."
Located = tuple[str, SavedTensor, Box]


def check_tensors(folder: Path, contents: Contents, files: frozenset[str]) -> None:
    """Of these files; raises DamagedError with the first tensor that is wrong."""
    by_file: dict[str, list[Located]] = defaultdict(list)
    for name, tensor in contents.tensors.items():
        for box in tensor.boxes:
            if box.file in files:
                by_file[box.file].append((name, tensor, box))
    trained = {f"{MODEL}{name}" for name in with_settings(contents.values)}
    for file in sorted(name for name in files if name.endswith(".safetensors")):
        for problem in _problems(folder / file, by_file.get(file, []), trained):
            raise DamagedError(f"{folder / file}: {problem}")


def _problems(path: Path, expected: list[Located], trained: set[str]) -> Iterator[str]:
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            yield from _wrong_header(file, expected)
            for name, _, box in expected:
                yield from wrong_numbers(name, file.get_tensor(box.key), name in trained)
    except (safetensors.SafetensorError, OSError) as error:
        yield f"cannot be read: {error}"


def _wrong_header(file: Any, expected: list[Located]) -> Iterator[str]:
    found, boxes = set(file.keys()), {box.key for _, _, box in expected}
    for key in sorted(boxes - found):
        yield f"it lacks '{key}'"
    for key in sorted(found - boxes):
        yield f"it holds '{key}', which the contents do not know"
    for _, tensor, box in expected:
        view = file.get_slice(box.key)
        if tuple(view.get_shape()) != box.sizes:
            yield f"'{box.key}' is of shape {view.get_shape()}, not {list(box.sizes)}"
        if view.get_dtype() != tensor.dtype:
            yield f"'{box.key}' is of {view.get_dtype()}, not {tensor.dtype}"


def wrong_numbers(name: str, tensor: Tensor, is_trained: bool) -> Iterator[str]:
    """is_trained: whether it is a parameter that an optimizer updates."""
    if name.startswith(RANDOM):
        yield from _wrong_random_state(name, tensor)
    elif name.startswith(SCALE):
        is_scale = name == f"{SCALE}scale"
        if tensor.numel() != 1 or not bool(torch.isfinite(tensor)) or tensor.item() < 0 or (is_scale and not tensor):
            yield f"'{name}' is {tensor.tolist()}, which is no {'scale' if is_scale else 'count'}"
    elif name.startswith(STATE):
        yield from _wrong_state(name, tensor)
    elif name == f"{DELAYED}num_steps":
        if tensor.numel() != 1 or tensor.is_floating_point() or tensor.item() < 0:
            yield f"'{name}' is {tensor.tolist()}, which is no count"
    elif (is_trained or name.startswith(DELAYED_PARAMETERS)) and _has_nan(tensor):
        yield f"parameter '{name.removeprefix(MODEL)}' holds NaN"


def _wrong_state(name: str, tensor: Tensor) -> Iterator[str]:
    parameter, key = state_key(name)
    if _has_nan(tensor):
        yield f"'{key}' that the optimizer kept for '{parameter}' holds NaN"
    elif key in SQUARES and tensor.numel() and bool(tensor.min() < 0):
        yield f"'{key}' that the optimizer kept for '{parameter}' is negative somewhere"
    elif key == COUNT and tensor.numel() == 1 and not (tensor.item() >= 0 and float(tensor.item()).is_integer()):
        yield f"the count of steps of '{parameter}' is {tensor.item()}"


def _wrong_random_state(name: str, state: Tensor) -> Iterator[str]:
    kind = name.rpartition(".")[2]
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        return  # there is no such generator here to ask, and none to set
    try:
        torch.Generator(kind).set_state(state)
    except (RuntimeError, TypeError) as error:
        yield f"'{name}' is no state of a generator: {str(error).splitlines()[0]}"


def _has_nan(tensor: Tensor) -> bool:
    """A sum is not a number where a part is not; of infinities of both signs too, so that these are looked at one by one."""
    if not tensor.is_floating_point() or tensor.element_size() < 2 or not tensor.numel():
        return False
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
