"""Casts and GEMMs of a matrix: by plain XLA operations everywhere, by Triton kernels and XLA's FP8 dots on a GPU."""
