"""Seconds of one microbatch on each stage of a plan, on one rank.

forward  = compute + communication inside the blocks (tp, cp, ep)
backward = the same, and the forward of the recomputed ops
dp       gathers and reductions overlap with that (cost/overlap.py): in every microbatch, or only in the first forward and the last
         backward of a step
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph, Kind, Pass, Phase, Segment
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.block_calls import block_calls
from meshwright.cost.communication.links import Call, axis_group, collective_seconds, send_seconds
from meshwright.cost.communication.step_calls import stage_calls, step_calls
from meshwright.cost.compute.block_compute import NO_WORK, Work, weight_products
from meshwright.cost.compute.recomputed_ops import ActivationMode, recompute_modes
from meshwright.cost.memory.local_parameters import split_dims
from meshwright.cost.microbatch import Microbatch
from meshwright.cost.overlap import Lane, exposed_seconds, play_backward, play_forward
from meshwright.cost.passes import StagePasses, sends_shares, sent_bytes
from meshwright.cost.timing import StageSeconds
from meshwright.rules.kinds import cached_in_value


class StageCosts:
    """Costs the stages of one plan."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        cluster: Cluster,
        recipe: Recipe,
        microbatch: Microbatch,
        like: StageCosts | None = None,
        modes: dict[str, ActivationMode] | None = None,
    ) -> None:
        """like: costs of a plan that differs in its recompute only. modes: how blocks are recomputed, if not as the plan says."""
        self.graph, self.plan, self.cluster, self.recipe = graph, plan, cluster, recipe
        self.microbatch, self.local_blocks, self.compute = microbatch, microbatch.local_blocks, microbatch.compute
        self.modes = recompute_modes(plan, recipe) if modes is None else modes
        self._stage_calls: dict[int, tuple[Call, ...]] = like._stage_calls if like else {}
        self._known: dict[tuple[object, ...], StageSeconds] = like._known if like else {}
        device = cluster.device
        waits = plan.zero > 0 and device.kind == "cpu"  # `fully_shard` waits for each of its collectives
        measured = 1.0 if waits else 1 - device.overlap_share
        self.slowdown = device.constants.overlap_slowdown if device.constants else measured

    def of(self, number: int, passes: StagePasses) -> StageSeconds:
        """Stages with the same work cost the same: the middle of a deep model is costed once."""
        key = self.form(number, passes)
        if key not in self._known:
            self._known[key] = self._cost(number, passes)
        return self._known[key]

    def form(self, number: int, passes: StagePasses) -> tuple[object, ...]:
        """The key of a stage's cost: all that it is made from. The last stage sends nothing."""
        kinds = self.graph.kind_by_block
        work = tuple(
            (
                id(self.local_blocks[segment.block]),
                _first_alike(kinds[segment.block])[segment.number],
                self.modes.get(segment.block),
            )
            for segment in (*passes.forward, *passes.backward)
        )
        blocks = tuple(kinds[name].name for name in self.plan.blocks_by_stage[number])
        sent = tuple((one.num_bytes, one.needs_gradient) for one in passes.sent)
        return work, blocks, sent, number == 0, number + 1 == len(self.plan.stages)

    def _cost(self, number: int, passes: StagePasses) -> StageSeconds:
        device = self.cluster.device
        data = self._data(number, passes)
        return StageSeconds(
            forward=self.work(passes.forward).seconds(device),
            backward=self.work(passes.backward).seconds(device),
            recompute=self.recompute_work(passes).seconds(device),
            weights=self.weights(passes.backward),
            inner_forward=self.inner_forward(passes),
            inner_backward=self.inner_backward(passes),
            transfer=self._transfer(number, passes),
            **data,
        )

    def work(self, segments: Iterable[Segment]) -> Work:
        return sum((self.compute.pass_work(self.local_blocks[s.block], s.block, s.number) for s in segments), NO_WORK)

    def recompute_work(self, passes: StagePasses) -> Work:
        """The forward work that backward of a stage runs again."""
        return sum((self._recompute(block) for block in _blocks(passes.backward)), NO_WORK)

    def _recompute(self, block: str) -> Work:
        mode = self.modes.get(block)
        return NO_WORK if mode is None else self.compute.recompute_work(self.local_blocks[block], block, mode)

    def weights(self, backward: tuple[Segment, ...]) -> float:
        """Seconds of the matmuls of backward whose result has no tokens: gradients of weights.

        Gradients of stacked experts do not count: the runtime postpones matmuls of whole parameters only.
        """
        found = 0.0
        for segment in backward:
            local_block = self.local_blocks[segment.block]
            for number in weight_products(local_block.kind, segment.number):
                op = local_block.kind.ops[number]
                if not (local_block.experts and op.region == "expert"):
                    found += op.count * self.compute.op_seconds(local_block, number)
        return found

    # ------------------------------------------------------------ communication

    def inner_forward(self, passes: StagePasses) -> float:
        return sum(self.inner_seconds(block, "forward", passes) for block in passes.numbers)

    def inner_backward(self, passes: StagePasses) -> float:
        """Collectives of backward, with the ones of the recomputed forward."""
        recompute_work = sum(
            self.inner_seconds(block, "forward", passes, again=True)
            for block in passes.numbers
            if self.modes.get(block) == "full"
        )
        return recompute_work + sum(self.inner_seconds(block, "backward", passes) for block in passes.numbers)

    def inner_seconds(self, block: str, phase: Phase, passes: StagePasses, *, again: bool = False) -> float:
        """Collectives inside the part of a block that is on the stage, in one microbatch; again: in its second forward."""
        local_block, numbers = self.local_blocks[block], passes.numbers.get(block, ())
        recomputed = self.modes.get(block) == "full"
        key = (id(local_block), phase, numbers, recomputed, again)
        known = self.microbatch.inner_seconds
        if key not in known:
            found = block_calls(local_block, self.plan, phase, numbers, recomputed=recomputed, again=again)
            known[key] = sum(self.call_seconds(call) for call in found)
        return known[key]

    def call_seconds(self, call: Call) -> float:
        """All `count` calls."""
        return call.count * collective_seconds(call.kind, call.num_bytes, call.group, self.cluster)

    def _transfer(self, number: int, passes: StagePasses) -> float:
        plan = self.plan
        if plan.mesh.pp == 1 or number + 1 == len(plan.stages):
            return 0.0
        size = sent_bytes(passes, plan, self.local_blocks, self.recipe)
        seconds = send_seconds(size, axis_group(plan.mesh, "pp"), self.cluster)
        if sends_shares(plan, self.recipe):
            seconds += collective_seconds("all_gather", size, axis_group(plan.mesh, "tp"), self.cluster)
        return seconds

    def _data(self, number: int, passes: StagePasses) -> dict[str, float]:
        """Exposed gathers and reductions along dp, each microbatch and once a step."""
        calls = [call for call in self._calls_of(number) if call.phase in ("forward", "backward")]
        gathers = self._by_block(c for c in calls if c.kind == "all_gather" and c.phase == "forward")
        again = self._by_block(c for c in calls if c.kind == "all_gather" and c.phase == "backward")
        every = self.plan.zero >= 2
        reduces = self._by_block(
            c for c in calls if c.kind == "reduce_scatter" or (c.kind != "all_gather" and not every)
        )
        forward = self._lanes(passes, "forward", gathers, {})
        backward = self._lanes(passes, "backward", again, reduces)
        gather = exposed_seconds(forward, play_forward(forward), self.slowdown)
        reduce = exposed_seconds(backward, play_backward(backward), self.slowdown)
        if not self.recipe.system.overlaps_reduction:
            reduce = sum(reduces.values()) + sum(again.values())
        shown = {
            "gather_each" if self.plan.zero == 3 else "gather_once": gather,
            "reduce_each" if every else "reduce_once": reduce,
        }
        across = self._by_block(c for c in calls if c.kind == "all_reduce") if every else {}
        if across:  # between sharding groups, behind the last microbatch only
            both = {name: reduces.get(name, 0.0) + across.get(name, 0.0) for name in {**reduces, **across}}
            last = self._lanes(passes, "backward", again, both)
            shown["reduce_once"] = exposed_seconds(last, play_backward(last), self.slowdown) - reduce
        return shown

    def _calls_of(self, number: int) -> tuple[Call, ...]:
        """Collectives of a stage's parameters and gradients; recompute does not change them."""
        if number not in self._stage_calls:
            self._stage_calls[number] = tuple(stage_calls(self.graph, self.plan, self.recipe, number, self._split_dims))
        return self._stage_calls[number]

    @cached_property
    def _split_dims(self) -> dict[tuple[str, str], int]:
        return split_dims(self.graph, self.plan)

    @cached_in_value
    def data_calls(self, coordinate: int) -> tuple[Call, ...]:
        """Collectives outside the blocks, of a rank on this coordinate; made once."""
        return step_calls(self.graph, self.plan, self.recipe, coordinate)

    def _by_block(self, calls: Iterable[Call]) -> dict[str, float]:
        """Seconds of collectives along dp, with the packing and unpacking around them."""
        found: dict[str, float] = {}
        for call in calls:
            seconds = collective_seconds(call.kind, call.num_bytes, call.group, self.cluster)
            found[call.block] = found.get(call.block, 0.0) + (seconds + self._packing_seconds(call))
        return found

    def _packing_seconds(self, call: Call) -> float:
        """Seconds that fully_shard adds to one of its collectives: copies, and host time where it is on the critical path.

        Bytes read and written: 2 n + 2 p n around an all-gather, 2 n around a reduce-scatter.
        """
        if self.plan.zero == 0 or not self.recipe.system.packs or call.kind not in ("all_gather", "reduce_scatter"):
            return 0.0
        copied = 2 * call.num_bytes * (1 + call.group.size if call.kind == "all_gather" else 1)
        return self.compute.costs.copy_seconds(copied, self.plan.precision) + self.cluster.device.shard_call_seconds

    def _lanes(
        self, passes: StagePasses, phase: Phase, gathers: dict[str, float], reduces: dict[str, float]
    ) -> list[Lane]:
        """One lane a block in the order they run.

        What is in no block of its own is gathered before the first and reduced after the last; replicas' buckets, which
        name no block, follow the bytes' progress.
        """
        device = self.cluster.device
        segments = passes.forward if phase == "forward" else passes.backward
        blocks = dict.fromkeys(_blocks(segments), 0.0)
        for segment in segments:
            blocks[segment.block] += self.work([segment]).seconds(device)
        for name in blocks:
            blocks[name] += self.inner_seconds(name, phase, passes)
            if phase == "backward":
                blocks[name] += self._recompute(name).seconds(device)
        loose = reduces.get("", 0.0)
        if self.plan.zero == 0:
            return [Lane(blocks[name], reduce=loose / len(blocks)) for name in blocks]
        first, last = next(iter(blocks), ""), next(reversed(blocks), "")
        gathers = {**gathers, "": 0.0, first: gathers.get("", 0.0) + (gathers.get(first, 0.0) if first else 0.0)}
        reduces = {**reduces, "": 0.0, last: loose + (reduces.get(last, 0.0) if last else 0.0)}
        return [Lane(blocks[name], gathers.get(name, 0.0), reduces.get(name, 0.0)) for name in blocks]


@cached_in_value
def _first_alike(kind: Kind) -> tuple[int, ...]:
    """For each pass, the first one that is equal to it. Code outside the blocks frees the input of each block in a pass without
    ops."""
    first: dict[Pass, int] = {}
    return tuple(
        first.setdefault(one, number) if one.num_ops == 0 else number for number, one in enumerate(kind.passes)
    )


def _blocks(segments: Iterable[Segment]) -> dict[str, None]:
    """The blocks of some passes, each once, in order."""
    return dict.fromkeys(segment.block for segment in segments)
