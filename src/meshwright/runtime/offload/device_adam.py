"""Adam and AdamW on the device in one pass over memory, for parameters that are kept in 16 bits beside fp32 masters.

    torch's fused update    a gradient is widened (2 bytes read, 4 written), the master updated (16 read, 12 written), the new
                            parameter narrowed (4 read, 2 written)                                                       40 bytes
    this one                gradient, master and moments are read once, and written with the parameter once             28 bytes

Operations and their order are those of the update on the host (adam.c), and nothing is contracted that is not there: which
parameters keep their state where changes no bit of the result. Imported only where Triton is, which torch brings along for GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.optim import AdamW, Optimizer

from meshwright.runtime.offload.kernel import AdamSettings
from meshwright.runtime.offload.pieces import MOMENTS
from meshwright.runtime.offload.rules import Task, TorchRule, adam_settings

BLOCK = 1024
"""Entries that a program of the kernel updates: eight for each of its 128 threads."""


class DeviceAdamRule(TorchRule):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.decoupled = type(optimizer) is AdamW

    def _update(self, tasks: list[Task]) -> None:
        """Tasks of one group, most of which are at the same step."""
        known: dict[int, AdamSettings] = {}
        for task in tasks:
            step = _next_step(task)
            if step not in known:
                known[step] = adam_settings(task.group, step, self.decoupled, task.scale)
            _launch(task, known[step])


def _next_step(task: Task) -> int:
    state = task.state
    if "step" not in state:
        state["step"] = torch.zeros(())  # on the host, where it is read
        state.update({key: torch.zeros_like(task.master) for key in MOMENTS})
    state["step"] = state["step"].cpu() + 1
    return int(state["step"])


def _launch(task: Task, settings: AdamSettings) -> None:
    given = [task.master, *(task.state[key] for key in MOMENTS), task.narrow]
    rows = [tensor.contiguous() for tensor in given]
    count = task.master.numel()
    _adam[(triton.cdiv(count, BLOCK),)](
        *rows, task.gradient.contiguous(), count,
        settings.rate_decay, settings.decay, settings.weight1, settings.beta2, settings.weight2, settings.step_size,
        settings.root2, settings.eps, settings.scale,
        is_decoupled=bool(settings.decoupled), is_near=bool(settings.near), block=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    for tensor, row in zip(given, rows, strict=True):
        if row is not tensor:  # its entries lie in another order
            tensor.copy_(row)


@triton.jit  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]
    weight, first, second, narrow, gradient, count,
    rate_decay, decay, weight1, beta2, weight2, step_size, root2, eps, scale,
    is_decoupled: tl.constexpr, is_near: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    p = tl.load(weight + place, mask=inside)
    m = tl.load(first + place, mask=inside)
    v = tl.load(second + place, mask=inside)
    g = tl.load(gradient + place, mask=inside).to(tl.float32) * scale
    if is_decoupled:
        p = p * rate_decay
    else:
        g = tl.fma(p, decay, g)
    if is_near:
        m = tl.fma(g - m, weight1, m)
    else:
        m = g - (g - m) * (1.0 - weight1)
    v = tl.fma(weight2 * g, g, v * beta2)
    p = p + tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root2) + eps)
    tl.store(weight + place, p, mask=inside)
    tl.store(first + place, m, mask=inside)
    tl.store(second + place, v, mask=inside)
    tl.store(narrow + place, p.to(narrow.dtype.element_ty), mask=inside)
