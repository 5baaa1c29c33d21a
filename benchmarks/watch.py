"""Time of a training step with and without `mf.watch`, as JSON: between samples, and in a sampled step.

Blocks of plain steps and of steps between samples take turns, so that a GPU that grows slower or faster meanwhile does
so for both; sampled ones follow. The medians over all blocks are reported, and those of each block beside them. A
sampled step includes the end of the sample before it, which copies its numbers to the host. The first two steps of a
block are not timed.

`plain_host_ms`, `between_samples_host_ms`, `sampled_host_ms`: what the host takes to launch a step, behind which the
GPU may be. `records_ms`: what it takes to make the records of one sample, when somebody asks for them. `allocations`:
how often torch asked the driver for memory in the timed steps of a kind.

PYTHONPATH=src python benchmarks/watch.py --layers 12 --hidden 2048 --tokens 8192 > watch.json
"""

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict

import torch

import microfloat.torch as mf

_EVERY = {"plain": None, "between_samples": 2**40, "sampled": 1}
_UNSAMPLED = ("plain", "between_samples")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Time of training steps with and without mf.watch.")
    for name, default in (("layers", 12), ("hidden", 2048), ("tokens", 8192), ("steps", 10), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="mxfp8")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, kind = options.hidden, {"device": device, "dtype": torch.bfloat16}
    layers = [mf.TransformerLayer(size, 4 * size, size // 64, **kind) for _ in range(options.layers)]
    model = torch.nn.Sequential(*layers)
    mf.convert(model, options.recipe)
    x = torch.randn(-(-options.tokens // 1024), min(options.tokens, 1024), size, **kind)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def step() -> tuple[float, float]:
        """Milliseconds until everything is launched, and until it is done."""
        wait()
        started = time.perf_counter()
        model(x).float().square().mean().backward()
        model.zero_grad()
        launched = time.perf_counter()
        wait()
        return 1e3 * (launched - started), 1e3 * (time.perf_counter() - started)

    def allocations() -> int:
        return torch.cuda.memory_stats().get("num_device_alloc", 0) if device.type == "cuda" else 0

    blocks: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    allocated: dict[str, int] = defaultdict(int)
    reading, records = [], 0
    # A GPU rests in sampled steps, which wait for the host, and is faster after them: they come last. Of the others the
    # first one of a round is the second one of the next.
    turns = [name for number in range(options.rounds + 1) for name in _UNSAMPLED[:: 1 - 2 * (number % 2)]]
    turns += ["sampled"] * (options.rounds + 1)
    met: dict[str, int] = defaultdict(int)
    for name in turns:
        every = _EVERY[name]
        with contextlib.nullcontext() if every is None else mf.watch(model, every=every) as watched:
            for _ in range(2):
                step()
            before = allocations()
            times = [step() for _ in range(options.steps)]
            if met[name]:  # the first block of a kind warms up
                blocks[name].append(times)
                allocated[name] += allocations() - before
            met[name] += 1
        if watched is not None and every == 1:
            started = time.perf_counter()
            records = len(watched.records) // (options.steps + 2)
            reading.append(1e3 * (time.perf_counter() - started) / (options.steps + 2))

    def median(name: str, which: int) -> float:
        return statistics.median(one[which] for block in blocks[name] for one in block)

    plain, between, sampled = (median(name, 1) for name in _EVERY)
    result = {
        **vars(options), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__, "plain_ms": plain, "between_samples_ms": between, "sampled_ms": sampled,
        "plain_host_ms": median("plain", 0), "between_samples_host_ms": median("between_samples", 0),
        "sampled_host_ms": median("sampled", 0),
        "overhead_every_100": (99 * between + sampled) / (100 * plain) - 1,
        "overhead_of_samples_every_100": (sampled / plain - 1) / 100,
        "records_ms": statistics.median(reading), "records_of_a_sample": records,
        "allocations": dict(allocated),
        "blocks_ms": {
            name: [statistics.median(one[1] for one in block) for block in made] for name, made in blocks.items()
        },
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
