"""The kernels of the triton backend on one GPU: the same bytes as the reference first, then time against a device copy.

    PYTHONPATH=src python benchmarks/gpu_kernels.py [--json FILE] [--quick] [--only PREFIX] [--sweep] [--skip-checks]

One row per id of docs/performance.md (q.*, dq.*, f.*). GB/s = stated bytes x elements / median time of CUDA events; the
share is that of a 2 GiB bfloat16 device copy of the same run (measured first and last). Inputs are random; three of
them rotate, together larger than the L2 cache. `--sweep` times tile shapes of the main kernels instead.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from microfloat import reference as oracle
from microfloat.formats import FORMATS
from microfloat.recipes import Cast, Delayed, Hadamard
from microfloat.torch.backends import reference as torch_reference
from microfloat.torch.backends import triton as backend
from microfloat.torch.backends.base import Operand
from microfloat.torch.backends.triton import _launch

SHAPES = ((16384, 4096), (16384, 8192), (16384, 14336))
WEIGHT = ((4096, 14336),)
SEED = 0x89ABCDEF01234567


@dataclass(frozen=True)
class Row:
    """One id: what is run on a matrix, bytes per element, target and stretch (share of the copy), instructions.

    `instructions`: per element, counted in the machine code (sm_90) before the first run; the prediction is
    that 65 % of the issue slots can be used (27.9 instructions per element and 4.0625 bytes fill all of them).
    """

    id: str
    run: Callable[[torch.Tensor, dict], object]
    bytes_per_element: float
    target: float
    stretch: float
    shapes: tuple = SHAPES
    instructions: float | None = None

    def prediction(self) -> float | None:
        """Share of the copy written down before the first run: 65 % of the issue slots, at most 0.95."""
        if self.instructions is None:
            return None
        return min(0.95, 0.65 * 27.9 * self.bytes_per_element / 4.0625 / self.instructions)


@dataclass
class Result:
    id: str
    shape: tuple
    median_ms: float
    p10_ms: float
    p90_ms: float
    gbs: float
    ratio: float
    target: float
    passed: bool
    extra: dict = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------ correctness


def _bytes(x: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy())


def operands_equal(got: Operand, codes, scale, tensor_scale=None) -> bool:
    """Whether an operand holds these bytes (torch tensors or arrays)."""

    def flat(value) -> np.ndarray:
        if isinstance(value, torch.Tensor):
            return _bytes(value)
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)

    same = np.array_equal(_bytes(got.codes), flat(codes)) and np.array_equal(_bytes(got.scale), flat(scale))
    if tensor_scale is not None:
        same = same and got.tensor_scale is not None and np.array_equal(_bytes(got.tensor_scale), flat(tensor_scale))
    return same


def wild_matrix(shape, dtype, seed=0, special=False) -> torch.Tensor:
    """Normal values times powers of two that vary by element and by block; `special` adds NaN, Inf, -0 and zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-6, 6, shape, generator=generator).float())
    x *= torch.exp2(
        torch.randint(-12, 12, (shape[0], -(-shape[1] // 48)), generator=generator).float()
    ).repeat_interleave(48, 1)[:, : shape[1]]
    if special and shape[0] > 8 and shape[1] > 8:
        x[3, 5], x[min(60, shape[0] - 1), 7], x[7], x[:, 2] = float("nan"), float("inf"), -0.0, 0.0
        x[5, 1] = -float("nan")
    return x.to(dtype)


# Shape, dtype, special values, roundings: aligned and unmasked, masked words, odd sizes, a transposed view, tiny.
OPERAND_CASES = (
    ((256, 384), torch.bfloat16, False, ("nearest", "stochastic")),
    ((136, 272), torch.bfloat16, True, ("nearest",)),
    ((101, 77), torch.float32, True, ("nearest", "stochastic")),
    ((64, 34), torch.float16, False, ("nearest",)),
    ((1, 1), torch.float32, False, ("nearest",)),
)


def check_operands(name: str) -> int:
    """Row and column operands of several inputs against the NumPy oracle; returns the number compared."""
    compared = 0
    seed = torch.tensor([SEED & 0xFFFFFFFF, SEED >> 32], device="cuda")
    for shape, dtype, special, roundings in OPERAND_CASES:
        x = wild_matrix(shape, dtype, special=special)
        for rounding in roundings:
            cast = Cast(name, rounding=rounding)
            row, column = backend.quantize_both(x.cuda(), cast, cast, seed=seed, row_stream=2, column_stream=4)
            for got, axis, stream in ((row, -1, 2), (column, -2, 4)):
                want = oracle.quantize(x.float().numpy(), cast, axis=axis, seed=SEED, stream=stream)
                if not operands_equal(got, want.codes, want.scale, want.tensor_scale):
                    raise AssertionError(first_difference(name, rounding, shape, dtype, axis, got, want))
                compared += 1
    return compared


def first_difference(name, rounding, shape, dtype, axis, got, want) -> str:
    text = f"DIFFERENT: {name} {rounding} {shape} {dtype} axis {axis}\n"
    for what, a, b in (("codes", got.codes, want.codes), ("scale", got.scale, want.scale)):
        a, b = _bytes(a), np.ascontiguousarray(b).reshape(-1).view(np.uint8)
        if a.shape != b.shape:
            text += f"  {what}: {a.shape} bytes, reference {b.shape}\n"
            continue
        where = np.flatnonzero(a != b)
        if len(where):
            i = where[0]
            text += f"  {what}: {len(where)} of {a.size} bytes; first at byte {i}: {a[i]:#x}, reference {b[i]:#x}\n"
    return text


def check_values(name: str) -> int:
    """quantize_to_bf16 against dequantized operands of the reference backend."""
    compared = 0
    cast = Cast(name)
    for shape in ((256, 384), (101, 77)):
        x = wild_matrix(shape, torch.bfloat16, special=True).cuda()
        row, column = backend.quantize_to_bf16(x, cast, cast)
        for got, transposed in ((row.values, False), (column.values, True)):
            operand = torch_reference.quantize(x, cast, transposed=transposed)
            operand = dataclasses.replace(operand, tensor_scale=None)  # it stays outside the values
            want = torch_reference.dequantize(operand, torch.bfloat16)
            same = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())
            if not bool(same.all()):
                raise AssertionError(f"DIFFERENT values: {name} {shape} transposed {transposed}: {int((~same).sum())}")
            compared += 1
    return compared


def check_fold(name: str) -> int:
    """fold_both against the oracle's quantize and fold, counters included."""
    compared = 0
    cast = Cast(name)
    for shape, tile in (((256, 384), False), ((101, 77), False), ((256, 384), True)):
        x = wild_matrix(shape, torch.bfloat16, special=True)
        row, column, lossy = backend.fold_both(x.cuda(), cast, cast, tile=tile)
        for got, axis, count in ((row, -1, lossy[0]), (column, -2, lossy[1])):
            quantized = oracle.quantize(x.float().numpy(), cast, axis=axis)
            want, number = oracle.fold(quantized, (128, 128) if tile else (1, 128))
            if not operands_equal(got, want.codes, want.scale) or int(count) != number:
                text = first_difference(name, "fold", shape, tile, axis, got, want)
                raise AssertionError(f"{text}  lossy {int(count)}, reference {number}")
            compared += 1
    return compared


NVFP4_CASTS = {
    "nvfp4": {}, "nvfp4 sr": {"rounding": "stochastic"}, "nvfp4 rht": {"hadamard": Hadamard()},
    "nvfp4 rht sr": {"hadamard": Hadamard(), "rounding": "stochastic"}, "nvfp4_2d": {}, "nvfp4_row": {},
    "nvfp4 two_level_torchao": {"scale_rule": "two_level_torchao"},
    "nvfp4 one_level_e4m3": {"scale_rule": "one_level_e4m3"},
    "nvfp4 two_level_17_16 sr": {"scale_rule": "two_level_17_16", "rounding": "stochastic"},
    "nvfp4 four_over_six": {"scale_rule": "four_over_six"},
    "nvfp4 four_over_six_mse_448": {"scale_rule": "four_over_six_mse_448"},
    "nvfp4_2d four_over_six": {"scale_rule": "four_over_six"},
}  # fmt: skip


def check_nvfp4(name: str) -> int:
    """NVFP4 operands of several inputs against the NumPy oracle."""
    cast = Cast(name.split()[0], **NVFP4_CASTS[name])
    seed = torch.tensor([SEED & 0xFFFFFFFF, SEED >> 32], device="cuda")
    compared = 0
    cases = [((256, 384), torch.bfloat16, False), ((136, 272), torch.bfloat16, True), ((101, 77), torch.float32, True)]
    for shape, dtype, special in cases:
        x = wild_matrix(shape, dtype, special=special)
        row, column = backend.quantize_both(x.cuda(), cast, cast, seed=seed, row_stream=2, column_stream=4)
        for got, axis, stream in ((row, -1, 2), (column, -2, 4)):
            want = oracle.quantize(x.float().numpy(), cast, axis=axis, seed=SEED, stream=stream)
            if not operands_equal(got, want.codes, want.scale, want.tensor_scale):
                raise AssertionError(first_difference(name, "", shape, dtype, axis, got, want))
            compared += 1
    return compared


def check_dequantize(name: str) -> int:
    """dequantize against the reference backend."""
    compared = 0
    for shape in ((256, 384), (101, 77)):
        operand = torch_reference.quantize(wild_matrix(shape, torch.float32, special=True).cuda(), Cast(name))
        for dtype in (torch.bfloat16, torch.float32):
            got, want = backend.dequantize(operand, dtype), torch_reference.dequantize(operand, dtype)
            bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
            same = (got.view(bits) == want.view(bits)) | (got.isnan() & want.isnan())
            if not bool(same.all()):
                raise AssertionError(f"DIFFERENT dequantize: {name} {shape} {dtype}: {int((~same).sum())}")
            compared += 1
    return compared


def check_fused(name: str) -> int:
    """Fused codes are those of the fused values, and the values are near torch's own."""
    import torch.nn.functional as functional

    cast = Cast(name)
    compared = 0
    for shape in ((256, 1024), (101, 78)):
        x, y, z = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(3))
        weight = torch.randn(shape[1], device="cuda").to(torch.bfloat16)
        values, amax = backend.activation_values(x, y)
        (gate, gate_amax), (up, up_amax) = backend.activation_backward_values(z, x, y)
        normed, normed_amax, _, _ = backend.norm_values(x, weight, None, eps=1e-5)
        leaf, other = x.clone().requires_grad_(), y.clone().requires_grad_()
        (functional.silu(leaf) * other).backward(z)
        pairs = [
            (values, functional.silu(x) * y), (normed, functional.rms_norm(x, shape[1:], weight, 1e-5)),
            (gate, leaf.grad), (up, other.grad),
        ]  # fmt: skip
        for got, want in pairs:
            error = float((got.float() - want.float()).norm() / want.float().norm())
            if not error < 1e-3:
                raise AssertionError(f"DIFFERENT fused values {name} {shape}: relative error {error}")
        tensor = cast.format.is_per_tensor
        given = {"amax": amax} if tensor else {}
        both_given = {"amax": (gate_amax, up_amax)} if tensor else {}
        norm_given = {"amax": normed_amax} if tensor else {}
        fused_norm = backend.norm_quantize(x, weight, None, cast, cast, eps=1e-5, **norm_given)
        # Sums of another order give other statistics: the codes are those of the statistics returned.
        again = (x.float() * fused_norm.inverse[:, None] * weight.float()).to(x.dtype)
        results = [
            (backend.activation_quantize(x, y, cast, cast, **given), values, amax),
            ((fused_norm.row, fused_norm.column), again, normed_amax),
        ]
        gradients = backend.activation_backward_quantize(z, x, y, cast, cast, **both_given)
        results += zip(gradients, (gate, up), (gate_amax, up_amax), strict=True)
        for number, (operands, matrix, measured) in enumerate(results):
            wanted = torch_reference.quantize_both(matrix, cast, cast, amax=measured if tensor else None)
            for got, want in zip(operands, wanted, strict=True):
                if not operands_equal(got, want.codes, want.scale):
                    raise AssertionError(f"DIFFERENT fused codes {name} {shape} result {number}")
                compared += 1
    return compared


def check_conversions(name: str) -> int:
    """The two forms of every conversion of one element on all 2^32 float32 inputs."""
    from microfloat.kernels.selfcheck import count_differences, count_packed_differences

    mantissa, bias = {"E4M3": (3, 7), "E5M2": (2, 15), "E3M2": (2, 3), "E2M3": (3, 1), "E2M1": (1, 1)}[name]
    for stochastic in (False, True):
        counts = torch.zeros(4, dtype=torch.int32, device="cuda")
        for check in range(4):
            count_differences[(1 << 22,)](counts[check:], check, mantissa, bias, stochastic, 1024)
        if any(counts.tolist()):
            raise AssertionError(
                f"DIFFERENT conversions {name} stochastic={stochastic}: pairs, quads, values, scales: {counts.tolist()}"
            )
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")
    count_packed_differences[(64,)](counts, mantissa, bias, 1024)
    if any(counts.tolist()):
        raise AssertionError(f"DIFFERENT packed conversions {name}: pairs, quads, folded, marks: {counts.tolist()}")
    return (2 << 32) + (1 << 16)


def check_large(name: str) -> int:
    """A large matrix against the reference backend on the same device (same bytes, every program of the grid)."""
    x = torch.randn((4096, 4096), device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(torch.bfloat16)
    cast = Cast(name)
    row, column = backend.quantize_both(x, cast, cast)
    for got, transposed in ((row, False), (column, True)):
        want = torch_reference.quantize(x, cast, transposed=transposed)
        for a, b in ((got.codes, want.codes), (got.scale, want.scale)):
            if not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
                raise AssertionError(f"DIFFERENT large {name} transposed {transposed}")
    return 2


def warm(row_id: str) -> int:
    """Compile what a row runs, on a small matrix of the same alignment, into Triton's disk cache."""
    row = next(row for row in make_rows() if row.id == row_id)
    row.run(torch.randn((256, 512), device="cuda").to(torch.bfloat16), {})
    return 1


CHECKS = {
    function.__name__: function
    for function in (
        check_conversions,
        check_operands,
        check_nvfp4,
        check_values,
        check_fold,
        check_dequantize,
        check_fused,
        check_large,
        warm,
    )
}


def run_check(task: tuple[str, str]) -> tuple[str, str, int, str]:
    """One check in a process of the pool: (check, argument, number compared, error)."""
    try:
        done = CHECKS[task[0]](task[1])
        torch.cuda.synchronize()
        return (*task, done, "")
    except AssertionError as error:
        return (*task, 0, str(error))
    except Exception as error:
        text = traceback.format_exc(limit=-3)
        return (*task, 0, f"{type(error).__name__}: {str(error)[-600:]}\n{text[-900:]}")


SCALED = ["fp8_tensor", "fp8_tensor_e5m2", "fp8_row", "fp8_128x128", "fp8_1x128", "fp8_1x128_e5m2"]
MX = ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"]


def check_all(only: str, with_checks: bool) -> tuple[dict, bool]:
    """Every check and every compilation, spread over processes; a summary, and whether all agree."""
    tasks = [("warm", row.id) for row in make_rows() if row.id.startswith(only)]
    if with_checks:
        tasks += [("check_operands", name) for name in SCALED + MX]
        tasks += [("check_nvfp4", name) for name in NVFP4_CASTS]
        tasks += [("check_values", name) for name in (*MX, "nvfp4", "nvfp4_2d")] + [("check_fold", name) for name in MX]
        tasks += [("check_dequantize", name) for name in FORMATS]
        tasks += [("check_fused", name) for name in ("fp8_tensor", "fp8_tensor_e5m2", "mxfp8", "mxfp4", "fp8_1x128")]
        tasks += [("check_conversions", name) for name in ("E4M3", "E5M2", "E3M2", "E2M3", "E2M1")]
        tasks += [
            ("check_large", name) for name in ("fp8_tensor", "fp8_row", "fp8_128x128", "fp8_1x128", "mxfp8", "mxfp4")
        ]
    summary: dict[str, int] = {}
    fine = True
    with multiprocessing.get_context("spawn").Pool(max(1, min(14, (os.cpu_count() or 2) - 1))) as pool:
        for check, argument, done, error in pool.imap_unordered(run_check, tasks):
            summary[check] = summary.get(check, 0) + done
            if error:
                fine = False
                summary[f"{check} failed"] = summary.get(f"{check} failed", 0) + 1
                print(f"FAILED {check} {argument}: {error}", flush=True)
    return summary, fine


# ----------------------------------------------------------------------------------------------------------- timing


def time_calls(call: Callable[[int], object], milliseconds: float) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of CUDA-event times of ``call(i)``, in ms."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for i in range(5):
        call(i)
    end.record()
    torch.cuda.synchronize()
    estimate = max(begin.elapsed_time(end) / 5, 1e-3)
    for i in range(max(1, int(25 / estimate))):
        call(i)
    repetitions = max(10, int(milliseconds / estimate))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for i, (start, stop) in enumerate(events):
        start.record()
        call(i)
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) for start, stop in events)
    return statistics.median(times), times[len(times) // 10], times[(len(times) * 9) // 10]


def copy_gbs() -> float:
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    median, _, _ = time_calls(lambda i: target.copy_(source), 100)
    return 2 * source.numel() * 2 / median / 1e6


def make_rows() -> list[Row]:
    """Every id with what it runs; `state` holds what a call needs besides the matrix."""
    delayed = Cast("fp8_tensor", scaling=Delayed())
    current, row8, block, weight = Cast("fp8_tensor"), Cast("fp8_row"), Cast("fp8_1x128"), Cast("fp8_128x128")
    mx8, mx6, mx4 = Cast("mxfp8"), Cast("mxfp6_e3m2"), Cast("mxfp4")
    nv, nv_sr, nv_2d = Cast("nvfp4"), Cast("nvfp4", rounding="stochastic"), Cast("nvfp4_2d")
    nv_rht_sr = Cast("nvfp4", rounding="stochastic", hadamard=Hadamard())
    seed = torch.tensor([SEED & 0xFFFFFFFF, SEED >> 32], device="cuda")

    def state_of(x, state):
        """What calls need besides the matrix: scale and histories, more matrices of its shape, a norm's weight."""
        if not state:
            state["scale_enc"] = torch.full((), 100.0, device="cuda")
            state["history"], state["history2"] = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
            state["amax"] = x.abs().max().float()
            state["y"], state["z"] = (torch.randn(x.shape, device="cuda").to(x.dtype) for _ in range(2))
            state["weight"] = torch.randn(x.shape[1], device="cuda").to(x.dtype)
        return state

    def known(s):
        return {"scale_enc": s["scale_enc"], "record": s["history"]}

    def both(s):
        return {"scale_enc": (s["scale_enc"],) * 2, "record": (s["history"], s["history2"])}

    def made(cast, key):
        """A call on an operand quantized before the clock runs."""

        def run(x, state):
            operand = state.get(key) or state.setdefault(key, backend.quantize(x, cast))
            return backend.dequantize(operand, torch.bfloat16)

        return run

    def with_state(call):
        return lambda x, state: call(x, state_of(x, state))

    def swizzle(x, state):
        """64 MB and more of scales: the matrix's bytes serve as such, two for every element."""
        return backend.swizzle_scales(x.view(torch.uint8)[:, : x.shape[1]])

    streams = {"seed": seed, "row_stream": 2, "column_stream": 4}
    return [
        Row("q.amax", lambda x, s: backend.amax(x), 2, 0.90, 0.98, instructions=3.2),
        Row(
            "q.fp8.delayed", with_state(lambda x, s: backend.quantize_both(x, delayed, delayed, **known(s))),
            4, 0.88, 0.94, instructions=8.3,
        ),
        Row("q.fp8.current", lambda x, s: backend.quantize_both(x, current, current), 6, 0.90, 0.94, instructions=10.0),
        Row("q.fp8.row", lambda x, s: backend.quantize_both(x, row8, row8), 6, 0.75, 0.88, instructions=14.8),
        Row("q.fp8.1x128", lambda x, s: backend.quantize_both(x, block, block), 4.0625, 0.85, 0.94, instructions=12.5),
        Row("q.fp8.128x128", lambda x, s: backend.quantize_both(x, weight, weight), 4, 0.91, 0.94, WEIGHT, 7.0),
        Row("q.mxfp8.row", lambda x, s: backend.quantize_both(x, mx8, None), 3.03125, 0.85, 0.92, instructions=5.8),
        Row("q.mxfp8.rowcol", lambda x, s: backend.quantize_both(x, mx8, mx8), 4.0625, 0.85, 0.92, instructions=11.1),
        Row("q.mxfp8.qdq", lambda x, s: backend.quantize_to_bf16(x, mx8, mx8), 6, 0.85, 0.92, instructions=18.5),
        Row("q.mxfp8.fold", lambda x, s: backend.fold_both(x, mx8, mx8), 4.0625, 0.80, 0.90, instructions=23.5),
        Row("q.mxfp4.row", lambda x, s: backend.quantize_both(x, mx4, None), 2.53125, 0.70, 0.85, instructions=9.5),
        Row("q.mxfp6.row(bytes)", lambda x, s: backend.quantize_both(x, mx6, None), 3.03125, 0.60, 0.80,
        instructions=9.5),
        Row(
            "q.nvfp4.row", with_state(lambda x, s: backend.quantize_both(x, nv, None, amax=s["amax"])),
            2.5625, 0.70, 0.85, instructions=17.7,
        ),
        Row(
            "q.nvfp4.train", lambda x, s: backend.quantize_both(x, nv_sr, nv_rht_sr, **streams), 5.125, 0.60, 0.75,
            instructions=58.1,
        ),
        Row("q.nvfp4.2d", lambda x, s: backend.quantize_both(x, nv_2d, nv_2d), 5.125, 0.60, 0.80, WEIGHT, 37.1),
        Row(
            "q.nvfp4.qdq", lambda x, s: backend.quantize_to_bf16(x, nv_sr, nv_rht_sr, **streams), 8, 0.60, 0.80,
            instructions=60.4,
        ),
        Row("dq.mxfp8", made(mx8, "mx8"), 3.03125, 0.85, 0.95, instructions=6.9),
        Row("sw.scales", swizzle, 2, 0.50, 0.80, ((1 << 20, 128),)),
        Row("dq.nvfp4", made(nv, "nv"), 2.5625, 0.85, 0.95, instructions=11.1),
        Row(
            "f.rmsnorm.fp8",
            with_state(lambda x, s: backend.norm_quantize(x, s["weight"], None, delayed, delayed, eps=1e-5,
            **known(s))),
            4, 0.80, 0.90, instructions=32.8,
        ),
        Row(
            "f.rmsnorm.mxfp8", with_state(lambda x, s: backend.norm_quantize(x, s["weight"], None, mx8, mx8, eps=1e-5)),
            4.0625, 0.75, 0.88, instructions=39.5,
        ),
        Row(
            "f.swiglu.fp8",
            with_state(lambda x, s: backend.activation_quantize(x, s["y"], delayed, delayed, **known(s))),
            6, 0.80, 0.90, instructions=26.8,
        ),
        Row(
            "f.swiglu.mxfp8", with_state(lambda x, s: backend.activation_quantize(x, s["y"], mx8, mx8)),
            6.0625, 0.75, 0.88, instructions=35.2,
        ),
        Row(
            "f.swiglu_bwd.fp8",
            with_state(lambda x, s: backend.activation_backward_quantize(s["z"], x, s["y"], delayed, delayed,
            **both(s))),
            10, 0.75, 0.88, instructions=52.4,
        ),
    ]  # fmt: skip


def run_one(row: Row, matrices: list[torch.Tensor], state: dict, i: int) -> object:
    return row.run(matrices[i % len(matrices)], state)


def measure(rows: list[Row], copy: float, milliseconds: float) -> list[Result]:
    results = []
    for row in rows:
        for shape in row.shapes:
            matrices = [torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(3)]
            state: dict = {}
            try:
                median, p10, p90 = time_calls(functools.partial(run_one, row, matrices, state), milliseconds)
            except Exception as error:
                print(f"{row.id:22} {shape!s:16} FAILED {type(error).__name__}: {str(error)[:300]}")
                continue
            gbs = row.bytes_per_element * shape[0] * shape[1] / median / 1e6
            ratio = gbs / copy
            predicted = row.prediction()
            extra = {"instructions": row.instructions, "predicted_ratio": predicted, "stretch": row.stretch}
            passed = ratio >= row.target
            results.append(Result(row.id, shape, median, p10, p90, gbs, ratio, row.target, passed, extra))
            print(
                f"{row.id:22} {shape!s:16} {median:8.4f} ms  p10 {p10:7.4f} p90 {p90:7.4f}  {gbs:7.0f} GB/s  "
                f"{ratio:5.3f} of copy  target {row.target:.2f} {'ok' if ratio >= row.target else '-'}"
            )
    return results


SWEEPS = {
    "cast": (["q.fp8.delayed", "q.fp8.current"], [(128, 128, 4), (128, 128, 8), (64, 128, 4), (128, 64, 4), (64, 128,
    2), (64, 64, 4)]),
    "axes": (["q.fp8.row"], [(128, 128, 4), (128, 128, 8), (64, 128, 4), (128, 64, 4)]),
    "blocks": (
        ["q.mxfp8.row", "q.mxfp8.rowcol", "q.mxfp8.qdq", "q.fp8.1x128"],
        [(128, 128, 4), (128, 128, 8), (128, 64, 4), (64, 128, 4), (32, 128, 2), (32, 256, 4), (64, 64, 2)],
    ),
    "fold": (["q.mxfp8.fold"], [(128, 128, 4), (128, 128, 8), (128, 128, 16)]),
    "nvfp4": (
        ["q.nvfp4.row", "q.nvfp4.train", "q.nvfp4.2d", "q.nvfp4.qdq"],
        [(64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (64, 64, 2), (32, 256, 4)],
    ),
    "dequantize": (["dq.mxfp8", "dq.nvfp4"], [(64, 128, 4), (32, 128, 4), (32, 256, 4), (16, 256, 4)]),
    "fused_scaled": (["f.swiglu.fp8", "f.swiglu_bwd.fp8"], [(64, 128, 8), (64, 128, 4), (32, 128, 4), (128, 64, 8),
    (128, 128, 8)]),
    "fused_blocks": (["f.swiglu.mxfp8"], [(128, 128, 8), (128, 128, 4), (64, 128, 4), (32, 256, 4)]),
    "norm": (
        ["f.rmsnorm.fp8", "f.rmsnorm.mxfp8"],
        [(32, 512, 16), (32, 256, 8), (32, 512, 8), (32, 256, 4), (32, 1024, 16)],
    ),
}  # fmt: skip


def sweep(copy: float, only: str) -> list[dict]:
    """Times of one shape under other tiles."""
    rows = {row.id: row for row in make_rows()}
    shape, found = (16384, 8192), []
    matrices = [torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(3)]

    def call(identity: str, state: dict) -> Callable[[int], object]:
        return lambda i: rows[identity].run(matrices[i % 3], state)

    for name, (ids, tiles) in SWEEPS.items():
        chosen = _launch.TILES[name]
        for identity in ids:
            if not (identity.startswith(only) or name == only):
                continue
            for tile in tiles:
                _launch.TILES[name] = tile
                state: dict = {}
                try:
                    median, _, _ = time_calls(call(identity, state), 40)
                except Exception as error:
                    print(f"sweep {identity:16} {tile!s:16} FAILED {type(error).__name__}: {str(error)[:120]}")
                    continue
                ratio = rows[identity].bytes_per_element * shape[0] * shape[1] / median / 1e6 / copy
                found.append({"id": identity, "tile": tile, "median_ms": median, "ratio": ratio})
                print(f"sweep {identity:16} {tile!s:16} {median:8.4f} ms  {ratio:5.3f} of copy")
        _launch.TILES[name] = chosen
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--only", default="", help="ids that begin so")
    parser.add_argument("--quick", action="store_true", help="shorter timings")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--time-anyway", action="store_true", help="time even if a check failed; the JSON says so")
    options = parser.parse_args()
    started = time.time()
    report: dict = {
        "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(), "torch": torch.__version__,
        "triton": __import__("triton").__version__,
    }  # fmt: skip
    print(report)
    report["checks"], fine = check_all(options.only, not options.skip_checks)
    print(f"checks: {report['checks']}  ({time.time() - started:.0f} s)", flush=True)
    if not fine and not options.time_anyway:
        raise SystemExit("something differs from the reference; nothing is timed (--time-anyway times all the same)")
    report["copy_gbs"] = [copy_gbs()]
    print(f"copy {report['copy_gbs'][0]:.0f} GB/s")
    if options.sweep:
        report["sweep"] = sweep(report["copy_gbs"][0], options.only)
    else:
        rows = [row for row in make_rows() if row.id.startswith(options.only)]
        results = measure(rows, report["copy_gbs"][0], 60 if options.quick else 150)
        report["rows"] = [asdict(result) for result in results]
        means: dict[str, list[float]] = {}
        for result in results:
            means.setdefault(result.id, []).append(result.ratio)
        report["geometric_means"] = {name: statistics.geometric_mean(values) for name, values in means.items()}
    report["copy_gbs"].append(copy_gbs())
    print(f"copy {report['copy_gbs'][1]:.0f} GB/s; {time.time() - started:.0f} s in all")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1, default=str)


if __name__ == "__main__":
    main()
