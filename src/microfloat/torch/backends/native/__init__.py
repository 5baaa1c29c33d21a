"""The native backend: fused casts feeding the vendor's GEMMs on a CUDA device.

`microfloat.routes` decides in which form each operand enters its GEMM (what `explain` prints and `prepare_both` makes),
`microfloat.torch.gemms` calls the GEMMs.
"""

import sys

import torch

from microfloat.errors import NotSupportedError
from microfloat.operands import GEMMS, operands_of
from microfloat.passes import is_stock
from microfloat.recipes import Cast, Recipe
from microfloat.torch import backends, gemms, reference
from microfloat.torch.backends import triton as casts
from microfloat.torch.backends.base import Operand, Values, record_amax_
from microfloat.torch.backends.native._plan import LinearPlan
from microfloat.torch.backends.native._plan import linear_plan as make_plan
from microfloat.torch.folding import FoldCounts, routes_of

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
            reader.key: (slot, orientation, form, x.numel())
            for reader, (orientation, operand) in zip(operands_of(slot), made, strict=True) if operand
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
    routes = routes_of(recipe, backends.chip_of(device), counts)
    return {name: route.forms for name, route in zip(GEMMS, routes, strict=True)}


def linear_plan(
    recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wants_dx: bool, wants_dw: bool,
    counts: FoldCounts | None = None,
) -> LinearPlan | None:  # fmt: skip
    """How an eager Linear of this kind runs with little host time; None where only the general path serves it."""
    chip = backends.chip_of(x.device)
    routes = routes_of(recipe, chip, counts)
    direct = chip.has_fp8 and not chip.has_block_scales
    if not direct or any(route.lhs == "codes" and not route.accelerated for route in routes):
        return None
    plan = make_plan(recipe, routes, x, weight, bias, wants_dx, wants_dw)
    if plan is not None:
        plan.module = sys.modules[__name__]
    return plan


def scaled_matmul(
    a: Operand | Values, b: Operand | Values, *, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32, accumulate: str = "split",
) -> torch.Tensor:  # fmt: skip
    """``round(a @ b.T + bias)``: [M, N] in `out_dtype`, one rounding; on the format's tensor cores where they exist."""
    device = (a.codes if isinstance(a, Operand) else a.values).device
    chip = backends.chip_of(device)
    return gemms.scaled_matmul(a, b, chip, bias=bias, out_dtype=out_dtype, accumulate=accumulate)
