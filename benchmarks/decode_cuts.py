"""Sweep over the divisions of products of a few rows with stored codes (``python -m benchmarks decode --cuts``).

For each format, number of rows and shape: every candidate cut is compiled beforehand by a pool of processes, which need
no GPU (``--compile`` stops there: the compiler's cache then serves a later run), compared with the float64 product of
the dequantized weight and with itself (a result that changes from call to call is a race), and timed in CUDA graphs
over as many weights as the L2 cache does not hold, in turns with F.linear in bfloat16. The fastest few are timed again,
and one row tells the best of them beside the cut that a Linear takes today. The file is written after each row; no row
begins after ``--seconds``, of which compiling takes half at most. Rows of the same weight follow each other, the most
telling formats first.
"""

import argparse
import concurrent.futures
import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks._recipes import sqnr_db
from benchmarks._report import Report, Row
from benchmarks.decode import CALLS, QUICK, SHAPES, WEIGHTS, graph_of, layers_of
from microfloat.kernels.constants import DecodeCodes, DecodeCut
from microfloat.passes import products
from microfloat.passes.matrix import At, Device, Passes
from microfloat.recipes import WeightOnly
from microfloat.routes import encoding_of
from microfloat.torch.launch.program import Program, device_of
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor
from microfloat.torch.timing import Times

TOKENS = (1, 64, 16, 32, 4, 8)
HOPPER, PROCESSORS = (9, 0), 132  # what is compiled for where there is no GPU
_ROUNDS, _FINALISTS, _LAST_ROUNDS = 5, 4, 24
_REPEATS = 3
Shape = tuple[int, int, int]


class Stored(NamedTuple):
    """A weight [N, K] as the kernel reads it."""

    codes: DecodeCodes
    strides: tuple[int, int]
    level_stride: int

    @staticmethod
    def of(weight: QuantizedTensor) -> "Stored":
        """That of a quantized matrix."""
        scale, rhs = weight.to_operand().scale, encoding_of(weight.cast)
        assert rhs is not None
        codes = products.stored_codes(rhs.format, rhs.hadamard, rhs.level, weight.shape[1])
        assert codes is not None
        strides = (scale.stride(0), scale.stride(1)) if scale.dim() == 2 else (0, 0)
        return Stored(codes, strides, int(rhs.level == "row"))

    def passes(self, shape: Shape, device: Device, cut: DecodeCut) -> Passes:
        """The launches of a product of M, K, N without a bias, in bfloat16."""
        passes = products.decode_passes(
            self.codes, shape, ("bfloat16", "bfloat16", None), self.strides, self.level_stride, device, None, cut
        )
        assert passes is not None, "a cut is given"
        return passes


def candidates(stored: Stored, shape: Shape, device: Device, *, dependent: bool) -> list[DecodeCut]:
    """The cuts that a row tries: that of a Linear first; `dependent`: the chip has programmatic dependent launch."""
    m, k, _ = shape
    about = stored.codes, shape, stored.strides, False
    tried = [products.cut_of(*about, device), *_by_warps(products.cut_of(*about, device._replace(is_hopper=False)), m)]
    fitted = [products.fitted(cut, stored.codes, k, stored.strides, False) for cut in tried]
    found = list(dict.fromkeys(cut for cut in fitted if _runs(cut, stored.codes, k)))
    return found if dependent else [cut for cut in found if not cut.DEPENDENT]


# ROW_WARPS and LENGTH_WARPS, and AHEAD where x comes in order, for up to 8, 32 and 64 rows of x.
_FEW_WARPS = ((1, 8), (1, 4), (2, 4), (2, 2), (4, 2))
_WARPS = ((1, 8), (2, 4), (2, 2), (4, 2), (4, 1), (8, 1))


def _by_warps(usual: DecodeCut, rows: int) -> Iterator[DecodeCut]:
    """Cuts that begin early."""
    aheads = (usual.AHEAD,) if rows <= 8 else (2, 4) if rows < 64 else (1, 2)
    for (row_warps, length_warps), tiles, stages, ahead in itertools.product(
        _FEW_WARPS if rows <= 8 else _WARPS, (1, 2), (0, 1, 2) if rows <= 16 else (1, 2), aheads
    ):
        yield usual._replace(
            ROW_WARPS=row_warps, LENGTH_WARPS=length_warps, TILES=tiles, STAGES=stages, AHEAD=ahead, DEPENDENT=True
        )


def _runs(cut: DecodeCut, codes: DecodeCodes, length: int) -> bool:
    """True where a cut has work for all warps along K, and is none of those that need too many registers."""
    sums = 4 * cut.TILES * cut.TOKENS
    return length * codes.BITS >= cut.LENGTH_WARPS * 1024 and sums <= 64 and cut.AHEAD <= 32 // codes.BITS


# ---- compiling, by processes that have no GPU


class Job(NamedTuple):
    """The launches of one candidate, to be compiled for a capability."""

    stored: Stored
    shape: Shape
    cut: DecodeCut
    capability: tuple[int, int]


Compiled = tuple[DecodeCodes, DecodeCut]


def _compiled(stored: Stored, cut: DecodeCut) -> Compiled:
    """What a kernel is compiled for, besides sizes that are multiples of 16."""
    return stored.codes, cut


def compile_one(job: Job) -> str:
    """Compile the kernels of a candidate into Triton's cache; the reason where it does not compile."""
    from triton.runtime import driver

    from tests.kernels.compiling import NamedTarget

    major, minor = job.capability
    target: Any = NamedTarget(10 * major + minor)
    driver.set_active(target)
    try:
        passes = job.stored.passes(job.shape, Device(0, PROCESSORS, job.capability >= (8, 9)), job.cut)
        for launch in passes.launches:
            _compile(launch, passes, job.stored)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[-160:]}"
    return ""


def _compile(launch: Any, passes: Passes, stored: Stored) -> None:
    """As `microfloat.torch.launch.program.Kernel` has it compiled, for tensors that begin at multiples of 16 bytes."""
    dtypes = {At.SOURCE: torch.bfloat16, products.CODES: torch.uint8, products.LEVEL: torch.float32}
    dtypes[products.SCALE] = torch.uint8 if stored.codes.SCALE else torch.float32
    for at, made in enumerate(passes.buffers):
        assert made is not None
        dtypes[At.MADE + at] = getattr(torch, made.dtype)
    tensors = [None if at == At.NOTHING else torch.empty(64, dtype=dtypes[at]) for at in launch.tensors]
    options = {"num_warps": launch.warps.number, "maxnreg": launch.warps.registers, "enable_fp_fusion": False}
    options |= {"launch_pdl": True} if launch.dependent else {}
    launch.kernel.warmup(*tensors, *launch.scalars, *launch.constants, grid=(launch.programs,), **options)


def compile_all(jobs: Iterable[Job], seconds: float) -> dict[Compiled, str]:
    """What does not compile, or was not compiled in time, and why."""
    unique = {_compiled(job.stored, job.cut): job for job in jobs}
    reasons = dict.fromkeys(unique, "not compiled in time")
    begin, done = time.perf_counter(), 0
    processes = max(1, multiprocessing.cpu_count())
    pool = concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        waiting = {pool.submit(compile_one, job): key for key, job in unique.items()}
        for future in concurrent.futures.as_completed(waiting, timeout=seconds):
            done += 1
            reasons[waiting[future]] = future.result()
            if done % 50 == 0 or done == len(unique):
                print(f"compiled {done} of {len(unique)} in {time.perf_counter() - begin:.0f} s", flush=True)
    except TimeoutError:
        print(f"compiled {done} of {len(unique)} when time ran out", flush=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return {key: reason for key, reason in reasons.items() if reason}


# ---- measuring


class Candidate(NamedTuple):
    """A cut that gave the right product: its replay, the product again, and how far it was off."""

    cut: DecodeCut
    replay: Callable[[int], object]
    repeats: Callable[[], bool]
    worst: float


class Weights(NamedTuple):
    """A format's weights of one shape, one after the other read from memory, and the plain layers beside them."""

    name: str
    size: tuple[int, int]
    stored: Stored
    parts: list[tuple[torch.Tensor, ...]]
    plain: list[torch.nn.Linear]
    exact: torch.Tensor

    @staticmethod
    def of(name: str, size: tuple[int, int], options: argparse.Namespace) -> "Weights":
        """Random ones."""
        layers, plain = layers_of(WeightOnly(WEIGHTS[name]), size, options), layers_of(None, size, options)
        quantized: list[Any] = [layer.weight.detach() for layer in layers]
        operands = [weight.to_operand() for weight in quantized]
        parts = [(one.codes, one.scale, one.tensor_scale) for one in operands]
        return Weights(name, size, Stored.of(quantized[0]), parts, plain, quantized[0].dequantize(torch.float64))


def measure(report: Report, weights: Weights, m: int, refused: dict[Compiled, str]) -> Row | None:
    """The row of the fastest cut for m rows of x."""
    options, (n, k) = report.options, weights.size
    shape, device = (m, k, n), device_of(0 if options.device == "cuda" else -1)
    capability = torch.cuda.get_device_capability() if options.device == "cuda" else HOPPER
    x = torch.randn(m, k, device=options.device).bfloat16()
    exact = x.double() @ weights.exact.T
    # One rounding of y, and float32 sums of K exact products (docs/numerics.md 8.2).
    bound = 2.0**-8 * exact.abs() + k * 2.0**-23 * (x.double().abs() @ weights.exact.abs().T)
    cuts = candidates(weights.stored, shape, device, dependent=capability >= HOPPER)
    cuts = cuts[:2] if options.quick else cuts
    usual, found, failed = cuts[0], [], {}
    for cut in cuts:
        if reason := refused.get(_compiled(weights.stored, cut)):
            failed[str(tuple(cut))] = reason
            continue
        try:
            found.append(_candidate(weights, shape, device, cut, x, exact, bound, options))
        except Exception as error:
            if "CUDA error" in str(error):  # nothing runs in this process any more; rows that are written stay
                raise SystemExit(f"{tuple(cut)} for {shape} of {weights.name}: {error}") from error
            failed[str(tuple(cut))] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    row_id = f"d.cuts.{weights.name}.m{m}"
    if not found:
        report.skip(row_id, f"no cut gave the product: {failed}")
        return None
    plain = graph_of(weights.plain, x)
    first, _ = in_rounds(plain, found, options, 1 if options.quick else _ROUNDS)
    ranked = sorted(found, key=lambda one: first[one.cut].median)
    best = ranked[:_FINALISTS]
    best += [one for one in found if one.cut == usual and one not in best]
    last, base = in_rounds(plain, best, options, 1 if options.quick else _LAST_ROUNDS)
    failed |= {str(tuple(one.cut)): "differs from call to call on a warm GPU" for one in best if not one.repeats()}
    best = [one for one in best if str(tuple(one.cut)) not in failed]
    if not best:
        report.skip(row_id, f"every cut differs from call to call on a warm GPU: {failed}")
        return None
    winner = min(best, key=lambda one: last[one.cut].median)
    row = Row(row_id, shape, WEIGHTS[weights.name], mode="graph", ratio_of="bf16", sqnr_db=sqnr_db(winner.worst))
    read = sum(part.numel() * part.element_size() for part in weights.parts[0] if part is not None)
    row.timed(last[winner.cut], base).gbs = read / last[winner.cut].median / 1e6
    row.extra = {
        "cut": dict(zip(DecodeCut._fields, winner.cut, strict=True)),
        "usual_cut": list(usual), "usual_ms": last[usual].median if usual in last else None,
        "first_ms": [[list(one.cut), round(first[one.cut].median, 5)] for one in ranked],
        "failed": failed,
    }  # fmt: skip
    print(f"   {len(found)} cuts ran, {len(failed)} did not; best {tuple(winner.cut)}", flush=True)
    return report.add(row)


def _candidate(
    weights: Weights, shape: Shape, device: Device, cut: DecodeCut, x: torch.Tensor, exact: torch.Tensor,
    bound: torch.Tensor, options: argparse.Namespace,
) -> Candidate:  # fmt: skip
    """A cut whose product is right, and the same in every call. Raises ValueError where it is not."""
    program = Program(weights.stored.passes(shape, device, cut), x.device)
    tables = [(None, x, None, *parts, *(None,) * (At.MADE - products.BIAS)) for parts in weights.parts]

    def call(i: int) -> Any:
        stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
        return program.run(stream, tables[i % len(tables)])[0]

    y = call(0)
    worst = float(((y.double() - exact).abs() / bound).max())
    if not worst <= 1:
        raise ValueError(f"differs from the dequantized product: {worst:.1e} of the bound")

    def repeats() -> bool:
        return all(torch.equal(call(0), y) for _ in range(1 if options.quick else _REPEATS))

    if not repeats():
        raise ValueError("differs from call to call")
    relative = float((y.double() - exact).norm() / exact.norm())
    if not x.is_cuda:
        return Candidate(cut, call, repeats, relative)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    return Candidate(cut, lambda i: graph.replay(), repeats, relative)


def in_rounds(
    plain: Callable[[int], object], found: list[Candidate], options: argparse.Namespace, rounds: int
) -> tuple[dict[DecodeCut, Times], Times]:
    """Milliseconds of one call of each candidate, and of bfloat16, which takes its turn among them."""
    calls: list[tuple[DecodeCut | None, Callable[[int], object]]] = []
    for number, one in enumerate(found):
        if number % 8 == 0:
            calls.append((None, plain))
        calls.append((one.cut, one.replay))
    samples: dict[DecodeCut | None, list[float]] = {cut: [] for cut, _ in calls}
    events: list[tuple[DecodeCut | None, torch.cuda.Event, torch.cuda.Event]] = []
    for turn in range(rounds + 1):  # the first one warms up
        for cut, call in calls:
            if options.device == "cpu":
                begin = time.perf_counter()
                call(0)
                samples[cut].append((time.perf_counter() - begin) * 1e3)
                continue
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call(turn)
            stop.record()
            if turn:
                events.append((cut, start, stop))
    if options.device != "cpu":
        torch.cuda.synchronize()
    for cut, start, stop in events:
        samples[cut].append(start.elapsed_time(stop) / CALLS)
    return {cut: Times.of(taken) for cut, taken in samples.items() if cut is not None}, Times.of(samples[None])


@torch.no_grad()
def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Compile, then measure row by row until the time is over."""
    begin = time.perf_counter()
    report = Report(options, arguments)
    torch.manual_seed(0)
    shapes = QUICK if options.quick else SHAPES
    tokens = (20,) if options.quick else TOKENS
    names = [name for name in WEIGHTS if any(report.wants(f"d.cuts.{name}.m{m}") for m in tokens)]
    capability = torch.cuda.get_device_capability() if options.device == "cuda" else HOPPER
    refused: dict[Compiled, str] = {}
    if not options.quick:
        chip = Device(0, PROCESSORS, capability >= (8, 9), is_hopper=capability == HOPPER)
        stored = {(name, size): stored_like(name, size) for name in names for size in shapes}
        jobs = [
            Job(stored[name, size], (m, size[1], size[0]), cut, capability)
            for name, size, m in itertools.product(names, shapes, tokens) if report.wants(f"d.cuts.{name}.m{m}")
            for cut in candidates(stored[name, size], (m, size[1], size[0]), chip, dependent=capability >= HOPPER)
        ]  # fmt: skip
        refused = compile_all(jobs, options.seconds if options.compile else options.seconds / 2)
        for (codes, cut), reason in refused.items():
            print(f"   {tuple(codes)} {tuple(cut)}: {reason}", flush=True)
    if options.compile:
        return 0
    for name, size in itertools.product(names, shapes):
        make = functools.partial(Weights.of, name, size, options)
        weights = None
        for m in tokens:
            row_id, spent = f"d.cuts.{name}.m{m}", time.perf_counter() - begin
            if not report.wants(row_id):
                continue
            if spent > options.seconds:
                print(f"{spent:.0f} s: no row begins any more", flush=True)
                return report.finish()
            weights = weights or report.attempt(row_id, make)
            if weights is not None:
                report.attempt(row_id, functools.partial(measure, report, weights, m, refused))
        del weights
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return report.finish()


def stored_like(name: str, size: tuple[int, int]) -> Stored:
    """The form of a weight of that size: of a small one of as many columns, since rows change nothing of it."""
    import microfloat.torch as mf

    return Stored.of(mf.quantize(torch.zeros(256, size[1]), WEIGHTS[name]))
