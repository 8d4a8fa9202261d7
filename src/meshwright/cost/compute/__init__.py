"""Seconds of compute: kernels, fused groups of ops, recomputed ops, the optimizer's update."""
