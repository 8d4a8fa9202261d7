"""The estimate of a plan: compute, communication and memory put together.

    each stage's microbatch is costed (cost/stages.py), the schedule is played (cost/play.py), and the step is

    step = played schedule + update + exposed collectives that run once a step + overhead

Peak memory is found for every pp coordinate (cost/memory/peak_memory.py); the worst one counts. A plan fits where the bytes the
allocator reserves for the peak, and the bytes driver and communicators hold, are within the device's memory together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from meshwright.core.cluster import Cluster
from meshwright.core.collective import Collective
from meshwright.core.errors import InfeasibleError, PlanError
from meshwright.core.estimate import Estimate, TimeParts
from meshwright.core.graph import PRECISION_BYTES, Graph
from meshwright.core.names import expand_names
from meshwright.core.pipeline.schedule import Order
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.units import format_bytes
from meshwright.cost.communication.block_calls import block_calls
from meshwright.cost.communication.links import Call, as_collectives
from meshwright.cost.compute.optimizer_update import accumulation_seconds, clip_seconds, update_seconds
from meshwright.cost.local_block import LocalBlock
from meshwright.cost.memory.allocator_slack import slack_and_context
from meshwright.cost.memory.peak_memory import KnownMoments, MemoryCost, Moment
from meshwright.cost.memory.rank_state import RankState
from meshwright.cost.microbatch import Microbatch, microbatch_of
from meshwright.cost.offload import Offloaded, exposed_activation_seconds, offloaded
from meshwright.cost.origin import error_share, rates_origin
from meshwright.cost.parameter_offload import StreamedCost, is_streamed
from meshwright.cost.passes import StagePasses, passes_by_stage, transfer_calls
from meshwright.cost.play import Play, enough_microbatches, play_schedule
from meshwright.cost.stages import StageCosts
from meshwright.cost.timing import StageSeconds, Transfers
from meshwright.rules.schedules import make_order
from meshwright.rules.stages import check_blocks
from meshwright.rules.tokens import token_names


def estimate(
    graph: Graph, plan: Plan, cluster: Cluster, recipe: Recipe | None = None, budget_bytes: int | None = None
) -> Estimate:
    """Time and memory of one step of the plan, on the worst device."""
    return Estimator(graph, plan, cluster, recipe or Recipe()).estimate(budget_bytes)


class Estimator:
    """The parts of one estimate, each made once."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        cluster: Cluster,
        recipe: Recipe,
        like: Estimator | None = None,
        microbatch: Microbatch | None = None,
    ) -> None:
        """like: the estimator of a plan that differs in its recompute only; what both share is reused. microbatch: where known."""
        check_costable(graph, plan, cluster)
        cluster = cluster.seen_by(plan.world)
        self.graph, self.plan, self.cluster, self.recipe = graph, plan, cluster, recipe
        self.microbatch: Microbatch = (
            like.microbatch if like else microbatch or microbatch_of(graph, plan, cluster, recipe)
        )
        self.local_blocks: dict[str, LocalBlock] = self.microbatch.local_blocks
        self.passes: tuple[StagePasses, ...] = like.passes if like else passes_by_stage(graph, plan)
        self.memory_order: Order = like.memory_order if like else full_order(plan)
        self._rank_states: dict[int, RankState] = like._rank_states if like else {}
        self._known_moments: KnownMoments = like._known_moments if like else {}
        self.costs: StageCosts = StageCosts(graph, plan, cluster, recipe, self.microbatch, like.costs if like else None)

    @cached_property
    def stages(self) -> list[StageSeconds]:
        return [self.costs.of(number, passes) for number, passes in enumerate(self.passes)]

    def estimate(self, budget_bytes: int | None) -> Estimate:
        played = self.played()
        parts = self.time_parts(played)
        moment = self.worst_moment()
        peak = moment.memory.total
        reserved, context = self.reserved_and_context(peak)
        budget = self.cluster.device.memory_bytes if budget_bytes is None else budget_bytes
        seconds = parts.total
        flops = self.graph.flops(self.plan.global_batch)
        return Estimate(
            step_seconds=seconds,
            time_seconds=parts,
            peak_bytes=peak,
            memory_bytes=moment.memory,
            host_bytes=self.host_bytes(peak),
            tokens_per_second=self.plan.global_batch * self.graph.tokens_per_sample / seconds,
            model_flops_utilisation=flops / (seconds * self.plan.world * self.cluster.device.peak_flops_per_second),
            budget_bytes=budget,
            fits=max(peak, reserved) + context <= budget,  # Estimate.needed_bytes
            reserved_bytes=reserved,
            context_bytes=context,
            worst_rank=moment.coordinate * self.plan.world // self.plan.mesh.pp,
            worst_moment=moment.when,
            bubble=played.bubble,
            collectives=self.collectives(0),
            rates=rates_origin(self.cluster),
            error_share=error_share(self.cluster),
        )

    # ------------------------------------------------------------ time

    def played(self) -> Play:
        plan = self.plan
        return play_schedule(
            plan.schedule,
            plan.mesh.pp,
            plan.num_microbatches,
            plan.virtual,
            self.stages,
            self.transfers,
        )

    @property
    def transfers(self) -> Transfers:
        return transfers_of(self.recipe, self.cluster)

    def time_parts(self, played: Play) -> TimeParts:
        """Where the time of the coordinate with the most work goes."""
        worst = played.busiest
        mine = self._stages_on(worst)
        count = self.plan.num_microbatches
        moved = self.offloaded(worst, played.step_seconds)
        return TimeParts(
            forward=count * sum(cost.forward for cost in mine),
            recompute=count * sum(cost.recompute for cost in mine),
            backward=count * sum(cost.backward for cost in mine),
            exposed_gather=sum(count * cost.gather_each + cost.gather_once for cost in mine),
            exposed_reduce=sum(count * cost.reduce_each + cost.reduce_once for cost in mine),
            exposed_inner=count * sum(cost.inner_forward + cost.inner_backward for cost in mine),
            bubble=played.idle_seconds[worst],
            transfer=played.exposed_seconds[worst] + moved.transfer_seconds + self.activation_offload_seconds(mine),
            update=moved.update_seconds,
            other=self.other_seconds(worst),
        )

    def after_seconds(self, coordinate: int, played_seconds: float) -> float:
        """Seconds of a step after its played schedule, on one coordinate: the update, and exposed transfers and collectives."""
        moved = self.offloaded(coordinate, played_seconds)
        transfer = moved.transfer_seconds + self.activation_offload_seconds(self._stages_on(coordinate))
        return transfer + moved.update_seconds + self.other_seconds(coordinate)

    def _stages_on(self, coordinate: int) -> list[StageSeconds]:
        return [
            cost for cost, stage in zip(self.stages, self.plan.stages, strict=True) if stage.coordinate == coordinate
        ]

    def update_seconds(self, coordinate: int) -> float:
        rank_state = self.rank_state(coordinate)
        about = (self.cluster.device, self.recipe.optimizer_slots, self.plan.master_bytes)
        seconds = update_seconds(rank_state.trainable, *about)
        if self.recipe.clips:
            seconds += clip_seconds(rank_state.trainable, len(rank_state.parameters), self.cluster.device)
        return seconds

    def other_seconds(self, coordinate: int) -> float:
        """Seconds of collectives that nothing hides, of adding up gradients, and the constant overhead of a step."""
        calls = self.costs.data_calls(coordinate)
        exposed = sum(self.costs.call_seconds(call) for call in calls if call.phase in ("other", "update"))
        elements = self.rank_state(coordinate).trainable
        exposed += accumulation_seconds(elements, self.plan.num_microbatches, self.cluster.device)
        constants = self.cluster.device.constants
        return exposed + (constants.step_overhead_seconds if constants else 0.0)

    def offloaded(self, coordinate: int, played_seconds: float) -> Offloaded:
        if self.plan.offload.what == "none":
            return Offloaded(0.0, self.update_seconds(coordinate))
        if self.streamed is not None:
            return self.streamed.seconds(self.cluster, self.stages)
        return offloaded(self.rank_state(coordinate), self.plan, self.cluster, self.recipe, self.stages, played_seconds)

    def activation_offload_seconds(self, stages: list[StageSeconds]) -> float:
        """Exposed seconds of activation offload in a step."""
        if not self.plan.offload.activations:
            return 0.0
        seconds = exposed_activation_seconds(self._offloaded_activation_bytes, self.cluster, stages)
        return self.plan.num_microbatches * seconds

    @cached_property
    def _offloaded_activation_bytes(self) -> float:
        """Bytes of one microbatch on one rank."""
        total = 0.0
        for name in expand_names(self.plan.offload.activations):
            local_block = self.local_blocks[name]
            for number, one in enumerate(local_block.kind.passes):
                if one.phase == "backward":
                    total += self.memory.footprints.of(local_block, name, number).rebuilt
        return total / self.plan.mesh.pp

    # ------------------------------------------------------------ memory

    @cached_property
    def streamed(self) -> StreamedCost | None:
        """The cost of parameter offload, where the plan streams its parameters; its peak memory differs too."""
        if not is_streamed(self.plan):
            return None
        return StreamedCost(self.graph, self.plan, self.recipe, self.local_blocks)

    @cached_property
    def memory(self) -> MemoryCost:
        about = (self.local_blocks, self.passes, self.rank_state, self.microbatch.footprints)
        return MemoryCost(self.plan, self.recipe, *about, known_moments=self._known_moments)

    def worst_moment(self) -> Moment:
        if self.streamed is not None:
            return self.streamed.worst()
        return self.memory.worst(self.memory_order, self.cluster.device)

    def needed_bytes(self) -> list[int]:
        """The memory that a device of each coordinate must have."""
        moments = [self.worst_moment()] if self.streamed else self.memory.peaks(self.memory_order, self.cluster.device)
        peaks = [moment.memory.total for moment in moments]
        slack = [self.reserved_and_context(peak) for peak in peaks]
        return [max(peak, reserved) + context for peak, (reserved, context) in zip(peaks, slack, strict=True)]

    def rank_state(self, coordinate: int) -> RankState:
        """The state of a rank on this coordinate; made once."""
        if coordinate not in self._rank_states:
            self._rank_states[coordinate] = RankState(self.graph, self.plan, self.recipe, coordinate)
        return self._rank_states[coordinate]

    def reserved_and_context(self, peak: int) -> tuple[int, int]:
        """The bytes that the allocator reserves for a peak, and the bytes that driver and communicators hold."""
        if self.cluster.device.constants is None:
            return 0, 0
        slack, context = slack_and_context(self.plan.mesh, self.plan.compile, self.cluster.device.constants)
        return round(peak * (1 + slack)), round(context)

    def host_bytes(self, peak: int) -> int:
        """Host memory of one host: offloaded state of its ranks; where the host is the device, all their memory."""
        ranks = min(self.plan.world, self.cluster.devices_per_host)
        if self.cluster.device.kind == "cpu":
            return ranks * peak
        if (streamed := self.streamed) is not None:
            return ranks * streamed.host_bytes()
        in_flight = min(self.plan.mesh.pp, self.plan.num_microbatches)
        activations = round(self._offloaded_activation_bytes) * in_flight
        if self.plan.offload.what == "none":
            return ranks * activations
        return ranks * (activations + max(self.rank_state(place).host_bytes for place in range(self.plan.mesh.pp)))

    # ------------------------------------------------------------ collectives

    def collectives(self, coordinate: int, context: int = 0) -> tuple[Collective, ...]:
        """All calls of a rank on this coordinate in one step. context: its place along cp."""
        local_blocks = {name: local_block.on(context) for name, local_block in self.local_blocks.items()}
        sends = transfer_calls(self.plan, self.passes, local_blocks, self.recipe, coordinate)
        return as_collectives([*self.costs.data_calls(coordinate), *self._inner(coordinate, local_blocks), *sends])

    def _inner(self, coordinate: int, local_blocks: dict[str, LocalBlock]) -> Iterator[Call]:
        recomputed = self.plan.recomputed("full")
        for stage in self.plan.stages_on(coordinate):
            for block, numbers in self.passes[stage].numbers.items():
                local_block, again = local_blocks[block], block in recomputed
                calls = [
                    *block_calls(local_block, self.plan, "forward", numbers),
                    *(block_calls(local_block, self.plan, "forward", numbers, again=True) if again else ()),
                    *block_calls(local_block, self.plan, "backward", numbers, recomputed=again),
                ]
                yield from (replace(call, count=call.count * self.plan.num_microbatches) for call in calls)


def transfers_of(recipe: Recipe, cluster: Cluster) -> Transfers:
    """How messages pass between stages: on a CPU they are gloo's."""
    if recipe.system.blocking_transfers:
        return "blocking"
    return "requested" if cluster.device.kind == "cpu" else "asynchronous"


def full_order(plan: Plan) -> Order:
    """With as many microbatches as fill the pipeline: more do not take more memory."""
    count = enough_microbatches(plan.schedule, plan.mesh.pp, plan.num_microbatches)
    return make_order(plan.schedule, plan.mesh.pp, count, plan.virtual)


def check_costable(graph: Graph, plan: Plan, cluster: Cluster) -> None:
    """A plan that does not belong to the graph or the cluster is refused."""
    if plan.precision != graph.precision:
        raise PlanError(
            f"the plan computes in {plan.precision}, but the graph was captured in {graph.precision}: "
            f"capture the model with precision {plan.precision}"
        )
    wanted = token_names(graph, plan.mesh.cp)
    if plan.token_blocks != wanted and plan.mesh.cp > 1:
        raise PlanError(
            f"the plan's token_blocks are {list(plan.token_blocks)}, but cp={plan.mesh.cp} cuts the tokens of '{graph.model}' in "
            f"{list(wanted)}: write that, or make the plan anew"
        )
    if plan.world > cluster.num_devices:
        raise PlanError(
            f"the plan needs {plan.world} devices, but '{cluster.name}' has {cluster.num_hosts} × {cluster.devices_per_host} = "
            f"{cluster.num_devices}: lower a degree, or add hosts with --hosts"
        )
    if plan.mesh.ep > 1 and not any(parameter.expert for parameter in graph.parameters):
        raise PlanError(f"ep={plan.mesh.ep}, but the model has no experts in stacked parameters: set ep to 1")
    check_blocks(graph, plan)


def check_memory_of_all(graph: Graph, plan: Plan, cluster: Cluster) -> None:
    """A model whose parameters no sharding could place is refused."""
    parameters = graph.num_parameters * PRECISION_BYTES[plan.precision]
    if plan.offload.what == "none" and parameters > plan.world * cluster.device.memory_bytes:
        raise InfeasibleError(
            f"the parameters alone take {format_bytes(parameters)} in {plan.precision}, more than all {plan.world} devices "
            f"of '{cluster.name}' together have ({format_bytes(plan.world * cluster.device.memory_bytes)}): use more hosts "
            "with --hosts, or keep parameters on the hosts with --offload parameters"
        )
