"""The Llama-like block of docs/performance.md, forward + backward, eager and compiled, bf16 against every recipe.

    python benchmarks/gpu_block.py [--json FILE] [--only NAME ...] [--compile]

16384 tokens x 4096; five Linears (4096 -> 6144, 4096 -> 4096, 4096 -> 14336 twice, 14336 -> 4096) converted by
`microfloat.torch.convert`, nothing else changed. Each variant takes turns with bf16, so that both share clocks; peak
memory is measured on its own after warm-up.
"""

import argparse
import copy
import datetime
import json
import platform
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import microfloat.torch as mf
from microfloat import recipes

TOKENS, WIDTH, HIDDEN = 16384, 4096, 14336
FLOP = 6 * (WIDTH * 6144 + WIDTH * WIDTH + 3 * WIDTH * HIDDEN) * TOKENS
RECIPES = {
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "row": recipes.Float8RowScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8.folded": recipes.MXFP8BlockScaling(path="folded"),
    "mxfp8.exact": recipes.MXFP8BlockScaling(path="exact"),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
TARGETS = {"delayed": 1.57, "current": 1.57, "nvfp4": 0.80}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 6144, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = x + self.out(self.qkv(self.norm1(x))[:, :WIDTH])
        h = self.norm2(x1)
        return x1 + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def step(block: nn.Module, x: torch.Tensor, g: torch.Tensor) -> None:
    for parameter in block.parameters():
        parameter.grad = None
    x.grad = None
    with mf.autocast():  # one delayed-scaling region; pinned recipes win, plain layers are nn.Linear
        y = block(x)
    y.backward(g)


def clear(block: nn.Module, x: torch.Tensor) -> None:
    for tensor in (*block.parameters(), x):
        tensor.grad = None
    torch.cuda.empty_cache()


def peak_memory(block: nn.Module, x: torch.Tensor, g: torch.Tensor) -> float:
    """GiB at the highest point of a step, everything resident included."""
    for _ in range(3):
        step(block, x, g)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(block, x, g)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def in_turn(
    plain: nn.Module, block: nn.Module, x: torch.Tensor, g: torch.Tensor, repetitions: int
) -> tuple[list[float], list[float]]:
    """Sorted milliseconds of both blocks, which take turns so that they share clocks and temperature."""
    pair = (plain, block)
    for module in pair * 3:
        step(module, x, g)
    events: tuple[list, list] = ([], [])
    for _ in range(repetitions):
        for module, recorded in zip(pair, events, strict=True):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step(module, x, g)
            stop.record()
            recorded.append((start, stop))
    torch.cuda.synchronize()
    first, second = (sorted(start.elapsed_time(stop) for start, stop in recorded) for recorded in events)
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repetitions", type=int, default=12)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    plain = Block().to("cuda", torch.bfloat16)
    # Differences are judged on 512 tokens against the same recipe on the reference backend.
    memory, differences, recipes_of = {}, {}, {}
    memory["bf16"] = peak_memory(plain, x, g)
    clear(plain, x)
    for name, recipe in RECIPES.items():
        if arguments.only and name not in arguments.only:
            continue
        values = []
        for backend in ("native", "reference"):
            candidate = copy.deepcopy(plain)
            mf.convert(candidate, recipe)
            for module in candidate.modules():
                if isinstance(module, mf.Linear):
                    module.backend = backend
            small = x[:512].detach().clone().requires_grad_()
            torch.manual_seed(1)
            step(candidate, small, g[:512])
            values.append((small.grad, candidate.gate.weight.grad))
        pairs = zip(*values, strict=True)
        differences[name] = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)
        del candidate, values
        # The very same parameters, so that nothing else is resident.
        mf.convert(plain, recipe)
        memory[name] = peak_memory(plain, x, g)
        mf.revert(plain)
        clear(plain, x)
        recipes_of[name] = recipe
    rows = []
    baseline = torch.compile(plain) if arguments.compile else plain
    for name, recipe in recipes_of.items():
        block: nn.Module = copy.deepcopy(plain)
        mf.convert(block, recipe)
        block = torch.compile(block) if arguments.compile else block
        bf16, samples = in_turn(baseline, block, x, g, arguments.repetitions)
        base, median = statistics.median(bf16), statistics.median(samples)
        row = {
            "id": f"b.{'compile' if arguments.compile else 'eager'}.{name}", "median_ms": median,
            "p10_ms": samples[len(samples) // 10], "p90_ms": samples[-1 - len(samples) // 10], "bf16_ms": base,
            "ratio": base / median, "tflops": FLOP / median / 1e9, "peak_gib": memory[name],
            "peak_ratio": memory[name] / memory["bf16"], "difference_to_reference": differences.get(name),
            "target": TARGETS.get(name),
        }  # fmt: skip
        rows.append(row)
        print(
            f"{row['id']:26s} {median:7.2f} ms, bf16 {base:7.2f} ms  x{row['ratio']:.3f}  {row['tflops']:.0f} TFLOP/s",
            f"peak {memory[name]:.2f} GiB ({row['peak_ratio']:.2f})  vs reference {differences.get(name, 0):.1e}",
            flush=True,
        )
        del block
        clear(plain, x)
    if arguments.json:
        result = {
            "command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(),
            "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
            "rows": rows,
        }  # fmt: skip
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
