"""What the vendor's scaled GEMM accepts on this GPU, how exact it is, how fast, and what a call costs on the host.

    python benchmarks/probe_gemm.py
"""

import time

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType as S

device = "cuda"
torch.manual_seed(0)


def attempt(name, run):
    try:
        out = run()
        torch.cuda.synchronize()
        print(f"ok    {name}: {out}")
    except Exception as error:  # noqa: BLE001 - a probe prints every refusal
        print(f"FAILS {name}: {type(error).__name__} {str(error).splitlines()[0][:200]}")


def milliseconds(run, repetitions=20):
    for _ in range(3):
        run()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repetitions):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repetitions


def fp8(shape, dtype=torch.float8_e4m3fn):
    return (torch.randn(shape, device=device) * 16).to(dtype)


one = torch.ones((), device=device)


def relative(y, a, b, scale=1.0):
    expected = (a.double() @ b.double().t()) * scale
    return float((y.double() - expected).norm() / expected.norm())


m, k, n = 512, 1024, 768
a, b, a5 = fp8((m, k)), fp8((n, k)), fp8((m, k), torch.float8_e5m2)
sa, sb = torch.rand(m, 1, device=device) + 0.5, torch.rand(n, 1, device=device) + 0.5
for out in (torch.bfloat16, torch.float32, torch.float16):
    for fast in (True, False):
        attempt(f"tensor {out} fast={fast}", lambda: relative(
            torch._scaled_mm(a, b.t(), one, one, out_dtype=out, use_fast_accum=fast), a, b))
        attempt(f"tensor e5m2 x e4m3 {out} fast={fast}", lambda: relative(
            torch._scaled_mm(a5, b.t(), one, one, out_dtype=out, use_fast_accum=fast), a5, b))
        attempt(f"row {out} fast={fast}", lambda: relative(
            torch._scaled_mm(a, b.t(), sa, sb.t(), out_dtype=out, use_fast_accum=fast), a.float() * sa, b.float() * sb))
for bias_dtype in (torch.bfloat16, torch.float32):
    bias = torch.randn(n, device=device, dtype=bias_dtype)
    attempt(f"bias {bias_dtype}", lambda: tuple(
        torch._scaled_mm(a, b.t(), one, one, bias=bias, out_dtype=torch.bfloat16).shape))

sa128 = (torch.rand(k // 128, m, device=device) + 0.5).t()  # strides (1, m)
sb128 = (torch.rand(k // 128, n, device=device) + 0.5).t()
sbt = torch.rand(n // 128, k // 128, device=device) + 0.5


def block_values(codes, scale):
    return (codes.float().view(codes.shape[0], -1, 128) * scale.unsqueeze(-1)).view(codes.shape)


values_a, values_b = block_values(a, sa128), block_values(b, sb128)
values_bt = (b.float().view(n // 128, 128, k // 128, 128) * sbt[:, None, :, None]).view(n, k)
for out in (torch.bfloat16, torch.float32):
    attempt(f"1x128 x 1x128 {out}", lambda: relative(F.scaled_mm(
        a, b.t(), sa128, S.BlockWise1x128, sb128, S.BlockWise1x128, output_dtype=out), values_a, values_b))
    attempt(f"1x128 x 1x128 scale_b.t() {out}", lambda: relative(F.scaled_mm(
        a, b.t(), sa128, S.BlockWise1x128, sb128.t(), S.BlockWise1x128, output_dtype=out), values_a, values_b))
    for name, view in (("[n,k] rows", sbt), ("[n,k] cols", sbt.t().contiguous().t()), ("[k,n] cols", sbt.t()),
                       ("[k,n] rows", sbt.t().contiguous())):
        attempt(f"1x128 x 128x128 {name} {out}", lambda: relative(F.scaled_mm(
            a, b.t(), sa128, S.BlockWise1x128, view, S.BlockWise128x128, output_dtype=out), values_a, values_bt))
    attempt(f"128x128 x 1x128 {out}", lambda: relative(F.scaled_mm(
        b, a.t(), sbt, S.BlockWise128x128, sa128, S.BlockWise1x128, output_dtype=out), values_bt, values_a))
    attempt(f"128x128 cols x 1x128 {out}", lambda: relative(F.scaled_mm(
        b, a.t(), sbt.t().contiguous().t(), S.BlockWise128x128, sa128, S.BlockWise1x128, output_dtype=out),
        values_bt, values_a))
    attempt(f"128x128 x 128x128 {out}", lambda: tuple(F.scaled_mm(
        b, b.t(), sbt, S.BlockWise128x128, sbt, S.BlockWise128x128, output_dtype=out).shape))
for rows in (1, 3, 8, 17, 100, 130):
    small = fp8((rows, k))
    small_scale = torch.ones(k // 128, -(-rows // 4) * 4, device=device).t()[:rows]
    attempt(f"tensor rows={rows}", lambda: relative(torch._scaled_mm(small, b.t(), one, one, out_dtype=torch.bfloat16), small, b))
    attempt(f"1x128 rows={rows}", lambda: relative(F.scaled_mm(
        small, b.t(), small_scale, S.BlockWise1x128, torch.ones_like(sb128), S.BlockWise1x128), small, b))
for width in (16, 48, 144, 1040):
    left, right = fp8((64, width)), fp8((64, width))
    blocks = -(-width // 128)
    attempt(f"tensor k={width}", lambda: relative(torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16), left, right))
    attempt(f"1x128 k={width}", lambda: relative(F.scaled_mm(
        left, right.t(), torch.ones(blocks, 64, device=device).t(), S.BlockWise1x128,
        torch.ones(blocks, 64, device=device).t(), S.BlockWise1x128), left, right))

print("host time of a call, microseconds")
tiny, tiny_w = fp8((64, 256)), fp8((256, 256))
x16, w16 = torch.randn(64, 256, device=device, dtype=torch.bfloat16), torch.randn(256, 256, device=device, dtype=torch.bfloat16)
for name, run in {
    "_scaled_mm": lambda: torch._scaled_mm(tiny, tiny_w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
    "aten._scaled_mm": lambda: torch.ops.aten._scaled_mm.default(tiny, tiny_w.t(), one, one, None, None, torch.bfloat16, True),
    "F.scaled_mm": lambda: F.scaled_mm(tiny, tiny_w.t(), one, S.TensorWise, one, S.TensorWise),
    "F.linear": lambda: F.linear(x16, w16),
    "mm": lambda: torch.mm(x16, w16),
    "empty": lambda: torch.empty(64, 256, device=device, dtype=torch.bfloat16),
    "view fp8": lambda: tiny.view(torch.uint8),
}.items():
    for _ in range(50):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(1000):
        run()
    print(f"{name:20s} {(time.perf_counter() - begin) * 1e3:.2f}")
    torch.cuda.synchronize()

print("GEMM milliseconds, T=16384, 4096 -> 14336: fprop, dgrad, wgrad")
for name, (m, k, n) in {"fprop": (16384, 4096, 14336), "dgrad": (16384, 14336, 4096), "wgrad": (14336, 16384, 4096)}.items():
    x, w, x5 = fp8((m, k)), fp8((n, k)), fp8((m, k), torch.float8_e5m2)
    xb, wb = x.to(torch.bfloat16), w.to(torch.bfloat16)
    sx, sw = torch.ones(k // 128, m, device=device).t(), torch.ones(k // 128, n, device=device).t()
    swt = torch.ones(n // 128, k // 128, device=device)
    rows = {
        "bf16": lambda: torch.mm(xb, wb.t()),
        "fp8 fast": lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        "fp8 split": lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=False),
        "e5m2 split": lambda: torch._scaled_mm(x5, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=False),
        "fp8 split f32 out": lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.float32, use_fast_accum=False),
        "1x128 x 1x128": lambda: F.scaled_mm(x, w.t(), sx, S.BlockWise1x128, sw, S.BlockWise1x128),
        "1x128 x 128x128": lambda: F.scaled_mm(x, w.t(), sx, S.BlockWise1x128, swt.t(), S.BlockWise128x128),
        "1x128 x 128x128 v2": lambda: F.scaled_mm(x, w.t(), sx, S.BlockWise1x128, swt, S.BlockWise128x128),
    }
    for label, run in rows.items():
        attempt(f"{name} {label}", lambda: round(milliseconds(run), 4))
    attempt(f"{name} bf16 again", lambda: round(milliseconds(rows["bf16"]), 4))
