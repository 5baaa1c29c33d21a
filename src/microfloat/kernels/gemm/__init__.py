"""The GEMM of FP8 blocks on Hopper, and kernels beside the vendors' GEMMs."""
