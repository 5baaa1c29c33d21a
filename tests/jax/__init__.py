"""Tests of microfloat.jax: on CPU, with eight host devices, one compilation per shape where possible."""
