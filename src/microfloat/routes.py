"""The route of a GEMM on a chip: the form in which each operand enters it, what multiplies them, and every refusal.

The decision is a function of the two Casts, the GEMM's path and the chip. Both front ends act on it and both `explain`s
print it, so what is said is what runs (docs/numerics.md, section 10). Nothing here imports a framework or Triton: the
answer about a chip is the same on every machine.

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
from typing import NamedTuple

from microfloat.chips import Chip
from microfloat.formats import E5M2, ELEMENTS, ScaledFormat
from microfloat.layout import folded_format
from microfloat.passes import WRITES_VALUES, family_of, most_decoded_rows
from microfloat.recipes import Cast, Gemm, Hadamard, Recipe

__all__ = [
    "NO_GRADIENT", "OWN_GEMMS", "UNTRIED", "Encoding", "OwnGemm", "Route", "Routes", "encoding_of", "is_outer",
    "own_gemm_is_faster", "route_between", "route_of", "routes_of",
]  # fmt: skip

UNTRIED = "not yet run on the hardware"
NO_GRADIENT = (
    "weight: got a backward that asks for its gradient, needed a frozen weight, since it is quantized for inference. "
    "Freeze it (model.requires_grad_(False)) and train adapters or inputs, or microfloat.torch.revert the model and "
    "train it under a recipe."
)
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
    """The route of one GEMM: its kind, the forms of both operands (`microfloat.layout`), what multiplies, and why."""

    kind: str
    lhs: str
    rhs: str
    kernel: str
    accelerated: bool
    reason: str

    @property
    def forms(self) -> tuple[str, str]:
        """Of the left and of the right operand."""
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
        """The same, where dgrad and wgrad take what fprop has read in the form in which it has (`Gemm.from_fprop`)."""
        fprop, dgrad, wgrad = self
        if recipe.dgrad.from_fprop:
            dgrad = dgrad._replace(kind="fprop turned" if fprop.turned else "fprop", rhs=fprop.rhs)
        if recipe.wgrad.from_fprop:
            wgrad = wgrad._replace(kind="fprop", rhs=fprop.lhs)
        return Routes(fprop, dgrad, wgrad)

    def of_stored(self, recipe: Recipe) -> "Routes":
        """The same for a weight stored as codes: fprop reads those, and has them decoded where it multiplies values."""
        if self.fprop.rhs != "values":
            return self
        return self._replace(fprop=self.fprop._replace(rhs="codes")).reading_fprop(recipe)


# Names of GEMMs in words, for each library: torch's, and XLA's as JAX calls it.
_KERNELS = {
    "torch": {
        "plain": "dequantize one operand, vendor GEMM in the compute dtype",
        "stored": "decoding GEMM up to {} rows; above, dequantize, vendor GEMM in the compute dtype",
        "high precision": "torch matmul",
        "fp8": "vendor FP8 GEMM, {} x {} scales",
        "blocks": "vendor FP8 GEMM, {} x {} scales",
        "folded": "fold to FP8, vendor FP8 GEMM, 1x128 x 128x128 scales",
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
        "float32": "decode to float32, float32 dot",
        "no chip": "decode to float32, float32 dot, scales in the epilogue",
        "float64": "decode to float64, float64 dot",
        "no chip, plain": "dequantize one operand, dot",
    },
}


def encoding_of(cast: Cast | None, form: str = "codes") -> Encoding | None:
    """The encoding that a cast makes in a form; None stays None."""
    if cast is None:
        return None
    fmt = folded_format(cast.format, form) if form in ("folded", "tiles") else cast.format
    return Encoding(fmt, cast.hadamard, cast.rule.power_of_two, cast.tensor_scale)


@functools.lru_cache(1024)
def routes_of(recipe: Recipe, chip: Chip | None) -> Routes:
    """The routes of a recipe's GEMMs on `chip`; None = no tensor cores."""
    fprop, dgrad, wgrad = (route_of(gemm, chip) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    return Routes(fprop, dgrad, wgrad).reading_fprop(recipe)


@functools.lru_cache(4096)
def route_of(gemm: Gemm, chip: Chip | None, fold: bool = True, library: str = "torch") -> Route:
    """The route of `gemm` on `chip`; None = no tensor cores: operands are decoded by plain operations.

    `fold`: whether path="auto" may fold, given the lossy counts of the step before. `library`: "torch" or "xla".
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
    if folds and families == ("blocks", "blocks") and _are_mx(lhs.format, rhs.format):
        reason = f"{chip.name} multiplies FP8: 1x32 scales folded (path={gemm.path!r}); changed elements are counted"
        return Route("blocks", "folded", "tiles", _KERNELS[library]["folded"], True, reason)
    # Other casts write codes, which are decoded later.
    left, right = ("values" if family in WRITES_VALUES else "codes" for family in families)
    return route._replace(lhs=left, rhs=right)


@functools.lru_cache(4096)
def route_between(
    lhs: Encoding | None, rhs: Encoding | None, chip: Chip | None, accumulate: str = "split", path: str = "auto",
    library: str = "torch",
) -> Route:  # fmt: skip
    """The route of a GEMM of two operands that exist as codes; None = an operand in high precision."""
    kernels = _KERNELS[library]

    def route(kind: str, reason: str, *sizes: object, accelerated: bool = False, kernel: str = "") -> Route:
        return Route(kind, "codes", "codes", kernels[kernel or kind].format(*sizes), accelerated, reason)

    if lhs is None and rhs is None:
        reason = "the recipe keeps this GEMM in high precision; it runs in the compute dtype"
        return route("plain", reason, accelerated=True, kernel="high precision")
    if lhs is None or rhs is None:
        if rhs is not None and chip is not None and chip.multiplies_stored_codes:
            most = most_decoded_rows(chip.capability == (9, 0) and library == "torch")
            reason = f"the recipe keeps x in high precision: up to {most} rows of it read the weight's codes as stored"
            return route("stored", reason if chip.is_tried else f"{reason}; {UNTRIED}", most)
        return route("plain", _ONE_WIDE, kernel="plain" if chip else "no chip, plain")
    if accumulate == "exact":
        if chip is None or library == "xla":
            return route("float64", "accumulate='exact' multiplies and sums in float64")
        needed = "accumulate='exact' is for the reference backend: sums of tensor cores are not exact"
        return Route("refused", "codes", "codes", "-", False, needed)
    if chip is None:
        return route("float32", "plain operations decode and multiply it in float32", kernel="no chip")
    a, b = lhs.format, rhs.format
    foreign = [fmt.element.name for fmt in (a, b) if fmt.element.name not in ELEMENTS]
    if foreign:
        reason = f"{foreign[0]} is not one of the stock elements: plain operations cast, decode and multiply it"
        return route("float32", reason)
    if a.element == b.element == E5M2:  # recipes cannot ask for it, stored operands can
        kind = "values" if a.scale.name == b.scale.name == "E8M0" else "float32"
        return route(kind, "no hardware multiplies E5M2 by E5M2")
    are_fp8, multiplies = a.element.bits == b.element.bits == 8, f"{chip.name} multiplies FP8 on tensor cores"
    here = chip.name if library == "torch" else f"XLA on {chip.name}"
    lacks = f"{here} has no" if chip.is_known else f"{here} is none that microfloat knows, so it gets no"
    if is_outer(a) and is_outer(b):
        if are_fp8 and chip.has_fp8:
            return route("fp8", multiplies, a.block_text, b.block_text, accelerated=True)
        missing = f"{lacks} FP8 tensor cores" if are_fp8 else "no GEMM multiplies these codes"
        return route("values", f"{missing}; {_NO_FASTER}", kernel="scaled values")
    if library == "torch" and are_fp8 and chip.has_fp8_blocks and _are_fp8_blocks(a, b):
        return route("blocks", multiplies, a.block_text, b.block_text, accelerated=True)
    if chip.has_block_scales and _are_block_scaled(lhs, rhs, library):
        as_mx = " as MXFP8, exactly: scales are powers of two" if a.scale.name == "FP32" else " on tensor cores"
        return route("block_scaled", f"{chip.name} multiplies it{as_mx}; {UNTRIED}", a.name, b.name, accelerated=True)
    if all(one.format.scale.name != "FP32" or one.power_of_two for one in (lhs, rhs)):
        reason = f"{lacks} block-scaled GEMM for {a.name} x {b.name}; {_NO_FASTER}"
        if path == "folded" and library == "xla":
            reason += "; folding is not offered here, since XLA has no dot with one scale for 128"
        return route("values", reason)
    return route("float32", f"{lacks} GEMM with one float32 scale for each block of {a.name} x {b.name}")


def is_outer(fmt: ScaledFormat) -> bool:
    """One FP32 scale per tensor or row, which multiplies the finished sum."""
    return fmt.scale.name == "FP32" and fmt.block in ((None, None), (1, None))


def _are_fp8_blocks(a: ScaledFormat, b: ScaledFormat) -> bool:
    """FP32 scales that Hopper's GEMM takes: 1x128, by 1x128 or 128x128."""
    blocks_of_b = ((1, _SIDE), (_SIDE, _SIDE))
    return a.scale.name == b.scale.name == "FP32" and a.block == (1, _SIDE) and b.block in blocks_of_b


def _are_mx(a: ScaledFormat, b: ScaledFormat) -> bool:
    return a.scale.name == b.scale.name == "E8M0" and a.block == b.block == (1, 32)


def _are_block_scaled(lhs: Encoding, rhs: Encoding, library: str) -> bool:
    """Operands for Blackwell's tensor cores, as the library's GEMM takes them."""
    a, b = lhs.format, rhs.format
    if library == "xla":  # jax.nn.scaled_matmul: FP8 by FP8 or FP4 by FP4; row scales follow
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
    return a.scale == b.scale and (
        _are_mx(a, b)
        or all(
            fmt.scale.name == "E4M3" and fmt.block in ((1, 16), (16, 16)) and fmt.tensor_scale != "row"
            for fmt in (a, b)
        )
    )


class OwnGemm(NamedTuple):
    """The cut of a program of microfloat's FP8 GEMM with 1x128 scales: warpgroups that multiply, parts of 64 rows of
    each, stages of its ring, rows of tiles to go down before the next column, registers of a multiplying thread."""

    warpgroups: int
    parts: int
    stages: int
    group: int
    registers: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C that one program makes at a time."""
        return 64 * self.warpgroups * self.parts, 128


# By whether the second operand has 128x128 scales ("tiles"); chosen by measurement.
OWN_GEMMS = {False: OwnGemm(2, 2, 4, 8, 240), True: OwnGemm(3, 1, 4, 8, 160)}
# Where it was measured to win: E4M3 to bfloat16 (the kernel's other forms have not run on a GPU yet), long sums, many
# products, and tiles that keep all multiprocessors busy to the end.
_LEAST_LENGTH, _LEAST_PRODUCTS, _LEAST_FILL = 4096, 2**38, 0.95


def own_gemm_is_faster(shape: tuple[int, int, int], tiles: bool, chip: Chip, processors: int = 132) -> bool:
    """True if microfloat's FP8 GEMM serves a product of M, K, N with a bfloat16 result and beats the vendor's.

    On compute capability 9.0, M a multiple of 4, K and N of 16; from 2^38 products and K of 4096 on, where tiles of C
    come in nearly whole rounds of `processors`. `tiles`: the second operand has 128x128 scales.
    """
    m, k, n = shape
    if chip.capability != (9, 0) or m * k * n < _LEAST_PRODUCTS or k < _LEAST_LENGTH:
        return False
    if m % 4 or (k | n) % 16 or m * k >= 2**37 or n * k >= 2**37:
        return False
    rows, columns = OWN_GEMMS[tiles].tile
    rounds = -(-(-(-m // rows) * -(-n // columns)) // processors)
    # The part of all multiprocessors' time that goes into elements of C, if every tile takes equally long.
    return m * n / (rounds * processors * rows * columns) >= _LEAST_FILL
