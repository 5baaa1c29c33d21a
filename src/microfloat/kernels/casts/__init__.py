"""Kernels that cast matrices, measure amaxes, and decode: one module for each family of formats."""
