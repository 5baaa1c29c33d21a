"""The cases of the contract: every Cast there is, and the inputs of docs/numerics.md 11 that decide its corners."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from microfloat.formats import FORMATS, ElementFormat
from microfloat.recipes import Cast, Hadamard
from microfloat.scale_rules import SCALE_RULES
from tests import extent
from tests.digests import input_set

SEED = 0x89ABCDEF01234567
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
FMAX = np.finfo(np.float32).max


def _every_cast() -> list[Cast]:
    casts = []
    for fmt, rule, rounding, hadamard in itertools.product(
        FORMATS.values(), SCALE_RULES, ("nearest", "stochastic"), (None, Hadamard())
    ):
        if rule == "two_level_256":  # two_level with other constants, for the casts of EDEN
            continue
        try:
            casts.append(Cast(fmt, rule, rounding, hadamard))
        except ValueError:  # a combination without a definition
            continue
    return [*casts, Cast("nvfp4", hadamard=Hadamard(16, 0)), Cast("mxfp8", hadamard=Hadamard(16, 0x8001))]


EVERY_CAST = _every_cast()
EDEN = [
    Cast("nvfp4", rounding="eden", hadamard=Hadamard(64, 0x9E3779B97F4A7C15)),
    Cast("nvfp4", "two_level_torchao", "eden", Hadamard()),
    Cast("nvfp4", "one_level_e4m3", "eden", Hadamard(64, 0)),
]


def cast_id(cast: Cast) -> str:
    """For ``pytest.mark.parametrize(..., ids=cast_id)``."""
    parts = [cast.format.name, str(cast.scale_rule)]
    parts += ["stochastic"] if cast.is_stochastic else []
    parts += [f"hadamard{cast.hadamard.sign_mask:x}"] if cast.hadamard else []
    return "-".join(parts)


def boundary_values(element: ElementFormat) -> np.ndarray:
    """amax = max * 2^k, powers of two, the rounding decisions of both, and their float32 neighbours."""
    centres = []
    for exponent in (-149, -140, -127, -126, -125, -119, -100, -20, -1, 0, 1, 20, 100, 118, 126, 127):
        for significand in (1.0, 1.25, 1.5, 1.75, 1.875, 1.9375, element.max / 2.0**element.emax):
            with np.errstate(over="ignore"):
                centres.append(np.float32(np.ldexp(np.float64(significand), exponent)))
    centres = np.array([value for value in centres if np.isfinite(value)] + [FMAX], np.float32)
    with np.errstate(over="ignore"):
        neighbours = [np.nextafter(centres, np.float32(direction)) for direction in (0.0, np.inf)]
    return np.unique(np.concatenate([centres, *neighbours]))


def _with(base: np.ndarray, *changes: tuple[Any, float]) -> np.ndarray:
    array = base.copy()
    for where, value in changes:
        array[where] = value
    return array


@functools.cache
def edge_inputs(element: ElementFormat) -> dict[str, np.ndarray]:
    """float32 arrays by name: all edge inputs of docs/numerics.md 11, ragged sizes, and every number of axes."""
    rng = np.random.default_rng(11)
    normal = rng.standard_normal((33, 77)).astype(np.float32)
    boundaries = boundary_values(element)
    blocks = np.zeros((boundaries.size, 32), np.float32)
    blocks[:, 0] = boundaries
    blocks[:, 5] = -boundaries / 3
    spread = (normal * np.exp2(rng.integers(-40, 12, normal.shape))).astype(
        np.float32
    )  # zero and subnormal E4M3 scales
    tiny = (normal * np.float32(2.0**-135)).astype(np.float32)
    nan_bits = np.array([0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32).view(np.float32)
    return {
        "zero": np.zeros((17, 40), np.float32),
        "minus zero": np.full((3, 33), -0.0, np.float32),
        "zero blocks": _with(normal, (np.s_[:16, 32:64], 0.0), (20, -0.0)),
        "one Inf": _with(normal, ((7, 40), np.inf)),
        "minus Inf beside tiny": _with(tiny, ((30, 76), -np.inf)),
        "one NaN": _with(normal, ((7, 40), np.nan)),
        "all NaN": np.full((2, 40), np.nan, np.float32),
        "NaN and Inf": _with(
            normal, ((0, 0), nan_bits[1]), ((0, 1), np.inf), ((20, 70), nan_bits[0]), ((32, 76), nan_bits[2])
        ),
        "boundaries": blocks,
        "spread": spread,
        "subnormal": tiny,
        "subnormal beside one": _with(tiny, ((0, 0), 1.0)),
        "FMAX": _with(normal, ((3, 3), FMAX), ((4, 4), -FMAX)),
        "set A": input_set("A")[:40, :130],
        "set B": input_set("B")[:40, :130],
        "set C": input_set("C")[:40, :130],
        "0-d": np.float32(-1.7).reshape(()),
        "one element": np.float32([[3e-39]]),
        "1-D": normal[0],
        "3-D": normal[:30].reshape(5, 6, 77),
        "4-D": normal[:24].reshape(2, 3, 4, 77),
        "empty": np.zeros((0, 40), np.float32),
        "empty contraction": np.zeros((5, 0), np.float32),
        "empty 1-D": np.zeros(0, np.float32),
        "column": normal[:, :1],
        "two tiles and a bit": rng.standard_normal((130, 260)).astype(np.float32),
        "specials in whole words": _with(
            (rng.standard_normal((36, 72)) * np.exp2(rng.integers(-40, 12, (36, 72)))).astype(np.float32),
            ((0, 0), nan_bits[0]), ((5, 70), np.inf), ((17, 33), -np.inf), (np.s_[16:32, 32:64], 0.0), (34, -0.0),
        ),
    }  # fmt: skip


@functools.cache
def _edge_inputs_in(element: ElementFormat, dtype: str) -> dict[str, np.ndarray]:
    return {name: in_dtype(edge, dtype) for name, edge in edge_inputs(element).items()}


def edge_cases(cast: Cast, dtype: str) -> Iterator[tuple[str, np.ndarray, int]]:
    """(name, input in `dtype`, axis) of every edge input of a Cast."""
    for name, x in _edge_inputs_in(cast.format.element, dtype).items():
        for axis in axes_of(x):
            yield name, x, axis


def edge_cases_in_turn(cast: Cast, dtype: str) -> Iterator[tuple[str, np.ndarray, int]]:
    """`edge_cases`; how an array is cut into blocks is no matter of the rule.

    So one Cast of a kind meets every shape on both axes, and the default Cast of a format all values on both; the
    others take the axes of each input in turn.
    """
    turn, cases = alike(cast).index(cast), edge_cases(cast, dtype)
    if cast == Cast(cast.format):
        return cases
    names, shapes = list(edge_inputs(cast.format.element)), () if turn else SHAPES
    taken = (case for case in cases if case[0] in shapes or (names.index(case[0]) + turn + case[2]) % 2)
    return (case for case in taken if not turn or case[0] not in SHAPES)


def few_edge_cases(cast: Cast, dtype: str) -> Iterator[tuple[str, np.ndarray, int]]:
    """`edge_cases` that keep pairs: every format and rule meets all values, every rounding and transform all shapes.

    The default Cast of a format takes both axes in float32, and in other dtypes the axes of each input in turn; so does
    one Cast of each rounding and transform. Others take half of the values, and another rounding or transform the rest.
    """
    same, names = alike(cast), list(edge_inputs(cast.format.element))
    is_plain = not cast.is_stochastic and cast.hadamard is None
    if cast == Cast(cast.format) and dtype == "float32":
        return edge_cases(cast, dtype)
    turn = same.index(cast) + list(DTYPES).index(dtype)
    taken = (
        case for case in edge_cases(cast, dtype) if case[1].ndim != 2 or (names.index(case[0]) + turn + case[2]) % 2
    )
    if cast == Cast(cast.format) or (cast == same[0] and not is_plain):
        return taken
    taken = (case for case in taken if case[0] not in SHAPES)
    half = cast.is_stochastic ^ (cast.hadamard is None)
    if sum((other.format, other.scale_rule) == (cast.format, cast.scale_rule) for other in EVERY_CAST) == 1:
        return taken
    return (case for case in taken if (names.index(case[0]) // 2 + half) % 2)


def edge_cases_of_few_shapes(cast: Cast, dtype: str) -> Iterator[tuple[str, np.ndarray, int]]:
    """`edge_cases` with values in arrays of COMMON_SHAPE, and shapes in one dtype and on one axis.

    A default Cast (of MXFP8, in `make test`) meets every shape, another one of each number of axes, since its programs
    take longest to compile.
    """
    meet_all = [Cast("mxfp8")] if extent.is_quick() else [Cast(cast.format)]
    shapes = SHAPES if cast in meet_all else ("0-d", "1-D", "3-D", "empty", "two tiles and a bit")
    for name, edge in edge_inputs(cast.format.element).items():
        x = in_dtype(edge, dtype)
        if name not in SHAPES:
            yield from ((name, part, axis) for part in in_common_shape(x) for axis in (-1, -2))
        elif dtype != "bfloat16" and name in shapes:
            yield name, x, -1


@functools.cache
def dtypes_in_turn(cast: Cast) -> tuple[str, ...]:
    """Input dtypes in which a Cast meets the edge inputs: all of them for the default rule of a format.

    How x is read does not depend on the scale rule. So casts of a format that differ in the rule alone take the dtypes
    in turn; between them each kind of cast (`alike`) meets every dtype.
    """
    dtypes, same = tuple(DTYPES), alike(cast)
    step = 1 if cast == Cast(cast.format) else min(len(same), len(dtypes))
    return dtypes[same.index(cast) % step :: step]


def alike(cast: Cast) -> list[Cast]:
    """The casts of this format that differ from `cast` in the scale rule alone."""
    kind = (cast.format, cast.rounding, cast.hadamard is None)
    return [other for other in EVERY_CAST if (other.format, other.rounding, other.hadamard is None) == kind]


# ---- where a kernel is compiled for every Cast, dtype, axis and kind of shape: edge inputs that share kernels

# Odd sizes, no multiples of anything: arrays of any other such sizes run the same kernels.
COMMON_SHAPE = (33, 77)
# What these are about is their shape, not their values.
SHAPES = (
    "0-d", "one element", "1-D", "3-D", "4-D", "empty", "empty contraction", "empty 1-D", "column",
    "two tiles and a bit", "specials in whole words",
)  # fmt: skip
EVERY_TURN = tuple(itertools.product(DTYPES, (-1, -2)))


@functools.cache
def turns(cast: Cast) -> tuple[tuple[str, int], ...]:
    """The dtype and axis in which a Cast runs: another for the next one of its format, all of them for the format."""
    casts = [other for other in EVERY_CAST if other.format == cast.format]
    number, step = casts.index(cast), min(len(casts), len(EVERY_TURN))
    return EVERY_TURN[number % step :: step]


def in_common_shape(x: np.ndarray) -> list[np.ndarray]:
    """The values of an edge input in arrays of COMMON_SHAPE: its corner, its repetitions, or 33 rows at a time."""
    rows, columns = COMMON_SHAPE
    if x.shape[0] <= 130 and x.shape[1] != 32:
        return [np.resize(x, COMMON_SHAPE) if x.shape[0] < rows or x.shape[1] < columns else x[:rows, :columns]]
    parts = [np.zeros(COMMON_SHAPE, x.dtype) for _ in range(-(-x.shape[0] // rows))]
    for number, part in enumerate(parts):
        block = x[number * rows : (number + 1) * rows]
        part[: block.shape[0], : block.shape[1]] = block
    return parts


@functools.cache
def sampled_edge_cases(cast: Cast, dtype: str) -> list[tuple[str, np.ndarray, int]]:
    """A sample of `edge_cases`, few of whose inputs need kernels of their own.

    Every Cast meets all values, in arrays of one shape, in the dtype and on the axis of its turn; every format meets
    every shape once, with one of its Casts, in a dtype and on an axis that change from one to the next.
    """
    found = []
    formats, casts = list(FORMATS.values()), [other for other in EVERY_CAST if other.format == cast.format]
    for number, (name, edge) in enumerate(edge_inputs(cast.format.element).items()):
        if name not in SHAPES:
            parts = in_common_shape(in_dtype(edge, dtype))
            found += [(name, x, axis) for turn, axis in turns(cast) if turn == dtype for x in parts]
        elif casts[(5 * number + formats.index(cast.format)) % len(casts)] == cast:
            turn, axis = EVERY_TURN[(number + formats.index(cast.format)) % len(EVERY_TURN)]
            if turn == dtype:
                x = in_dtype(edge, dtype)
                found.append((name, x, axis if axis in axes_of(x) else -1))
    return found


def in_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x` rounded to one of the input dtypes."""
    with np.errstate(all="ignore"):
        return x.astype(DTYPES[dtype])


def axes_of(x: np.ndarray) -> tuple[int, ...]:
    """The contraction axes that an array may have."""
    return (-1, -2) if x.ndim == 2 else (-1,)
