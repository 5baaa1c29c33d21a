"""Eight host devices for the sharding tests; without jax nothing here is collected, and the run says so.

Modules that compare bytes of casts compile as users do. The others compile with XLA's cheaper passes.
"""

import importlib.util
import os

import pytest

from tests.jax.effort import cheaper_passes

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


# Its steps are those of Flax bit for bit, which depends on how XLA fuses the floats of both.
_FUSED_AS_USERS_DO = ("test_linen",)
_AS_USERS_DO = ("test_bits", "test_every_cast", "test_excess", "test_fp8_ops", "test_guide", "test_quantize")


@pytest.fixture(autouse=True)
def compile_effort(request):
    """How hard XLA tries in this test."""
    module = request.module.__name__.rpartition(".")[2]
    if not HAVE_JAX or module.startswith(_AS_USERS_DO) or os.environ.get("HYPOTHESIS_PROFILE") == "thorough":
        yield
        return
    with cheaper_passes(fusion_emitters=module in _FUSED_AS_USERS_DO):
        yield


@pytest.fixture
def x64():
    """The wrapped test runs with 64-bit types switched on."""
    import jax

    with jax.enable_x64(True):
        yield
