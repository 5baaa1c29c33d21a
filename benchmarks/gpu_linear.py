"""Linear forward + backward on a GPU under every recipe, against nn.Linear in bfloat16, in one process.

    python benchmarks/gpu_linear.py [--json FILE] [--only NAME ...] [--quick]

Every row is first compared with the reference backend on a small shape, to the tolerance of docs/numerics.md 8.3.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import microfloat.torch as mf
from microfloat import recipes

SHAPES = {"judged": (16384, 4096, 14336), "square": (16384, 8192, 8192)}
ROWS = {
    "l.delayed": (recipes.DelayedScaling(amax_history_len=1024), 1.70),
    "l.current": (recipes.Float8CurrentScaling(), 1.63),
    "l.row": (recipes.Float8RowScaling(), 1.40),
    "l.block": (recipes.Float8BlockScaling(), 1.40),
    "l.mxfp8.folded": (recipes.MXFP8BlockScaling(path="folded"), 1.30),
    "l.mxfp8.exact": (recipes.MXFP8BlockScaling(path="exact"), 0.90),
    "l.mxfp4": (recipes.MXFP4BlockScaling(), 1.20),
    "l.nvfp4": (recipes.NVFP4BlockScaling(), 0.80),
}


def check(recipe: recipes.Recipe) -> dict[str, float]:
    """Relative Frobenius difference of y, dx, dw between the native and the reference backend on the GPU."""
    torch.manual_seed(0)
    values = []
    for backend in ("native", "reference"):
        torch.manual_seed(1)
        layer = mf.Linear(512, 768, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe, backend=backend)
        x = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(384, 768, device="cuda", dtype=torch.bfloat16)
        torch.manual_seed(2)
        y = layer(x)
        y.backward(dy)
        values.append((y.detach(), x.grad, layer.weight.grad))
    pairs = zip(("y", "dx", "dw"), *values, strict=True)
    return {name: float((a.double() - b.double()).norm() / b.double().norm()) for name, a, b in pairs}


def step_times(plain, layer, x: torch.Tensor, dy: torch.Tensor, repetitions: int) -> tuple[list[float], list[float]]:
    """Milliseconds of forward + backward of two layers that take turns, so that they share clocks and temperature."""

    def one(module) -> None:
        x.grad = module.weight.grad = None
        module(x).backward(dy)

    pair = (plain, layer)
    for module in pair * 3:
        one(module)
    events: tuple[list, list] = ([], [])
    for _ in range(repetitions):
        # Queued without waiting, so that a step's host time hides behind the step before, as in a training loop.
        for module, recorded in zip(pair, events, strict=True):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            one(module)
            stop.record()
            recorded.append((start, stop))
    torch.cuda.synchronize()
    first, second = ([start.elapsed_time(stop) for start, stop in recorded] for recorded in events)
    return first, second


def host_time(layer, x: torch.Tensor, dy: torch.Tensor) -> float:
    """Microseconds of host time of a forward + backward, queued without waiting for the GPU."""

    def blocks() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            x.grad = layer.weight.grad = None
            layer(x).backward(dy)
        return (time.perf_counter() - begin) / 200 * 1e6

    blocks()
    return statistics.median(blocks() for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    chosen = {name: row for name, row in ROWS.items() if not arguments.only or name in arguments.only}
    result = {
        "command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "rows": [],
    }  # fmt: skip
    usable = {}
    for name, (recipe, target) in chosen.items():
        try:
            differences = check(recipe)
            good = max(differences.values()) < 6e-3
            print(
                f"{name:16s} {'ok ' if good else 'BAD'} vs reference: "
                + ", ".join(f"{key} {value:.1e}" for key, value in differences.items()),
                flush=True,
            )
            if good:
                usable[name] = (recipe, target)
        except Exception as error:  # a failing row must not hide the others
            import traceback

            traceback.print_exc()
            print(f"{name:16s} FAILS {type(error).__name__}: {error}", flush=True)
    for label, (m, k, n) in SHAPES.items():
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        plain = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        for name, (recipe, goal) in usable.items():
            layer = mf.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
            bf16, samples = step_times(plain, layer, x, dy, arguments.repetitions)
            base, median = statistics.median(bf16), statistics.median(samples)
            target = goal if label == "judged" else None
            print(
                f"{label:8s} {name:16s} {median:8.3f} ms, bf16 {base:8.3f} ms  ratio {base / median:5.3f}"
                + (f"  target {target}" if target else ""),
                flush=True,
            )
            result["rows"].append({
                "id": name, "shape": [m, k, n], "median_ms": median, "p10_ms": sorted(samples)[len(samples) // 10],
                "p90_ms": sorted(samples)[-1 - len(samples) // 10], "bf16_ms": base, "ratio": base / median,
                "target": target,
            })  # fmt: skip
            del layer
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    base = host_time(torch.nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16), x, dy)
    print(f"host     nn.Linear {base:.0f} us")
    for name, (recipe, _) in usable.items():
        layer = mf.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
        ours = host_time(layer, x, dy)
        print(f"host     {name:16s} {ours:.0f} us, {ours / base:.2f} x nn.Linear", flush=True)
        result["rows"].append({"id": "h.fwdbwd", "recipe": name, "host_us": ours, "ratio": ours / base})
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
