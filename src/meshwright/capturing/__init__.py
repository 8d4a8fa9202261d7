"""nn.Module on fake tensors → Graph: blocks, ops, flops, bytes, memory over a step. No torch.distributed here."""
