"""Eight host devices for the sharding tests; without jax nothing here is collected, and the run says so.

Tests marked `as_users_compile` have all of XLA's passes, the others its cheaper ones.
"""

import importlib.util
import os

import pytest

from tests.jax.effort import effort_of

HAVE_JAX = importlib.util.find_spec("jax") is not None
HAVE_FLAX = importlib.util.find_spec("flax") is not None
_DEVICES = "--xla_force_host_platform_device_count=8"

if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    # Read when JAX first makes its CPU client, which no test module does while it is imported.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

_NEED_FLAX = ("test_bad_input", "test_fp8_ops", "test_guide", "test_linen", "test_microbatches", "test_nnx")


def pytest_ignore_collect(collection_path):
    """Modules import jax or flax at their top; test_missing.py reports why they are left out."""
    name = collection_path.stem
    if not name.startswith("test_") or name == "test_missing":
        return None
    if not HAVE_JAX or (not HAVE_FLAX and name.startswith(_NEED_FLAX)):
        return True
    return None


@pytest.fixture(autouse=True)
def compile_effort(request):
    """XLA's effort in this test."""
    if not HAVE_JAX:
        yield
        return
    with effort_of(request.node):
        yield


@pytest.fixture
def x64():
    """The wrapped test runs with 64-bit types switched on."""
    import jax

    with jax.enable_x64(True):
        yield
