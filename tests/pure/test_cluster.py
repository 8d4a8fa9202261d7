"""Named clusters: every one loads, with figures a person would believe."""

from __future__ import annotations

import pytest

from meshwright.core.cluster import MATMUL_SHARE_OF_PEAK, Cluster, catalogue
from meshwright.core.errors import InputError

NAMES = sorted(catalogue())


def rate(cluster: Cluster, kind: str, dtype: str) -> float:
    (found,) = [rate for rate in cluster.device.rates if (rate.kind, rate.dtype) == (kind, dtype)]
    return found.per_second


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
    assert 0.5 <= rate(cluster, "matmul", "fp16") / device.peak_flops_per_second <= 1
    assert 5e11 <= rate(cluster, "copy", "fp32") <= 5e12
    assert 1e-7 <= device.launch_seconds <= 1e-4
    assert cluster.notes


@pytest.mark.parametrize("name", NAMES)
def test_links_are_slower_the_further_they_reach(name: str) -> None:
    cluster = Cluster.named(name)
    assert cluster.inter_host is not None
    assert cluster.inter_host.bytes_per_second >= 1e9
    if cluster.devices_per_host > 1:
        assert cluster.intra_host is not None
        share_of_outer_link = cluster.inter_host.bytes_per_second / cluster.devices_per_host
        assert share_of_outer_link < cluster.intra_host.bytes_per_second < rate(cluster, "copy", "fp32")


@pytest.mark.parametrize("name", NAMES)
def test_a_named_cluster_survives_its_file(name: str) -> None:
    cluster = Cluster.named(name, hosts=3)
    assert Cluster.from_json(cluster.to_json()) == Cluster.from_toml(cluster.to_toml()) == cluster


def test_figures_of_one_cluster_in_full() -> None:
    selene = Cluster.named("a100-80g-selene", hosts=4)
    assert (selene.num_hosts, selene.num_devices) == (4, 32)
    assert selene.device.memory_bytes == 80 * 2**30
    assert selene.device.peak_flops_per_second == pytest.approx(312e12)
    assert rate(selene, "matmul", "bf16") == pytest.approx(312e12 * MATMUL_SHARE_OF_PEAK)
    assert rate(selene, "matmul", "fp32") == pytest.approx(rate(selene, "matmul", "bf16") / 2)
    assert selene.intra_host is not None
    assert selene.intra_host.bytes_per_second == pytest.approx(300e9)
    assert selene.inter_host is not None
    assert selene.inter_host.bytes_per_second == pytest.approx(200e9)


def test_measured_figures_win_over_the_vendors() -> None:
    h200 = Cluster.named("h200-single")
    assert rate(h200, "matmul", "bf16") == pytest.approx(799e12)
    assert rate(h200, "copy", "bf16") == pytest.approx(4300e9)
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
    assert not [rate for rate in v100.device.rates if rate.kind == "matmul" and rate.dtype == "bf16"]
    assert rate(v100, "matmul", "fp32") == pytest.approx(15.7e12 * MATMUL_SHARE_OF_PEAK)  # 15.7: the vendor's peak
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
    with pytest.raises(InputError, match=f"hosts is {hosts}: a cluster has at least one host"):
        Cluster.named("h200-single", hosts=hosts)
