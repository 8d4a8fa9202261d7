"""The cost of another library's configuration, and a search with the same batch and precision for a better plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InputError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.cost.estimate import estimate
from meshwright.interop.foreign import Foreign, filled, foreign_plan
from meshwright.planner.plan import Limits, PlanQuestion
from meshwright.planner.subject import Subject


@dataclass(frozen=True)
class ForeignQuestion:
    """A configuration as a plan with its cost, and the search for a better one."""

    foreign: Foreign
    plan: Plan
    estimate: Estimate
    better: PlanQuestion

    @classmethod
    def ask(
        cls, foreign: Foreign, subject: Subject, cluster: Cluster, flags: PlanRequest, limits: Limits
    ) -> ForeignQuestion:
        asked = msgspec.structs.replace(flags, precision=filled(foreign, flags).precision)
        question = PlanQuestion.ask(subject, cluster, asked, replace(limits, recipe=foreign.recipe))
        _check_ranks(foreign, cluster)
        flags = msgspec.structs.replace(flags, precision=question.graph.precision)
        whole = foreign_plan(foreign, flags, question.graph, cluster.num_devices, cluster.hash)
        plan = subject.with_legal_sharding(whole)
        cost = estimate(question.graph_run_by(plan), plan, cluster, foreign.recipe, question.budget_bytes)
        return cls(foreign, plan, cost, replace(question, request=_kept(plan, flags)))


def _kept(theirs: Plan, flags: PlanRequest) -> PlanRequest:
    """The request of that search: batch and precision stay, so that the same numbers are computed."""
    return PlanRequest(
        global_batch=theirs.global_batch,
        precision=theirs.precision,
        compile=theirs.compile or None,
        sync_batch_norm=theirs.sync_batch_norm or None,
        offload=flags.offload,
    )


def _check_ranks(foreign: Foreign, cluster: Cluster) -> None:
    if foreign.num_ranks is not None and foreign.num_ranks > cluster.num_devices:
        raise InputError(
            f"{foreign.where} starts {foreign.num_ranks} processes, but '{cluster.name}' with {cluster.num_hosts} hosts has "
            f"{cluster.num_devices} devices: add --hosts"
        )
