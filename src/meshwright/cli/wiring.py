"""What several verbs do with their arguments: find the cluster, read the plan, and say so when it takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.cli.options import PlanFlags
    from meshwright.core.cluster import Cluster
    from meshwright.core.graph import Casting, Graph, Precision
    from meshwright.core.plan import Plan
    from meshwright.core.request import PlanRequest


def find_cluster(
    console: Console, name: str, hosts: int = 1, nproc: int | None = None, device: str = "auto", backend: str = "auto"
) -> Cluster:
    """`local` is probed, a path is read, anything else is a name of the catalogue."""
    import msgspec

    from meshwright.core.cluster import Cluster, check_hosts, load_cluster

    if name == "local":
        return probe_with_notice(console, nproc, device, backend)
    if name.endswith((".json", ".toml")):
        found = load_cluster(name)
        return found if hosts == 1 else msgspec.structs.replace(found, num_hosts=check_hosts(hosts))
    return Cluster.named(name, hosts)


def probe_with_notice(console: Console, nproc: int | None, device: str, backend: str, fresh: bool = False) -> Cluster:
    from meshwright.cli.choices import check_choice
    from meshwright.measure.others import BUSY_SHARE
    from meshwright.measure.probe import default_num_ranks, probe
    from meshwright.runtime.launch import check_num_ranks

    check_choice("--device", device, ("auto", "cpu", "cuda"))
    check_choice("--backend", backend, ("auto", "gloo", "nccl"))
    num_ranks = nproc if nproc is not None else default_num_ranks(device)  # type: ignore[arg-type]
    check_num_ranks(num_ranks)

    def say() -> None:
        ranks = f"{num_ranks} ranks at once" if num_ranks > 1 else "one rank"
        console.print(f"measuring this machine with {ranks} (about ten seconds, then cached) …")

    cluster = probe(num_ranks, device=device, backend=backend, fresh=fresh, on_start=say)  # type: ignore[arg-type]
    if cluster.others_share > BUSY_SHARE:
        console.print(
            f"other programs took {cluster.others_share:.0%} of the cores while this machine was measured: predictions are "
            "those of a busy machine. It is measured again once it is quieter, or by `meshwright probe --fresh`",
            highlight=False,
        )
    return cluster


def plan_from_flags(flags: PlanFlags, graph: Graph, cluster: Cluster, devices: int | None = None) -> Plan:
    """A plan file as it is, or plan flags with plain defaults for the rest, on all devices of the cluster.

    devices: how many of them are used, where not all are.
    """
    from meshwright.cli.decision import check_made_for
    from meshwright.cli.shardings import with_legal_sharding
    from meshwright.core.plan import Plan
    from meshwright.rules.plain_plan import plain_plan

    if flags.file is None:
        world = _world(flags.request, devices or cluster.num_devices)
        plan = with_legal_sharding(plain_plan(flags.request, graph, world, cluster.hash), graph.model)
    else:
        plan = Plan.load(flags.file)
        check_made_for(plan, graph, flags.file)
    _check_uses_all(plan, cluster, devices)
    return plan


def precision_of(flags: PlanFlags, cluster: Cluster) -> Precision:
    """What the plan will compute in, known before the plan: the model is captured in it."""
    from meshwright.core.plan import Plan

    if flags.file:
        return Plan.load(flags.file).precision
    return flags.request.precision or plain_precision(cluster)


def casting_of_flags(flags: PlanFlags, precision: Precision, devices: int) -> Casting:
    """How the plan will reach 16 bits, known before the plan as well."""
    from meshwright.core.plan import Plan, casting_of, stores_16_bits

    if flags.file:
        return Plan.load(flags.file).casting
    wish = flags.request
    stored = stores_16_bits(precision, wish.offload or "none", _world(wish, devices))
    return casting_of(precision, wish.zero or 0, stored)


def plain_precision(cluster: Cluster) -> Precision:
    """Where nobody says: 16 bits on a device with units for it, as everyone trains there; fp32 on a CPU."""
    if cluster.device.kind == "cpu":
        return "fp32"
    return (
        "bf16"
        if "bf16" in cluster.device.peaks or any(rate.dtype == "bf16" for rate in cluster.device.rates)
        else "fp16"
    )


def _world(request: PlanRequest, devices: int) -> int:
    """Degrees that were given in full say how many ranks; else all devices are used."""
    if request.dp is None:
        return devices
    return request.dp * (request.tp or 1) * (request.pp or 1) * (request.cp or 1)


def _check_uses_all(plan: Plan, cluster: Cluster, devices: int | None) -> None:
    """Devices are left idle only where somebody says so."""
    from meshwright.core.errors import PlanError

    mesh = plan.mesh
    used = f"pp {mesh.pp} · dp {mesh.dp} · cp {mesh.cp} · tp {mesh.tp} = {plan.world}"
    if devices is not None and plan.world != devices:
        raise PlanError(f"--devices is {devices}, but the plan uses {used}: make them equal")
    if devices is None and plan.world < cluster.num_devices:
        raise PlanError(
            f"the plan uses {used} of {cluster.num_devices} devices of '{cluster.name}': change a degree or --hosts, or add "
            f"--devices {plan.world} to leave the others idle"
        )


def budget_of(memory: str | None) -> int | None:
    from meshwright.core.units import parse_bytes

    return None if memory is None else parse_bytes(memory)
