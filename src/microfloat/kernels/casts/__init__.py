"""Kernels that cast matrices, measure what scales need, and decode: one module for each family of formats."""
