"""Front ends x backends behind one face: NumPy arrays in, bytes out. A new one joins by one entry in ADAPTERS.

Every adapter is held to the same cases (`cases.py`) by the same tests; one that cannot run here says why.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from microfloat import reference
from microfloat.recipes import Cast


@dataclass(frozen=True)
class Bytes:
    """What `quantize` returned, in the oracle's types: uint8 codes (FP4 packed), uint8 or float32 scales."""

    codes: np.ndarray
    scale: np.ndarray
    tensor_scale: np.ndarray | None
    handle: Any  # what the adapter's own dequantize and scaled_matmul take


@dataclass(frozen=True)
class Tolerance:
    """Docs/numerics.md 8.3: Frobenius bound, and t(C) of the elementwise bound ``u*|Y| + t * (|A| @ |B|.T)``."""

    relative: dict[str, float]
    accumulation: Callable[[int], float]


# CPU, or emulation through float32 or bfloat16: the row "CPU, bf16/fp32 emulation".
EMULATED = Tolerance({"float32": 1e-5, "bfloat16": 2.5e-3, "float16": 4e-4}, lambda length: length * 2.0**-24)
# Tensor cores with promotion every 128 elements: the row "Hopper/Ada FP8, split".
HOPPER_SPLIT = Tolerance({"float32": 5e-4, "bfloat16": 3e-3, "float16": 3e-3}, lambda length: 2.0**-12)


class Adapter:
    """One front end on one backend and device."""

    name: str
    tolerance = EMULATED

    def unavailable(self) -> str | None:
        """Why it cannot run here, or None."""
        raise NotImplementedError

    def supports(self, cast: Cast) -> bool:
        """Whether this backend takes the Cast at all; the reference backends take every one."""
        return True

    def quantize(self, x: np.ndarray, cast: Cast, **arguments: Any) -> Bytes:
        """`arguments`: axis, seed (int), stream, amax, scale_enc (NumPy float32)."""
        raise NotImplementedError

    def dequantize(self, handle: Any) -> np.ndarray:
        """float32 in the original shape."""
        raise NotImplementedError

    def scaled_matmul(self, a: Any, b: Any, out_dtype: str, accumulate: str = "split") -> np.ndarray:
        """[R_a, R_b] rounded to `out_dtype`, as float32."""
        raise NotImplementedError


class OracleAdapter(Adapter):
    """The oracle itself: keeps the cases honest."""

    name = "numpy"

    def unavailable(self) -> str | None:
        return None

    def quantize(self, x: np.ndarray, cast: Cast, **arguments: Any) -> Bytes:
        q = reference.quantize(x, cast, **arguments)
        return Bytes(q.codes, q.scale, q.tensor_scale, q)

    def dequantize(self, handle: Any) -> np.ndarray:
        return reference.dequantize(handle)

    def scaled_matmul(self, a: Any, b: Any, out_dtype: str, accumulate: str = "split") -> np.ndarray:
        with np.errstate(over="ignore"):
            exact = reference.scaled_matmul(a, b).astype(np.float32)
            return exact.astype(getattr(ml_dtypes, out_dtype, out_dtype)).astype(np.float32)


class TorchAdapter(Adapter):
    """`microfloat.torch` with an explicit backend on one device."""

    def __init__(self, backend: str, device: str) -> None:
        self.name, self.backend, self.device = f"torch-{backend}-{device}", backend, device

    @functools.cache  # noqa: B019 - a handful of adapters live as long as the process
    def unavailable(self) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device"
        from microfloat.torch import backends

        verdict = backends.support(self.backend, torch.device(self.device))
        return None if verdict else verdict.reason

    def quantize(self, x: np.ndarray, cast: Cast, **arguments: Any) -> Bytes:
        from microfloat.torch.ops import quantize

        for name in ("amax", "scale_enc"):
            if arguments.get(name) is not None:
                arguments[name] = self._tensor(np.asarray(arguments[name], np.float32))
        q = quantize(self._tensor(x), cast, backend=self.backend, **arguments)
        tensor_scale = None if q.tensor_scale is None else q.tensor_scale.cpu().numpy()
        scale = q.scale.cpu().numpy()
        return Bytes(_bytes(q.codes), scale, tensor_scale, q)

    def dequantize(self, handle: Any) -> np.ndarray:
        import torch

        return handle.dequantize(torch.float32).cpu().numpy()

    def scaled_matmul(self, a: Any, b: Any, out_dtype: str, accumulate: str = "split") -> np.ndarray:
        import torch

        from microfloat.torch.ops import scaled_matmul

        product = scaled_matmul(
            a, b, out_dtype=getattr(torch, out_dtype), accumulate=accumulate, backend=self.backend
        )  # fmt: skip
        assert product.dtype == getattr(torch, out_dtype)
        return product.float().cpu().numpy()

    def _tensor(self, x: np.ndarray) -> Any:
        import torch

        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16).to(self.device)
        return torch.from_numpy(np.array(x)).to(self.device)


def _bytes(codes: Any) -> np.ndarray:
    import torch

    return codes.view(torch.uint8).cpu().numpy()


ADAPTERS: list[Adapter] = [
    OracleAdapter(),
    TorchAdapter("reference", "cpu"),
    TorchAdapter("reference", "cuda"),
    TorchAdapter("triton", "cuda"),
    TorchAdapter("native", "cuda"),
]
RUNNING = [adapter for adapter in ADAPTERS if adapter.unavailable() is None]
# The oracle is its own expectation: it takes part in the pinned cases only.
COMPARED = [adapter for adapter in RUNNING if adapter.name != "numpy"]
