"""Plans of every kind, upon tiny models: what faults meet."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from meshwright.core.cluster import Cluster
from meshwright.core.request import PlanRequest
from meshwright.planner.graphs import both_castings
from meshwright.rules.plain_plan import plain_plan

GPT = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=64,dropout=0.1"
EXPERTS = "moe:layers=2,hidden=16,heads=2,seq=8,vocab=64,experts=4"
DATA = Path(__file__).parent / "tokens.py"
STEPS, SAVE_EVERY, VALIDATE_EVERY, KEEP = 40, 5, 6, 2
MOST_RANKS = 4
STATE = "state"
"""The folder of optimizer state on disk, beside the run folder."""


@dataclass(frozen=True)
class PlanKind:
    name: str
    request: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    model: str = GPT
    offload: dict[str, Any] = field(default_factory=dict)
    """Fields of the plan's offload that a request does not have: then the run is given a whole plan."""
    fewer: bool = False
    """After a fault the run goes on without the rank that was lost: then its losses are others."""


PLANS = (
    PlanKind("dp"),
    PlanKind("fewer", fewer=True),
    PlanKind("zero3", {"zero": 3}),
    PlanKind("pp-tp", {"pp": 2, "tp": 2, "microbatch": 2}, num_ranks=4),
    PlanKind("cp", {"cp": 2}),
    PlanKind("ep", {"ep": 2}, model=EXPERTS),
    PlanKind("offload", {"offload": "optimizer"}),
    PlanKind("streamed", {"zero": 3, "offload": "parameters", "recompute": "full"}),
    PlanKind("delayed", {"offload": "optimizer", "offload_delayed": True}, offload={"warmup_steps": 7}),
    PlanKind("disk", {"offload": "optimizer"}, offload={"where": "disk", "folder": STATE}),
)


def write_settings(plan: PlanKind, folder: Path, timeout_seconds: float) -> Path:
    """A cluster by name, so that nothing is measured: what it promises does not matter here."""
    cluster: Cluster = Cluster.named("h200-single", hosts=MOST_RANKS)
    request = {"global_batch": 8, "precision": "fp32", **plan.request}
    values: dict[str, Any] = {
        "model": plan.model, "cluster": str(cluster.save(folder / "cluster.json")), "nproc": plan.num_ranks, "device": "cpu",
        "steps": STEPS, "timeout": timeout_seconds, "tensorboard": False, "plan": request,
        "checkpoint": {"every": SAVE_EVERY, "keep": KEEP},
        "data": {"source": f"{DATA}:slowly", "validation_every": VALIDATE_EVERY, "validation_batches": 2},
        "faults": {"restarts": 1000, "ranks": "fewer" if plan.fewer else "same"},
    }  # fmt: skip
    if plan.offload:
        del values["plan"]
        values["plan_file"] = str(_write_plan(plan, request, cluster, folder))
    path = folder / "settings.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def _write_plan(plan: PlanKind, request: dict[str, Any], cluster: Cluster, folder: Path) -> Path:
    offload = dict(plan.offload)
    if "folder" in offload:
        offload["folder"] = str(folder / offload["folder"])
        Path(offload["folder"]).mkdir()
    made = plain_plan(
        PlanRequest(**request), both_castings(plan.model, "fp32")[0], plan.num_ranks, cluster=cluster.hash
    )
    changed = msgspec.structs.replace(made, offload=msgspec.structs.replace(made.offload, **offload))
    return changed.save(folder / "plan.json")
