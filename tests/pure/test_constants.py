"""The constants of the cost model: each has a name, a unit, a meaning and an origin."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, get_args

import msgspec
import pytest

from meshwright.core import constants
from meshwright.core.cluster import Cluster, catalogue, from_facts
from meshwright.core.constants import Constants, Origin, family_of
from meshwright.report.explain import MEANINGS

FIELDS = Constants.__struct_fields__
NAMES = list(json.loads(resources.files("meshwright.core").joinpath("families.json").read_text())["families"])


def test_every_constant_has_a_meaning_and_every_meaning_a_constant() -> None:
    assert set(MEANINGS) == set(FIELDS)
    assert all(meaning for _, meaning in MEANINGS.values())
    assert {unit for name, (unit, _) in MEANINGS.items() if name.endswith("_seconds")} == {"s"}
    assert {unit for name, (unit, _) in MEANINGS.items() if name.endswith("_bytes")} == {"bytes"}


@pytest.mark.parametrize("name", NAMES)
def test_every_constant_of_a_family_has_an_origin(name: str) -> None:
    family = family_of(name)
    assert set(family.origins) == set(FIELDS)
    for origin in family.origins.values():
        assert origin.partition(":")[0] in get_args(Origin)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_within_bounds_and_believable(name: str) -> None:
    found = family_of(name).constants
    assert msgspec.convert(msgspec.to_builtins(found), Constants) == found
    assert found.matmul_unaligned_share <= found.matmul_aligned_by_2_share <= found.matmul_aligned_by_4_share < 1
    assert found.attention_backward_share <= found.attention_share <= found.matmul_share
    assert found.compiled_launch_seconds <= found.backward_launch_seconds <= found.launch_seconds < 1e-4
    assert found.inner_hop_seconds <= found.hop_seconds < 1e-3
    assert 16 <= found.num_multiprocessors <= 256


def test_a_value_out_of_bounds_is_refused() -> None:
    out_of_bounds = {
        "matmul_share": 1.2,
        "hop_seconds": -1.0,
        "num_multiprocessors": 0,
        "step_overhead_seconds": 2.0**31,
    }
    for wrong in ({"matmul_share": 0.0}, *({name: value} for name, value in out_of_bounds.items())):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Constants)


@pytest.mark.parametrize(
    ("device", "family"),
    [
        ("A100-80GB SXM", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx 4090", "RTX 4090"),
    ],
)
def test_a_device_belongs_to_the_family_in_its_name(device: str, family: str) -> None:
    found = family_of(device)
    assert found == family_of(family)
    assert not all(origin.startswith("assumed") for origin in found.origins.values())


UNKNOWN = {
    "TPU v9": None,
    "RTX A1000": 18,
    "NVIDIA RTX A1000 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": 114,
    "NVIDIA H100 PCIe": 114,
    "NVIDIA GH200 480GB": 132,
    "AMD Instinct MI300X OAM": 304,
    "NVIDIA B200": 148,
    "NVIDIA L40S": 142,
    "A100X": None,
    "": None,
}


@pytest.mark.parametrize("device", UNKNOWN)
def test_all_about_an_unknown_device_is_assumed(device: str) -> None:
    """Whatever family's name is part of its name: an A1000 is no A100, and a GH200 no H200."""
    found = family_of(device)
    assert found.name == device
    assert set(found.origins) == set(FIELDS)
    assert all(origin.startswith("assumed") for origin in found.origins.values())
    assert found.constants.num_multiprocessors == (UNKNOWN[device] or family_of("H200").constants.num_multiprocessors)


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_named_cluster_is_of_a_known_family(name: str) -> None:
    device = Cluster.named(name).device
    assert device.constants is not None
    assert family_of(device.name).name in NAMES, "an unknown device keeps its own name"
    assert device.launch_seconds == device.constants.launch_seconds


FILE: dict[str, Any] = {
    "default": "B",
    "common": {"matmul_share": [0.8, "probe"], "hop_seconds": [1e-5, "assumed"]},
    "families": {"A": {"matmul_share": [0.7, "vendor sheet"]}, "B": {}},
    "fits": {"all": {"A": {"hop_seconds": [2e-5, "fit: all"]}}, "table 1": {"A": {"hop_seconds": [3e-5, "fit: less"]}}},
}


def test_a_family_wins_over_what_is_common_and_a_fit_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_families", lambda: FILE)
    found = family_of("A")
    assert (found.constants.matmul_share, found.constants.hop_seconds) == (0.7, 2e-5)
    assert found.origins == {"matmul_share": "vendor sheet", "hop_seconds": "fit: all"}
    assert (family_of("B").constants.matmul_share, family_of("B").constants.hop_seconds) == (0.8, 1e-5)


def test_a_score_out_of_sample_takes_the_fit_without_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_families", lambda: FILE)
    assert family_of("A", without="table 1").constants.hop_seconds == 3e-5
    assert family_of("A", without="table 1").origins["hop_seconds"] == "fit: less"
    assert family_of("A", without="a table no fit used").constants.hop_seconds == 2e-5
    facts = msgspec.structs.replace(catalogue()["a100-80g-selene"], device="A")
    one, other = (from_facts("mine", facts, without) for without in (None, "table 1"))
    assert (one.device.constants.hop_seconds, other.device.constants.hop_seconds) == (2e-5, 3e-5)
