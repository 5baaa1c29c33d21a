"""Says, as skips with a reason, which tests of this folder cannot be collected here."""

import pytest

from tests.jax.conftest import HAVE_FLAX, HAVE_JAX


@pytest.mark.skipif(HAVE_JAX, reason="jax is installed: the tests of this folder run")
def test_jax_is_missing():
    pytest.skip("jax is not installed: the tests of microfloat.jax are left out")


@pytest.mark.skipif(HAVE_FLAX or not HAVE_JAX, reason="flax is installed (or jax is missing as well)")
def test_flax_is_missing():
    pytest.skip("flax is not installed: the tests of fp8_ops, linen and nnx are left out")
