"""Casts, decoding and fused producers on one GPU: the same bytes as the reference first, then time (q.* dq.* sw.* f.*).

GB/s = stated bytes x elements / median time; the ratio is to a 2 GiB bfloat16 device copy of the same run, measured
first and last. A copy that moves as many bytes as the row takes turns with it (`equal_copy_ratio`), and so do the
unfused form and torchao's compiled cast where there is one. Three matrices rotate, together larger than the L2 cache.
A pass that only reads takes turns with nobody: what a copy leaves to be written back, 7 us of it, would count as its.
"""

import argparse
import multiprocessing
import os
import time
from typing import Any

import torch

from benchmarks import _torchao, fused_rows, quantize_rows
from benchmarks._report import Report, Row, wanted
from benchmarks.quantize_rows import Case, first_difference
from microfloat.torch.timing import copy_gbs, in_turn

CHECKED_SHAPE, QUICK_SHAPE = (256, 512), (32, 64)
COPIED = 1 << 30


def all_cases(only: list[str]) -> list[Case]:
    """The chosen ids."""
    listed = [*quantize_rows.cases(), *fused_rows.cases()]
    return [case for case in listed if wanted(only, case.id)]


def check(case_id: str, device: str, shape: tuple[int, int]) -> str:
    """Run a case on a small matrix, of ordinary values and (on a GPU) of wild ones: "" or the first difference to the
    reference.

    In a process of a pool it also fills the compilers' caches on disk for the timing that follows.
    """
    (case,) = (case for case in all_cases([]) if case.id == case_id)
    torch.manual_seed(0)
    plain = torch.randn(shape, device=device)
    spread = torch.exp2(torch.randint(-12, 12, (shape[0], shape[1] // 32), device=device).float())
    wild = [] if device == "cpu" else [("of many magnitudes", plain * spread.repeat_interleave(32, 1))]
    for kind, values in (("normal", plain), *wild):
        x = values.bfloat16()
        state = case.state(x)
        where = first_difference(case.run(x, state), case.expected(x, state))
        if where:
            return f"{kind} values: {where}"
    if case.unfused is not None and device != "cpu":
        for full in case.shapes:
            x = torch.zeros(full, device=device, dtype=torch.bfloat16)
            case.unfused(x, case.state(x))
    return ""


def checked(task: tuple[str, str, tuple[int, int]]) -> tuple[str, str]:
    """`check` for a pool: (id, "" or what is wrong)."""
    try:
        return task[0], check(*task)
    except Exception as error:
        return task[0], f"{type(error).__name__}: {' '.join(str(error).split())[-500:]}"


def check_all(cases: list[Case], options: argparse.Namespace) -> dict[str, str]:
    """Every case, in processes of their own where a GPU makes compilation the slow part."""
    shape = QUICK_SHAPE if options.quick else CHECKED_SHAPE
    tasks = [(case.id, options.device, shape) for case in cases]
    if options.device == "cpu":
        return dict(map(checked, tasks))
    with multiprocessing.get_context("spawn").Pool(max(1, min(14, len(tasks), (os.cpu_count() or 2) - 1))) as pool:
        return dict(pool.imap_unordered(checked, tasks))


def measure(report: Report, case: Case, shape: tuple[int, int], copy: float, peer: Any) -> None:
    """One id at one shape."""
    options = report.options
    matrices = [torch.randn(shape, device=options.device).bfloat16() for _ in range(3)]
    state = case.state(matrices[0])
    moved = case.bytes_per_element * shape[0] * shape[1]
    source = torch.empty(int(moved) // 4, device=options.device, dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    calls = {"ours": lambda i: case.run(matrices[i % 3], state)}
    beside = {"equal copy": lambda i: target.copy_(source)}
    if case.writes:
        calls |= beside
    unfused = case.unfused
    if unfused is not None:
        calls["unfused"] = lambda i: unfused(matrices[i % 3], state)
    if peer is not None:
        try:
            peer(matrices[0])
            calls["torchao"] = lambda i: peer(matrices[i % 3])
        except Exception as error:  # what a peer cannot do must not hide our row
            print(f"{case.id}: torchao: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    times = in_turn(calls, options.device)
    if not case.writes:
        times |= in_turn(beside, options.device)
    ours = times["ours"]
    row = Row(case.id, shape, backend="triton", ratio_of="copy", bytes_equal=True).timed(ours)
    row.gbs = moved / ours.median / 1e6
    row.ratio = row.gbs / copy
    row.extra = {
        "instructions": case.instructions, "predicted_ratio": case.prediction(),
        "equal_copy_ratio": round(times["equal copy"].median / ours.median, 4),
        **{name: round(times[key].median, 5) for key, name in (("torchao", "torchao_ms"),) if key in times},
    }  # fmt: skip
    report.add(row)
    if unfused is not None:
        parts = Row(case.id, shape, variant="unfused", backend="triton", label=f"{case.id}.unfused")
        report.add(parts.timed(ours, times["unfused"]))


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    report = Report(options, arguments)
    started = time.monotonic()
    cases = all_cases(options.only)
    if options.sweep:
        from benchmarks import quantize_sweep

        return quantize_sweep.sweep(cases, options)
    verdicts = check_all(cases, options)
    print(f"compared with the reference after {time.monotonic() - started:.0f} s", flush=True)
    peers = {} if _torchao.missing() or options.device == "cpu" else _torchao.quantizers()
    copies = [copy_gbs(1 << 10 if options.quick else COPIED, options.device)]
    print(f"copy {copies[0]:.0f} GB/s")
    for case in cases:
        if verdicts[case.id]:
            report.skip(case.id, f"differs from the reference, or fails: {verdicts[case.id]}", backend="triton")
            continue
        for shape in (QUICK_SHAPE,) if options.quick else case.shapes:
            report.attempt(
                case.id, lambda case=case, shape=shape: measure(report, case, shape, copies[0], peers.get(case.id)),
                shape=shape, backend="triton",
            )  # fmt: skip
        report.summarize(case.id)
    copies.append(copy_gbs(1 << 10 if options.quick else COPIED, options.device))
    apart = abs(copies[1] / copies[0] - 1)
    print(
        f"copy {copies[1]:.0f} GB/s"
        + (f": {apart:.1%} apart, repeat this run" if apart > 0.03 and not options.quick else "")
    )
    report.extra["copy_gbs"] = [round(copy, 1) for copy in copies]
    return report.finish()
