"""Named clusters: every one loads, with figures a person would believe."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.cluster import Cluster, catalogue, from_facts, load_cluster, read_facts
from meshwright.core.errors import InputError

NAMES = sorted(catalogue())


def test_the_catalogue_names_the_published_clusters() -> None:
    assert {"a100-80g-selene", "v100-16g-p3", "h200-single", "rtx4090-24g"} <= set(NAMES)
    assert "note" not in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_named_cluster_has_sane_figures(name: str) -> None:
    cluster = Cluster.named(name)
    device = cluster.device
    assert cluster.name == name
    assert cluster.num_devices == cluster.devices_per_host in (1, 8)
    assert 8 * 2**30 <= device.memory_bytes <= 256 * 2**30
    assert 1e14 <= device.peak_flops_per_second <= 1e15
    assert device.peaks["fp16"] == device.peak_flops_per_second > device.peaks["fp32"]
    assert device.bytes_per_second is not None
    assert 5e11 <= device.bytes_per_second <= 5e12
    assert device.constants is not None
    assert 1e-7 <= device.launch_seconds <= 1e-4
    assert cluster.notes


@pytest.mark.parametrize("name", NAMES)
def test_links_are_slower_the_further_they_reach(name: str) -> None:
    cluster = Cluster.named(name)
    assert cluster.inter_host is not None
    assert cluster.inter_host.bytes_per_second >= 1e9
    assert cluster.device.bytes_per_second is not None
    if cluster.devices_per_host > 1:
        assert cluster.intra_host is not None
        share_of_outer_link = cluster.inter_host.bytes_per_second / cluster.devices_per_host
        assert share_of_outer_link < cluster.intra_host.bytes_per_second < cluster.device.bytes_per_second


@pytest.mark.parametrize("name", NAMES)
def test_a_named_cluster_survives_its_file(name: str) -> None:
    cluster = Cluster.named(name, hosts=3)
    assert Cluster.from_json(cluster.to_json()) == Cluster.from_toml(cluster.to_toml()) == cluster


def test_figures_of_one_cluster_in_full() -> None:
    selene = Cluster.named("a100-80g-selene", hosts=4)
    assert (selene.num_hosts, selene.num_devices) == (4, 32)
    assert selene.device.memory_bytes == 80 * 2**30
    assert selene.device.peak_flops_per_second == pytest.approx(312e12)
    assert selene.device.peaks == pytest.approx({"bf16": 312e12, "fp16": 312e12, "fp32": 156e12})
    assert selene.device.bytes_per_second == pytest.approx(2039e9)
    assert selene.intra_host is not None
    assert selene.intra_host.bytes_per_second == pytest.approx(300e9)
    assert selene.inter_host is not None
    assert selene.inter_host.bytes_per_second == pytest.approx(200e9)


def test_measured_figures_of_the_host_win_over_the_vendors() -> None:
    h200, facts = Cluster.named("h200-single"), catalogue()["h200-single"]
    assert h200.host_link is not None
    assert facts.measured_both_ways_gb_per_second_each is not None
    assert facts.measured_host_fused_adamw_gparams_per_second is not None
    assert h200.host_link.bytes_per_second == 1e9 * facts.measured_both_ways_gb_per_second_each
    assert h200.host_link.origin == "measured elsewhere"
    assert h200.host_updates_per_second == 1e9 * facts.measured_host_fused_adamw_gparams_per_second
    assert h200.device.peak_flops_per_second == pytest.approx(989e12)
    assert h200.host_memory_bytes == 125 * 2**30


def test_an_unpublished_link_is_assumed_and_noted() -> None:
    mosaic, selene = Cluster.named("h100-80g-mosaic"), Cluster.named("a100-80g-selene")
    assert mosaic.inter_host is not None
    assert selene.inter_host is not None
    assert (mosaic.inter_host.origin, selene.inter_host.origin) == ("assumed", "vendor sheet")
    assert any("link between hosts" in note for note in mosaic.notes)
    assert not any("link between hosts" in note for note in selene.notes)


def test_a_device_without_bf16_or_tf32_units_is_not_given_their_rates() -> None:
    v100 = Cluster.named("v100-16g-p3")
    assert set(v100.device.peaks) == {"fp16", "fp32"}
    assert v100.device.peaks["fp32"] == pytest.approx(15.7e12)  # the vendor's peak
    assert any("no bf16" in note for note in v100.notes)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="no cluster is called 'a100-80g-selen': did you mean 'a100-80g-selene'"):
        Cluster.named("a100-80g-selen")
    with pytest.raises(InputError, match=r"valid here: .*h200-single.*rtx4090-24g"):
        Cluster.named("frontier")


def test_local_is_probed_not_named() -> None:
    with pytest.raises(InputError, match="probe"):
        Cluster.named("local")


@pytest.mark.parametrize("hosts", [0, -1])
def test_a_cluster_has_at_least_one_host(hosts: int) -> None:
    with pytest.raises(InputError, match=f"hosts is {hosts}: .* 1 or more"):
        Cluster.named("h200-single", hosts=hosts)


FACTS = """{"note": "a note", "mine": {"device": "A100-SXM4-80GB", "devices_per_host": 4, "memory_gib": 80,
 "hbm_gb_per_second": 2000, "peak_bf16_tflops": 300}}"""


def test_facts_of_ones_own_become_a_cluster_and_what_they_leave_open_is_said() -> None:
    facts = read_facts(FACTS, "mine.json")
    assert list(facts) == ["mine"]
    cluster = from_facts("mine", facts["mine"])
    assert (cluster.num_devices, cluster.intra_host) == (4, None)
    assert cluster.host_link is not None
    assert cluster.host_link.origin == "assumed"
    assert any("link between hosts" in note for note in cluster.notes)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('"peak_bf16_tflops": 300', '"peak_fp8_tflops": 600', "mine.json: mine: peak_fp8_tflops: unknown field"),
        (', "peak_bf16_tflops": 300', "", "neither peak_bf16_tflops nor peak_fp16_tflops is given"),
        ('"memory_gib": 80', '"memory_gib": 0', "memory_gib: Expected `float` >= 1e-30"),
    ],
)
def test_facts_that_are_wrong_are_refused(right: str, wrong: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_facts(FACTS.replace(right, wrong), "mine.json")
    assert said in str(caught.value)


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_named_cluster_that_was_saved_is_a_cluster_file(tmp_path: Path, suffix: str) -> None:
    """The origins of its constants are words, though the constants are seconds and bytes."""
    named = Cluster.named("a100-80g-selene", hosts=2)
    assert load_cluster(str(named.save(tmp_path / f"mine.{suffix}"))) == named
