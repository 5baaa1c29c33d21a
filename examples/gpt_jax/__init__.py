"""The parts of train_gpt_jax.py that need JAX; what no framework has a part in is in `gpt`."""
