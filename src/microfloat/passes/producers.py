"""Passes of activations, their gradients and norms, whose results are cast in the launch that computes them.

The cast value is that of the unfused operation, rounded to the dtype of the inputs. Casts per tensor need an encode
scale (delayed scaling) or an amax; without them `values_passes` writes the value and its amax instead.

Results: codes, scale and tensor scale of the row operand, then of the column operand, and six more for a second matrix;
or value and amax of each matrix. Mean (LayerNorm only) and inverse of a norm come last.
"""

from typing import NamedTuple

from microfloat.errors import NotSupportedError, unknown_name
from microfloat.kernels.casts import scaled
from microfloat.kernels.constants import How
from microfloat.kernels.device import convert, produce
from microfloat.kernels.device.squares import takes
from microfloat.kernels.producers import fused
from microfloat.layout import Part
from microfloat.passes import OperandSpec, tables
from microfloat.passes.casts import block_casts, operands_of, scaled_casts, shared_scale
from microfloat.passes.matrix import SCALAR, At, Buffer, KernelCast, Matrix, Pass, Passes, kernel_cast
from microfloat.recipes import Cast

# Positions of further inputs: up of a gate, and gradient of the result; or weight and bias of a norm.
UP, GRADIENT, SECOND_AMAX = 6, 7, At.SECOND
WEIGHT, BIAS = 6, 7

_ACTIVATIONS = {
    "silu": produce.SILU.value, "gelu_tanh": produce.GELU_TANH.value, "gelu": produce.GELU.value,
    "relu": produce.RELU.value, "qgelu": produce.QUICK_GELU.value, "srelu": produce.SQUARED_RELU.value,
    "sigmoid": produce.SIGMOID.value,
}  # fmt: skip
NORMS = {"rms": produce.RMS_NORM.value, "layer": produce.LAYER_NORM.value}
# Elements that a program of `measure_rows` loads at once; most columns among them, and fewest: the words of one warp.
_ELEMENTS, _MOST_COLUMNS, _LEAST_COLUMNS = 16384, 8192, 256


class Producer(NamedTuple):
    """The operation that computes a matrix, or (`two`) both gradients of a gate.

    `number`, `function`: the constants PRODUCER and F of `kernels.device.produce`. `y`, `z`: positions of further
    inputs. `parameter_dtype`: dtype of the weight and bias of a norm, None for an activation. `eps`: that of the norm.
    """

    number: int
    function: int = 0
    y: int = At.NOTHING
    z: int = At.NOTHING
    two: bool = False
    parameter_dtype: str | None = None
    eps: float = 0.0

    @staticmethod
    def of_activation(name: str, *, gated: bool, backward: bool = False) -> "Producer":
        """The producer of ``f(x)``, of ``f(x) * up`` (`gated`), or of their gradients (`backward`)."""
        if name not in _ACTIVATIONS:
            raise unknown_name("activation", name, _ACTIVATIONS)
        function = _ACTIVATIONS[name]
        if not backward:
            number = produce.GATE if gated else produce.ACTIVATE
            return Producer(number.value, function, UP if gated else At.NOTHING)
        if gated:
            return Producer(produce.GATE_GRADIENTS.value, function, UP, GRADIENT, two=True)
        return Producer(produce.ACTIVATE_GRADIENT.value, function, GRADIENT)

    @property
    def is_layer_norm(self) -> bool:
        """True for a norm that subtracts the mean."""
        return self.number == NORMS["layer"]


class _Statistics(NamedTuple):
    """Positions of the statistics and parameters of a norm, NOTHING for an activation."""

    mean: int = At.NOTHING
    inverse: int = At.NOTHING
    weight: int = At.NOTHING
    bias: int = At.NOTHING


def fuses(row_cast: Cast | None, column_cast: Cast | None) -> bool:
    """True if a producer can write the codes of both casts in one launch."""
    casts = [kernel_cast(cast) for cast in (row_cast, column_cast) if cast is not None]
    if not casts or any(one.bare is not None or one.family not in ("scaled", "blocks") for one in casts):
        return False
    first, last = casts[0], casts[-1]
    if first.family != last.family or first.epsilon != last.epsilon:
        return False
    is_scaled = first.family == "scaled"
    return not is_scaled or (first.block == last.block == (None, None) and first.scaled_cast == last.scaled_cast)


def cast_passes(
    matrix: Matrix, work: Producer, row: OperandSpec | None, column: OperandSpec | None, *,
    records: tuple[bool, bool] = (False, False), given: str = "",
) -> Passes:  # fmt: skip
    """The passes that cast one produced matrix, or two, into both operands; `given`: "scale_enc", "amax" or ""."""
    if not fuses(row and row.cast, column and column.cast):
        raise NotSupportedError("a fused cast: got casts that no kernel writes in one launch; quantize the result.")
    numbers = kernel_cast(next(spec.cast for spec in (row, column) if spec is not None))
    if numbers.family == "scaled" and not given:
        raise NotSupportedError(
            f"a fused cast to {numbers.cast.format.name} needs scale_enc= or amax=; without them use "
            "`values`, which measures the amax, and cast its result."
        )
    results = 12 if work.two else 6
    passes = Passes(results + (2 if work.parameter_dtype else 0))
    statistics = _statistics(passes, matrix, work)
    produced = [operands_of(passes, matrix, (row, column), (at, at + 3)) for at in ((0, 6) if work.two else (0,))]
    _measure(passes, matrix, work, statistics)
    inputs = (At.SOURCE, work.y, work.z, *statistics)
    streams = produced[0].streams
    seeds = (At.SEED, At.SECOND_SEED) if produced[0].seed != At.NOTHING else (At.NOTHING, At.NOTHING)
    seeds = seeds if work.two else (seeds[0], At.NOTHING)
    outputs: list[int] = []
    if numbers.family == "blocks":
        casts = block_casts(produced[0])
        kind = matrix.kind if matrix.kind == _produced_kind(matrix) else 0
        squares = tables.TILES["fused_squares"]
        are_squares = not work.two and takes(*casts, kind, matrix.fills(squares[0], squares[1]))
        rows, columns, warps = squares if are_squares else tables.TILES["fused_blocks"]
        for both in produced:
            outputs += [both.codes[0], both.scales[0], both.codes[1], both.scales[1]]
        outputs += [At.NOTHING] * (8 - len(outputs))
        kernel, tensors = fused.produce_blocks, (*inputs, *outputs, *seeds)
        constants = (*casts, work.number, work.function, _how(matrix, rows, columns))
    else:
        casts = scaled_casts(produced[0])
        rows, columns, warps = tables.TILES["fused_gradients" if work.two else "fused_scaled"]
        each = _records(passes, records, numbers, given)
        sources = (At.SCALE_ENC, At.SECOND_SCALE_ENC) if given == "scale_enc" else (At.AMAX, SECOND_AMAX)
        for both, source, record in zip(produced, sources, each, strict=False):
            outputs += [*both.codes, shared_scale(passes, both), source, record]
        outputs += [At.NOTHING] * (10 - len(outputs))
        scratch = At.NOTHING if each[0] == At.NOTHING else At.WORDS
        kernel, tensors = fused.produce_scaled, (*inputs, *outputs, scratch, *seeds)
        how = _how(matrix, rows, columns)
        mode = (scaled.GIVEN if given == "scale_enc" else scaled.AMAX).value
        constants = (*casts, mode, each[0] != At.NOTHING, work.number, work.function, how)
    passes.launches.append(Pass(
        kernel, (matrix.key, constants, warps, *streams, work.parameter_dtype), matrix.tiles(rows, columns), tensors,
        (*streams, numbers.epsilon, *matrix.sizes), constants, warps,
    ))  # fmt: skip
    return passes


def values_passes(matrix: Matrix, work: Producer) -> Passes:
    """The passes that write one produced matrix, or two, in the dtype of the inputs, and the amax of each."""
    results = 4 if work.two else 2
    passes = Passes(results + (2 if work.parameter_dtype else 0))
    statistics = _statistics(passes, matrix, work)
    _measure(passes, matrix, work, statistics)
    value = Part((matrix.rows, matrix.columns), (matrix.columns, 1), matrix.dtype)
    outputs = [passes.put(at, Part(*SCALAR[:3]) if at % 2 else value) for at in range(results)]
    outputs += [At.NOTHING] * (4 - results)
    rows, columns, warps = tables.TILES["fused_values"]
    how = _how(matrix, rows, columns)._replace(QUADS=False)  # no columns are written
    constants = (work.number, work.function, how)
    passes.launches.append(Pass(
        fused.produce_values, (matrix.key, constants, warps, work.parameter_dtype), matrix.tiles(rows, columns),
        (At.SOURCE, work.y, work.z, *statistics, *outputs, At.WORDS), matrix.sizes, constants, warps,
    ))  # fmt: skip
    return passes


def _records(passes: Passes, records: tuple[bool, bool], numbers: KernelCast, given: str) -> list[int]:
    """Positions at which amaxes are recorded; a gradient with a given scale needs one, since its stored scale does."""
    needed = numbers.cast.is_gradient and given == "scale_enc"
    return [
        at if is_given else passes.add(Buffer((1,), (1,), "float32", cleared=True)) if needed else At.NOTHING
        for at, is_given in zip((At.RECORD, At.SECOND_RECORD), records, strict=True)
    ]


def _produced_kind(matrix: Matrix) -> int:
    return (convert.WORDS_BF16 if matrix.dtype == "bfloat16" else convert.ELEMENTWISE).value


def _how(matrix: Matrix, tile_rows: int, tile_columns: int) -> How:
    """Constants of a kernel that produces this matrix."""
    return matrix.how(tile_rows, tile_columns, units=True)._replace(KIND=_produced_kind(matrix))


def _statistics(passes: Passes, matrix: Matrix, work: Producer) -> _Statistics:
    """Positions of the statistics, which are the last results, and the parameters of a norm."""
    if not work.parameter_dtype:
        return _Statistics()
    part = Part((matrix.rows,), (1,), "float32")
    mean = passes.put(passes.results - 2, part) if work.is_layer_norm else At.NOTHING
    return _Statistics(mean, passes.put(passes.results - 1, part), WEIGHT, BIAS if work.is_layer_norm else At.NOTHING)


def _measure(passes: Passes, matrix: Matrix, work: Producer, statistics: _Statistics) -> None:
    """Add the launch that computes the statistics of a norm."""
    if not work.parameter_dtype:
        return
    columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, 1 << (matrix.columns - 1).bit_length()))
    rows, is_whole = max(1, _ELEMENTS // columns), matrix.columns % columns == 0
    constants = (matrix.kind, is_whole, matrix.index64, rows, columns)
    passes.launches.append(Pass(
        fused.measure_rows, (matrix.key, constants, not work.is_layer_norm), -(-matrix.rows // rows),
        (At.SOURCE, statistics.mean, statistics.inverse), (work.eps, *matrix.sizes), constants,
    ))  # fmt: skip
