"""The dispatch mode that sees every op of forward and backward, below autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.capturing.guesses import Guesser
from meshwright.capturing.opkinds import base_name, flops_of, is_causal, kind_of, moves_data
from meshwright.capturing.place import Place, Spot
from meshwright.capturing.recording import OpEntry, Recording, TracedOp
from meshwright.capturing.storages import Storages, stored_bytes
from meshwright.core.graph import Precision
from meshwright.runtime._torch import TorchDispatchMode, _get_sequence_nr

_NAMES: dict[torch.dtype, Precision] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


class Watcher(TorchDispatchMode):
    def __init__(self, recording: Recording, place: Place, storages: Storages, guesser: Guesser) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.place = place
        self.storages = storages
        self.guesser = guesser
        self.makers_of_nodes: dict[int, int] = {}
        self.num_nodes = 0

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        spot = self.place.find()
        result = self.guesser.run(op, arguments, options)
        outputs = list(tensors_in(result))
        self.storages.notice(outputs)
        self.guesser.follow(op, arguments, options, outputs)
        if moves_data(op) and spot.block not in self.recording.representatives:
            inputs = [*tensors_in(arguments), *tensors_in(list(options.values()))]
            self._record(op, spot, inputs, outputs, flops_of(op, arguments, options, result))
            self.recording.ops[-1].causal = is_causal(op, arguments, options)
        return result

    def _record(self, op: Any, spot: Spot, inputs: list[Tensor], outputs: list[Tensor], flops: float) -> None:
        number = len(self.recording.ops)
        self.recording.ops.append(
            TracedOp(
                name=base_name(op),
                kind=kind_of(op),
                phase=self.place.phase,
                dtype=_dtype_of(outputs or inputs),
                block=spot.block,
                module=spot.module,
                inputs=tuple(self.storages.read(tensor, spot.block) for tensor in inputs),
                input_shapes=tuple(tuple(tensor.shape) for tensor in inputs),
                result_shape=tuple(outputs[0].shape) if outputs else (),
                flops=flops,
                read_bytes=float(sum(map(stored_bytes, inputs))),
                written_bytes=float(sum(map(stored_bytes, outputs))),
                made_by=self._made_by(number),
            )
        )
        self.recording.log.append(OpEntry(self.place.phase, spot.block, number))
        self.storages.written(outputs, number)

    def _made_by(self, number: int) -> int | None:
        """In forward, note whose the node is that torch has just made; in backward, look it up."""
        if self.place.phase == "backward":
            return self.makers_of_nodes.get(self.place.node)
        num_nodes = _get_sequence_nr()
        if num_nodes > self.num_nodes:
            self.makers_of_nodes[num_nodes - 1] = number
            self.num_nodes = num_nodes
        return None


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """Arguments and results of an op nest lists and tuples at most."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, list | tuple):
        for item in nest:
            yield from tensors_in(item)


def _dtype_of(tensors: list[Tensor]) -> Precision:
    """The first floating dtype; ops on integers alone are rare and small, and count as fp32."""
    return next((_NAMES[tensor.dtype] for tensor in tensors if tensor.dtype in _NAMES), "fp32")
