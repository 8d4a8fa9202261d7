"""The constants of the cost model: each with a name, a unit and an origin.

A *family* is a type of device (A100, H100, …). Its constants come from four places, and each value says which:

    vendor sheet   printed by the vendor
    probe          measured by us on such a device
    fit            few numbers fitted to published runs of such devices, see docs/accuracy.md
    assumed        nobody published it: the value that other devices have

`families.json` beside this file holds them. For every table of published runs it also holds what the fit gives *without*
that table, so that a score on the table is out of sample.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from meshwright.core.bounds import Degree, Latency, NotNegative, Positive
from meshwright.core.codec import Value

Origin = Literal["probe", "vendor sheet", "measured elsewhere", "fit", "assumed"]
Share = Annotated[float, Meta(gt=0, le=1)]


class Constants(Value, kw_only=True):
    """The constants of the cost model, beyond peaks and links."""

    num_multiprocessors: Degree = 132
    matmul_share: Share = 0.82
    matmul_ramp_seconds: Latency = 1.9e-6
    matmul_aligned_by_4_share: Share = 0.36
    matmul_aligned_by_2_share: Share = 0.25
    matmul_unaligned_share: Share = 0.16
    attention_share: Share = 0.65
    attention_backward_share: Share = 0.55
    attention_ramp_length: NotNegative = 430.0
    narrow_head_share: Share = 0.7
    elementwise_share: Share = 0.88
    cast_up_share: Share = 0.45
    transcendental_share: Share = 0.68
    normalisation_share: Share = 0.60
    normalisation_backward_share: Share = 0.38
    softmax_share: Share = 0.50
    reduction_share: Share = 0.60
    fused_share: Share = 0.60
    copy_share: Share = 0.85
    update_share: Share = 0.73
    kernel_floor_seconds: Latency = 2e-6
    launch_seconds: Latency = 26e-6
    backward_launch_seconds: Latency = 21e-6
    compiled_launch_seconds: Latency = 5e-6
    intra_host_share: Share = 0.78
    inter_host_share: Share = 0.60
    hop_seconds: Latency = 8e-6
    inner_hop_seconds: Latency = 2e-6
    overlap_slowdown: NotNegative = 0.0
    step_overhead_seconds: Latency = 0.0
    context_bytes: NotNegative = 1.2e9
    communicator_bytes: NotNegative = 0.4e9
    allocator_slack_share: NotNegative = 0.08
    compiled_slack_share: NotNegative = 0.02
    assumed_inter_host_gb_per_second: Positive = 200.0


class Family(Value, kw_only=True):
    """Constants of one type of device, with where each came from."""

    name: str
    constants: Constants
    origins: dict[str, str]


_SAYS_NOTHING = re.compile(
    r"\b(nvidia|amd|intel|instinct|tesla|geforce|gpu|sxm\d?|oam|hbm\d?e?|\d+ ?gi?b|\d+ ?w)\b", re.IGNORECASE
)
"""Parts of a device's name that say nothing about its chip: who makes it, its memory and its power."""


@lru_cache(maxsize=1)
def _families() -> dict[str, Any]:
    text = resources.files("meshwright.core").joinpath("families.json").read_text(encoding="utf-8")
    found: dict[str, Any] = msgspec.json.decode(text)
    return found


def family_of(device: str, without: str | None = None) -> Family:
    """The constants for a device by its name; `without` leaves one table of published runs out of the fit.

    A device of no family gets what all families have in common, with the number of multiprocessors from its data sheet where the
    sheet is known. All of that is assumed.
    """
    file = _families()
    name = next((name for name in file["families"] if _is_of(device, name, file.get("forms", {}).get(name, []))), None)
    values, origins = _values(file["common"])
    if name is None:
        sheet, of_sheet = _values(_sheet(device, file))
        assumed = {key: f"assumed: as elsewhere ({origin})" for key, origin in origins.items()} | of_sheet
        return Family(name=device, constants=msgspec.convert(values | sheet, Constants), origins=assumed)
    own, own_origins = _values(file["families"][name])
    fitted, fit_origins = _values(file["fits"].get(without or "", file["fits"]["all"]).get(name, {}))
    constants = msgspec.convert({**values, **own, **fitted}, Constants)
    return Family(name=name, constants=constants, origins={**origins, **own_origins, **fit_origins})


def _is_of(device: str, name: str, forms: list[str]) -> bool:
    """Whether a device's name is this one, but for its maker, memory, power, and the forms in which the same chip is sold."""
    return [word for word in _words(_SAYS_NOTHING.sub(" ", device)) if word not in forms] == _words(name)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.casefold())


def _sheet(device: str, file: dict[str, Any]) -> dict[str, list[Any]]:
    """The figures that a data sheet has of a device without a family: its number of multiprocessors."""
    sheets: dict[str, int] = file.get("sheets", {})
    count = next((count for name, count in sheets.items() if _is_of(device, name, [])), None)
    if count is None:
        default = file["families"][file["default"]]["num_multiprocessors"][0]
        return {
            "num_multiprocessors": [default, f"assumed: as {file['default']}, no data sheet of '{device}' is known"]
        }
    return {"num_multiprocessors": [count, "assumed: one tile on each multiprocessor of the data sheet"]}


def _values(entries: dict[str, list[Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """`{"name": [value, "origin"]}` → values and origins."""
    return {key: entry[0] for key, entry in entries.items()}, {key: entry[1] for key, entry in entries.items()}
