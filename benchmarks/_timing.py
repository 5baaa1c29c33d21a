"""Times of calls that take turns: CUDA events on a GPU, a clock on a CPU."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["L2_BYTES", "Times", "copy_gbs", "host_us", "in_turn", "rotations"]

L2_BYTES = 50 << 20  # of an H200
WARM_MS = 25.0


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(samples: Sequence[float]) -> "Times":
        """Of a list of samples."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Times(statistics.median(ordered), ordered[last // 10], ordered[last - last // 10])

    def per(self, count: int) -> "Times":
        """The same for one of `count` equal parts of a call."""
        return Times(self.median / count, self.p10 / count, self.p90 / count)


def in_turn(
    calls: Mapping[str, Callable[[int], object]], device: str, milliseconds: float = 150.0, least: int = 8
) -> dict[str, Times]:
    """Times of several calls, A B A B, so that they share clocks and temperature; call(i) gets the number of its turn.

    Each is warmed up for 25 ms and then measured for `milliseconds`, at least `least` times. Nothing waits between
    calls, so that the host runs ahead as in a training loop.
    """
    if device == "cpu":
        return _in_turn_on_cpu(calls)
    estimate = {name: _estimate(call) for name, call in calls.items()}
    for name, call in calls.items():
        for i in range(min(1000, max(1, int(WARM_MS / estimate[name])))):
            call(i)
    repetitions = min(3000, max(least, int(milliseconds / max(estimate.values()))))
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for i in range(repetitions):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call(i)
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: Times.of([start.elapsed_time(stop) for start, stop in pairs]) for name, pairs in events.items()}


def _estimate(call: Callable[[int], object]) -> float:
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for i in range(3):
        call(i)
    end.record()
    torch.cuda.synchronize()
    return max(begin.elapsed_time(end) / 3, 1e-3)


def _in_turn_on_cpu(calls: Mapping[str, Callable[[int], object]]) -> dict[str, Times]:
    """One repetition after one call to warm up: for --quick, whose times say nothing."""
    samples = {}
    for name, call in calls.items():
        call(0)
        begin = time.perf_counter()
        call(1)
        samples[name] = [(time.perf_counter() - begin) * 1e3]
    return {name: Times.of(values) for name, values in samples.items()}


def rotations(bytes_of_one_set: int) -> int:
    """How many sets of buffers to rotate over so that together they are larger than four L2 caches; at most 24."""
    return max(2, min(24, -(-4 * L2_BYTES // max(bytes_of_one_set, 1))))


def copy_gbs(elements: int, device: str) -> float:
    """GB/s, read and written, of a device copy of so many bfloat16 elements."""
    source = torch.randn(elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = in_turn({"copy": lambda i: target.copy_(source)}, device, 100)
    return 4 * elements / times["copy"].median / 1e6


def host_us(calls: Mapping[str, Callable[[], object]], device: str, count: int = 2000) -> dict[str, float]:
    """Microseconds of host time of a call: medians of 5 blocks of `count` calls that are queued without waiting.

    The calls take turns block by block. Where the GPU falls behind, the host waits for room in the queue: keep what a
    call launches shorter than its host time.
    """
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(6):
        for name, call in calls.items():
            if device != "cpu":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            if turn:  # the first is the warm-up
                blocks[name].append((time.perf_counter() - begin) / count * 1e6)
    return {name: statistics.median(values) for name, values in blocks.items()}
