"""The triton backend: every cast, and a producer before it, as one fused kernel; both orientations in one pass.

The same functions as `torch.reference`, bit for bit, and `cast_parts` for operands in the other forms that GEMMs read.
Every function runs programs (`launch.program`), kept by what they were made for.

Producers (`launch.prologues`) are fused with the cast of their result: `codes` quantizes the value that the unfused
graph would have produced, rounded to the inputs' dtype first. Casts per tensor take a known encode scale (delayed
scaling) or amax; `values` writes the value and its amax, for current scaling.

Legend: M x F = gate, up and their product; M x K = the input of a norm.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from microfloat.kernels.casts import scaled as kernels
from microfloat.kernels.producers import fused, loss, rotary, routing
from microfloat.layout import Part, folded_format
from microfloat.passes import CastInputs, OperandSpec
from microfloat.passes import producers as producer_passes
from microfloat.passes.amaxes import amax_passes
from microfloat.passes.casts import cast_passes
from microfloat.passes.conversions import dequantize_passes, fold_codes_passes, swizzle_passes, turn_codes_passes
from microfloat.passes.matrix import Matrix, Passes, specialization
from microfloat.passes.tables import Warps
from microfloat.recipes import Cast, Delayed
from microfloat.torch import reference
from microfloat.torch.backends.base import Operand, Operands, Parts, capturing, current_device, dtype_name, raw_stream
from microfloat.torch.launch import program
from microfloat.torch.launch.program import device_of, matrix_of, run_passes
from microfloat.torch.launch.prologues import Activation, Both, Norm, Producer, Statistics, Valued
from microfloat.torch.reference._hadamard import inverse

# The interface of `backends.base.Backend`.
name, programs, no_programs, is_strict, producers = "triton", program, "", True, sys.modules[__name__]
fuses = producer_passes.fuses
# The GEMMs of this backend are torch's, in float32; `backends.native` has the vendor's.
chip_of, scaled_matmul = reference.chip_of, reference.scaled_matmul
_WARPS = Warps(4)


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of matrix `x`, float32 (); NaN is ignored, infinity counts (docs/numerics.md 2.3)."""
    if x.numel() == 0:
        return reference.amax(x)
    return run_passes(("amax", *_like(x)), lambda: amax_passes(matrix_of(x)), x.device, (None, x, None))[0]


def quantize(
    x: torch.Tensor, cast: Cast, *, transposed: bool = False, seed: torch.Tensor | None = None, stream: int = 0,
    batch: int = 0, amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
) -> Operand:  # fmt: skip
    """See `torch.reference.quantize`; `record[0]` takes the larger of itself and the amax of `x` in the same pass."""
    row, column = quantize_both(
        x, None if transposed else cast, cast if transposed else None, seed=seed, row_stream=stream,
        column_stream=stream, batch=batch, amax=amax, scale_enc=scale_enc, record=record,
    )  # fmt: skip
    return column if transposed else row  # type: ignore[return-value]


def quantize_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, *, seed: torch.Tensor | None = None,
    row_stream: int = 0, column_stream: int = 0, batch: int = 0, amax: torch.Tensor | None = None,
    scale_enc: torch.Tensor | None = None, record: torch.Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    """The row operand (x) and the column operand (x.T, codes stored transposed) of matrix `x`, each if asked for."""
    if x.numel() == 0:
        return reference.quantize_both(x, row_cast, column_cast, seed=seed, amax=amax, scale_enc=scale_enc)
    row = None if row_cast is None else OperandSpec(row_cast, stream=row_stream)
    column = None if column_cast is None else OperandSpec(column_cast, stream=column_stream)
    made = cast_parts(x, row, column, CastInputs(scale_enc, seed, record, amax=amax), batch)
    rows, columns = x.shape
    return _operand_of(row, made.row, rows, columns), _operand_of(column, made.column, columns, rows)


def dequantize(operand: Operand, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of an operand, [R, C] in `dtype`, rounded once from float32; see `torch.reference.dequantize`."""
    if operand.hadamard is not None:
        values = inverse(_dequantize(operand, torch.float32), operand.hadamard)
        return values[:, : operand.length].to(dtype).contiguous()
    return _dequantize(operand, dtype)


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scale bytes [R, C] in tiles of 128 x 4: [512 * ceil(R / 128) * ceil(C / 4)], padded with 0 (numerics 7.2)."""
    (rows, columns), strides = scale.shape, scale.stride()
    if scale.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=scale.device)
    words = columns % 4 == 0 and strides[1] == 1 and strides[0] % 4 == 0 and scale.data_ptr() % 4 == 0
    return run_passes(
        ("swizzle", rows, columns, strides, words),
        lambda: swizzle_passes(rows, columns, (strides[0], strides[1]), words, device_of(scale.get_device())),
        scale.device, (None, scale, None),
    )[0]  # fmt: skip


def fold_codes(operand: Operand, form: str, part: Part) -> Operand:
    """See `torch.reference.fold_codes`."""
    rows, columns, fmt = operand.rows, operand.stored_length, operand.format
    strides = operand.scale.stride(0), operand.scale.stride(1)
    if rows * columns == 0 or fmt.scale.name != "E8M0" or form == "rows":  # the kernel folds MX codes, to 128 columns
        return reference.fold_codes(operand, form, part)
    codes = operand.codes.contiguous()
    if codes.data_ptr() & 1:  # codes are read two at once
        codes = codes.clone()
    folded, scale = run_passes(
        ("folded codes", form, fmt, rows, columns, strides, part),
        lambda: fold_codes_passes(fmt, form, rows, columns, strides, part, device_of(codes.get_device())),
        codes.device, (None, codes, None, operand.scale),
    )  # fmt: skip
    return replace(operand, codes=folded, scale=scale, format=folded_format(fmt, form))


def turned(codes: torch.Tensor) -> torch.Tensor:
    """See `torch.reference.turned`."""
    rows, columns = codes.shape
    if rows % 4 or columns % 4 or not codes.numel() or not codes.is_contiguous() or codes.data_ptr() & 3:
        return reference.turned(codes)
    return run_passes(
        ("turned", rows, columns, codes.dtype),
        lambda: turn_codes_passes(rows, columns, dtype_name(codes.dtype), device_of(codes.get_device())),
        codes.device, (None, codes, None),
    )[0]  # fmt: skip


def _like(x: torch.Tensor) -> tuple:
    """All properties of a matrix, except its device, on which passes over it depend."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() & 15


def cast_parts(
    x: torch.Tensor, row: OperandSpec | None, column: OperandSpec | None, inputs: CastInputs, batch: int = 0
) -> Operands:
    """Both operands, each in its own form, by a program that is kept."""
    options = {"records": inputs.record is not None, "given_amax": inputs.amax is not None, "batch": batch}
    made = run_passes(
        (row, column, *options.values(), *_like(x)), lambda: cast_passes(matrix_of(x), row, column, **options),
        x.device, (None, x, None, *inputs),
    )  # fmt: skip
    return Operands.of(made)


def _dequantize(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    rows, columns, fmt = operand.rows, operand.stored_length, operand.format
    codes, scale, level = operand.codes.contiguous(), operand.scale, operand.tensor_scale
    if rows * columns == 0:
        return torch.empty((rows, columns), dtype=dtype, device=codes.device)
    if codes.data_ptr() & 3:  # codes are read two or four bytes at once
        codes = codes.clone()
    strides = (0, 0)
    if scale.dim() == 2:
        strides = scale.stride(0), scale.stride(1) if fmt.block[1] is not None else 0
    level_stride = None if level is None else level.stride(0) if level.dim() else 0
    return run_passes(
        ("values", fmt, rows, columns, strides, level_stride, dtype),
        lambda: dequantize_passes(
            fmt, rows, columns, strides, level_stride, dtype_name(dtype), device_of(codes.get_device())
        ),
        codes.device, (None, codes, None, scale, level),
    )[0]  # fmt: skip


def _operand_of(spec: OperandSpec | None, made: Parts, rows: int, length: int) -> Operand | None:
    """Codes, scale and tensor scale as the operand [`rows`, `length`] of a cast; None without a cast."""
    if spec is None:
        return None
    cast = spec.cast
    power_of_two = None if cast.rule.two_level is not None else cast.rule.power_of_two
    return Operand(*made, cast.format, rows, length, cast.hadamard, power_of_two)


class _Inputs(NamedTuple):
    """Matrices of one shape and dtype, read alike, and vectors beside them (weight and bias of a norm)."""

    x: torch.Tensor
    y: torch.Tensor | None = None
    z: torch.Tensor | None = None
    is_norm: bool = False

    @staticmethod
    def alike(x: torch.Tensor, y: torch.Tensor | None = None, z: torch.Tensor | None = None) -> "_Inputs":
        """Inputs that lie alike, copied where they do not."""
        if any(t is not None and t.stride() != x.stride() for t in (y, z)):
            x, y, z = x.contiguous(), *(t if t is None else t.contiguous() for t in (y, z))
        return _Inputs(x, y, z)

    @property
    def key(self) -> tuple:
        """All properties of the inputs, except their device, on which passes over them depend."""
        others = tuple(
            None if t is None else (t.dtype, t.data_ptr() & 15, self.is_norm and t.stride(0) == 1)
            for t in (self.y, self.z)
        )
        return *_like(self.x), *others

    @property
    def matrix(self) -> Matrix:
        """The inputs as one matrix of passes, with the smallest of their alignments; vectors with gaps have none."""
        matrix = matrix_of(self.x)
        for other in (self.y, self.z):
            if other is not None:
                address = other.data_ptr()
                aligned = 1 if self.is_norm and other.stride(0) != 1 else address & -address or matrix.alignment
                matrix = replace(matrix, alignment=min(matrix.alignment, aligned))
        return matrix

    def run(self, key: tuple, make: Callable[[], Passes], given: Sequence[CastInputs]) -> list:
        """The results of passes over these inputs; `given`: the inputs of the casts of each produced matrix."""
        first, second = given[0], given[1] if len(given) > 1 else CastInputs()
        table = (
            None, self.x, None, first.scale_enc, first.seed, first.record, self.y, self.z, first.amax, None,
            second.amax, second.scale_enc, second.seed, second.record,
        )  # fmt: skip
        return run_passes((*key, *self.key), make, self.x.device, table)


def _work_of(producer: Producer) -> tuple[producer_passes.Producer, _Inputs]:
    """A producer as passes know it, and its inputs; a LayerNorm without bias gets zeros."""
    work = producer_passes.Producer
    if isinstance(producer, Norm):
        x, weight, bias = producer.x_MK, producer.weight_K, producer.bias_K
        weight = torch.ones_like(x[0]) if weight is None else weight
        number = producer_passes.NORMS[producer.kind]
        made = work(number, parameter_dtype=dtype_name(weight.dtype), eps=producer.eps)
        if not made.is_layer_norm:
            bias = None
        elif bias is None:
            bias = torch.zeros_like(weight)
        return made, _Inputs(x, weight, bias, is_norm=True)
    x, up, is_gated = producer.x_MF, producer.up_MF, producer.up_MF is not None
    if isinstance(producer, Activation):
        return work.of_activation(producer.activation, gated=is_gated), _Inputs.alike(x, up)
    made = work.of_activation(producer.activation, gated=is_gated, backward=True)
    if is_gated:
        return made, _Inputs.alike(x, up, producer.grad_MF)
    inputs = _Inputs.alike(x, producer.grad_MF)
    return made, _Inputs(inputs.x, None, inputs.y)


def values(producer: Producer) -> tuple[list[Valued], Statistics | None]:
    """Each value that a producer makes, in x's dtype, with its amax (float32 ()); the statistics of a norm."""
    work, inputs = _work_of(producer)
    passes = functools.partial(producer_passes.values_passes, inputs.matrix, work)
    value, amax, *rest = inputs.run(("values", work), passes, (CastInputs(),))
    if isinstance(producer, Norm):
        return [Valued(value, amax)], Statistics(*rest)
    return [Valued(value, amax), *([Valued(*rest)] if work.two else [])], None


def codes(
    producer: Producer, row: OperandSpec | None, column: OperandSpec | None, *given: CastInputs
) -> tuple[list[Both], Statistics | None]:
    """Both operands of each value that a producer makes, in one pass; the statistics of a norm.

    `given`: the inputs of the casts of each value, since each gradient of a gate belongs to a layer of its own
    (docs/numerics.md 5.3).
    """
    work, inputs = _work_of(producer)
    known = "scale_enc" if given[0].scale_enc is not None else "amax" if given[0].amax is not None else ""
    records = given[0].record is not None, len(given) > 1 and given[1].record is not None

    options = {"records": records, "given": known}
    passes = functools.partial(producer_passes.cast_passes, inputs.matrix, work, row, column, **options)
    made = inputs.run((work, row, column, records, known), passes, given)
    rows, columns = inputs.x.shape
    both = [
        (_operand_of(row, one.row, rows, columns), _operand_of(column, one.column, columns, rows))
        for one in (Operands.of(made), *((Operands.of(made[6:]),) if work.two else ()))
    ]
    return both, Statistics(*made[6:]) if isinstance(producer, Norm) else None


def gated_halves(x: torch.Tensor, grad: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``f(gate) * up`` [S, F] of x = (gate, up) [S, 2 F]; with `grad`, its gradient, the gradient of x."""
    x, grad, columns = x.contiguous(), None if grad is None else grad.contiguous(), x.shape[1] // 2
    out = torch.empty_like(x) if grad is not None else x.new_empty((x.shape[0], columns))
    block = min(1024, 1 << (columns - 1).bit_length())
    function = producer_passes.Producer.of_activation(activation, gated=True).function
    constants = function, block, device_of(x.get_device()).conversions
    _start(fused.gate_halves, x.shape[0] * -(-columns // block), (x, grad, out), (columns,), constants)
    return out


def rotate(
    parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, *,
    inverse: bool, interleaved: bool,
) -> None:  # fmt: skip
    """Rotate q and k, and copy v where its output is another tensor: `kernels.producers.rotary`.

    All [B, S, heads, D], elements of a head neighbours; outputs token after token; cos, sin [B or 1, S, R].
    """
    (batch, length, heads, size), kv_heads, rotated = parts[0].shape, parts[1].shape[2], cos.shape[2]
    copied = len(parts) > 2 and outputs[2] is not parts[2]
    tensors = [*parts, None][:3] if copied else [*parts[:2], None]
    written = [*outputs[:2], outputs[2] if copied else None]
    strides = [n for x in tensors for n in ((0, 0, 0) if x is None else x.stride()[:3])]
    steps = [0 if x is None else x.stride(1) for x in written]
    table = 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)
    half = 1 << (rotated // 2 - 1).bit_length()
    constants = (
        heads, kv_heads, 1 << (heads - 1).bit_length(), 1 << (kv_heads - 1).bit_length(), size, rotated, half, inverse,
        interleaved,
    )  # fmt: skip
    scalars = (length, *strides, *steps, *table)
    _start(rotary.rotate_tokens, batch * length, [*tensors, *written, cos, sin], scalars, constants)


def _start(
    kernel: Callable, programs: int, tensors: Sequence[torch.Tensor | None], scalars: tuple, constants: tuple,
    warps: Warps = _WARPS,
) -> None:  # fmt: skip
    """Start a kernel on the device of the first tensor; kept by all that Triton specializes on."""
    if not programs:
        return
    number = tensors[0].get_device()  # type: ignore[union-attr]
    aligned = tuple(x is None or x.data_ptr() & 15 == 0 for x in tensors)
    dtypes = tuple(None if x is None else x.dtype for x in tensors)
    key = (constants, dtypes, tuple(specialization(n) for n in scalars), number, *aligned)
    launch = program.kernel_of(kernel).prepared(key, programs, scalars, constants, warps)
    if number < 0:
        launch(0, *tensors)
        return
    with torch.cuda.device(number):
        launch(raw_stream(number), *tensors)


def route_rows(spreads: bool, *tensors: torch.Tensor) -> None:
    """Start `spread_rows` or `sum_rows` of `kernels.producers.routing`; the last of the tensors is written."""
    x, place, ends, weights, rows, dots, made = (t if t is None else t.contiguous() for t in tensors)
    (tokens, many), columns = place.shape, x.shape[1]
    padded, block = 1 << (many - 1).bit_length(), min(1024, 1 << (columns - 1).bit_length())
    scalars, conversions = (columns, ends.shape[0]), device_of(x.get_device()).conversions
    if spreads:
        constants = many, padded, max(64, min(block, 4096 // padded)), conversions
        _start(routing.spread_rows, tokens, (x, place, ends, weights, rows, dots, made), scalars, constants)
    else:
        programs = tokens * -(-columns // block)
        _start(routing.sum_rows, programs, (x, place, ends, weights, made), scalars, (many, block, conversions))


LOSS_BLOCK, LOSS_WARPS = 4096, Warps(8)  # the fastest of seven pairs on an H200


def cross_entropy_(
    logits: torch.Tensor, of_label: torch.Tensor, labels: torch.Tensor, s: torch.Tensor | None, losses: torch.Tensor
) -> None:
    """Write `losses` [C] of contiguous logits [C, N] and, with their gradients `s`, dy over the logits. `of_label` [C]:
    the logit of each row's label."""
    rows, columns = logits.shape
    constants = min(LOSS_BLOCK, 1 << (columns - 1).bit_length()), logits.dtype == torch.bfloat16, s is not None
    _start(loss.cross_entropy_rows, rows, (logits, of_label, labels, s, losses), (columns,), constants, LOSS_WARPS)


_UPDATE = program.Kernel(kernels.update_delayed)
_LONGEST_HISTORY = 8192


def _on_device(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A vector of plain numbers, filled in one by one under capture, which forbids copies from memory not pinned."""
    if not capturing():
        return torch.tensor(values, dtype=dtype, device=device)
    made = torch.empty(len(values), dtype=dtype, device=device)
    for index, value in enumerate(values):
        made[index].fill_(value)
    return made


class Slots:
    """The buffers of some slots as kernels find them: addresses and largest elements, on their device.

    Made while a CUDA graph is captured, they belong to that graph, whose replays write them.
    """

    def __init__(self, histories: list[torch.Tensor], scales: list[torch.Tensor], maxima: list[float]) -> None:
        device = histories[0].device
        pairs = [[history.data_ptr(), scale.data_ptr()] for history, scale in zip(histories, scales, strict=True)]
        self.addresses = _on_device([n for pair in pairs for n in pair], torch.int64, device)
        self.maxima = _on_device(maxima, torch.float32, device)
        self.count, self.length, self.device = len(histories), histories[0].shape[0], device
        self.number = histories[0].get_device()
        self.empty = program.fast_empty(device)
        self.at = self.addresses.data_ptr(), self.maxima.data_ptr()
        self.updates: dict[tuple, program.Prepared] = {}

    def gather_live(self) -> torch.Tensor:
        """The live amaxes of all slots, float32 [slots], for one all-reduce."""
        live = torch.empty(self.count, dtype=torch.float32, device=self.device)
        _start(kernels.gather_live, -(-self.count // 128), (self.addresses, live), (self.count,), (128,))
        return live


def slots_of(histories: list[torch.Tensor], scales: list[torch.Tensor], maxima: list[float]) -> Slots | None:
    """The Slots of these buffers; None where their histories differ in length or are too long."""
    length = histories[0].shape[0]
    if length > _LONGEST_HISTORY or any(history.shape[0] != length for history in histories):
        return None
    return Slots(histories, scales, maxima)


def update_delayed(slots: Slots, delayed: Delayed, live: torch.Tensor | None) -> torch.Tensor:
    """Roll every slot once; returns the former scales, float32 [slots]. `live`: reduced amaxes, or None."""
    device = slots.number
    if device >= 0 and device != current_device():
        with torch.cuda.device(device):
            return update_delayed(slots, delayed, live)
    previous = slots.empty((slots.count,), (1,), torch.float32)
    most_recent = delayed.amax_compute_algo == "most_recent"
    update = slots.updates.get((live is not None, most_recent, delayed.margin))
    if update is None:
        constants = (live is not None, most_recent, 1 << (slots.length - 1).bit_length())
        key = (constants, slots.length, delayed.margin, device)
        update = _UPDATE.prepared(key, slots.count, (2.0**-delayed.margin, slots.length), constants)
        slots.updates[live is not None, most_recent, delayed.margin] = update
    stream = 0 if device < 0 else raw_stream(device)
    if update.at is None or live is not None:
        update(stream, slots.addresses, previous if live is None else live, previous, slots.maxima)
    else:
        addresses, maxima = slots.at
        update.at(stream, addresses, previous.data_ptr(), previous.data_ptr(), maxima)
    return previous
