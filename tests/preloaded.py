"""What the process that tests' processes are copies of has imported, besides torch (`tests.processes`)."""

import importlib
import sys

# fully_shard imports torch's compiler in every rank, which takes a second, and that asks for triton. Triton itself has
# to come later: some processes say first that its kernels are interpreted.
if "triton" not in sys.modules:
    sys.modules["triton"] = None  # type: ignore[assignment]  # its import fails
    importlib.import_module("torch._dynamo")
    del sys.modules["triton"]
    importlib.import_module("torch.utils._triton").has_triton_package.cache_clear()
