"""JAX: microfloat's FP8 GEMM, which XLA starts from pointers, compared with float32 products and then timed.

    python benchmarks/jax_gemm.py [--json FILE] [--tiny]

Scales of blocks (1x128 by 128x128, "tiles"; by 1x128, "lines") and of rows. Ragged sizes come first: a difference above
docs/numerics.md 8.3, or from the product that is written as its transpose, ends the script before anything is timed.
The rival is a bfloat16 dot of the same codes.
"""

import argparse
import json
import math
import sys
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(_ROOT), str(_ROOT / "src")]

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks import _jax_measure as measure
from microfloat.jax.backends import cuda, kernels
from microfloat.jax.backends.reference import Matrix

_LAST = (((1,), (1,)), ((), ()))
RAGGED = [(256, 512, 384), (1000, 1040, 640), (4096, 4096, 2048)]
TIMED = [
    ("tiles", 16384, 4096, 14336), ("tiles", 16384, 14336, 4096), ("lines", 14336, 16384, 4096),
    ("rows", 16384, 4096, 14336), ("tiles", 8192, 8192, 8192), ("lines", 8192, 8192, 8192),
    ("rows", 8192, 8192, 8192), ("tiles", 4096, 4096, 4096), ("tiles", 2048, 4096, 4096),
]  # fmt: skip
TOLERANCE = 3e-3


def operand(seed: int, rows: int, length: int, block: tuple[int, int | None]) -> Matrix:
    """Codes [R, K] of normal numbers, and powers of two as scales."""
    first, second = jax.random.split(jax.random.key(seed))
    codes = jax.random.normal(first, (rows, length), jnp.bfloat16).astype(jnp.float8_e4m3fn)
    grid = -(-rows // block[0]), 1 if block[1] is None else -(-length // block[1])
    return Matrix(codes, 2.0 ** jax.random.randint(second, grid, -3, 3).astype(jnp.float32), None)


def operands(scales: str, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    """Both operands of a product with such scales."""
    block = (1, None) if scales == "rows" else (1, 128)
    return operand(1, m, k, block), operand(2, n, k, (128, 128) if scales == "tiles" else block)


def values(matrix: Matrix) -> Array:
    """Codes times scales, float32."""
    (rows, length), grid = matrix.codes.shape, matrix.scale
    grid = grid if grid.shape[0] == rows else jnp.repeat(grid, 128, 0)[:rows]
    grid = grid if grid.shape[1] == 1 else jnp.repeat(grid, 128, 1)[:, :length]
    return matrix.codes.astype(jnp.float32) * grid


def own(scales: str, a: Matrix, b: Matrix, is_turned: bool = False) -> Array:
    """The product by microfloat's GEMM, or its transpose."""
    from microfloat.jax.backends import program

    chip = cuda.capability()
    assert chip is not None
    return program.multiply_fp8(a, b, scales, jnp.dtype(jnp.bfloat16), chip, is_turned=is_turned)


def plain(a: Array, b: Array) -> Array:
    """A bfloat16 dot."""
    return lax.dot_general(a, b, _LAST, preferred_element_type=jnp.bfloat16)


def differs(scales: str, shape: tuple[int, int, int]) -> float:
    """The relative difference from a float32 product; infinity if the transpose has other numbers."""
    a, b = operands(scales, *shape)
    exact = lax.dot_general(values(a), values(b), _LAST, precision=lax.Precision.HIGHEST)
    made = jax.jit(partial(own, scales))(a, b).astype(jnp.float32)
    if (made != jax.jit(partial(own, scales, is_turned=True))(a, b).T).any():
        return math.inf
    return float(jnp.linalg.norm(made - exact) / jnp.linalg.norm(exact))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the result; rewritten after every row")
    parser.add_argument("--tiny", action="store_true", help="the comparison alone")
    options = parser.parse_args()
    if why := kernels.why_no_gemm():
        print(f"nothing to compare: {why}")
        return 0
    differences = dict.fromkeys(("tiles", "lines", "rows"), 0.0)
    for scales in differences:
        for shape in RAGGED:
            found = differs(scales, shape)
            differences[scales] = max(differences[scales], found)
            print(f"{scales} {shape}: relative difference {found:.1e}", flush=True)
            if not found < TOLERANCE:
                return 1
    rows = []
    for scales, m, k, n in [] if options.tiny else TIMED:
        a, b = operands(scales, m, k, n)
        wide = a.codes.astype(jnp.bfloat16), b.codes.astype(jnp.bfloat16)
        calls = {"own": partial(jax.jit(partial(own, scales)), a, b), "bf16": partial(jax.jit(plain), *wide)}
        medians = {
            name: measure.percentiles(samples)["median_ms"] for name, samples in measure.in_turns(calls, 7, 10).items()
        }
        ratio = medians["bf16"] / medians["own"]
        rows.append({"id": "j.gemm", "shape": [m, k, n], "scales": scales, "median_ms": medians["own"],
                     "bf16_ms": medians["bf16"], "ratio": ratio, "ratio_of": "bf16"})  # fmt: skip
        print(f"{scales} {m} x {k} x {n}: {medians['own']:.3f} ms, bf16 {medians['bf16']:.3f}, {ratio:.2f}", flush=True)
        if options.json:
            about = {
                "command": "python benchmarks/jax_gemm.py", "device": jax.devices()[0].device_kind,
                "date": str(date.today()), "versions": {name: version(name) for name in ("jax", "triton")},
                "differences_from_float32": differences,
            }  # fmt: skip
            Path(options.json).write_text(json.dumps({**about, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
