"""The cost of importing microfloat.jax, whose core needs jax alone."""

import importlib.util


def test_the_core_needs_jax_alone_and_front_ends_come_when_they_are_asked_for(fresh_python):
    """Features J12."""
    code = """
import sys
others = ("flax", "optax", "torch")
for absent in others:
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
try:
    mj.scaling.max_accumulate(mj.scaling.init("delayed"))
except ModuleNotFoundError as error:
    print(error)
try:
    mj.haiku
except AttributeError as error:
    print(error)
for absent in others:
    del sys.modules[absent]
"""
    if importlib.util.find_spec("flax"):
        code += """
assert mj.fp8_ops.OVERWRITE_WITH_GRADIENT == "_overwrite_with_gradient"
assert mj.linen.TrainState and mj.nnx.ScaleState
assert "torch" not in sys.modules
"""
    finished = fresh_python(code)
    assert finished.returncode == 0, finished.stderr
    first, accumulated, second = finished.stdout.splitlines()
    assert first == "done"
    assert "needs the package flax" in accumulated
    assert "has no attribute 'haiku'" in second
