"""Which shardings of a module are legal: found by running its blocks on fake tensors, with the ranks pretended.

The plain sharding is a proposal read off the graph (rules/sharding.py). Here one block of each rule is called as the model calls
it, under the Splitter. What comes out is a plan that says what will run:

    a dim that must be cut in runs (a fused query, key, value)   gets them
    a size the degree does not divide                            the weights around it left whole, with the reason
    a table or head whose rows do not divide                     left whole, with the reason
    a function that has no rule, or fails on a part              the weights around it left whole, with the reason
    nothing that could be split                                  refused, with the first reason
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.core.axes import Axis
from meshwright.core.errors import MeshwrightError, PlanError
from meshwright.core.names import expand_names
from meshwright.core.plan import BlockSharding, Plan, TensorSharding
from meshwright.models.experts import idle_experts
from meshwright.models.faked.attributes import fake_attributes
from meshwright.models.faked.copies import copy_module
from meshwright.models.faked.unchanged import unchanged
from meshwright.models.fakes import no_log_of_fakes
from meshwright.models.objective import Batch, call
from meshwright.models.packed import nothing_packed
from meshwright.runtime._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    tree_leaves,
)
from meshwright.runtime.split.alike import alike_once
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.faked import Called, Steps, faked, faked_batch, first_alike
from meshwright.runtime.split.layout import Cut, lay
from meshwright.runtime.split.splitter import Indivisible, NotSplit, Splitter
from meshwright.runtime.split.token_blocks import TokenBlocks
from meshwright.runtime.split.weights import AXIS, sharded_tensors

UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
"""Fake tensors have no values: where a block reads one, it is followed no further."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
TOKEN_AXES: tuple[Axis, ...] = ("cp", "tp")


def legal_plan(plan: Plan, module: nn.Module, batch: Batch) -> Plan:
    """The plan with shardings that run. The module may be on the meta device; the batch is one microbatch."""
    if plan.mesh.tp == 1 and plan.mesh.cp == 1:
        return plan
    followed, mode = _with_idle_experts(module), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake_attributes(followed, None)
    with no_log_of_fakes(), nothing_packed(), unchanged(followed):
        if plan.mesh.tp > 1 and plan.sharding:
            trial = _Trial(followed, batch, plan, mode)
            plan = msgspec.structs.replace(plan, sharding=tuple(trial.legal(rule) for rule in plan.sharding))
            _check_any_is_split(plan)
        if plan.mesh.cp > 1 or plan.sequence_parallel:
            _check_tokens(followed, batch, plan, mode)
    return plan


def _check_any_is_split(plan: Plan) -> None:
    tensors = [(rule, tensor) for rule in plan.sharding for tensor in rule.tensors]
    if tensors and not any(any(tensor.dims) for _, tensor in tensors):
        rule, tensor = next((one for one in tensors if one[1].reason), tensors[0])
        block = next(iter(rule.for_blocks), rule.for_kind)
        raise PlanError(
            f"tp={plan.mesh.tp} can split no tensor of this model; '{tensor.tensor}' of block '{block}': {tensor.reason}: change tp"
        )


def _check_tokens(module: nn.Module, batch: Batch, plan: Plan, mode: FakeTensorMode) -> None:
    """Tokens that lie over ranks go through the whole model: it is followed once as the plan will run it."""
    degrees = {axis: getattr(plan.mesh, axis) for axis in TOKEN_AXES}
    splitter = Splitter(
        [
            Ranks(axis, degrees[axis], folded=axis == "cp" and plan.context == "ring")
            for axis in TOKEN_AXES
            if degrees[axis] > 1
        ],
        plan.sequence_parallel,
        plan.context,
    )
    cutting = TokenBlocks(splitter, plan.token_blocks)
    running = [""]

    def follow(shortcut: AbstractContextManager[Any]) -> None:
        with mode:
            parameters = faked(module, first_alike(module, plan))
            if AXIS in splitter.axes:
                _cut_parameters(parameters, sharded_tensors(module, plan), splitter)
            given = faked_batch(batch)
            splitter.read(given)
            with splitter, shortcut, cutting.followed(module):
                call(Called(module, parameters), given)

    handles = [
        module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: running.__setitem__(0, name))
        for name in plan.blocks
    ]
    try:
        try:
            follow(alike_once(module, plan.blocks))
        except (MeshwrightError, *UNKNOWN):
            raise
        except Exception:  # a block may leave something behind that one which stands for it does not
            follow(nullcontext())
    except UNKNOWN:
        pass  # what comes behind is tried when it runs
    except NotSplit as error:
        error.block = error.block or running[0]
        words = " · ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        tokens = " with sequence parallel" if plan.sequence_parallel else ""
        heads = isinstance(error, Indivisible) and plan.context == "heads" and "cp=" in error.words
        or_ring = ", or set context to ring, which divides no heads" if heads else ""
        raise PlanError(f"{error}: {words}{tokens} does not fit this model, change a degree{or_ring}") from None
    except MeshwrightError:
        raise
    except Exception as error:  # the model's own code, on a part of what it expects
        found = _stopped_by(error, running[0])
        raise PlanError(
            f"{found}: set {' and '.join(a for a in degrees if degrees[a] > 1)} to 1 for this model"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _cut_parameters(
    parameters: dict[str, Tensor], shardings: Iterable[tuple[str, TensorSharding]], splitter: Splitter, block: str = ""
) -> None:
    """This rank's part in the place of each tensor: once, under all its names. block: what their names lack."""
    done: dict[int, Tensor] = {}
    for name, sharding in shardings:
        whole = parameters[name]
        if AXIS not in sharding.dims or id(whole) in done:
            continue
        cut = Cut(sharding.dims.index(AXIS), sharding.runs)
        splitter.divide(whole.shape[cut.dim] // cut.runs, AXIS, f"'{f'{block}.{name}' if block else name}'")
        part = splitter.axes[AXIS].own_part(whole.detach(), cut)
        done[id(whole)] = lay(nn.Parameter(part, requires_grad=whole.requires_grad), {AXIS: cut})
    parameters.update({name: done[id(tensor)] for name, tensor in parameters.items() if id(tensor) in done})


class _Trial:
    def __init__(self, module: nn.Module, batch: Batch, plan: Plan, mode: FakeTensorMode) -> None:
        self.module, self.degree = module, plan.mesh.tp
        self.mode = mode
        self.alike = first_alike(module, plan)
        firsts = [expand_names(rule.for_blocks)[0] for rule in plan.sharding if rule.for_blocks]
        with alike_once(module, plan.blocks):
            self.calls = self._follow(firsts, batch)

    def _follow(self, blocks: Iterable[str], batch: Batch) -> dict[str, Call]:
        """How the model calls each of these blocks."""
        calls: dict[str, Call] = {}
        handles = []
        for name in blocks:

            def note(block: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                calls.setdefault(name, (args, kwargs))

            handles.append(self.module.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True))
        try:
            with self.mode:
                fakes = faked(self.module, self.alike)
                call(Called(self.module, fakes), faked_batch(batch))
        except MeshwrightError:
            raise
        except Exception:  # a value is asked for, or the model's code fails: what comes behind is tried when it runs
            pass
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def legal(self, rule: BlockSharding) -> BlockSharding:
        if not rule.for_blocks:
            return rule
        block = expand_names(rule.for_blocks)[0]
        tensors = self._divisible(block, rule.tensors)
        self._borrow_call(block)
        if block in self.calls:
            tensors = self._that_run(block, tensors)
        return msgspec.structs.replace(rule, tensors=tensors)

    def _borrow_call(self, block: str) -> None:
        """A block that was not reached is called as one of its class that was."""
        kind = type(self.module.get_submodule(block))
        alike = [call for name, call in self.calls.items() if type(self.module.get_submodule(name)) is kind]
        if alike:
            self.calls.setdefault(block, alike[0])

    def _divisible(self, block: str, tensors: tuple[TensorSharding, ...]) -> tuple[TensorSharding, ...]:
        """A table or a head stands alone in its block: it may stay whole."""
        own = dict(self.module.get_submodule(block).named_parameters(remove_duplicate=False))
        alone = sum(parameter.dim() > 1 for parameter in own.values()) == 1
        found = []
        for tensor in tensors:
            size = own[tensor.tensor].shape[tensor.dims.index(AXIS)] if AXIS in tensor.dims else 0
            if size % self.degree and alone:
                tensor = _whole(tensor, f"its {size} rows do not divide over tp={self.degree}")
            found.append(tensor)
        return tuple(found)

    def _that_run(self, block: str, tensors: tuple[TensorSharding, ...]) -> tuple[TensorSharding, ...]:
        for _ in tensors:  # each time round one more weight is cut in runs
            error = self._attempt(block, tensors)
            if error is None:
                return tensors
            fixed = self._in_runs(block, tensors, error) if error.runs > 1 else None
            if fixed is None:
                return self._parts_that_run(block, tensors)
            tensors = fixed
        return self._parts_that_run(block, tensors)

    def _in_runs(
        self, block: str, tensors: tuple[TensorSharding, ...], error: NotSplit
    ) -> tuple[TensorSharding, ...] | None:
        """One layer's tensors cut in the runs the error asks for: the first with which the block gets further."""
        for layer in dict.fromkeys(_layer(tensor) for tensor in tensors if tensor.runs == 1 and AXIS in tensor.dims):
            tried = tuple(
                msgspec.structs.replace(tensor, runs=error.runs) if _layer(tensor) == layer else tensor
                for tensor in tensors
            )
            found = self._attempt(block, tried)
            if found is None or found.reached > error.reached:
                return tried
        return None

    def _parts_that_run(self, block: str, tensors: tuple[TensorSharding, ...]) -> tuple[TensorSharding, ...]:
        """Of the block's parts (attention, MLP, …) those that run split by themselves; the others whole, with the reason."""
        found = list(tensors)
        for part in dict.fromkeys(_part(tensor) for tensor in tensors):
            alone = tuple(tensor if _part(tensor) == part else _whole(tensor, "") for tensor in tensors)
            error = self._attempt(block, alone)
            if error is not None:
                found = [_whole(t, error.words) if _part(t) == part and AXIS in t.dims else t for t in found]
        return tuple(found)

    def _attempt(self, block: str, tensors: tuple[TensorSharding, ...]) -> NotSplit | None:
        """What stops the block, if anything does."""
        args, kwargs = self.calls[block]
        splitter, steps = Splitter([Ranks(AXIS, self.degree)]), Steps()
        with self.mode:
            parameters = faked(self.module.get_submodule(block))
            try:
                _cut_parameters(parameters, ((tensor.tensor, tensor) for tensor in tensors), splitter, block)
                with splitter, steps:
                    output = functional_call(
                        self.module.get_submodule(block), parameters, args, kwargs, tie_weights=False
                    )
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor):
                        splitter.summed(leaf)
            except NotSplit as error:
                error.block, error.reached = error.block or block, steps.num_taken
                return error
            except UNKNOWN:
                return None
            except MeshwrightError:
                raise
            except Exception as error:  # the model's own code, on a part of what it expects
                return _stopped_by(error, block, steps.num_taken)
        return None


def _stopped_by(error: Exception, block: str, reached: int = 0) -> NotSplit:
    """An error of the model's own code, in words."""
    found = NotSplit(f"its code fails on a part: {type(error).__name__}: {' '.join(str(error).split())}")
    found.block, found.reached = block, reached
    return found


def _with_idle_experts(module: nn.Module) -> nn.Module:
    """A copy, with the same parameters."""
    copied = copy_module(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    idle_experts(copied)
    return copied


def _layer(tensor: TensorSharding) -> str:
    """The module that holds it: a weight and its bias are cut alike."""
    return tensor.tensor.rpartition(".")[0]


def _part(tensor: TensorSharding) -> str:
    return tensor.tensor.partition(".")[0]


def _whole(tensor: TensorSharding, reason: str) -> TensorSharding:
    return msgspec.structs.replace(tensor, dims=("",) * len(tensor.dims), runs=1, reason=reason)
