"""nn.Module on fake tensors → Graph: blocks, ops, flops, bytes, memory over a step. No torch.distributed here."""

from meshwright._callable import make_callable

make_callable(__name__)
