"""The route of a GEMM on a chip: the form in which each operand enters it, what multiplies them, and every refusal.

The decision is a function of the two Casts, the GEMM's path and the chip. Both front ends act on it and both `explain`s
print it, so what is said is what runs (docs/numerics.md, section 10). It depends on the kernels that serve a Cast
(`family_of`), and says in turn how the operands of a tensor are cast (`entries_of`). Nothing here imports a framework
or Triton: the answer about a chip is the same on every machine.

| kind | what multiplies | the right operand |
|---|---|---|
| fp8 | FP8 tensor cores, one scale per tensor or row | turned |
| blocks | FP8 tensor cores, 1x128 by 1x128 or 128x128 scales | turned |
| block_scaled | MX and NVFP4 tensor cores | as it is |
| values | bfloat16 tensor cores, of operands decoded to bfloat16 | turned where it has the form "values" |
| float32, float64 | operands decoded to float32 or float64 | as it is |
| plain | one operand in high precision, the other dequantized; or both in high precision | as it is |
| stored | a few rows in high precision by codes decoded in registers; more of them as plain | as it is |
| fprop, fprop turned | dy in high precision by the values of an operand that fprop has read | as fprop has read it |
| refused | nothing: `reason` says why | |

"Turned": a GEMM that contracts the first axis of its right operand takes it [C, R] (`microfloat.layout`).
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

from microfloat.chips import Chip
from microfloat.formats import E2M1, E5M2, ELEMENTS, SCALE_E4M3, SCALE_E8M0, SCALE_FP32, ScaledFormat
from microfloat.layout import FOLDED, folded_format
from microfloat.operands import OPERANDS_OF, Operand
from microfloat.recipes import Cast, Gemm, Hadamard, Recipe
from microfloat.recipes.core import folds_beside
from microfloat.scale_rules import TwoLevel, unknown_kind

UNTRIED = "not yet run on the hardware"
NO_GRADIENT = (
    "weight: got a backward that asks for its gradient, needed a frozen weight, since it is quantized for inference. "
    "Freeze it (model.requires_grad_(False)) and train adapters or inputs, or microfloat.torch.revert the model and "
    "train it under a recipe."
)
# The scales that kernels and GEMMs know, and the kinds of rules that kernels compute for them.
_RULE_KINDS = {SCALE_FP32: "ratio", SCALE_E8M0: "threshold", SCALE_E4M3: "two_level"}
_BLOCKS = (16, 32, 64, 128)
_LEAST_SCALE = 2.0**-6
# The families whose kernels also write operands decoded to bfloat16; those of others write codes alone.
WRITES_VALUES = ("blocks", "nvfp4")
# Rows of x in high precision (of experts, the mean of their rows) up to which a kernel multiplies the stored codes of a
# weight (benchmarks/results/decode_h200.json). Above, the weight is decoded for the vendor's GEMM.
MOST_DECODED_ROWS = 64
_SIDE = 128
_NO_FASTER = "products are exact, no faster than bfloat16"
_ONE_WIDE = "the recipe keeps one operand in high precision: the other is dequantized to the compute dtype"


class Encoding(NamedTuple):
    """Properties of a quantized operand that decide which GEMM takes it.

    `power_of_two`: its FP32 scales are powers of two. `level`: its tensor scale, None, one for the "tensor" or one for
    each "row".
    """

    format: ScaledFormat
    hadamard: Hadamard | None = None
    power_of_two: bool = False
    level: str | None = None


class Route(NamedTuple):
    """The route of one GEMM: its kind, the forms of both operands (`microfloat.layout`), its kernel, and the reason."""

    kind: str
    lhs: str
    rhs: str
    kernel: str
    accelerated: bool
    reason: str

    @property
    def forms(self) -> tuple[str, str]:
        """Forms of the left and the right operand."""
        return self.lhs, self.rhs

    @property
    def turned(self) -> bool:
        """True where the GEMM takes its right operand turned, [C, R]."""
        return self.kind in ("fp8", "blocks") or (self.kind == "values" and self.rhs == "values")


class Routes(NamedTuple):
    """The routes of the three GEMMs of a Linear."""

    fprop: Route
    dgrad: Route
    wgrad: Route

    def reading_fprop(self, recipe: Recipe) -> "Routes":
        """The routes with fprop's forms for dgrad and wgrad where they read its operands (`Gemm.from_fprop`)."""
        fprop, dgrad, wgrad = self
        if recipe.dgrad.from_fprop:
            dgrad = dgrad._replace(kind="fprop turned" if fprop.turned else "fprop", rhs=fprop.rhs)
        if recipe.wgrad.from_fprop:
            wgrad = wgrad._replace(kind="fprop", rhs=fprop.lhs)
        return Routes(fprop, dgrad, wgrad)

    def of_stored(self, recipe: Recipe) -> "Routes":
        """The routes for a weight stored as codes: fprop reads codes, and decodes them where it multiplies values."""
        if self.fprop.rhs != "values":
            return self
        return self._replace(fprop=self.fprop._replace(rhs="codes")).reading_fprop(recipe)


# Names of GEMMs in words, for each library: torch's, XLA's as JAX calls it, and XLA's beside microfloat's kernels.
_KERNELS = {
    "torch": {
        "plain": "dequantize one operand, vendor GEMM in the compute dtype",
        "stored": "decoding GEMM up to {} rows; above, dequantize, vendor GEMM in the compute dtype",
        "high precision": "torch matmul",
        "fp8": "vendor FP8 GEMM, {} x {} scales",
        "blocks": "vendor FP8 GEMM, {} x {} scales",
        "own blocks": "microfloat's FP8 GEMM, {} x {} scales",
        "folded": "fold to FP8, vendor FP8 GEMM, 1x128 x {} scales",
        "own folded": "fold to FP8, microfloat's FP8 GEMM, 1x128 x {} scales",
        "folded values": "fold to FP8, float32 matmul",
        "block_scaled": "native block-scaled GEMM ({} x {})",
        "values": "decode to bfloat16, vendor GEMM",
        "scaled values": "decode to bfloat16, vendor GEMM, scales in the epilogue",
        "float32": "decode to float32, float32 GEMM",
        "no chip": "decode to float32, float32 matmul, scales in the epilogue",
        "float64": "decode to float64, float64 matmul, scales in the epilogue",
        "no chip, plain": "dequantize one operand, torch matmul",
    },
    "xla": {
        "plain": "dequantize one operand, dot",
        "stored": "decoding GEMM up to {} rows; above, dequantize, dot",
        "high precision": "lax.dot_general",
        "fp8": "FP8 dot, scales in the epilogue",
        "block_scaled": "jax.nn.scaled_matmul",
        "values": "decode to bfloat16, bfloat16 dot",
        "scaled values": "decode to bfloat16, bfloat16 dot",
        "folded values": "fold to FP8, decode, dot",
        "float32": "decode to float32, float32 dot",
        "no chip": "decode to float32, float32 dot, scales in the epilogue",
        "float64": "decode to float64, float64 dot",
        "no chip, plain": "dequantize one operand, dot",
    },
}


_OWN, _FOLDS = _KERNELS["torch"]["own blocks"], _KERNELS["torch"]["own folded"]
_KERNELS["jax"] = _KERNELS["xla"] | {"blocks": _OWN, "own blocks": _OWN, "rows": _OWN, "folded": _FOLDS}


def encoding_of(cast: Cast | None, form: str = "codes") -> Encoding | None:
    """The encoding that a cast makes in a form; None stays None."""
    if cast is None:
        return None
    if form in FOLDED:
        return Encoding(folded_format(cast.format, form), cast.hadamard)
    return Encoding(cast.format, cast.hadamard, cast.rule.power_of_two, cast.tensor_scale)


@functools.lru_cache(1024)
def routes_of(recipe: Recipe, chip: Chip | None) -> Routes:
    """The routes of a recipe's GEMMs on `chip`; None = no tensor cores."""
    fprop, dgrad, wgrad = (route_of(gemm, chip) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    return Routes(fprop, dgrad, wgrad).reading_fprop(recipe)


@functools.lru_cache(4096)
def route_of(gemm: Gemm, chip: Chip | None, fold: bool = True, library: str = "torch") -> Route:
    """The route of `gemm` on `chip`; None = no tensor cores: operands are decoded by plain operations.

    `fold`: whether path="auto" may fold, given the lossy counts of the step before. `library`: "torch", "xla" or "jax".
    """
    lhs, rhs = gemm.lhs, gemm.rhs
    if gemm.path == "refused":
        return Route("refused", "codes", "codes", "-", False, NO_GRADIENT)
    route = route_between(encoding_of(lhs), encoding_of(rhs), chip, gemm.accumulate, gemm.path, library)
    if route.kind == "stored" and gemm.from_fprop:
        return route._replace(kind="plain", kernel=_KERNELS[library]["plain"], reason=_ONE_WIDE)
    if route.kind != "values" or lhs is None or rhs is None or lhs.format.scale.name == "FP32" or library != "torch":
        return route
    assert chip is not None
    families = family_of(lhs)[0], family_of(rhs)[0]
    folds = chip.has_fp8_blocks and lhs.hadamard is None and gemm.path != "exact" and (fold or gemm.path == "folded")
    has_e5m2 = E5M2 in (lhs.format.element, rhs.format.element)
    takes = chip.own_gemm or not has_e5m2
    if folds and families == ("blocks", "blocks") and _are_mx(lhs.format, rhs.format) and takes:
        reason = f"{chip.name} multiplies FP8: 1x32 scales folded (path={gemm.path!r}); changed elements are counted"
        kernel = _KERNELS[library]["own folded" if has_e5m2 else "folded"].format("128x128")
        return Route("blocks", "folded", "tiles", kernel, True, reason)
    if folds and not takes:
        route = route._replace(reason=f"{route.reason}; not folded, since torch's GEMM takes E4M3 alone")
    # Other casts write codes, which are decoded later.
    left, right = ("values" if family in WRITES_VALUES else "codes" for family in families)
    return route._replace(lhs=left, rhs=right)


@functools.lru_cache(4096)
def route_between(
    lhs: Encoding | None, rhs: Encoding | None, chip: Chip | None, accumulate: str = "split", path: str = "auto",
    library: str = "torch",
) -> Route:  # fmt: skip
    """The route of a GEMM of two operands that exist as codes; None = an operand in high precision."""
    if path == "folded" and lhs and rhs:
        are_nvfp4 = is_nvfp4(lhs.format) and is_nvfp4(rhs.format)
        # torch folds MX operands as it casts them (`route_of`), and multiplies stored ones exactly.
        if are_nvfp4 or (_has_own_gemm(chip, library) and _folds_mx(lhs, rhs)):
            exact = route_between(lhs, rhs, chip, accumulate, "exact", library)
            return _route_of_folded(rhs.format, exact, chip, library)
        if folds_beside(lhs.format, rhs.format):
            rows = Encoding(folded_format(rhs.format, "rows"))
            return _route_of_rows(rhs.format, route_between(lhs, rows, chip, accumulate, "exact", library))
    kernels = _KERNELS[library]

    def route(kind: str, reason: str, *sizes: object, accelerated: bool = False, kernel: str = "") -> Route:
        return Route(kind, "codes", "codes", kernels[kernel or kind].format(*sizes), accelerated, reason)

    if lhs is None and rhs is None:
        reason = "the recipe keeps this GEMM in high precision; it runs in the compute dtype"
        return route("plain", reason, accelerated=True, kernel="high precision")
    if lhs is None or rhs is None:
        if rhs is not None and chip is not None and chip.multiplies_stored_codes:
            few = f"up to {MOST_DECODED_ROWS} rows of it read the weight's codes as stored"
            reason = f"the recipe keeps x in high precision: {few}"
            return route("stored", reason if chip.is_tried else f"{reason}; {UNTRIED}", MOST_DECODED_ROWS)
        return route("plain", _ONE_WIDE, kernel="plain" if chip else "no chip, plain")
    if accumulate == "exact":
        if chip is None or library != "torch":
            return route("float64", "accumulate='exact' multiplies and sums in float64")
        needed = "accumulate='exact' is for the reference backend: sums of tensor cores are not exact"
        return Route("refused", "codes", "codes", "-", False, needed)
    if chip is None:
        return route("float32", "plain operations decode and multiply it in float32", kernel="no chip")
    a, b = lhs.format, rhs.format
    foreign = [
        f"{fmt.element.name} is not one of the stock elements" for fmt in (a, b) if fmt.element.name not in ELEMENTS
    ]
    foreign += [f"{fmt.scale.name} is not one of the stock scales" for fmt in (a, b) if fmt.scale not in _RULE_KINDS]
    if foreign:
        return route("float32", f"{foreign[0]}: plain operations cast, decode and multiply it")
    if a.element == b.element == E5M2:  # recipes cannot ask for it, stored operands can
        kind = "values" if a.scale.name == b.scale.name == "E8M0" else "float32"
        return route(kind, "no hardware multiplies E5M2 by E5M2")
    are_fp8, multiplies = a.element.bits == b.element.bits == 8, f"{chip.name} multiplies FP8 on tensor cores"
    here = chip.name if library == "torch" else f"XLA on {chip.name}"
    lacks = f"{here} has no" if chip.is_known else f"{here} is none that microfloat knows, so it gets no"
    if is_outer(a) and is_outer(b):
        if are_fp8 and chip.has_fp8:
            name = "rows" if _has_own_gemm(chip, library) and a.block == b.block == (1, None) else "fp8"
            return route("fp8", multiplies, a.block_text, b.block_text, accelerated=True, kernel=name)
        missing = f"{lacks} FP8 tensor cores" if are_fp8 else "no GEMM multiplies these codes"
        return route("values", f"{missing}; {_NO_FASTER}", kernel="scaled values")
    has_gemm = library == "torch" or _has_own_gemm(chip, library)
    if has_gemm and are_fp8 and chip.has_fp8_blocks and _are_fp8_blocks(a, b, chip):
        name = "own blocks" if E5M2 in (a.element, b.element) else "blocks"
        return route("blocks", multiplies, a.block_text, b.block_text, accelerated=True, kernel=name)
    if chip.has_block_scales and _are_block_scaled(lhs, rhs, library):
        as_mx = " as MXFP8, exactly: scales are powers of two" if a.scale.name == "FP32" else " on tensor cores"
        if library == "torch" and _are_mx(a, b) and a.element.bits == b.element.bits == 4 and not chip.has_mxfp4:
            as_mx = " as MXFP8, exactly: torch has no GEMM of MXFP4 for this chip"
        return route("block_scaled", f"{chip.name} multiplies it{as_mx}; {UNTRIED}", a.name, b.name, accelerated=True)
    by_rows = a.scale != b.scale and folds_beside(a, b)
    if by_rows and library == "torch" and chip.multiplies_stored_codes and lhs.power_of_two:
        return route("stored", f"up to {MOST_DECODED_ROWS} rows of x, decoded, read the weight's codes as stored",
                     MOST_DECODED_ROWS)  # fmt: skip
    if by_rows or all(one.format.scale.name != "FP32" or one.power_of_two for one in (lhs, rhs)):
        reason = f"{lacks} block-scaled GEMM for {a.name} x {b.name}; {_NO_FASTER}"
        if path == "folded" and library != "torch":
            reason += "; folding is not offered here"
        return route("values", reason)
    return route("float32", f"{lacks} GEMM with one float32 scale for each block of {a.name} x {b.name}")


def _route_of_folded(rhs: ScaledFormat, exact: Route, chip: Chip | None, library: str) -> Route:
    """The route of MX or NVFP4 operands under path="folded", instead of the exact one. The fold of NVFP4 rounds
    (docs/numerics.md 9.4). So it is the same without a chip, where nothing is gained."""
    if exact.kind in ("block_scaled", "refused"):
        return exact
    if chip is not None and not chip.has_fp8_blocks:
        return exact._replace(reason=f"{exact.reason}; not folded, which takes FP8 GEMMs with 1x128 scales")
    bound = "at most 1/21, or 2^-17.9 of the largest value that their group or tile of 128 can hold"
    bound = "at most 2^-17.8 of the amax of their group or tile" if rhs.scale.name == "E8M0" else bound
    rounds = f"scales of {rhs.block[1]} folded, elements rounded by {bound} (path='folded')"
    block, form = ("1x128", "folded") if rhs.tensor_scale == "row" else ("128x128", "tiles")
    if chip is not None and (library == "torch" or _has_own_gemm(chip, library)):
        kernel, reason = _KERNELS[library]["folded"].format(block), f"{chip.name} multiplies FP8: {rounds}"
        counts = "; changed elements are counted" if library == "torch" else ""
        return Route("blocks", "folded", form, kernel, True, reason + counts)
    here = "plain operations multiply it" if chip is None else f"XLA on {chip.name} multiplies it decoded"
    return exact._replace(lhs="folded", rhs=form, kernel=_KERNELS[library]["folded values"], reason=f"{here}: {rounds}")


def _route_of_rows(fmt: ScaledFormat, route: Route) -> Route:
    """The route of FP8 rows by a weight in `fmt` that is folded to such rows, from that of two operands of rows."""
    if route.kind == "refused":
        return route
    bound = "by at most 1/21, or 2^-17.9 of" if fmt.scale.name == "E4M3" else "where they are far below"
    rounds = f"scales folded to one for each row, elements rounded {bound} the largest value that their row can hold"
    return route._replace(rhs="rows", kernel=f"fold to FP8, {route.kernel}", reason=f"{route.reason}; {rounds}")


def is_outer(fmt: ScaledFormat) -> bool:
    """True for one FP32 scale per tensor or row: it commutes with the contraction and multiplies the sum."""
    return fmt.scale.name == "FP32" and fmt.block in ((None, None), (1, None))


def _are_fp8_blocks(a: ScaledFormat, b: ScaledFormat, chip: Chip) -> bool:
    """FP32 scales that a GEMM on Hopper takes: 1x128, by 1x128 or 128x128; torch 2.11 refuses E5M2, ours does not."""
    are_blocks = a.block == (1, _SIDE) and b.block in ((1, _SIDE), (_SIDE, _SIDE)) and a.scale.name == b.scale.name
    return are_blocks and a.scale.name == "FP32" and (chip.own_gemm or E5M2 not in (a.element, b.element))


def is_nvfp4(fmt: ScaledFormat) -> bool:
    """True for E2M1 elements with E4M3 scales, in blocks of any size."""
    return fmt.scale == SCALE_E4M3 and fmt.element == E2M1


def _has_own_gemm(chip: Chip | None, library: str) -> bool:
    """True where JAX starts microfloat's FP8 GEMM."""
    return library == "jax" and chip is not None and chip.capability == (9, 0)


def _folds_mx(lhs: Encoding, rhs: Encoding) -> bool:
    """True for two MX operands that GEMMs of 1x128 scales take once they are folded."""
    a, b = lhs.format, rhs.format
    return lhs.hadamard is None and _are_mx(a, b) and E5M2 not in (a.element, b.element)


def _are_mx(a: ScaledFormat, b: ScaledFormat) -> bool:
    return a.scale.name == b.scale.name == "E8M0" and a.block == b.block == (1, 32)


def _are_block_scaled(lhs: Encoding, rhs: Encoding, library: str) -> bool:
    """Operands for Blackwell's tensor cores, as the library's GEMM takes them."""
    a, b = lhs.format, rhs.format
    if library != "torch":  # jax.nn.scaled_matmul: FP8 by FP8 or FP4 by FP4; row scales follow
        if a.scale != b.scale or a.block[1] != b.block[1]:
            return False
        if a.scale.name == "E8M0":
            return a.block[1] == 32 and a.element.bits == b.element.bits == 8
        return a.block[1] == 16 and a.element.name == b.element.name == "E2M1"
    if a.scale.name == b.scale.name == "FP32":  # powers of two for 128 elements are MX scales, repeated
        return all(
            one.power_of_two and one.format.element.bits == 8 and one.format.block in ((1, _SIDE), (_SIDE, _SIDE))
            for one in (lhs, rhs)
        )
    if a.scale != b.scale or _are_mx(a, b):
        return a.scale == b.scale
    blocks = ((1, 16), (16, 16))
    return all(is_nvfp4(fmt) and fmt.block in blocks and fmt.tensor_scale != "row" for fmt in (a, b))


@functools.lru_cache(512)
def family_of(cast: Cast) -> tuple[str, str]:
    """(family, "") of the kernel that serves a Cast, or ("", the reason) where none does.

    The family is the module of `microfloat.kernels.casts`: "scaled" (a scale per tensor, row or 128x128 tile), "blocks"
    (per block of 16, 32, 64 or 128) or "nvfp4" (per 16 under a tensor scale).
    """
    fmt, element = cast.format, cast.format.element
    if cast.rounding == "eden":
        return "", "rounding 'eden', which corrects block scales by the errors of their elements"
    if cast.hadamard is not None and cast.hadamard.size != 16:
        return "", f"a Hadamard transform of {cast.hadamard.size} points"
    if element.name not in ELEMENTS:
        return "", f"element {element.name}, which is not one of the stock elements"
    if fmt.scale not in _RULE_KINDS:
        return "", f"scale {fmt.scale.name}, which is not one of the stock scales"
    if fmt.scale == SCALE_E4M3 and element != E2M1:
        return "", f"element {element.name} under E4M3 scales"
    if _RULE_KINDS[fmt.scale] != cast.rule.kind:
        return "", unknown_kind(cast.rule)
    level = cast.rule.two_level
    # The rules that kernels compute with this capacity and sixth; the rest of a rule are constants of theirs.
    computed = () if level is None else (
        TwoLevel(level.capacity, level.inverse_max or 1.0), TwoLevel(level.capacity, None, _LEAST_SCALE),
        TwoLevel(level.capacity, None, _LEAST_SCALE, tensor_scale=False),
        TwoLevel(level.capacity, smallest_amax=level.capacity * 2.0**-117, four_over_six="mae"),
        TwoLevel(level.capacity, smallest_amax=level.capacity * 2.0**-117, four_over_six="mse"),
    )  # fmt: skip
    if level is not None and level not in computed:
        return "", f"the constants of the scale rule {cast.rule.name!r}"
    if fmt.scale == SCALE_E4M3 and fmt.block in ((1, 16), (16, 16)):
        return "nvfp4", ""
    if fmt.block in ((None, None), (1, None), (128, 128)) and fmt.scale.name == "FP32" and element.bits == 8:
        return "scaled", ""
    is_block = fmt.block[1] in _BLOCKS and fmt.block[0] in (1, fmt.block[1])
    if is_block and (element.bits == 8 or fmt.scale.name == "E8M0"):
        return "blocks", ""
    return "", f"block {fmt.block_text} of {fmt.name}"


@functools.lru_cache(512)
def why_not_in_groups(cast: Cast) -> str:
    """Reason against one launch for many groups of rows, "" if there is none: tiles of 128 rows are enough."""
    family, refusal = family_of(cast)
    if refusal:
        return f"no kernel for {refusal}"
    if family == "nvfp4":  # folded: no other route multiplies all groups at once
        return f"{cast.format.name} has a scale for each row" if cast.tensor_scale == "row" else ""
    if cast.is_stochastic:
        return "stochastic rounding counts the rows of each group"
    if cast.hadamard is not None:
        return f"the Hadamard transform of {cast.format.name} is a launch for the whole group"
    return ""


class OperandSpec(NamedTuple):
    """One operand of a matrix: its cast, its form (`microfloat.layout`), whether a GEMM takes it turned, and the word
    of its random counters (docs/numerics.md 5.3).
    """

    cast: Cast
    form: str = "codes"
    turned: bool = False
    stream: int = 0


class Entry(NamedTuple):
    """One of the six operands in a schedule; `spec` is the request to the casts.

    `cast` and `spec` are None where the GEMM reads the operand in high precision.
    """

    operand: Operand
    cast: Cast | None
    form: str
    turned: bool
    spec: OperandSpec | None


Entries = tuple[Entry | None, Entry | None]  # row and column of one tensor; None: no GEMM will read it


def entries_of(recipe: Recipe, routes: Routes, tensor: str, row: bool, column: bool) -> Entries:
    """The row and the column operand of "x", "w" or "dy", each if a GEMM will read it."""
    made: list[Entry | None] = []
    for is_read, operand in zip((row, column), OPERANDS_OF[tensor], strict=True):
        gemm = getattr(recipe, operand.gemm)
        if not is_read or gemm.path == "refused" or (operand.side == "rhs" and gemm.from_fprop):
            made.append(None)
            continue
        cast, route = getattr(gemm, operand.side), getattr(routes, operand.gemm)
        if cast is not None and tensor == "dy":
            cast = cast.of_gradient  # it tells its products of overflow
        is_rhs = operand.side == "rhs"
        form, turned = (route.rhs, route.turned) if is_rhs else (route.lhs, False)
        spec = None if cast is None else OperandSpec(cast, form, turned, operand.stream)
        made.append(Entry(operand, cast, form, turned, spec))
    return made[0], made[1]


def first_delayed(casts: Iterable[Cast | None]) -> Cast | None:
    """The first of some casts whose scaling is delayed."""
    return next((cast for cast in casts if cast is not None and cast.is_delayed), None)
