"""The native backend: fused casts feeding the vendor's GEMMs on a CUDA device.

`backends.routes` decides in which form each operand enters its GEMM (what `explain` prints and `prepare_both` makes),
`_gemm` calls the GEMMs of Ada and Hopper and the exact bfloat16 products of every other chip, `_blackwell` the
block-scaled ones.
"""

import sys
from dataclasses import replace

import torch

from microfloat.errors import NotSupportedError, invalid_value
from microfloat.formats import E5M2, FP8_1x128, FP8_1x128_E5M2, FP8_128x128, FP8_128x128_E5M2, ScaledFormat
from microfloat.kernels.families import is_stock
from microfloat.recipes import Cast, Gemm, Recipe
from microfloat.torch import reference
from microfloat.torch.backends import triton as casts
from microfloat.torch.backends.base import Operand, Values, record_amax_
from microfloat.torch.backends.native._blackwell import block_scaled_matmul
from microfloat.torch.backends.native._gemm import fp8_matmul, values_matmul
from microfloat.torch.backends.native._lossy import READERS, FoldCounts, gemm_forms
from microfloat.torch.backends.native._plan import LinearPlan
from microfloat.torch.backends.native._plan import linear_plan as make_plan
from microfloat.torch.backends.routes import chip_of, route_of

__all__ = [
    "FoldCounts",
    "amax",
    "call_forms",
    "dequantize",
    "linear_plan",
    "prepare_both",
    "quantize",
    "quantize_both",
    "scaled_matmul",
]

amax = casts.amax
COLUMN_MAJOR_BLOCK_SCALES = True
_SIGN_AND_MANTISSA = ~0x7F800000  # of a float32


def folded_format(fmt: ScaledFormat, form: str) -> ScaledFormat:
    """The FP8 format that an MX operand becomes in the form "folded" or "tiles"."""
    formats = {"folded": (FP8_1x128, FP8_1x128_E5M2), "tiles": (FP8_128x128, FP8_128x128_E5M2)}[form]
    return formats[fmt.element == E5M2]


def _kernels(*wanted: Cast | None) -> object:
    """The backend with kernels for these casts: triton, or the reference where one of them has none."""
    return reference if any(cast is not None and casts.refusal(cast) for cast in wanted) else casts


def quantize(x: torch.Tensor, cast: Cast, **options: object) -> Operand:
    """See `torch.reference.quantize`."""
    return _kernels(cast).quantize(x, cast, **options)  # type: ignore[attr-defined]


def quantize_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, **options: object
) -> tuple[Operand | None, Operand | None]:
    """See `torch.reference.quantize_both`."""
    return _kernels(row_cast, column_cast).quantize_both(x, row_cast, column_cast, **options)  # type: ignore[attr-defined]


def dequantize(operand: Operand | Values, dtype: torch.dtype) -> torch.Tensor:
    """See `torch.reference.dequantize`."""
    if isinstance(operand, Values):
        raise NotSupportedError("dequantize: got decoded values in the transformed domain, needed codes.")
    by_kernel = operand.codes.is_cuda and is_stock(operand.format.element)
    return (casts if by_kernel else reference).dequantize(operand, dtype)


def prepare_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, *, row_form: str, column_form: str,
    seed: torch.Tensor | None, row_stream: int, column_stream: int, scale_enc: torch.Tensor | None = None,
    record: torch.Tensor | None = None, slot: str = "x", counts: FoldCounts | None = None,
) -> tuple[Operand | Values | None, Operand | Values | None]:  # fmt: skip
    """Both operand forms of `x` as their GEMMs read them: in one pass where the forms agree, else in two.

    Forms: "codes", "values" (decoded to bfloat16), "folded" (MX to 1x128), "tiles" (MX to 128x128). `slot` and `counts`
    name where the number of elements that folding changed is noted.
    """
    streams = {"seed": seed, "row_stream": row_stream, "column_stream": column_stream}
    if row_cast is None or column_cast is None or row_form == column_form:
        parts = [(row_form if row_cast is not None else column_form, row_cast, column_cast)]
    else:
        parts = [(row_form, row_cast, None), (column_form, None, column_cast)]
    row = column = None
    for form, wanted_row, wanted_column in parts:
        if form == "values" and _kernels(wanted_row, wanted_column) is casts:
            made = _values_both(x, wanted_row, wanted_column, streams)
        elif form in ("folded", "tiles"):
            made = _folded_both(x, wanted_row, wanted_column, form, slot, counts, streams)
        else:
            made = _codes_both(x, wanted_row, wanted_column, streams, scale_enc, record)
        row, column = made[0] if wanted_row is not None else row, made[1] if wanted_column is not None else column
    return row, column


def _codes_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, streams: dict, scale_enc: torch.Tensor | None,
    record: torch.Tensor | None,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    if _kernels(row_cast, column_cast) is reference:
        if record is not None:
            record_amax_(record, reference.amax(x))
        return reference.quantize_both(x, row_cast, column_cast, **streams, scale_enc=scale_enc)
    return casts.quantize_both(x, row_cast, column_cast, **streams, scale_enc=scale_enc, record=record)


def _folded_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, form: str, slot: str, counts: FoldCounts | None,
    streams: dict,
) -> tuple[Operand | None, Operand | None]:  # fmt: skip
    row, column, lossy = casts.fold_both(x, row_cast, column_cast, tile=form == "tiles", **streams)
    if counts is not None:
        made = (("row", row), ("column", column))
        counts.note({
            READERS[slot, orientation]: (slot, orientation, form, x.numel()) for orientation, operand in made if operand
        })  # fmt: skip
        counts.places(slot)[form == "tiles"].copy_(lossy, non_blocking=True)
    return row, column


def _values_both(
    x: torch.Tensor, row_cast: Cast | None, column_cast: Cast | None, streams: dict
) -> tuple[Values | None, Values | None]:
    made = casts.quantize_to_bf16(x, row_cast, column_cast, **streams)
    extents = ((row_cast, x.shape[0], x.shape[1]), (column_cast, x.shape[1], x.shape[0]))
    row, column = (
        None if cast is None or part is None
        else Values(part.values, part.tensor_scale, cast.format, rows, length, cast.hadamard)
        for part, (cast, rows, length) in zip(made, extents, strict=True)
    )  # fmt: skip
    return row, column


def call_forms(recipe: Recipe, device: torch.device, counts: FoldCounts | None) -> dict[str, tuple[str, str]]:
    """The forms in which the operands of each GEMM of a call enter it on `device`."""
    return gemm_forms(recipe, chip_of(device), counts)


def linear_plan(
    recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wants_dx: bool, wants_dw: bool,
    forms: dict[str, tuple[str, str]] | None = None,
) -> LinearPlan | None:  # fmt: skip
    """How an eager Linear of this kind runs with little host time; None where only the general path serves it.

    `forms`: of the operands of each GEMM; None = those of a layer that has not folded yet.
    """
    chip = chip_of(x.device)
    routes = (route_of(gemm, chip) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    if (
        not chip.has_fp8
        or chip.has_block_scales
        or any(route.lhs == "codes" and not route.accelerated for route in routes)
    ):
        return None
    plan = make_plan(recipe, forms or gemm_forms(recipe, chip, None), x, weight, bias, wants_dx, wants_dw)
    if plan is not None:
        plan.module = sys.modules[__name__]
    return plan


def scaled_matmul(
    a: Operand | Values, b: Operand | Values, *, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32, accumulate: str = "split",
) -> torch.Tensor:  # fmt: skip
    """``round(a @ b.T + bias)``: [M, N] in `out_dtype`, one rounding; on the format's tensor cores where they exist."""
    if accumulate == "exact":
        raise invalid_value(
            "accumulate",
            "'exact'",
            "'fast' or 'split' on the native backend",
            "Use backend='reference' for exact sums.",
        )
    if isinstance(a, Values) and isinstance(b, Values):
        return values_matmul(a, b, bias=bias, out_dtype=out_dtype)
    assert isinstance(a, Operand)
    assert isinstance(b, Operand)
    kind, a, b = _kind_of(a, b), _by_rows(a), _by_rows(b)
    if kind in ("fp8", "blocks"):
        return fp8_matmul(a, b, bias=bias, out_dtype=out_dtype, fast=accumulate == "fast")
    if kind == "block_scaled":
        return block_scaled_matmul(a, b, bias=bias, out_dtype=out_dtype)
    if kind == "values":
        return values_matmul(_decoded(a), _decoded(b), bias=bias, out_dtype=out_dtype)
    return reference.scaled_matmul(a, b, bias=bias, out_dtype=out_dtype, accumulate=accumulate)


def _by_rows(operand: Operand) -> Operand:
    """The operand with codes and scales that lie row by row, as GEMMs read them; the reference backend's lie as x did.

    Kernels write both as the GEMM wants them, so that scales beside contiguous codes stay as they are.
    """
    codes, scale = operand.codes, operand.scale
    return operand if codes.is_contiguous() else replace(operand, codes=codes.contiguous(), scale=scale.contiguous())


# By identity of the formats, which live as long as the entry: see `gemm_forms`.
_KINDS: dict[tuple[int, int, bool, bool | None, bool | None, torch.device], tuple[str, object, object]] = {}


def _kind_of(a: Operand, b: Operand) -> str:
    """Which GEMM multiplies two operands of codes: `Route.kind`."""
    device = a.codes.device
    if a.format.block[1] == 128 and not chip_of(device).has_fp8_blocks:
        _look_at_scales(a)
        _look_at_scales(b)
    key = (id(a.format), id(b.format), a.hadamard is None, a.power_of_two, b.power_of_two, device)
    known = _KINDS.get(key)
    if known is None:
        if a.format.element == b.format.element == E5M2:  # no hardware multiplies these, no recipe may ask for them
            kind = "values" if a.format.scale.name == b.format.scale.name == "E8M0" else "float32"
        else:
            lhs, rhs = (Cast(operand.format, _rule(operand), hadamard=operand.hadamard) for operand in (a, b))
            kind = route_of(Gemm(lhs, rhs, path="exact"), chip_of(device)).kind
        known = _KINDS[key] = (kind, a.format, b.format)
    return known[0]


def _rule(operand: Operand) -> str | None:
    if operand.format.scale.name != "FP32":
        return None
    return "amax_pow2" if operand.power_of_two else "amax"


def _look_at_scales(operand: Operand) -> None:
    """Whether float32 scales of unknown origin, such as a checkpoint's, are powers of two: asked of the scales."""
    if operand.power_of_two is not None or operand.format.scale.name != "FP32":
        return
    if not (operand.codes.is_cuda and torch.cuda.is_current_stream_capturing()):
        operand.power_of_two = not bool((operand.scale.view(torch.int32) & _SIGN_AND_MANTISSA).any())


def _decoded(operand: Operand) -> Values:
    """Element times block scale in bfloat16, exact where normal; tensor scales, and FP32 scales of rows, stay apart."""
    scale, tensor_scale = operand.scale, operand.tensor_scale
    if operand.format.scale.name == "FP32" and operand.format.block[1] is None:
        scale, tensor_scale = torch.ones_like(scale), scale
    bare = Operand(operand.codes, scale, None, operand.format, operand.rows, operand.stored_length, None)
    values = dequantize(bare, torch.bfloat16)
    return Values(values, tensor_scale, operand.format, operand.rows, operand.length, operand.hadamard)
