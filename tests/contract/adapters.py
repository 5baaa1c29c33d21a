"""Front ends x backends behind one face: NumPy arrays in, bytes out. A new one joins by one entry in ADAPTERS.

Every adapter is held to the same cases (`cases.py`) by the same tests; one that cannot run here says why.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from microfloat import reference
from microfloat.formats import FORMATS, SCALE_FP32
from microfloat.recipes import Cast, Hadamard
from microfloat.reference import Quantized
from microfloat.routes import family_of

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@dataclass(frozen=True)
class Bytes:
    """Result of `quantize` in the oracle's types: uint8 codes (FP4 packed), uint8 or float32 scales."""

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

    def tolerance(self, a: Quantized, b: Quantized) -> Tolerance:
        """The row of docs/numerics.md 8.3 by which this adapter multiplies two such operands."""
        return EMULATED

    def unavailable(self) -> str | None:
        """Reason why it cannot run here, or None."""
        raise NotImplementedError

    # For runs of a sample: `supports` says which Casts, `compiles_every_shape` that tests of many shapes thin them out,
    # `compiles_kinds_of_shapes` that they use few kinds of shapes and that dtypes and axes take turns (`cases.turns`).
    compiles_every_shape = False
    compiles_kinds_of_shapes = False
    left_out = "does not take this Cast"

    def supports(self, cast: Cast, dtype: str = "any") -> bool:
        """True if this backend takes the Cast of such an input at all; the reference backends take every one."""
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
    """`microfloat.torch` with an explicit backend on one device.

    Triton compiles a kernel for every Cast, dtype, axis and kind of shape (sizes of 1, odd, even, multiples of 4 and of
    16): for all edge inputs 5600 of them, 0.2 to 2 s each on an idle processor and 2 s where 15 share one, spent in its
    own passes, LLVM and ptxas alike. So dtypes and axes take turns there, and values go in arrays of one kind of shape;
    HYPOTHESIS_PROFILE=thorough runs everything, as tests of the reference backends always do.
    """

    def __init__(self, backend: str, device: str) -> None:
        self.name, self.backend, self.device = f"torch-{backend}-{device}", backend, device
        self.compiles_kinds_of_shapes = not THOROUGH and backend in ("triton", "native")

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

    left_out = "has no kernel for a format that is not the library's own"

    def supports(self, cast: Cast, dtype: str = "any") -> bool:
        if self.backend != "triton" or cast.format in FORMATS.values():
            return True
        return not family_of(cast)[1]

    def tolerance(self, a: Quantized, b: Quantized) -> Tolerance:
        """Tensor cores multiply codes of 8 bits with float32 scales, except E5M2 by E5M2; others are decoded first."""
        elements = {a.format.element.name, b.format.element.name}
        codes = elements <= {"E4M3", "E5M2"} and elements != {"E5M2"}
        if self.backend != "native" or not codes or {a.format.scale, b.format.scale} != {SCALE_FP32}:
            return EMULATED
        import torch

        has_fp8 = (8, 9) <= torch.cuda.get_device_capability() < (10, 0)
        return HOPPER_SPLIT if has_fp8 else EMULATED

    def quantize(self, x: np.ndarray, cast: Cast, **arguments: Any) -> Bytes:
        from microfloat.torch.tensor.ops import quantize

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

        from microfloat.torch.tensor.ops import scaled_matmul

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


class JaxAdapter(Adapter):
    """`microfloat.jax` on the platform that JAX chooses.

    Every new shape is a compilation there, so a run takes a sample of Casts that reaches each family of scale rules,
    both roundings, the transform and all dtypes; HYPOTHESIS_PROFILE=thorough takes them all.
    """

    name = "jax"
    compiles_every_shape = not THOROUGH
    left_out = "compiles every shape: takes a sample of Casts here, all of them in tests/jax/test_every_cast.py"
    SAMPLE = (
        (Cast("fp8_tensor"), ("float32",)),
        (Cast("mxfp8"), ("float32", "bfloat16")),
        (Cast("nvfp4", rounding="stochastic", hadamard=Hadamard()), ("float16",)),
    )

    def unavailable(self) -> str | None:
        return None if importlib.util.find_spec("jax") else "jax is not installed"

    def is_on_cpu(self) -> bool:
        """True if JAX chooses the CPU."""
        import jax

        return jax.default_backend() == "cpu"

    def supports(self, cast: Cast, dtype: str = "any") -> bool:
        return not self.compiles_every_shape or any(
            cast == one and (dtype == "any" or dtype in dtypes) for one, dtypes in self.SAMPLE
        )

    def quantize(self, x: np.ndarray, cast: Cast, **arguments: Any) -> Bytes:
        from microfloat.jax import quantize

        q = quantize(np.asarray(x), cast, **arguments)
        codes, scale = np.asarray(q.codes), np.asarray(q.scale)
        tensor_scale = None if q.tensor_scale is None else np.asarray(q.tensor_scale)
        return Bytes(codes if codes.dtype == np.uint8 else codes.view(np.uint8), scale, tensor_scale, q)

    def dequantize(self, handle: Any) -> np.ndarray:
        return np.asarray(handle.dequantize(np.float32))

    def scaled_matmul(self, a: Any, b: Any, out_dtype: str, accumulate: str = "split") -> np.ndarray:
        import jax.numpy as jnp

        from microfloat.jax import scaled_matmul

        product = scaled_matmul(a, b, out_dtype=getattr(jnp, out_dtype), accumulate=accumulate)
        assert product.dtype == getattr(jnp, out_dtype)
        return np.asarray(product, np.float32)


ADAPTERS: list[Adapter] = [
    OracleAdapter(),
    TorchAdapter("reference", "cpu"),
    TorchAdapter("reference", "cuda"),
    TorchAdapter("triton", "cuda"),
    TorchAdapter("native", "cuda"),
    JaxAdapter(),
]
RUNNING = [adapter for adapter in ADAPTERS if adapter.unavailable() is None]
# The oracle is its own expectation: it takes part in digests and products only.
COMPARED = [adapter for adapter in RUNNING if adapter.name != "numpy"]
