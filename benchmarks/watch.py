"""Time of a training step with and without `mf.watch`, as JSON: between samples, and in a sampled step.

`records_ms`: what the host takes to make the records of one sample, when somebody asks for them. `watched_host_ms`:
what it takes to launch a sampled step, which the GPU may be behind.

PYTHONPATH=src python benchmarks/watch.py --layers 12 --hidden 2048 --tokens 8192 > watch.json
"""

import argparse
import json
import statistics
import time

import torch

import microfloat.torch as mf


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Time of training steps with and without mf.watch.")
    for name, default in (("layers", 12), ("hidden", 2048), ("tokens", 8192), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--kernels", action="store_true", help="measure by kernels that have not run on a GPU yet")
    options = parser.parse_args()
    if options.kernels:
        from microfloat.torch import measured

        measured.SEEN_ON_A_GPU = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, kind = options.hidden, {"device": device, "dtype": torch.bfloat16}
    layers = [mf.TransformerLayer(size, 4 * size, size // 64, **kind) for _ in range(options.layers)]
    model = torch.nn.Sequential(*layers)
    mf.convert(model, options.recipe)
    x = torch.randn(options.tokens // 1024, 1024, size, **kind)

    def step(waits: bool = True) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        model(x).float().square().mean().backward()
        model.zero_grad()
        if waits and device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started)

    def median(steps: int) -> float:
        return statistics.median(step() for _ in range(steps))

    median(5)
    plain = median(options.steps)
    with mf.watch(model, every=2**40):
        step()
        between = median(options.steps)
    with mf.watch(model, every=1) as watched:
        step()
        sampled = median(5)
        started = time.perf_counter()
        records = len(watched.records)
        reading = 1e3 * (time.perf_counter() - started) / 6
        launching = statistics.median(step(waits=False) for _ in range(5))
    again = median(options.steps)
    plain = min(plain, again)
    result = {
        **vars(options), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__, "plain_ms": plain, "between_samples_ms": between, "sampled_ms": sampled,
        "watched_host_ms": launching, "records_ms": reading, "records_of_a_sample": records // 6,
        "overhead_every_100": (99 * between + sampled) / (100 * plain) - 1,
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
