"""The cost of importing microfloat.jax, whose core needs jax alone."""

import pytest


def test_the_core_needs_jax_alone(fresh_python):
    """Features J12."""
    code = """
import sys
for absent in ("flax", "optax", "torch"):
    sys.modules[absent] = None
import jax
jax.config.update("jax_platforms", "cpu")
import microfloat.jax as mj
from jax._src import xla_bridge
assert not xla_bridge._backends, "no array is made, no device is touched at import"
import numpy as np
q = mj.quantize(np.ones((2, 32), np.float32), "mxfp8")
assert float(q.dequantize()[0, 0]) == 1.0
try:
    mj.linen
except ImportError:
    print("done")
"""
    finished = fresh_python(code)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "done"


def test_front_ends_are_reached_as_attributes(fresh_python):
    pytest.importorskip("flax")
    code = """
import sys
import microfloat.jax as mj
assert "flax" not in sys.modules and "torch" not in sys.modules
assert mj.fp8_ops.OVERWRITE_WITH_GRADIENT == "_overwrite_with_gradient"
assert mj.linen.TrainState and mj.nnx.ScaleState
assert "torch" not in sys.modules
try:
    mj.haiku
except AttributeError as error:
    print(error)
"""
    finished = fresh_python(code)
    assert finished.returncode == 0, finished.stderr
    assert "has no attribute 'haiku'" in finished.stdout
