"""JAX: Linear forward + backward under jit, every recipe against `lax.dot_general` in bfloat16, in one process.

    python benchmarks/jax_linear.py [--json FILE] [--dump FOLDER] [--only NAME ...] [--tiny] [--repetitions N]

T = 16384 tokens, 4096 -> 14336, kernel [K, N] as Flax stores it; the result and both gradients are computed. Rows
`j.*` are 8192^3. A row is first compared with the reference backend on a small shape (docs/numerics.md 8.3) and with a
float32 product at full size; then it takes turns with its rival. Of every program the row records which GEMM serves
fprop, dgrad and wgrad, its kernels in microseconds, and the memory that XLA plans; `--dump` keeps its optimised text.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(_ROOT), str(_ROOT / "src")]

import jax
import jax.numpy as jnp
from jax import lax

import microfloat.jax as mj
from benchmarks import _jax_measure as measure
from microfloat import recipes

DIMENSIONS = (((1,), (0,)), ((), ()))
SHAPE, CUBE = (16384, 4096, 14336), (8192, 8192, 8192)
TINY, TINY_CUBE = (64, 32, 96), (64, 64, 64)
SMALL = (384, 512, 768)
# Two ways to the same GEMM differ by the order of sums and one rounding to bfloat16.
TOLERANCE = 6e-3


class Row(NamedTuple):
    """One measurement: `target` is what the ratio should reach, `limit` what no honest measurement exceeds."""

    recipe: recipes.Recipe | None
    target: float | None
    limit: float | None
    reaches_fp8: bool = False
    cube: bool = False


ROWS = {
    "j.l.current": Row(recipes.Float8CurrentScaling(), 1.40, 1.72, True),
    "j.l.delayed": Row(recipes.DelayedScaling(amax_history_len=1024), 1.50, 1.78, True),
    "j.l.row": Row(recipes.Float8RowScaling(), 1.60, 1.62, True),
    "j.l.block": Row(recipes.Float8BlockScaling(), 1.45, 1.68),
    "j.l.mxfp8.exact": Row(recipes.MXFP8BlockScaling(path="exact"), 0.75, 0.94),
    "j.l.mxfp8.folded": Row(recipes.MXFP8BlockScaling(path="folded"), 1.45, 1.68),
    "j.l.nvfp4": Row(recipes.NVFP4BlockScaling(), 0.75, 0.93),
    "j.l.nvfp4.folded": Row(recipes.NVFP4BlockScaling(path="folded"), None, 1.68),
    "j.l.flax_direct": Row(None, None, 1.78, True),
    "j.fp8": Row(recipes.Float8CurrentScaling(), 1.35, 1.80, True, cube=True),
}


class Step(NamedTuple):
    """A step ``function(x, w, dy, extra) -> (y, dx, dw, new extra)`` and what to pass as its first `extra`."""

    function: Callable[..., tuple]
    extra: Any
    advance: Callable[[Any, Any], Any]


def plain_step() -> Step:
    """The bfloat16 rival."""

    def function(x: jax.Array, w: jax.Array, dy: jax.Array, extra: None) -> tuple:
        dot = partial(lax.dot_general, dimension_numbers=DIMENSIONS, preferred_element_type=x.dtype)
        y, pullback = jax.vjp(dot, x, w)
        return y, *pullback(dy), extra

    return Step(function, None, lambda old, new: old)


def recipe_step(recipe: recipes.Recipe, backend: str = "auto") -> Step:
    """One of ours; `extra` is the delayed state, or the key of stochastic rounding."""
    op = mj.dot_general(recipe, backend=backend)

    def with_state(x: jax.Array, w: jax.Array, dy: jax.Array, state: Any) -> tuple:
        y, pullback = jax.vjp(lambda x, w, state: op(x, w, DIMENSIONS, state=state), x, w, state)
        return y, *pullback(dy)

    def with_key(x: jax.Array, w: jax.Array, dy: jax.Array, key: Any) -> tuple:
        y, pullback = jax.vjp(lambda x, w: op(x, w, DIMENSIONS, key=key), x, w)
        return y, *pullback(dy), key

    if recipe.is_delayed:
        return Step(with_state, mj.scaling.init(recipe), mj.scaling.apply)
    return Step(with_key, jax.random.key(7) if recipe.is_stochastic else None, lambda old, new: old)


def flax_step(outputs: int) -> Step:
    """Flax's own FP8 Dense; its state is overwritten by its gradient. Raises ImportError without Flax."""
    import flax.linen as nn
    from flax.linen import fp8_ops

    dtype = jnp.bfloat16
    layer = nn.Dense(
        outputs, use_bias=False, dtype=dtype, param_dtype=dtype, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp
    )
    collection = fp8_ops.OVERWRITE_WITH_GRADIENT
    state = layer.init(jax.random.key(0), jnp.zeros((1, 16), dtype))[collection]

    def function(x: jax.Array, w: jax.Array, dy: jax.Array, state: Any) -> tuple:
        def apply(x: jax.Array, w: jax.Array, state: Any) -> jax.Array:
            return layer.apply({"params": {"kernel": w}, collection: state}, x)  # type: ignore[return-value]

        y, pullback = jax.vjp(apply, x, w, state)
        return y, *pullback(dy)

    return Step(function, state, lambda old, new: new)


def step_of(name: str, row: Row, outputs: int, backend: str = "auto") -> Step:
    """The step of a row of `ROWS`."""
    return flax_step(outputs) if row.recipe is None else recipe_step(row.recipe, backend)


def operands(shape: tuple[int, int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [T, K], w [K, N] scaled by 1 / sqrt(K), dy [T, N]; bfloat16, normally distributed."""
    tokens, inputs, outputs = shape
    return (
        measure.normal(1, (tokens, inputs)),
        measure.normal(2, (inputs, outputs), inputs**-0.5),
        measure.normal(3, (tokens, outputs)),
    )


def settled(program: Callable[..., tuple], step: Step, arrays: tuple) -> Any:
    """The `extra` of a step in the middle of training: delayed scales know the tensors' amaxes."""
    extra = step.extra
    for _ in range(3 if jax.tree.leaves(extra) else 0):
        extra = step.advance(extra, program(*arrays, extra)[3])
    return extra


def difference_from_reference(row: Row) -> dict[str, float]:
    """Relative distance of y, dx, dw between this platform's backend and the reference backend, small shape."""
    assert row.recipe is not None
    arrays = operands(SMALL)
    results = []
    for backend in ("auto", "reference"):
        step = recipe_step(row.recipe, backend)
        program = jax.jit(step.function)
        results.append(program(*arrays, settled(program, step, arrays))[:3])
    ours, wanted = results
    return {name: measure.relative(*pair) for name, *pair in zip(("y", "dx", "dw"), ours, wanted, strict=True)}


@jax.jit
def exact_slices(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first 128 rows of y and dx and columns of dw as float32 products."""
    wide = partial(lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    x, w, dy = (array.astype(jnp.float32) for array in (x, w, dy))
    return (
        wide(x[:128], w, DIMENSIONS),
        wide(dy[:128], w, (((1,), (1,)), ((), ()))),
        wide(x, dy[:, :128], (((0,), (0,)), ((), ()))),
    )


def noise(results: tuple, exact: tuple) -> dict[str, float]:
    """SQNR in dB of y, dx, dw against the float32 products."""
    y, dx, dw = results[:3]
    parts = zip(("y", "dx", "dw"), (y[:128], dx[:128], dw[:, :128]), exact, strict=True)
    return {name: round(measure.sqnr_db(value, wanted), 2) for name, value, wanted in parts}


def roles(shape: tuple[int, int, int]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Shapes that the product of each GEMM may have. In a cube all three are alike."""
    tokens, inputs, outputs = shape
    shapes = {"fprop": (tokens, outputs), "dgrad": (tokens, inputs), "wgrad": (inputs, outputs)}
    return {name: ((rows, cols), (cols, rows)) for name, (rows, cols) in shapes.items()}


def judged(row: Row, ratio: float) -> dict[str, Any]:
    """Verdict on a ratio and its target; above the limit the measurement itself is at fault."""
    passed = None if row.target is None else ratio >= row.target
    return {
        "target": row.target, "limit": row.limit, "ratio": ratio, "passed": passed,
        "fault": row.limit is not None and ratio > row.limit,
    }  # fmt: skip


class Bench(NamedTuple):
    """Inputs of every row."""

    options: argparse.Namespace
    shape: tuple[int, int, int]
    cube: tuple[int, int, int]
    result: dict[str, Any]
    rivals: dict[str, measure.Program]

    def program(self, name: str, function: Callable, *arguments: Any) -> measure.Program:
        """A compiled function whose text is kept under the row's name."""
        program = measure.compiled(function, *arguments)
        measure.dump(self.options.dump, name, program.text)
        return program

    def rival(self, name: str, shape: tuple[int, int, int]) -> measure.Program:
        """The bfloat16 step of a shape; compiled once."""
        if name not in self.rivals:
            self.rivals[name] = self.program(name, plain_step().function, *operands(shape), None)
        return self.rivals[name]

    def add(self, entry: dict[str, Any]) -> None:
        """Record a finished row, at once."""
        self.result["rows"].append(entry)
        measure.save(self.options.json, self.result)

    def times(self, calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        return measure.in_turns(calls, self.options.repetitions, self.options.inner)


def linear_row(bench: Bench, name: str, row: Row) -> None:
    """Check, compile, inspect and time one row against bfloat16 (and delayed scaling against Flax)."""
    shape = bench.cube if row.cube else bench.shape
    entry: dict[str, Any] = {"id": name, "shape": list(shape), "dtype": "bfloat16", "mode": "jit"}
    if row.recipe is not None:
        entry["recipe"] = repr(row.recipe)
        entry["difference"] = difference_from_reference(row)
        if max(entry["difference"].values()) > TOLERANCE:
            print(f"{name:18s} BAD vs reference: {entry['difference']}", flush=True)
            bench.add({**entry, "passed": False, "reason": "differs from the reference backend; not timed"})
            return
    arrays = operands(shape)
    step = step_of(name, row, shape[2])
    program = bench.program(name, step.function, *arrays, step.extra)
    rival = bench.rival("bf16.cube" if row.cube else "bf16", shape)
    extra = settled(program.run, step, arrays)
    entry["sqnr_db"] = noise(program.run(*arrays, extra), exact_slices(*arrays))
    entry["hlo"] = measure.summary(program, roles(shape))
    entry["bf16_hlo"] = measure.summary(rival, roles(shape))
    on_gpu = jax.default_backend() == "gpu"
    if row.reaches_fp8 and on_gpu:
        wanted = 1 if not row.cube else 3
        entry["reaches_fp8"] = all(role["fp8"] >= wanted for role in entry["hlo"]["gemms"].values())
    calls = {"bf16": partial(rival.run, *arrays, None), name: partial(program.run, *arrays, extra)}
    if row.recipe is not None and row.recipe.is_delayed and bench.options.flax:
        other = flax_step(shape[2])
        peer = measure.compiled(other.function, *arrays, other.extra)
        calls["flax"] = partial(peer.run, *arrays, settled(peer.run, other, arrays))
    times = bench.times(calls)
    medians = {key: measure.percentiles(samples)["median_ms"] for key, samples in times.items()}
    entry["kernels_us"] = measure.kernels(calls[name])
    tokens, inputs, outputs = shape
    entry |= measure.percentiles(times[name]) | judged(row, medians["bf16"] / medians[name])
    entry |= {
        "ratio_of": "bf16", "bf16_ms": medians["bf16"],
        "tflops": 6 * tokens * inputs * outputs / medians[name] / 1e9,
        "temporary_ratio": program.temporary_bytes / max(rival.temporary_bytes, 1),
    }  # fmt: skip
    bench.add(entry)
    if "flax" in calls:
        against = Row(None, 1.0, None)
        ratio = medians["flax"] / medians[name]
        bench.add({
            "id": "j.l.delayed.flax", "shape": list(shape), "mode": "jit", "ratio_of": "flax Fp8DirectDotGeneralOp",
            "median_ms": medians[name], "flax_ms": medians["flax"], **judged(against, ratio),
        })  # fmt: skip
        print(f"{'':18s} against Flax's Fp8DirectDotGeneralOp {medians['flax']:.3f} ms: {ratio:.3f}", flush=True)
    gemms = ", ".join(f"{role} {found['fp8']}/{found['gemms']}" for role, found in entry["hlo"]["gemms"].items())
    kernels = ", ".join(f"{entry['hlo'][kind]} {kind}" for kind in ("fusions", "copies", "transposes"))
    print(
        f"{name:18s} {medians[name]:9.3f} ms, bf16 {medians['bf16']:9.3f}  ratio {entry['ratio']:.3f}"
        f" (target {row.target})  FP8 GEMMs: {gemms}; {kernels}; temporary {program.temporary_bytes / 2**30:.2f} GiB;"
        f" SQNR {entry['sqnr_db']}; compiled in {program.compile_s:.1f} s",
        flush=True,
    )


def matmul_row(bench: Bench) -> None:
    """`scaled_matmul` of MXFP8 operands at hand, against a bfloat16 dot; `jax.nn.scaled_matmul` beside it."""
    rows, inputs, cols = bench.cube
    a, b = measure.normal(4, (rows, inputs)), measure.normal(5, (cols, inputs), inputs**-0.5)
    transposed = (((1,), (1,)), ((), ()))
    quantized = [mj.quantize(array, "mxfp8") for array in (a, b)]

    def ours(a: mj.QuantizedArray, b: mj.QuantizedArray) -> jax.Array:
        return mj.scaled_matmul(a, b, out_dtype=jnp.bfloat16)

    def peer(a: mj.QuantizedArray, b: mj.QuantizedArray) -> jax.Array:
        scales = [lax.bitcast_convert_type(q.scale, jnp.float8_e8m0fnu)[None] for q in (a, b)]
        return jax.nn.scaled_matmul(a.codes[None], b.codes[None], *scales, preferred_element_type=jnp.bfloat16)[0]

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, transposed, preferred_element_type=jnp.bfloat16)

    program, rival = bench.program("j.mxfp8", ours, *quantized), bench.program("bf16.forward", plain, a, b)
    wide = [q.dequantize(jnp.float32) for q in (mj.quantize(a[:128], "mxfp8"), quantized[1])]
    exact = lax.dot_general(*wide, transposed, precision=lax.Precision.HIGHEST)
    distance = measure.relative(program.run(*quantized)[:128], exact)
    row = Row(None, 0.88, 1.60)
    entry = {"id": "j.mxfp8", "shape": list(bench.cube), "dtype": "bfloat16", "mode": "jit, forward, codes given"}
    entry |= {"difference": {"y": distance}, "hlo": measure.summary(program, roles(bench.cube))}
    if distance > TOLERANCE:
        print(f"j.mxfp8 BAD vs the product of the dequantized operands: {distance:.2e}", flush=True)
        bench.add({**entry, "passed": False, "reason": "differs from the dequantized product; not timed"})
        return
    calls = {"bf16": partial(rival.run, a, b), "j.mxfp8": partial(program.run, *quantized)}
    try:
        calls["jax.nn"] = partial(bench.program("jax.nn.scaled_matmul", peer, *quantized).run, *quantized)
    except NotImplementedError as error:
        print(f"jax.nn.scaled_matmul is not measured: {str(error).splitlines()[0][:100]}", flush=True)
    times = bench.times(calls)
    medians = {key: measure.percentiles(samples)["median_ms"] for key, samples in times.items()}
    entry |= measure.percentiles(times["j.mxfp8"]) | judged(row, medians["bf16"] / medians["j.mxfp8"])
    entry |= {"ratio_of": "bf16", "bf16_ms": medians["bf16"], "jax_nn_ms": medians.get("jax.nn")}
    entry["tflops"] = 2 * rows * inputs * cols / medians["j.mxfp8"] / 1e9
    bench.add(entry)
    shown = ", ".join(f"{key} {value:.3f} ms" for key, value in medians.items())
    print(f"{'j.mxfp8':18s} forward, codes given: {shown}; ratio {entry['ratio']:.3f} (target 0.88)", flush=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the result; rewritten after every row")
    parser.add_argument("--dump", help="folder for the optimised programs")
    parser.add_argument("--only", nargs="*", help="ids of rows")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try this script on a CPU")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--inner", type=int, default=4, help="calls per sample")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    options.flax = True
    if options.tiny:
        options.repetitions, options.inner = min(options.repetitions, 2), 1
    names = [name for name in (*ROWS, "j.mxfp8") if not options.only or name in options.only]
    unknown = set(options.only or ()) - {*ROWS, "j.mxfp8"}
    if unknown:
        raise SystemExit(f"--only: unknown {sorted(unknown)}; choose from {[*ROWS, 'j.mxfp8']}")
    try:
        import flax  # noqa: F401
    except ImportError:
        options.flax = False
        names = [name for name in names if name != "j.l.flax_direct"]
        print("Flax is not installed: its rows are left out", flush=True)
    result = {**measure.provenance(), "rows": [], "failures": {}}
    bench = Bench(options, TINY if options.tiny else SHAPE, TINY_CUBE if options.tiny else CUBE, result, {})
    print(f"{result['machine']}, jax {jax.__version__}, {jax.default_backend()}", flush=True)
    for name in names:
        try:
            if name == "j.mxfp8":
                matmul_row(bench)
            else:
                linear_row(bench, name, ROWS[name])
        except Exception as error:  # a failing row must not hide the others
            traceback.print_exc()
            print(f"{name:18s} FAILS {type(error).__name__}: {error}", flush=True)
            result["failures"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
            measure.save(options.json, result)
    if result["failures"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
