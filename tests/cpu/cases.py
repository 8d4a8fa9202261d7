"""Models, plans and a cluster that several test files use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

from captures import shared_graph

from meshwright.core.cluster import Cluster, Device, Link, Rate
from meshwright.core.graph import Graph, OpKind, Precision
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.models.source import ModelSource, resolve
from meshwright.rules.plain_plan import plain_plan

ASSETS = Path(__file__).parent.parent / "assets"
ROOT = ASSETS.parent.parent
MODELS = {
    "gpt": "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61",
    "tied": "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61,tied=true",
    "grouped": "llama:layers=2,hidden=32,heads=4,kv_heads=2,intermediate=48,seq=16,vocab=61",
    "bert": "bert:layers=2,hidden=32,heads=4,seq=16,vocab=64",
    "t5": "t5:layers=2,hidden=32,heads=4,head_width=8,intermediate=48,seq=16,vocab=64,gated=true,tied=false",
    "vit": "vit:layers=2,hidden=32,heads=4,image=16,patch=4,classes=12",
    "coatnet": "coatnet:blocks=2-2-2-2-2,channels=8-8-16-32-64,head_width=8,image=64,classes=12",
    "mlp": "mlp:layers=2,inputs=24,hidden=32,classes=12",
    "resnet": "resnet:depth=26,image=64,classes=10,channels=8",
    "switch": "moe:layers=2,hidden=32,heads=4,seq=16,vocab=61,experts=4,top=1,capacity=1.0",
    "gshard": "moe:layers=2,hidden=32,heads=4,seq=16,vocab=61,experts=4,top=2,capacity=1.0",
    "dropless": "moe:layers=2,hidden=32,heads=4,seq=16,vocab=61,experts=4,top=2,capacity=0,every=2,balance=0",
    "frozen": f"{ASSETS}/models.py:frozen",
    "odd": f"{ASSETS}/models.py:odd",
    "head_first": f"{ASSETS}/models.py:head_first",
    "unused": f"{ASSETS}/models.py:unused",
    "padded": f"{ASSETS}/models.py:padded",
    "llama": f"hf:{ASSETS}/llama-tiny.json",
    "gpt2": f"hf:{ASSETS}/gpt2-tiny.json",
    "hf_bert": f"hf:{ASSETS}/bert-tiny.json",
    "hf_t5": f"hf:{ASSETS}/t5-tiny.json",
    "hf_vit": f"hf:{ASSETS}/vit-tiny.json",
    "mixtral": f"hf:{ASSETS}/mixtral-tiny.json",
}
ZERO_STAGES = (0, 1, 2, 3)
RECOMPUTES = ("none", "full")


@dataclass(frozen=True)
class Case:
    """One row of a table of plans."""

    model: str
    zero: int = 0
    recompute: str = "none"
    num_microbatches: int = 1
    precision: Precision = "fp64"
    samples: int = 4
    """Per rank and step."""
    compile: bool = False
    hybrid: int | None = None
    sync_batch_norm: bool = False
    ep: int = 1

    def __str__(self) -> str:
        words = f"{self.model}-zero{self.zero}-{self.recompute}-m{self.num_microbatches}-{self.precision}"
        words += f"-hybrid{self.hybrid}" if self.hybrid else ""
        words += f"-ep{self.ep}" if self.ep > 1 else ""
        return f"{words}-compiled" if self.compile else words


@cache
def source_of(model: str) -> ModelSource:
    """A model of the table above, or by its full name."""
    return resolve(MODELS.get(model, model))


@cache
def graph_of(model: str, precision: Precision = "fp32") -> Graph:
    return shared_graph(source_of(model), precision, model)


def plan_of(case: Case, num_ranks: int | None = None) -> Plan:
    """The plan of a case for the ranks that run now, or for a given number."""
    world = num_ranks or int(os.environ["WORLD_SIZE"])
    request = PlanRequest(
        zero=case.zero,  # type: ignore[arg-type]
        recompute=case.recompute,
        precision=case.precision,
        global_batch=case.samples * world,
        microbatch=case.samples // case.num_microbatches,
        compile=case.compile,
        hybrid=case.hybrid,
        sync_batch_norm=case.sync_batch_norm,
        ep=case.ep,
    )
    return plain_plan(request, graph_of(case.model), world, "tests")


def hand_cluster(num_devices: int) -> Cluster:
    """A CPU cluster with round figures: for what does not depend on speed."""
    rates = tuple(
        Rate(kind=kind, dtype=dtype, size=1.0, per_second=1e9)
        for kind in get_args(OpKind)
        for dtype in ("fp64", "fp32", "bf16", "fp16")
    )
    device = Device(
        name="hand", kind="cpu", memory_bytes=2**34, rates=rates, launch_seconds=1e-6, peak_flops_per_second=1e9
    )
    link = Link(bytes_per_second=1e9, latency_seconds=1e-5, origin="assumed")
    return Cluster(name="hand", origin="assumed", devices_per_host=num_devices, device=device, intra_host=link)
