"""Measurements for `microfloat doctor`, `microfloat bench` and benchmarks/: time, and results for the oracle.

Shapes M x K x N: y [M, N] = x [M, K] @ w [N, K].T.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from microfloat.passes import CastInputs
from microfloat.recipes import Cast, CustomRecipe, Gemm
from microfloat.routes import Route, Routes, entries_of, route_of
from microfloat.torch import backends, reference
from microfloat.torch.backends.base import Operand
from microfloat.torch.launch import gemms
from microfloat.torch.linear.schedule import CastStep
from microfloat.torch.tensor.ops import quantize, scaled_matmul

L2_BYTES = 50 << 20  # of an H200


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(samples: Sequence[float]) -> "Times":
        """The percentiles of samples."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Times(statistics.median(ordered), ordered[last // 10], ordered[last - last // 10])

    def per(self, count: int) -> "Times":
        """Times of one of `count` equal parts of a call."""
        return Times(self.median / count, self.p10 / count, self.p90 / count)


def in_turn(
    calls: Mapping[str, Callable[[int], object]], device: str, milliseconds: float = 150.0, least: int = 8, *,
    cpu_milliseconds: float = 0.0,
) -> dict[str, Times]:  # fmt: skip
    """Times of several calls, A B A B, so that they share clocks and temperature; call(i) gets the number of its turn.

    On a GPU, by CUDA events, each is warmed up for 25 ms and then measured for `milliseconds`, at least `least` times;
    nothing waits between calls, so that the host runs ahead as in a training loop. On a CPU each is warmed up once and
    measured for `cpu_milliseconds`, once for 0.
    """
    on_gpu, turns = device != "cpu", 3000
    if on_gpu:
        estimate = {name: _estimate(call) for name, call in calls.items()}
        turns = min(turns, max(least, int(milliseconds / max(estimate.values()))))
    for name, call in calls.items():
        for i in range(min(1000, max(1, int(25 / estimate[name]))) if on_gpu else 1):  # pyright: ignore
            call(i)
    pairs: dict[str, list[tuple]] = {name: [] for name in calls}
    begin, turn, is_done = time.perf_counter(), 0, False
    while not is_done:
        turn += 1
        for name, call in calls.items():
            start = _now(on_gpu)
            call(turn)
            pairs[name].append((start, _now(on_gpu)))
        spent = (time.perf_counter() - begin) * 1e3
        is_done = turn >= turns or (not on_gpu and spent >= cpu_milliseconds * len(calls) and turn >= least)
        is_done |= not (on_gpu or cpu_milliseconds)
    if on_gpu:
        torch.cuda.synchronize()
        return {name: Times.of([start.elapsed_time(stop) for start, stop in found]) for name, found in pairs.items()}
    return {name: Times.of([(stop - start) * 1e3 for start, stop in found]) for name, found in pairs.items()}


def _now(on_gpu: bool) -> "torch.cuda.Event | float":
    """A mark of time: an event on the current stream, or seconds."""
    if on_gpu:
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[return-value]
    return time.perf_counter()


def _estimate(call: Callable[[int], object]) -> float:
    """Milliseconds of a call, roughly."""
    begin = 0.0
    for _ in range(2):  # the first round compiles
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(3):
            call(i)
    torch.cuda.synchronize()
    return max((time.perf_counter() - begin) / 3 * 1e3, 1e-3)


def rotations(bytes_of_one_set: int) -> int:
    """Number of sets of buffers that are together larger than four L2 caches, to rotate over; at most 24."""
    return max(2, min(24, -(-4 * L2_BYTES // max(bytes_of_one_set, 1))))


def quantize_times(shape: tuple[int, int], cast: Cast, device: str, cpu_milliseconds: float = 0.0) -> Times:
    """Times of the public `quantize`, with bfloat16 matrices in turn, so that none is in the cache."""
    sets = rotations(2 * shape[0] * shape[1]) if device == "cuda" else 2
    x = [torch.randn(shape, device=device).bfloat16() for _ in range(sets)]
    call = {"quantize": lambda i: quantize(x[i % sets], cast)}
    return in_turn(call, device, cpu_milliseconds=cpu_milliseconds)["quantize"]


def copy_gbs(elements: int, device: str) -> float:
    """GB/s, read and written, of a device copy of bfloat16 elements."""
    source = torch.randn(elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = in_turn({"copy": lambda i: target.copy_(source)}, device, 100, cpu_milliseconds=50)
    return 4 * elements / times["copy"].median / 1e6


@dataclass(frozen=True)
class Maker:
    """One GEMM on a device."""

    gemm: Gemm
    device: str

    @functools.cached_property
    def backend(self) -> str:
        """The name of the backend that a layer would take on this device."""
        return backends.resolve("auto", torch.device(self.device))[0]

    @functools.cached_property
    def route(self) -> Route:
        """The route of the GEMM on the chip behind the device."""
        return route_of(self.gemm, backends.chip_of(torch.device(self.device)))

    def bound(self, x: torch.Tensor, w: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The product in bfloat16 of x and w, which are cast here, as in the schedule of a layer."""
        if self.backend == "reference":
            a, b = _reference_operands(self.gemm, x, w)
            options = {"out_dtype": torch.bfloat16, "accumulate": self.gemm.accumulate}
            return functools.partial(reference.scaled_matmul, a, b, **options)
        backend, index = backends.choose(self.backend, x.device), backends.device_index(x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream if index >= 0 and backend.programs else 0
        words = backend.programs.scratch(index) if backend.programs else None
        recipe, routes = CustomRecipe(self.gemm, self.gemm, self.gemm), Routes(self.route, self.route, self.route)
        operands = []
        for tensor, matrix in (("x", x), ("w", w)):
            step = CastStep(backend, matrix, entries_of(recipe, routes, tensor, True, False))
            operands.append(step(matrix, stream, words, CastInputs()).row)
        shape = (x.shape[0], x.shape[1], w.shape[0])
        product = gemms.product(self.gemm, self.route, shape, None, torch.bfloat16, x.device)
        return functools.partial(product, *operands, None)

    def difference(self, shape: tuple[int, int, int] = (256, 512, 384)) -> float:
        """Relative difference to the exact product of the reference's operands."""
        x, w = matrices(shape, self.device)
        a, b = _reference_operands(self.gemm, x, w)
        want = reference.scaled_matmul(a, b, out_dtype=torch.float32, accumulate="exact")
        return difference(self.bound(x, w)(), want)

    def times(self, shape: tuple[int, int, int], sets: int, cpu_milliseconds: float = 0.0) -> dict[str, Times]:
        """Times of the product ("ours") in turn with bfloat16's ("bf16"), over `sets` pairs of operands."""
        plain = [matrices(shape, self.device) for _ in range(sets)]
        made = [self.bound(x, w) for x, w in plain]
        calls = {
            "bf16": lambda i: torch.mm(plain[i % sets][0], plain[i % sets][1].t()),
            "ours": lambda i: made[i % sets](),
        }
        return in_turn(calls, self.device, cpu_milliseconds=cpu_milliseconds)


def _reference_operands(gemm: Gemm, x: torch.Tensor, w: torch.Tensor) -> tuple[Operand, Operand]:
    return reference.quantize(x, gemm.lhs), reference.quantize(w, gemm.rhs)  # type: ignore[arg-type]


def matrices(shape: tuple[int, int, int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal x [M, K], and w [N, K] scaled by 1 / sqrt(K)."""
    m, k, n = shape
    x = torch.randn(m, k, device=device).bfloat16()
    return x, (torch.randn(n, k, device=device) / k**0.5).bfloat16()


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius difference."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def cast_and_multiply(
    pairs: Sequence[tuple[np.ndarray, Cast, float | None]], backend: str, device: str | None
) -> tuple[list[list[bytes | None]], np.ndarray]:
    """The bytes of codes, scale and tensor scale of two casts, each with an encode scale, and their product."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    made = [
        quantize(torch.from_numpy(x).to(device), cast, scale_enc=scale, backend=backend) for x, cast, scale in pairs
    ]
    product = scaled_matmul(*made, out_dtype=torch.float32, backend=backend)
    return [[_bytes(part) for part in (q.codes, q.scale, q.tensor_scale)] for q in made], product.cpu().numpy()


def _bytes(part: torch.Tensor | None) -> bytes | None:
    return None if part is None else part.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def has_cuda() -> bool:
    """True if torch sees a CUDA device."""
    return torch.cuda.is_available()


def cuda_version() -> str | None:
    """The version of CUDA or ROCm that this torch was built with, or None."""
    return torch.version.cuda or (torch.version.hip and f"ROCm {torch.version.hip}")
