"""Time of the host in a step of tensor parallelism, without kernels, without other ranks and without a GPU.

    python -m benchmarks.rank_host OUT.json tp.current tp.delayed tp.mxfp8

One process is one of two ranks: torch's fake process group returns from every collective at once. Casts and products of
this library are replaced by allocations of their results, after a first step that computes them, and the tensors are
tiny: what is left is what a host does between two launches, in DTensor, autograd, the collectives' Python and here. The
ids are those of `benchmarks fsdp`; bfloat16, whose products are torch's, takes turns with them. For each: `host_ms` of
a step, the median ratio to bfloat16, calls of Python and C functions, and those that make DTensors and take them apart.
"""

import contextlib
import cProfile
import datetime
import functools
import json
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import fsdp
from microfloat.torch import backends
from microfloat.torch.backends.base import Operands
from microfloat.torch.linear import schedule

_TURNS, _STEPS, _COUNTED = 25, 4, 5
_CALLS = ("from_local", "to_local", "redistribute", "wrap")


def _like(parts: Sequence[Any]) -> list[Any]:
    return [None if p is None else torch.empty_strided(p.shape, p.stride(), dtype=p.dtype) for p in parts]


def _amax(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.float32)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Casts and products allocate what they made the first time."""
    cast, product, known = schedule.CastStep._by_torch, schedule.product, {}

    def allocated(step: Any, x: torch.Tensor, inputs: Any) -> Operands:
        key = id(step), x.shape
        if key not in known:
            known[key] = step, cast(step, x, inputs)
        return Operands.of(_like(known[key][1].flat()))

    def made(*arguments: Any) -> Any:
        multiply, results = product(*arguments), {}

        @functools.wraps(multiply, updated=())
        def call(a: Any, b: Any, bias: Any) -> torch.Tensor:
            key = a.codes.shape, b.codes.shape
            if key not in results:
                results[key] = multiply(a, b, bias)
            return _like([results[key]])[0]

        call.direct, call.reason = multiply.direct, multiply.reason  # type: ignore[attr-defined]
        return call

    backend = backends.choose("auto", torch.device("cpu"))
    with (
        mock.patch.object(schedule.CastStep, "_by_torch", allocated), mock.patch.object(schedule, "product", made),
        mock.patch.object(backend, "amax", _amax),
    ):  # fmt: skip
        yield


def timed(steps: dict[str, Callable[[], object]]) -> dict[str, dict[str, Any]]:
    """The figures of every step, the first of which is bfloat16's."""
    for step in steps.values():
        for _ in range(5):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_TURNS):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(_STEPS):
                step()
            times[name].append((time.perf_counter() - start) / _STEPS * 1e3)
    found, base = {}, times[next(iter(times))]
    for name, step in steps.items():
        profile = cProfile.Profile()
        with profile:
            for _ in range(_COUNTED):
                step()
        stats: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        in_dtensor = {key: one[1] for key, one in stats.items() if "distributed/tensor" in key[0]}
        found[name] = {
            "host_ms": statistics.median(times[name]),
            "of_bf16": statistics.median(a / b for a, b in zip(times[name], base, strict=True)),
            "calls": sum(one[1] for one in stats.values()) // _COUNTED,
            **{n: sum(count for key, count in in_dtensor.items() if key[2] == n) // _COUNTED for n in _CALLS},
        }
    return found


def main(arguments: list[str]) -> None:
    """Measure the models named behind the file, and write it."""
    path, names = Path(arguments[0]), arguments[1:]
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.manual_seed(0)
    base = nn.Sequential(*(fsdp.Block(128, 256) for _ in range(fsdp.LAYERS))).to(torch.bfloat16)
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    variants = [one for one in fsdp.under_plan(base, x) if one.recipe is None or one.id in names]
    # A backward of tensors on a CPU runs on the thread that calls it.
    with without_kernels():
        models = timed({one.id: one.make() for one in variants})
    found = {
        "command": f"python -m benchmarks.rank_host {' '.join(arguments)}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": f"CPU, {platform.machine()}",
        "torch": torch.__version__, "models": models,
    }  # fmt: skip
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
