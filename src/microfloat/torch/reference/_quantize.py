"""`quantize`: one matrix in operand form becomes codes and scales, chunk by chunk.

Legend: R = rows of the operand form, C = its contraction length; names without these letters, such as x, are in memory
order (`_grid`). Amaxes of the tensor and of whole rows are measured first; then every chunk is widened to float32
(exact), scaled, and encoded while it is in the cache.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from microfloat.recipes import Cast
from microfloat.scale_rules import check_kind
from microfloat.torch.backends.base import Operand
from microfloat.torch.reference import _elements, _scales
from microfloat.torch.reference._grid import Chunk, Grid, Workspace, is_stored_across, reads_values
from microfloat.torch.reference._hadamard import transform
from microfloat.torch.reference._scales import INFINITY_BITS, BlockScales, TensorLevel, four_over_six_scales

_MAGNITUDE = 0x7FFFFFFF


def quantize(
    x: torch.Tensor, cast: Cast, *, transposed: bool = False, seed: torch.Tensor | None = None, stream: int = 0,
    batch: int = 0, amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None,
) -> Operand:  # fmt: skip
    """Quantize matrix `x` (float32, bfloat16 or float16, any strides) in operand form x, or x.T if `transposed`.

    `seed`: int64 [2], the words of the call seed, low first, for stochastic casts; `stream`, `batch`: counter words.
    `amax`: float32 () or [R, 1] in place of the measured one; `scale_enc`: float32 (), for delayed casts. All on x's
    device. Arguments are not validated here (`microfloat.torch.quantize` does). Source: docs/numerics.md, 2 to 5.
    """
    operand = quantize_operand(
        x.t() if transposed else x, cast, seed=seed, stream=stream, batch=batch, amax=amax, scale_enc=scale_enc
    )
    operand.codes, operand.scale = _row_major(operand.codes), _row_major(operand.scale)
    if operand.tensor_scale is not None:
        operand.tensor_scale = _row_major(operand.tensor_scale)
    return operand


def _row_major(part: torch.Tensor) -> torch.Tensor:
    """`part` with the strides of a new tensor, also along axes of size 1."""
    return part.reshape(-1).view(part.shape)


def quantize_operand(
    x_RC: torch.Tensor, cast: Cast, *, seed: torch.Tensor | None = None, stream: int = 0, batch: int = 0,
    amax: torch.Tensor | None = None, scale_enc: torch.Tensor | None = None,
) -> Operand:  # fmt: skip
    """Quantize operand form `x_RC` (any strides) under `cast`; the other arguments are those of `quantize`.

    Codes and scales have the memory order of x: for a transposed view they are transposed views.
    """
    check_kind(cast.rule, "the reference backend")
    x_RC = x_RC.detach()
    rows, length = x_RC.shape
    if cast.hadamard is not None:
        x_RC = transform(x_RC, cast.hadamard)
    across = x_RC.numel() > 0 and is_stored_across(x_RC)
    x = x_RC.t() if across else x_RC
    fmt, device = cast.format, x.device
    searches = cast.rule.two_level is not None and cast.rule.two_level.four_over_six is not None
    grid = Grid.of(fmt, x, contraction=0 if across else 1, in_one_tile=searches and x.numel() > 0)
    codes = x.new_empty(grid.packed(fmt.element.codes_per_byte), dtype=_elements.codes_dtype(fmt.element))
    level, whole = _whole_tensor_scales(x, cast, grid, amax, scale_enc)
    if whole is not None:
        stored = whole.stored
    elif x.numel() == 0 and fmt.block[1] is None:  # a row without elements still has its scale, that of amax 0
        zeros = torch.zeros(grid.blocks[0], 1, dtype=torch.int32, device=device)
        stored = _scales_of_amax(zeros, zeros, cast, level).stored
    else:
        stored = x.new_empty(grid.blocks, dtype=torch.float32 if fmt.scale.bits == 32 else torch.uint8)
    noise = None
    if cast.is_stochastic and seed is not None:
        noise = functools.partial(
            _elements.random_bytes, seed, stream=stream, batch=batch, contraction=grid.contraction
        )
    workspace = Workspace(device)
    for chunk in grid.chunks(device):
        values = _load(x, chunk, grid, workspace)
        blocks = grid.as_blocks(values)
        scales = whole
        if scales is None:
            rows_level = level.window(chunk, grid.contraction) if level else None
            scales = _block_scales(blocks, cast, rows_level, workspace, grid.contraction)
            stored[chunk.block_rows, chunk.block_columns] = scales.stored.view(blocks.shape[0], blocks.shape[2])
        blocks.mul_(scales.encode)
        if noise is not None and cast.rounding == "eden":
            window, cuts = stored[chunk.block_rows, chunk.block_columns], (chunk.rows, chunk.columns)
            drawn = noise(*[range(cut.start, cut.stop) for cut in cuts])
            window.copy_(_scales.eden_scales(values, window, cast, drawn, workspace, grid.contraction))
        _encode_chunk(values, codes, chunk, grid, cast, scales, noise, workspace)
    stored = stored.reshape(()) if fmt.is_per_tensor else stored
    tensor_scale = level.handed if level is not None and cast.tensor_scale is not None else None
    if across:
        codes, stored = codes.t(), stored.t() if stored.dim() == 2 else stored
        tensor_scale = tensor_scale.t() if tensor_scale is not None and tensor_scale.dim() == 2 else tensor_scale
    return Operand(codes, stored, tensor_scale, fmt, rows, length, cast.hadamard, cast.rule.power_of_two)


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of matrix `x`, float32 (); NaN is ignored, infinity counts (docs/numerics.md 2.3)."""
    x = x.detach()
    return _amax_bits(x.t() if is_stored_across(x) else x)[1].view(torch.float32)


def _amax_bits(x: torch.Tensor, axis: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of the amax, or along `axis`: int32, with NaN above infinity and with NaN ignored (one if there is none)."""
    shape = [] if axis is None else [*x.shape]
    if axis is not None:
        shape[axis] = 1
    raw = clean = torch.zeros(shape, dtype=torch.int32, device=x.device)
    workspace = Workspace(x.device)
    for chunk in Grid(x.shape[0], x.shape[1], (1, x.shape[1]), True).chunks(x.device):
        bits = _loaded_magnitude_bits(x[chunk.rows, chunk.columns], workspace)
        raw_part, clean_part = _reduce(bits, (0, 1) if axis is None else (axis,))
        window = () if axis is None else (chunk.rows, slice(None)) if axis == 1 else (slice(None), chunk.columns)
        if clean_part is not raw_part and clean is raw:
            clean = raw.clone()
        for total, partial in ((raw, raw_part),) if clean is raw else ((raw, raw_part), (clean, clean_part)):
            target = total[window]
            torch.maximum(target, partial.to(torch.int32).view(target.shape), out=target)
    if x.dtype == torch.bfloat16:
        raw, clean = (raw << 16,) * 2 if clean is raw else (raw << 16, clean << 16)
    return raw, clean


def _loaded_magnitude_bits(part: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Integers that order like |part|: int16 for bfloat16 (the upper half of float32's), else float32's int32."""
    if part.dtype == torch.bfloat16:
        narrow = workspace.take("narrow", tuple(part.shape), torch.int16)
        return torch.bitwise_and(part.view(torch.int16), 0x7FFF, out=narrow)
    bits = workspace.take("bits", tuple(part.shape), torch.int32)
    if part.dtype == torch.float32:
        return torch.bitwise_and(part.view(torch.int32), _MAGNITUDE, out=bits)
    bits.view(torch.float32).copy_(part)
    return bits.bitwise_and_(_MAGNITUDE)


def _reduce(bits: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima of magnitude bits over `dims`, which are kept: once with NaN above infinity, once with NaN ignored."""
    raw = _maximum(bits, dims)
    infinity = INFINITY_BITS if bits.dtype == torch.int32 else INFINITY_BITS >> 16
    if reads_values(bits) and int(raw.amax()) <= infinity:
        return raw, raw
    return raw, _maximum(bits.masked_fill(bits > infinity, 0), dims)


def _maximum(bits: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in reversed(dims):  # one axis at a time, the contiguous one first: torch vectorizes that
        if bits.shape[dim] != 1:
            bits = bits.amax(dim, keepdim=True)
    return bits


def _whole_tensor_scales(
    x: torch.Tensor, cast: Cast, grid: Grid, amax: torch.Tensor | None, scale_enc: torch.Tensor | None
) -> tuple[TensorLevel | None, BlockScales | None]:
    """The upper level of a two-level rule, and the scales of a per-tensor format; None where there is none."""
    constants, fmt = cast.rule.two_level, cast.format
    level = None
    if constants is not None and not constants.tensor_scale:
        level = _scales.tensor_level(x.new_ones((), dtype=torch.float32), constants)
    elif constants is not None:
        if amax is None:
            amax = _amax_bits(x, grid.contraction if fmt.tensor_scale == "row" else None)[1].view(torch.float32)
        elif fmt.tensor_scale == "row" and grid.contraction == 0:
            amax = amax.t()
        level = _scales.tensor_level(amax, constants, cast.is_gradient)
    if not grid.is_per_tensor:
        return level, None
    if scale_enc is not None:
        gradient_amax = (tensor_amax(x) if amax is None else amax) if cast.is_gradient else None
        return level, _scales.scales_of_encode_factor(scale_enc, gradient_amax)
    if constants is None and fmt.scale.name == "FP32" and amax is not None:
        return level, _scales.fp32_scales(amax, cast)
    raw, clean = _amax_bits(x)
    return level, _scales_of_amax(raw, clean, cast, level)


def _scales_of_amax(raw: torch.Tensor, clean: torch.Tensor, cast: Cast, level: TensorLevel | None) -> BlockScales:
    """Block scales from the two kinds of amax bits (NaN above infinity; NaN ignored, the same tensor without NaN)."""
    constants = cast.rule.two_level
    if constants is not None and level is not None:
        return _with_nan(
            _scales.two_level_scales(clean.view(torch.float32), cast.format, constants, level), raw, clean, cast
        )
    if cast.rule.thresholds is not None:
        return _scales.e8m0_scales(raw, cast)
    scales = _scales.fp32_scales(clean.view(torch.float32), cast)
    return BlockScales(scales.stored, scales.encode, None, elements_may_be_nan=raw is not clean)


def _block_scales(
    blocks: torch.Tensor, cast: Cast, level: TensorLevel | None, workspace: Workspace, contraction: int
) -> BlockScales:
    """Scales of every block of float32 `blocks` [blocks, rows, blocks, columns]."""
    bits, constants = workspace.take("bits", tuple(blocks.shape), torch.int32), cast.rule.two_level
    torch.bitwise_and(blocks.view(torch.int32), _MAGNITUDE, out=bits)
    if cast.rule.thresholds is not None:
        return _scales.e8m0_scales(_maximum(bits, (1, 3)), cast)
    raw, clean = _reduce(bits, (1, 3))
    if constants is not None and constants.four_over_six is not None and level is not None:
        amax = clean.view(torch.float32)
        scales = four_over_six_scales(blocks, amax, cast.format, constants, level, workspace, contraction)
        return _with_nan(scales, raw, clean, cast)
    return _scales_of_amax(raw, clean, cast, level)


def _with_nan(scales: BlockScales, raw: torch.Tensor, clean: torch.Tensor, cast: Cast) -> BlockScales:
    """Block scales with a mantissa in which a block with a NaN stores the NaN scale.

    A block of a gradient with an infinity stores it too where no tensor scale shows the overflow.
    """
    nan_code = cast.format.scale.element.nan_code
    if cast.is_gradient and cast.tensor_scale is None:
        scales = replace(scales, stored=scales.stored.masked_fill(raw >= INFINITY_BITS, nan_code))
    if raw is clean:
        return scales
    is_nan = raw > INFINITY_BITS
    return BlockScales(scales.stored.masked_fill(is_nan, nan_code), scales.encode, is_nan)


def _load(x: torch.Tensor, chunk: Chunk, grid: Grid, workspace: Workspace) -> torch.Tensor:
    """A float32 copy of a chunk, zero-padded to whole blocks."""
    shape, (rows, columns) = grid.padded(chunk), chunk.shape
    values = workspace.take("values", shape, torch.float32)
    if shape != (rows, columns):
        values.zero_()
    values[:rows, :columns] = x[chunk.rows, chunk.columns]
    return values


def _encode_chunk(
    values: torch.Tensor, codes: torch.Tensor, chunk: Chunk, grid: Grid, cast: Cast, scales: BlockScales,
    noise: Callable[[range, range], torch.Tensor] | None, workspace: Workspace,
) -> None:  # fmt: skip
    """Encode scaled `values` (overwritten) of a chunk into its window of `codes`."""
    element, (rows, columns) = cast.format.element, chunk.shape
    nan_blocks = None
    if scales.is_nan is not None:  # one flag for each element of the padded chunk
        nan_blocks = scales.is_nan.expand(grid.as_blocks(values).shape).reshape(values.shape)
    if noise is None and codes.dtype != torch.uint8:
        window, saturate = codes[chunk.rows, chunk.columns], _scales.saturates(cast)
        may_be_nan = scales.elements_may_be_nan
        _elements.encode_float8(values[:rows, :columns], element, window, saturate=saturate, may_be_nan=may_be_nan)
        if nan_blocks is not None:
            window.view(torch.uint8).masked_fill_(nan_blocks[:rows, :columns], element.nan_code)
        return
    is_nan = values.isnan() if scales.elements_may_be_nan else nan_blocks
    drawn = None
    if noise is not None and cast.rounding == "stochastic":
        first_row, first_column = chunk.rows.start, chunk.columns.start
        height, width = values.shape
        drawn = noise(range(first_row, first_row + height), range(first_column, first_column + width))
    unpacked = _elements.encode_integer(values, element, drawn, workspace)
    if is_nan is not None:
        unpacked.masked_fill_(is_nan, element.nan_code)
    unpacked = unpacked[:rows, :columns]
    window = grid.packed_window(codes.view(torch.uint8), chunk, element.codes_per_byte)
    if element.codes_per_byte == 2:
        _elements.pack_fp4(unpacked, window, grid.contraction)
    else:
        window.copy_(unpacked)


def quantize_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, *, seed: torch.Tensor | None = None,
    row_stream: int = 0, column_stream: int = 0, batch: int = 0, amax: torch.Tensor | None = None,
    scale_enc: torch.Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    """The operand of x under `row_cast` and that of x.T under `column_cast`, each None for a cast that is None.

    Equal casts that commute with transposition are made once (docs/numerics.md 3.1, "Sharing"). `amax` and `scale_enc`
    go to the casts that take them. Codes and scales of x.T may be transposed views, in the memory order of x.
    """
    if row_cast is not None and row_cast == column_cast and row_cast.transposes:
        shared = quantize_operand(x, row_cast, amax=amax, scale_enc=scale_enc)
        return shared, transpose_operand(shared)
    casts = [cast for cast in (row_cast, column_cast) if cast is not None]
    measure_alike = [cast.takes_amax and cast.tensor_scale != "row" and cast.hadamard is None for cast in casts]
    if amax is None and measure_alike == [True, True]:
        amax = tensor_amax(x)
    operands = []
    for cast, x_RC, stream in ((row_cast, x, row_stream), (column_cast, x.t(), column_stream)):
        if cast is None:
            operands.append(None)
            continue
        one_amax, encode_scale = amax if cast.takes_amax else None, scale_enc if cast.is_delayed else None
        options = {"seed": seed, "stream": stream, "batch": batch, "amax": one_amax, "scale_enc": encode_scale}
        operands.append(quantize_operand(x_RC, cast, **options))
    return operands[0], operands[1]


def transpose_operand(operand: Operand) -> Operand:
    """The operand of x.T, a view where codes are bytes; of formats that transpose, without a Hadamard transform."""
    codes = operand.codes.t()
    if operand.format.element.codes_per_byte == 2:  # packed along the other axis now
        axis = 0 if is_stored_across(operand.codes) else 1
        stored = codes if axis == 0 else operand.codes
        unpacked = _elements.unpack_fp4(stored, operand.length, axis)
        packed = [*unpacked.shape]
        packed[1 - axis] = -(-packed[1 - axis] // 2)
        stored = codes.new_empty(packed)
        _elements.pack_fp4(unpacked, stored, 1 - axis)
        codes = stored if axis == 0 else stored.t()
    scale = operand.scale.t() if operand.scale.dim() == 2 else operand.scale
    return Operand(
        codes, scale, operand.tensor_scale, operand.format, operand.length, operand.rows,
        power_of_two=operand.power_of_two,
    )  # fmt: skip
