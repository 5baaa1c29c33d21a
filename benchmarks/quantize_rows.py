"""The rows q.*, dq.* and sw.*: what each runs on a matrix, and what the reference makes of the same matrix.

Legend: R x C = the matrix; both = the row operand and the column operand of one pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from microfloat import reference as oracle
from microfloat.passes import CastInputs, OperandSpec
from microfloat.recipes import Cast, Delayed, Hadamard
from microfloat.torch import reference
from microfloat.torch.backends.base import Operand
from microfloat.torch.launch import triton as backend

SHAPES = ((16384, 4096), (16384, 8192), (16384, 14336))
WEIGHT = ((4096, 14336),)
SCALES = ((1 << 20, 128),)
SEED = 0x89ABCDEF01234567
SCALE_ENC = 100.0
STREAMS = {"row_stream": 2, "column_stream": 4}

State = dict[str, Any]
Call = Callable[[torch.Tensor, State], Any]


@dataclass(frozen=True)
class Case:
    """One id: `run` on a matrix, `expected` of the reference, bytes that must move per element.

    `state`: what a call needs besides the matrix, made once per shape before the clock runs. `instructions`: per
    element, counted in the machine code (sm_90) before the first run; the prediction is that 65 % of the issue slots
    can be used (27.9 instructions per element and 4.0625 bytes fill all of them). `unfused`: the same work in parts.
    `writes`: whether a call leaves results of its own size in the L2 cache, to be written back while the next one runs.
    """

    id: str
    run: Call
    expected: Call
    bytes_per_element: float
    shapes: tuple[tuple[int, int], ...] = SHAPES
    instructions: float | None = None
    state: Callable[[torch.Tensor], State] = field(default=lambda x: {})
    unfused: Call | None = None
    writes: bool = True

    def prediction(self) -> float | None:
        """Share of the copy, at most 0.95."""
        if self.instructions is None:
            return None
        return min(0.95, 0.65 * 27.9 * self.bytes_per_element / 4.0625 / self.instructions)


def seed_words(x: torch.Tensor) -> torch.Tensor:
    """The call seed, where the matrix is."""
    return torch.tensor([SEED & 0xFFFFFFFF, SEED >> 32], device=x.device)


def delayed_state(x: torch.Tensor) -> State:
    """A known encode scale and a history whose first entry is live."""
    scale = torch.full((), SCALE_ENC, device=x.device)
    return {"scale_enc": scale, "record": torch.zeros(1024, device=x.device)}


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of operands, values and tuples of them, in order."""
    if result is None:
        return []
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Operand):
        return [result.codes, result.scale, *([] if result.tensor_scale is None else [result.tensor_scale])]
    if isinstance(result, np.ndarray):
        return [torch.from_numpy(np.ascontiguousarray(result).view(np.uint8))]
    return [tensor for part in result for tensor in tensors_of(part)]


def first_difference(got: Any, want: Any) -> str:
    """First place where two results differ, or ""; NaN bit patterns of decoded values count as one."""
    ours, theirs = tensors_of(got), tensors_of(want)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors, reference {len(theirs)}"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a_bytes, b_bytes = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        if a_bytes.numel() != b_bytes.numel():
            return f"tensor {number}: {a_bytes.numel()} bytes, reference {b_bytes.numel()}"
        differs = a_bytes != b_bytes
        if a.dtype == torch.bfloat16:
            nan = (a.isnan() & b.to(a.device).isnan()).cpu().reshape(-1)
            differs &= ~nan.repeat_interleave(2)
        if bool(differs.any()):
            at = int(differs.nonzero()[0])
            return (
                f"tensor {number}: {int(differs.sum())} of {differs.numel()} bytes, first at byte {at}: "
                f"{int(a_bytes[at]):#x}, reference {int(b_bytes[at]):#x}"
            )
    return ""


def both(
    row_id: str, cast: Cast, size: float, instructions: float | None = None, *, column: Any = "same",
    shapes: tuple = SHAPES, stochastic: bool = False,
) -> Case:  # fmt: skip
    """A cast of rows, and of columns unless `column` is None."""
    second = cast if column == "same" else column
    streams: State = STREAMS if stochastic else {}

    def run(x: torch.Tensor, state: State) -> Any:
        return backend.quantize_both(x, cast, second, **state, **streams)

    def expected(x: torch.Tensor, state: State) -> Any:
        return reference.quantize_both(x, cast, second, **state, **streams)

    make = (lambda x: {"seed": seed_words(x)}) if stochastic else (lambda x: {})
    return Case(row_id, run, expected, size, shapes, instructions, make)


def delayed(row_id: str, cast: Cast, size: float, instructions: float) -> Case:
    """A delayed cast: the scale is known, the amax is recorded in the same pass."""

    def run(x: torch.Tensor, state: State) -> Any:
        return backend.quantize_both(x, cast, cast, **state), state["record"][:1]

    def expected(x: torch.Tensor, state: State) -> Any:
        made = reference.quantize_both(x, cast, cast, scale_enc=state["scale_enc"])
        return made, reference.amax(x).reshape(1)

    return Case(row_id, run, expected, size, instructions=instructions, state=delayed_state)


def specs(
    row: Cast, column: Cast, form: str = "codes", row_stream: int = 0, column_stream: int = 0
) -> tuple[OperandSpec, OperandSpec]:
    """Both operands of a matrix in one form."""
    return OperandSpec(row, form, stream=row_stream), OperandSpec(column, form, stream=column_stream)


def decoded(row_id: str, row: Cast, column: Cast, size: float, instructions: float, stochastic: bool = False) -> Case:
    """Quantized and dequantized in one pass, both axes, without codes."""
    streams: State = STREAMS if stochastic else {}

    def run(x: torch.Tensor, state: State) -> Any:
        made = backend.cast_parts(x, *specs(row, column, "values", **streams), CastInputs(**state))
        return [made.row.codes, made.column.codes]

    def expected(x: torch.Tensor, state: State) -> Any:
        values = []
        for operand in reference.quantize_both(x, row, column, **state, **streams):
            bare = replace(operand, tensor_scale=None, hadamard=None, length=operand.stored_length)  # type: ignore[arg-type,union-attr]
            values.append(reference.dequantize(bare, torch.bfloat16))
        return values

    make = (lambda x: {"seed": seed_words(x)}) if stochastic else (lambda x: {})
    return Case(row_id, run, expected, size, instructions=instructions, state=make)


def dequantized(row_id: str, cast: Cast, size: float, instructions: float) -> Case:
    """Codes of rows back to bfloat16."""
    return Case(
        row_id, lambda x, s: backend.dequantize(s["operand"], torch.bfloat16),
        lambda x, s: reference.dequantize(s["operand"], torch.bfloat16), size, instructions=instructions,
        state=lambda x: {"operand": backend.quantize(x, cast)},
    )  # fmt: skip


def folded(
    row_id: str, row: Cast, column: Cast, size: float, instructions: float, *, form: str = "folded",
    shapes: tuple = SHAPES,
) -> Case:  # fmt: skip
    """A cast of rows and columns folded to FP8, amaxes included, and the numbers of elements that changed."""
    stochastic = row.is_stochastic or column.is_stochastic
    streams: State = STREAMS if stochastic else {}
    both_specs = specs(row, column, form, **streams)

    def run(x: torch.Tensor, state: State) -> Any:
        lossy = torch.empty(2, dtype=torch.int64, device=x.device)
        made = backend.cast_parts(x, *both_specs, CastInputs(folded=lossy, tiles=lossy, **state))
        sides = (made.row, x.shape[1]), (made.column, x.shape[0])
        return [(operand.codes, operand.scale[:, : -(-length // 128)]) for operand, length in sides], lossy

    def expected(x: torch.Tensor, state: State) -> Any:
        parts, counts, seed = [], [], {"seed": SEED} if stochastic else {}
        for axis, spec in ((-1, both_specs[0]), (-2, both_specs[1])):
            made = oracle.quantize(x.float().cpu().numpy(), spec.cast, axis=axis, stream=spec.stream, **seed)
            operand, count = oracle.fold(made, (1, 128) if form == "folded" else (128, 128))
            parts.append((operand.codes.reshape(-1), operand.scale.reshape(-1)))
            counts.append(count)
        return parts, torch.tensor(counts)

    make = (lambda x: {"seed": seed_words(x)}) if stochastic else (lambda x: {})
    return Case(row_id, run, expected, size, shapes, instructions, make)


def cases() -> list[Case]:
    """Every id of casts, decoding and scale layout."""
    mx8, mx4 = Cast("mxfp8"), Cast("mxfp4")
    nv, nv_sr = Cast("nvfp4"), Cast("nvfp4", rounding="stochastic")
    nv_rht_sr = Cast("nvfp4", rounding="stochastic", hadamard=Hadamard())

    def given_amax(x: torch.Tensor) -> State:
        return {"amax": x.abs().max().float()}

    return [
        Case("q.amax", lambda x, s: backend.amax(x), lambda x, s: reference.amax(x), 2, instructions=3.2, writes=False),
        delayed("q.fp8.delayed", Cast("fp8_tensor", scaling=Delayed()), 4, 8.3),
        both("q.fp8.current", Cast("fp8_tensor"), 6, 10.0),
        both("q.fp8.row", Cast("fp8_row"), 6, 14.8),
        both("q.fp8.1x128", Cast("fp8_1x128"), 4.0625, 12.5),
        both("q.fp8.128x128", Cast("fp8_128x128"), 4, 7.0, shapes=WEIGHT),
        # Weights of other sizes; TransformerEngine's figure is of the second. A copy of so few bytes as those of WEIGHT
        # is slower than the copy that all ratios are to.
        both("q.fp8.128x128.large", Cast("fp8_128x128"), 4, 7.0),
        both("q.mxfp8.row", mx8, 3.03125, 5.8, column=None),
        both("q.mxfp8.rowcol", mx8, 4.0625, 11.1),
        decoded("q.mxfp8.qdq", mx8, mx8, 6, 18.5),
        folded("q.mxfp8.fold", mx8, mx8, 4.0625, 23.5),
        both("q.mxfp4.row", mx4, 2.53125, 9.5, column=None),
        replace(both("q.nvfp4.row", nv, 2.5625, 17.7, column=None), state=given_amax),
        both("q.nvfp4.train", nv_sr, 5.125, 58.1, column=nv_rht_sr, stochastic=True),
        both("q.nvfp4.2d", Cast("nvfp4_2d"), 5.125, 17.6, shapes=WEIGHT),
        decoded("q.nvfp4.qdq", nv_sr, nv_rht_sr, 8, 60.4, stochastic=True),
        folded("q.nvfp4.fold", nv_sr, nv_rht_sr, 6.0625, 44.0),
        folded("q.nvfp4.fold.2d", Cast("nvfp4_2d"), Cast("nvfp4_2d"), 6, 43.6, form="tiles", shapes=WEIGHT),
        dequantized("dq.mxfp8", mx8, 3.03125, 6.9),
        dequantized("dq.nvfp4", nv, 2.5625, 11.1),
        # 64 MB and more of scales: the matrix's bytes serve as such, two for every element.
        Case(
            "sw.scales", lambda x, s: backend.swizzle_scales(scale_bytes(x)),
            lambda x, s: oracle.swizzle_scales(scale_bytes(x).cpu().numpy()), 2, SCALES,
        ),
    ]  # fmt: skip


def scale_bytes(x: torch.Tensor) -> torch.Tensor:
    """As many bytes as the matrix has elements."""
    return x.view(torch.uint8)[:, : x.shape[1]]
