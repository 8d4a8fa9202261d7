"""What makes a plan fit in memory: recompute, offload of the optimizer's state, streaming of parameters."""
