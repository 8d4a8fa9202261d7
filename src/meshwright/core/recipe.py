"""What training adds to a model: the state its optimizer keeps, whether gradients are clipped, and which system runs it.

Systems differ in what they store, send, fuse and recompute: TrainingSystem.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from meshwright.core.codec import Value

ItemBytes = Literal[1, 2, 4, 6, 8]


class TrainingSystem(Value, kw_only=True):
    """How a training system stores, sends and fuses what a plan says. The defaults are Meshwright's own.

    To cost what another system would take: Megatron-LM with 16-bit parameters beside fp32 masters is
    `TrainingSystem(parameter_item_bytes=2, gradient_item_bytes=2, master_item_bytes=4)`. Item bytes are of one number.
    """

    parameter_item_bytes: ItemBytes | None = None
    """Bytes of an element of stored parameters; without it, fp32 (fp64 in fp64)."""
    gradient_item_bytes: ItemBytes | None = None
    """Bytes of an element of gradients; 6 is a 16-bit gradient with an fp32 sum of them. Without it, as parameters."""
    master_item_bytes: Literal[0, 4, 8] = 0
    """An fp32 copy of each parameter that the optimizer updates, where parameters are stored in 16 bits; 8 with an fp32
    gradient beside it."""
    gather_item_bytes: ItemBytes | None = None
    """Bytes of an element in ZeRO's all-gathers; without it, the dtype the plan computes in."""
    reduce_item_bytes: ItemBytes | None = None
    """Bytes of an element when gradients are reduced; without it, as they are stored."""
    bucket_bytes: Annotated[int, Meta(ge=0)] = 0
    """Buffers for collectives that are held throughout."""
    reduces_whole: bool = False
    """ZeRO 1 that all-reduces gradients and then gathers parameters, as DeepSpeed's pipelines do."""
    overlaps_reduction: bool = True
    """Whether gradients are reduced while backward still runs."""
    whole_transfers: bool = True
    """Whether every tp rank sends the whole activation to the next stage, or its shard, which is all-gathered there."""
    blocking_transfers: bool = False
    """Whether sender and receiver wait for a transfer between stages."""
    copies_received: bool = False
    """Whether what a stage received is kept twice."""
    blocking_launches: bool = False
    """Whether the host waits for every kernel before it launches the next (CUDA_LAUNCH_BLOCKING)."""
    fused_ops: bool = False
    """Whether ops that only move bytes run fused by hand, though nothing is compiled."""
    loss: Literal["fused", "plain"] | None = None
    """Whether the loss runs fused (without fp32 copies of the logits) or op by op; without it, as the blocks do."""
    selective: Literal["selective", "selective core", "selective ops"] = "selective"
    """Ops that selective recompute runs again: ops that rebuild the dropped tensors of the attention core; all of the core,
    as a checkpoint around it does; or all ops but attention and every second matmul, as torchtitan's."""
    whole_recompute: bool = False
    """Whether full recompute runs a block's forward to its end, rather than until all is made that backward needs: torch's own
    stops there, and compiled code leaves the rest out."""

    @property
    def packs(self) -> bool:
        """Whether ZeRO packs parameters flat for every collective, as fully_shard does. Systems with 16-bit parameters beside
        fp32 masters do not."""
        return not self.master_item_bytes


class Recipe(Value, kw_only=True):
    """What training adds to the model, as far as time and memory follow from it. The defaults are AdamW without clipping.

        mw.plan(model, cluster, recipe=mw.Recipe(optimizer_slots=1, clips=True))      # SGD with momentum, gradients clipped

    optimizer_slots           tensors the size of a parameter that the optimizer keeps: 2 for Adam, 1 for momentum, 0 for plain SGD
    optimizer_scalar_bytes    what it keeps beside them for each tensor
    clips                     whether the norm of all gradients is known before they are used
    fused_update              whether the update on a GPU runs in one pass, as torch's `fused=True`
    system                    the training system that runs the plan: Meshwright, unless another one's published runs are costed
    """

    optimizer_slots: Annotated[int, Meta(ge=0)] = 2
    """Tensors the size of a parameter that the optimizer keeps for it: 2 for Adam, 1 for momentum, 0 for plain SGD."""
    optimizer_scalar_bytes: Annotated[int, Meta(ge=0)] = 4
    """Bytes it keeps in addition for each tensor: Adam's step count."""
    clips: bool = False
    fused_update: bool = True
    """Whether the update of a GPU's optimizer runs in one pass that needs no room of its own, as torch's fused ones do."""
    system: TrainingSystem = TrainingSystem()
    """The system that runs the plan; another one only where its published runs are costed."""
