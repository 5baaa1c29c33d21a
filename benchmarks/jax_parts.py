"""JAX: the parts of a Linear one by one on a GPU: amax, casts and their alternatives, GEMM forms, epilogues.

    python benchmarks/jax_parts.py [--json FILE] [--dump FOLDER] [--only PREFIX ...] [--tiny]

No row has a target: this says where the time of `jax_linear.py` goes and what another formulation would cost. An
alternative cast says whether its bytes equal ours, over every bfloat16 value and random float32 ones.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(_ROOT), str(_ROOT / "src")]

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import microfloat.jax as mj
from benchmarks import _jax_measure as measure
from microfloat import recipes
from microfloat.formats import E4M3, E5M2
from microfloat.jax.backends import reference
from microfloat.jax.numerics.scales import tensor_amax
from microfloat.recipes import as_cast

SHAPE, TINY = (16384, 4096, 14336), (64, 32, 96)
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))
_MAX = {"e4m3": (jnp.float8_e4m3fn, 448.0, E4M3.nan_code), "e5m2": (jnp.float8_e5m2, 57344.0, E5M2.nan_code)}
Parts = Iterator[tuple[str, Callable[..., Any], tuple]]


def delayed_cast(fmt: str) -> recipes.Cast:
    """A per-tensor Cast whose scale is given: the cast alone, without its amax."""
    name = "fp8_tensor" if fmt == "e4m3" else "fp8_tensor_e5m2"
    return recipes.Cast(as_cast(name).format, scaling=recipes.Delayed())


def ours(x: jax.Array, scale: jax.Array, fmt: str) -> jax.Array:
    """Codes by integer arithmetic, as the library makes them."""
    return reference.cast_matrix(x, delayed_cast(fmt), scale_enc=scale).codes


def converted(x: jax.Array, scale: jax.Array, fmt: str) -> jax.Array:
    """Codes by XLA's own conversion after a clip."""
    dtype, largest, nan = _MAX[fmt]
    scaled = x.astype(jnp.float32) * scale
    codes = lax.bitcast_convert_type(jnp.clip(scaled, -largest, largest).astype(dtype), jnp.uint8)
    return lax.bitcast_convert_type(jnp.where(jnp.isnan(scaled), np.uint8(nan), codes), dtype)


def bytes_differ(fmt: str, scale: float) -> int:
    """In how many of all bfloat16 values and 4 M random float32 the two casts differ (NaN included)."""
    every = lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint32).astype(jnp.uint16), jnp.bfloat16)
    words = jax.random.bits(jax.random.key(3), (1 << 22,), jnp.uint32)
    total = 0
    for values in (every[None].astype(jnp.float32), lax.bitcast_convert_type(words, jnp.float32)[None]):
        codes = [
            np.asarray(jax.jit(make, static_argnums=2)(values, jnp.float32(scale), fmt)).view(np.uint8)
            for make in (ours, converted)
        ]
        total += int((codes[0] != codes[1]).sum())
    return total


def casts(shape: tuple[int, int, int]) -> Parts:
    """Amaxes and casts of dy, the largest operand, and of x along both axes."""
    tokens, inputs, outputs = shape
    dy, x, scale = measure.normal(3, (tokens, outputs)), measure.normal(1, (tokens, inputs)), jnp.float32(100.0)
    yield "copy.dy", lambda x: x * jnp.bfloat16(1.5), (dy,)
    yield "amax.ours.dy", lambda x: tensor_amax(x.astype(jnp.float32)), (dy,)
    yield "amax.float.dy", lambda x: jnp.max(jnp.abs(x)), (dy,)
    for fmt in ("e4m3", "e5m2"):
        for name, make in (("ours", ours), ("convert", converted)):
            yield f"cast.{fmt}.{name}.dy", lambda x, s, make=make, fmt=fmt: make(x, s, fmt), (dy, scale)

            def both(x: jax.Array, s: jax.Array, make: Callable = make, fmt: str = fmt) -> tuple:
                codes = make(x, s, fmt)
                return codes, codes.T

            yield f"cast.{fmt}.{name}.both.dy", both, (dy, scale)
    codes = converted(dy, scale, "e5m2")
    yield "transpose.fp8.dy", lambda q: jnp.copy(q.T), (codes,)
    for name in ("mxfp8", "nvfp4", "fp8_1x128", "fp8_row"):
        yield f"quantize.{name}.x", lambda x, name=name: mj.quantize(x, name), (x,)
        yield f"quantize.{name}.along_m.x", lambda x, name=name: mj.quantize(x, name, axis=-2), (x,)
        q = mj.quantize(x, name)
        yield f"dequantize.{name}.x", lambda q: mj.dequantize(q, jnp.bfloat16), (q,)


def gemms(shape: tuple[int, int, int]) -> Parts:
    """fprop in several forms: precision, output dtype, epilogue, layouts, and XLA's quantize-dequantize pattern."""
    tokens, inputs, outputs = shape
    x, w = measure.normal(1, (tokens, inputs)), measure.normal(2, (outputs, inputs))
    e4m3, e5m2, f32, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
    a, b, wide = x.astype(e4m3), w.astype(e4m3), x.astype(e5m2)
    s, t = jnp.float32(0.37), jnp.float32(1.21)
    fast, split = lax.Precision.DEFAULT, lax.Precision.HIGHEST

    def dot(numbers: Any, precision: Any, out: Any) -> Callable:
        return lambda a, b: lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=out)

    yield "gemm.bf16", dot(NT, fast, bf16), (x, w)
    yield "gemm.fp8.fast.f32", dot(NT, fast, f32), (a, b)
    yield "gemm.fp8.split.f32", dot(NT, split, f32), (a, b)
    yield "gemm.fp8.fast.bf16", dot(NT, fast, bf16), (a, b)
    yield "gemm.fp8.split.bf16", dot(NT, split, bf16), (a, b)
    yield "gemm.fp8.e5m2.split.f32", dot(NT, split, f32), (wide, b)
    yield "gemm.fp8.nn.fast.bf16", dot(NN, fast, bf16), (a, b.T.copy())
    yield "gemm.fp8.tn.fast.bf16", dot(TN, fast, bf16), (a.T.copy(), b.T.copy())

    def scaled_f32(precision: Any) -> Callable:
        inner = dot(NT, precision, f32)
        return lambda a, b, s, t: ((inner(a, b) * s) * t).astype(bf16)

    yield "epilogue.f32_then_scale.fast", scaled_f32(fast), (a, b, s, t)
    yield "epilogue.f32_then_scale.split", scaled_f32(split), (a, b, s, t)
    yield (
        "epilogue.bf16_then_scale",
        lambda a, b, s, t: ((dot(NT, fast, bf16)(a, b).astype(f32) * s) * t).astype(bf16),
        (a, b, s, t),
    )

    def combined(a: jax.Array, b: jax.Array, s: jax.Array, t: jax.Array) -> jax.Array:
        return (dot(NT, split, f32)(a, b) * (s * t)).astype(bf16)

    def scaled_bf16(a: jax.Array, b: jax.Array, s: jax.Array, t: jax.Array) -> jax.Array:
        return dot(NT, split, bf16)(a, b) * (s * t).astype(bf16)

    yield "epilogue.f32_then_one_scale.split", combined, (a, b, s, t)
    yield "epilogue.bf16_times_bf16_scale", scaled_bf16, (a, b, s, t)

    def pattern(wide: Any, precision: Any) -> Callable:
        def function(a: jax.Array, b: jax.Array, s: jax.Array, t: jax.Array) -> jax.Array:
            left, right = a.astype(wide) * s.astype(wide), b.astype(wide) * t.astype(wide)
            return dot(NT, precision, bf16)(left, right)

        return function

    for precision, label in ((fast, "fast"), (split, "split")):
        yield f"pattern.qdq.f32.{label}", pattern(f32, precision), (a, b, s, t)
        yield f"pattern.qdq.bf16.{label}", pattern(bf16, precision), (a, b, s, t)


def distance_from_exact(value: jax.Array, arguments: tuple) -> float:
    """Relative distance of the first rows of ``(a @ b.T) * s * t`` from the float32 product."""
    a, b, s, t = arguments
    exact = lax.dot_general(a[:64].astype(jnp.float32), b.astype(jnp.float32), NT, precision=lax.Precision.HIGHEST) * (
        s * t
    )
    return measure.relative(value[:64].astype(jnp.float32), exact)


def direct_call(shape: tuple[int, int, int]) -> Parts:
    """XLA's FP8 GEMM named directly: both scales inside it, one rounding to bfloat16. A private interface of XLA."""
    tokens, inputs, outputs = shape
    a = measure.normal(1, (tokens, inputs)).astype(jnp.float8_e4m3fn)
    b = measure.normal(2, (outputs, inputs)).astype(jnp.float8_e4m3fn)
    for label in ("DEFAULT", "HIGHEST"):
        numbers = {
            "lhs_contracting_dimensions": ["1"], "rhs_contracting_dimensions": ["1"],
            "lhs_batch_dimensions": [], "rhs_batch_dimensions": [],
        }  # fmt: skip
        config = {
            "alpha_real": 1, "alpha_imag": 0, "beta": 0, "dot_dimension_numbers": numbers, "epilogue": "DEFAULT",
            "precision_config": {"operand_precision": [label, label], "algorithm": "ALG_UNSET"},
        }  # fmt: skip
        text = json.dumps({"gemm_backend_config": config, "operation_queue_id": "0", "wait_on_operation_queues": []})
        call = jax.ffi.ffi_call(
            "__cublas$lt$matmul$f8", jax.ShapeDtypeStruct((tokens, outputs), jnp.bfloat16),
            custom_call_api_version=2, legacy_backend_config=text,
        )  # fmt: skip
        yield f"direct.{label}", call, (a, b, jnp.float32(0.37), jnp.float32(1.21))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--dump")
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    shape = TINY if options.tiny else SHAPE
    result = {**measure.provenance(), "shape": list(shape), "bytes_differ": {}, "rows": []}
    wanted = tuple(options.only)
    print(f"{result['machine']}, jax {jax.__version__}", flush=True)
    if "bytes".startswith(wanted):
        for fmt in _MAX:
            for scale in (1.0, 100.0, 1.7e-5, 3.1e20):
                result["bytes_differ"][f"{fmt} {scale}"] = count = bytes_differ(fmt, scale)
                print(f"codes by conversion that differ from ours: {fmt}, scale {scale}: {count}", flush=True)
    groups = [gemms, casts] + ([direct_call] if jax.default_backend() == "gpu" else [])
    for group in groups:
        for name, function, arguments in group(shape):
            if not name.startswith(wanted):
                continue
            try:
                program = measure.compiled(function, *arguments)
                measure.dump(options.dump, f"part.{name}", program.text)
                samples = measure.in_turns({name: lambda: program.run(*arguments)}, options.repetitions, 4)[name]  # noqa: B023
            except Exception as error:  # the other parts are still of interest
                traceback.print_exc()
                print(f"{name:32s} FAILS {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
                continue
            moved = program.argument_bytes + program.output_bytes
            times = measure.percentiles(samples)
            found = measure.dots(program.text)
            kinds = ", ".join(f"{dot['kind']}({' x '.join(dot['operands'])})" for dot in found)
            speed = moved / times["median_ms"] / 1e6
            entry = {"id": name, **times, "bytes": moved, "compile_s": program.compile_s, "dots": found}
            if name.startswith(("epilogue", "pattern", "direct")):
                # One rounding to bfloat16 is 1.7e-3; two are 2.4e-3; more than that is a rounded scale.
                entry["distance"] = distance_from_exact(program.run(*arguments), arguments)
                kinds = f"{entry['distance']:.2e} from exact; {kinds}"
            how = f"{times['median_ms']:8.3f} ms {speed:7.0f} GB/s, compiled in {program.compile_s:5.1f} s"
            print(f"{name:32s} {how}  {kinds}", flush=True)
            result["rows"].append(entry)
            measure.save(options.json, result)


if __name__ == "__main__":
    main()
