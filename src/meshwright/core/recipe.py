"""What training adds to a model: the state its optimizer keeps, in which dtypes, and whether gradients are clipped."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from meshwright.core.codec import Value

ItemBytes = Literal[1, 2, 4, 6, 8]


class Recipe(Value, kw_only=True):
    """The defaults are Meshwright's own: parameters, gradients and AdamW's two moments in fp32 (fp64 in fp64)."""

    optimizer_slots: Annotated[int, Meta(ge=0)] = 2
    """Tensors the size of a parameter that the optimizer keeps for it: 2 for Adam, 1 for momentum, 0 for plain SGD."""
    optimizer_scalar_bytes: Annotated[int, Meta(ge=0)] = 4
    """Bytes it keeps beside them for each tensor: Adam's step count."""
    clips: bool = False
    fused_update: bool = True
    """Whether the update of a GPU's optimizer runs in one pass that needs no room of its own, as torch's fused ones do."""
    parameter_item_bytes: ItemBytes | None = None
    """What parameters are stored in; without it, fp32 (fp64 in fp64)."""
    gradient_item_bytes: ItemBytes | None = None
    """What gradients are kept in; 6 is a 16-bit gradient beside an fp32 sum of them. Without it, as parameters."""
    master_item_bytes: Literal[0, 4, 8] = 0
    """An fp32 copy of each parameter that the optimizer updates, where parameters are stored in 16 bits; 8 with an fp32
    gradient beside it."""
    gather_item_bytes: ItemBytes | None = None
    """What ZeRO gathers parameters in; without it, the dtype the plan computes in."""
    reduce_item_bytes: ItemBytes | None = None
    """What gradients are reduced in; without it, what they are stored in."""
    bucket_bytes: Annotated[int, Meta(ge=0)] = 0
    """Buffers for collectives that are held throughout."""
    reduces_whole: bool = False
    """ZeRO 1 that all-reduces gradients and then gathers parameters, as DeepSpeed's pipelines do."""
    whole_transfers: bool = True
    """Whether every tp rank sends the whole activation to the next stage, or its share, put together again there."""
    blocking_transfers: bool = False
    """Whether sender and receiver wait for a transfer between stages."""
    blocking_launches: bool = False
    """Whether the host waits for every kernel before it launches the next (CUDA_LAUNCH_BLOCKING)."""
    fused_ops: bool = False
    """Whether ops that only move bytes run fused by hand, though nothing is compiled."""
    fused_loss: bool = False
    """Whether the loss runs fused, without fp32 copies of the logits, though the blocks do not."""
    plain_loss: bool = False
    """Whether the loss runs op by op, though the blocks are compiled."""
    selective_ops: bool = False
    """Whether selective recompute keeps attention's result and every second matmul's and redoes all else, as torchtitan's,
    rather than redo the attention core alone."""
    selective_core: bool = False
    """Whether selective recompute redoes all of the attention core, as a checkpoint around it does, rather than only what
    rebuilds the tensors that were not kept."""
    whole_recompute: bool = False
    """Whether full recompute runs a block's forward to its end, rather than until all is made that backward needs: torch's own
    stops there, and compiled code leaves the rest out."""
    copies_received: bool = False
    """Whether what a stage received is kept twice."""
    overlaps_reduction: bool = True
    """Whether gradients are reduced while backward still runs."""
