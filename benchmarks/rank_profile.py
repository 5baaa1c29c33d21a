"""Where the time of a step across ranks goes: kernels of rank 0, idle time of its GPU, and what the host needs.

    torchrun --nproc-per-node 2 -m benchmarks.rank_profile OUT.json fsdp.bf16 fsdp.mxfp8.folded.low tp.delayed

The ids are those of `benchmarks fsdp`. For each: `step_ms` and `host_ms`, until everything is done and until it is
launched, without a profiler; then, under torch's profiler, `busy_ms` and `idle_ms` of the GPU but for collectives,
and the kernels that take longest, with milliseconds and launches of a step.
"""

import collections
import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import fsdp

_STEPS, _KERNELS = 5, 24


def profiled(step: Any) -> dict[str, Any]:
    """The figures of one model's step on this rank."""
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    whole, host = [], []
    for _ in range(_STEPS):
        start = time.perf_counter()
        step()
        host.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - start) * 1e3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
    for event in events:
        kernels[event.name][0] += (event.time_range.end - event.time_range.start) / 1e3
        kernels[event.name][1] += 1
    spans = sorted((one.time_range.start, one.time_range.end) for one in events if "nccl" not in one.name)
    busy, idle, end = 0.0, 0.0, spans[0][0]
    for first, last in spans:
        idle += max(first - end, 0.0)
        busy += max(last - max(first, end), 0.0)
        end = max(end, last)
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:_KERNELS]
    return {
        "step_ms": statistics.median(whole), "host_ms": statistics.median(host), "busy_ms": busy / 1e3,
        "idle_ms": idle / 1e3, "kernels": [[name[:160], *taken] for name, taken in longest],
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Profile the models named behind the file, one after the other; rank 0 writes after each."""
    path, names = Path(arguments[0]), arguments[1:]
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    base = nn.Sequential(*(fsdp.Block(4096, 14336) for _ in range(fsdp.LAYERS))).to("cuda", torch.bfloat16)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)
    launch = f"torchrun --nproc-per-node {dist.get_world_size()} -m benchmarks.rank_profile"
    found: dict[str, Any] = {
        "command": f"{launch} {' '.join(arguments)}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "models": {},
    }  # fmt: skip
    for variants in (fsdp.under_fsdp(base, x), fsdp.under_plan(base, x)):
        for variant in variants:
            if variant.id in names:
                found["models"][variant.id] = profiled(variant.make())
                torch.cuda.empty_cache()
                if rank == 0:
                    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
