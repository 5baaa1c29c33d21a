"""Where a cast or a GEMM runs: `reference` (everywhere) and `native` (FP8 and MX units of a GPU)."""
