"""Where the time of one Linear forward + backward goes: host functions at a small shape, GPU kernels at a large one.

python benchmarks/gpu_profile.py [--json FILE] RECIPE [RECIPE ...]
"""

import argparse
import cProfile
import datetime
import json
import platform
import pstats
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import microfloat.torch as mf
from microfloat import recipes


def step(layer, x, dy) -> None:
    x.grad = layer.weight.grad = None
    layer(x).backward(dy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("recipes", nargs="+")
    arguments = parser.parse_args()
    result = {
        "command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "shape": [16384, 4096, 14336], "kernels": {},
    }  # fmt: skip
    for name in arguments.recipes:
        recipe = recipes.from_name(name)
        layer = mf.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
        with torch.autograd.set_multithreading_enabled(False):
            for _ in range(20):
                step(layer, x, dy)
            torch.cuda.synchronize()
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(200):
                step(layer, x, dy)
            profiler.disable()
        torch.cuda.synchronize()
        print(f"==== {name}: host time of 200 steps")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
        m, k, n = 16384, 4096, 14336
        layer = mf.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            step(layer, x, dy)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            step(layer, x, dy)
            torch.cuda.synchronize()
        print(f"==== {name}: kernels of one step, T=16384 4096 -> 14336")
        kernels = result["kernels"][name] = []
        for event in sorted(trace.events(), key=lambda event: event.time_range.start):
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels.append({"us": round(event.time_range.elapsed_us(), 1), "kernel": event.name[:110]})
                print(f"{kernels[-1]['us']:9.1f} us  {kernels[-1]['kernel']}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
