"""Flax: the operators of linen and nnx that run a recipe, the names of `flax.linen.fp8_ops`, and their state."""
