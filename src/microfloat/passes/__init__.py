"""Host side of the kernels without a framework: a matrix and its casts become passes, which torch and JAX bind.

A `Pass` is one launch: its kernel, the key of the compiled version, how many programs, and every argument. `Passes` are
the launches that fill the operands of a matrix and the buffers they fill (`matrix`). `casts` makes them from the
`OperandSpec` of each orientation, `producers` from an activation or a norm and the casts of its result, `conversions`
from codes and scales that stand already. Nothing here allocates or starts anything.

This module imports no Triton, so that schedules may speak of operands, and `explain` of kernels, where it is not
installed.
"""

import functools
from typing import Any, NamedTuple

from microfloat.formats import ELEMENTS, SCALE_E4M3, SCALE_E8M0, SCALE_FP32
from microfloat.recipes import Cast
from microfloat.scale_rules import TwoLevel, unknown_kind

__all__ = [
    "MOST_DECODED_ROWS",
    "MOST_ROWS_BY_WARPGROUPS",
    "WRITES_VALUES",
    "CastInputs",
    "OperandSpec",
    "family_of",
    "most_decoded_rows",
    "why_not_in_groups",
]

# The kinds of scale rules that kernels compute, by the scale format.
_RULE_KINDS = {SCALE_FP32: "ratio", SCALE_E8M0: "threshold", SCALE_E4M3: "two_level"}
_BLOCKS = (16, 32, 64, 128)
_LEAST_SCALE = 2.0**-6
# The families whose kernels also write operands decoded to bfloat16; those of others write codes alone.
WRITES_VALUES = ("blocks", "nvfp4")
# Rows of x in high precision up to which a kernel multiplies a weight's stored codes: anywhere (of experts, the mean of
# their rows), and by the warpgroups of a Hopper (benchmarks/results/decode.json). Above, the weight is decoded for the
# vendor's GEMM.
MOST_DECODED_ROWS, MOST_ROWS_BY_WARPGROUPS = 64, 256


class OperandSpec(NamedTuple):
    """One operand of a matrix: its cast, its form (`microfloat.layout`), whether a GEMM takes it turned, and the word
    of its random counters (docs/numerics.md 5.3).
    """

    cast: Cast
    form: str = "codes"
    turned: bool = False
    stream: int = 0


class CastInputs(NamedTuple):
    """Tensors that casts of one matrix read and write besides it: the encode scale of delayed scaling; words of the
    call seed; the history whose first element takes the amax; int64 [2] for the elements that folding to 1x128 and to
    128x128 changed (row and column operand; of one launch to either: the first); the amax where it need not be
    measured; the groups of its rows.
    """

    scale_enc: Any = None
    seed: Any = None
    record: Any = None
    folded: Any = None
    tiles: Any = None
    amax: Any = None
    groups: Any = None


def most_decoded_rows(warpgroups: bool) -> int:
    """The most rows of x by which a kernel multiplies one weight's stored codes; `warpgroups`: on a Hopper."""
    return MOST_ROWS_BY_WARPGROUPS if warpgroups else MOST_DECODED_ROWS


@functools.lru_cache(512)
def family_of(cast: Cast) -> tuple[str, str]:
    """(family, "") of the kernel that serves a Cast, or ("", the reason) where none does.

    The family is the module of `microfloat.kernels.casts`: "scaled" (a scale per tensor, row or 128x128 tile), "blocks"
    (per block of 16, 32, 64 or 128) or "nvfp4" (per 16 under a tensor scale).
    """
    fmt, element = cast.format, cast.format.element
    if element.name not in ELEMENTS:
        return "", f"element {element.name}, which is not one of the stock elements"
    if _RULE_KINDS.get(fmt.scale) != cast.rule.kind:
        return "", unknown_kind(cast.rule)
    level = cast.rule.two_level
    # The rules that kernels compute with this capacity and sixth; the rest of a rule are constants of theirs.
    computed = () if level is None else (
        TwoLevel(level.capacity, level.inverse_six or 1.0), TwoLevel(level.capacity, None, _LEAST_SCALE),
        TwoLevel(level.capacity, None, _LEAST_SCALE, tensor_scale=False),
        TwoLevel(level.capacity, smallest_amax=level.capacity * 2.0**-117, four_over_six="mae"),
        TwoLevel(level.capacity, smallest_amax=level.capacity * 2.0**-117, four_over_six="mse"),
    )  # fmt: skip
    if level is not None and level not in computed:
        return "", f"the constants of the scale rule {cast.rule.name!r}"
    if fmt.scale.name == "E4M3" and fmt.block in ((1, 16), (16, 16)) and element.name == "E2M1":
        return "nvfp4", ""
    if fmt.block in ((None, None), (1, None), (128, 128)) and fmt.scale.name == "FP32" and element.bits == 8:
        return "scaled", ""
    if (
        fmt.block[0] in (1, fmt.block[1])
        and fmt.block[1] in _BLOCKS
        and (element.bits == 8 or fmt.scale.name == "E8M0")
    ):
        return "blocks", ""
    return "", f"block {fmt.block_text} of {fmt.name}"


@functools.lru_cache(512)
def why_not_in_groups(cast: Cast) -> str:
    """Reason against one launch for many groups of rows, "" if there is none: tiles of 128 rows are enough."""
    family, refusal = family_of(cast)
    if refusal:
        return f"no kernel for {refusal}"
    if cast.is_stochastic:
        return "stochastic rounding counts the rows of each group"
    if cast.hadamard is not None or family == "nvfp4":
        return f"{cast.format.name} has a scale of the whole group"
    if None in cast.format.block and not cast.is_delayed:
        return f"{cast.format.name} measures the amax of whole groups, or of rows as long as one"
    return ""
