"""The arithmetic of casts in plain XLA operations: bits, random numbers, tiles, scales, the Hadamard transform."""
