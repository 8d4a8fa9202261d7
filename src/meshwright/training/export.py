"""A trained model as a folder that transformers loads: safetensors, config, and the tokenizer it was trained with.

The folder is written under another name and read back by transformers before it gets its own. It must give

    the same tensors, bit for bit, under the same names, tied where they were
    the same outputs on an example batch, to the rounding of a sum taken in another order

or it is removed and the export fails: weights that were lost, exchanged or read with other settings do not get out unseen.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.units import format_bytes
from meshwright.models.objective import Batch, call, map_batch
from meshwright.models.parameters import list_parameters

SLACK = 64
"""Rounding errors of the dtype that outputs may differ by, of their largest."""
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "preprocessor_config.json",
)  # fmt: skip
"""Files beside the weights that say what goes in and comes out: training does not change them."""


class ExportError(MeshwrightError):
    """What was written is not what was trained."""


@dataclass(frozen=True)
class Exported:
    folder: Path
    num_tensors: int
    num_bytes: int
    largest_difference: float
    """Between outputs, of their largest."""
    copied: tuple[str, ...]
    """Files of the tokenizer."""


def check_exportable(module: nn.Module, name: str) -> None:
    if not hasattr(module, "save_pretrained"):
        raise InputError(
            f"model '{name}' is not one of transformers, which could not load it: export takes hf:CONFIG.json, or a function that "
            "returns a transformers model"
        )


def check_target(folder: Path) -> None:
    """An export never writes over anything."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already: choose another with -o, or remove it")


def export(
    module: nn.Module, batch: Batch, folder: Path, dtype: torch.dtype | None, shard_bytes: int, beside: Path | None
) -> Exported:
    """Write, read back, compare, and only then give the folder its name.

    dtype: what weights are rounded to; None: as they are. beside: where the tokenizer is."""
    check_target(folder)
    if dtype is not None:
        _round(module, dtype)
    module.eval()
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        _check_room(module, draft)
        _write(module, draft, shard_bytes)
        difference = compare(module, draft, batch)
        copied = _copy_tokenizer(beside, draft)
        if folder.is_dir():
            folder.rmdir()
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    tensors = {one.data_ptr(): one for one in module.state_dict().values()}.values()
    return Exported(folder, len(tensors), sum(one.numel() * one.element_size() for one in tensors), difference, copied)


def _round(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: what a model computes for itself (rotary angles) stays as exact as transformers has it."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _check_room(module: nn.Module, draft: Path) -> None:
    draft.mkdir(parents=True)
    needed = sum(one.numel() * one.element_size() for one in module.parameters())
    free = shutil.disk_usage(draft).free
    if needed > free:
        raise ExportError(
            f"{draft.parent}: the disk is full: {format_bytes(needed)} are needed, {format_bytes(free)} are free"
        )


def _write(module: Any, draft: Path, shard_bytes: int) -> None:
    """With the architecture's own answer to whether past tokens are cached: in training they never are."""
    config = module.config
    trained_with, usual = config.use_cache, getattr(type(config)(), "use_cache", None)
    config.use_cache = usual
    if usual is None:
        del config.use_cache
    try:
        module.save_pretrained(draft, max_shard_size=shard_bytes)
    finally:
        config.use_cache = trained_with


def compare(module: nn.Module, folder: Path, batch: Batch) -> float:
    """The largest difference of outputs, of their largest; what differs too much, or at all where it must not, is named."""
    loaded, told = type(module).from_pretrained(  # type: ignore[attr-defined]
        folder, dtype=next(module.parameters()).dtype, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if told[kind]:
            raise ExportError(f"transformers reads the export with {kind.replace('_', ' ')}: {sorted(told[kind])[:5]}")
    _compare_tensors(module, loaded)
    loaded.config.use_cache = False
    return _compare_outputs(_outputs(module, batch), _outputs(loaded.eval(), batch))


def _compare_tensors(module: nn.Module, loaded: nn.Module) -> None:
    read = loaded.state_dict()
    for name, tensor in module.state_dict().items():
        if name not in read or not torch.equal(tensor, read[name]):
            raise ExportError(f"tensor '{name}' is not the one that was trained when transformers reads the export")
    ties = {one.name: one.tied_to for one in list_parameters(module)}
    for one in list_parameters(loaded):
        if one.tied_to != ties[one.name]:
            raise ExportError(
                f"parameter '{one.name}' was tied to {ties[one.name]} and is tied to {one.tied_to} in the export"
            )


@torch.no_grad()
def _outputs(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    dtype = next(module.parameters()).dtype
    output = call(module, map_batch(lambda one: one.to(dtype) if one.is_floating_point() else one, batch))
    if not isinstance(output, Mapping):
        raise ExportError(
            f"{type(module).__name__} returned {type(output).__name__}: outputs by name are needed to compare them"
        )
    return {key: one for key, one in output.items() if isinstance(one, Tensor) and one.is_floating_point()}


def _compare_outputs(own: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    worst = 0.0
    for key, tensor in own.items():
        largest = float(tensor.abs().max())
        difference = float((tensor - other[key]).abs().max()) / (largest or 1.0) if key in other else float("inf")
        allowed = SLACK * torch.finfo(tensor.dtype).eps
        if not difference <= allowed:
            raise ExportError(
                f"output '{key}' of the export differs by {difference:.2g} of its largest value, where {allowed:.2g} is rounding: "
                "the config that was written is not the one that was trained with"
            )
        worst = max(worst, difference)
    return worst


def _copy_tokenizer(beside: Path | None, draft: Path) -> tuple[str, ...]:
    found = [name for name in TOKENIZER if beside is not None and (beside / name).is_file()]
    for name in found:
        assert beside is not None
        shutil.copyfile(beside / name, draft / name)
    return tuple(found)
