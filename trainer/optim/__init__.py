"""Optimizers: groups by pattern, fused kernels, the loss scale."""
