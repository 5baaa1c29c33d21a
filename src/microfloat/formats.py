"""Element, scale and scaled formats as rows of numbers, and the exact encode and decode of one element.

A *scaled format* is an element format (the codes), a scale format (what one block shares) and a block shape.
Code reads ``fmt.element.max`` or ``fmt.block``; nothing here is a class hierarchy (docs/numerics.md, sections 1 and 7).
"""

import functools
import json
import math
import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from microfloat.arguments import check_bool, check_choice, check_int, check_name, check_number
from microfloat.errors import InvalidValueError, invalid_type, invalid_value, unknown_name

__all__ = [
    "E2M1", "E2M3", "E3M2", "E4M3", "E5M2",
    "ELEMENTS", "FORMATS",
    "FP8_1x128", "FP8_1x128_E5M2", "FP8_128x128", "FP8_128x128_E5M2",
    "FP8_ROW", "FP8_ROW_E5M2", "FP8_TENSOR", "FP8_TENSOR_E5M2",
    "MXFP4", "MXFP6_E2M3", "MXFP6_E3M2", "MXFP8", "MXFP8_E5M2",
    "NVFP4", "NVFP4_2D", "NVFP4_ROW",
    "SCALE_E4M3", "SCALE_E8M0", "SCALE_FP32",
    "ElementFormat", "ScaleFormat", "ScaledFormat",
    "decode", "encode", "get_element", "get_format", "get_scale",
]  # fmt: skip


# The stock elements by name, written below; their names stand for their numbers everywhere.
ELEMENTS: dict[str, "ElementFormat"] = {}
# Magnitudes lie in [2^-60, 2^60] and the largest is 4 or more, so that the factor max / amax, its reciprocal and the
# powers of two of E8M0 are normal float32 numbers for every amax. A scale takes up any other choice of the bias.
_LARGEST_EXPONENT = 60
_LEAST_MAX = 4.0
_LARGEST_BLOCK = 1 << 30
# Bits, exponent bits, mantissa bits and bias of the stock scale formats; their names stand for their numbers.
_SCALES = {"E8M0": (8, 8, 0, 127), "E4M3": (8, 4, 3, 7), "FP32": (32, 8, 23, 127)}
# Those of a user's own that are powers of two lie in [2^-126, 2^126], and they and their reciprocals are normal float32
# numbers; others lie in [2^-60, 2^60] with a largest one of 1 or more, as elements do.


@dataclass(frozen=True)
class ElementFormat:
    """A sign-magnitude float of at most 8 bits: ``(-1)^s * (2^mb + m) * 2^(e - bias - mb)``, subnormal at e = 0.

    `max` is the largest finite value, a normal one; encoding saturates to it. Above it are no codes without `has_inf`
    and `has_nan`, codes of NaN with `has_nan` alone, and with both those of the largest exponent, where mantissa 0 is
    infinity. `max` is 4 or more (a scale takes up any other choice of `bias`), magnitudes lie in [2^-60, 2^60], and the
    names of the stock elements stand for their numbers alone. Without mantissa bits the values are powers of two and
    zero; with one exponent bit they are multiples of one step, integers of sign and magnitude. Raises InvalidTypeError
    and InvalidValueError, which name the field and a call that is accepted.
    Source: OCP Microscaling Formats v1.0, section 5.3; docs/numerics.md 1.1.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool
    has_nan: bool

    def __post_init__(self) -> None:
        check_name("ElementFormat.name", self.name)
        check_bool("ElementFormat.has_inf", self.has_inf)
        check_bool("ElementFormat.has_nan", self.has_nan)
        try:
            self._check_numbers()
        except InvalidValueError as error:
            raise InvalidValueError(f"{error} {self._remedy()}".strip()) from None
        stock = ELEMENTS.get(self.name)
        if stock is not None and stock != self:
            got = f"{self.name!r} for other numbers than those of the stock element"
            raise invalid_value("ElementFormat.name", got, "a name of its own")

    def _check_numbers(self) -> None:
        """Widths and bias are in range, `max` is a normal value, and the codes above it are infinity and NaN alone."""
        check_int("ElementFormat.exponent_bits", self.exponent_bits, 1, 6)
        check_int("ElementFormat.mantissa_bits", self.mantissa_bits, 0, 6)
        if not 4 <= self.bits <= 8:
            raise invalid_value("ElementFormat", f"{self.bits} bits", "4 to 8 bits (1 + exponent_bits + mantissa_bits)")
        check_int("ElementFormat.bias", self.bias, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        limit = 2.0**_LARGEST_EXPONENT
        needed = f"the largest finite value, a number in [{_LEAST_MAX:g}, 2^{_LARGEST_EXPONENT}]"
        object.__setattr__(self, "max", check_number("ElementFormat.max", self.max, needed, _LEAST_MAX, limit))
        if self.step < 1 / limit:
            needed = f"one with which the smallest value is at least 2^-{_LARGEST_EXPONENT}"
            raise invalid_value("ElementFormat.bias", self.bias, needed)
        codes = range(1 << self.mantissa_bits, self.sign_code)  # of the normal values
        if self.max_code not in codes or self._magnitude(self.max_code) != self.max:
            needed = f"a normal value of E{self.exponent_bits}M{self.mantissa_bits} with bias {self.bias}"
            raise invalid_value("ElementFormat.max", f"{self.max:g}", needed)
        above = self.sign_code - 1 - self.max_code
        taken = 1 << self.mantissa_bits if self.has_inf else above if self.has_nan else 0
        unnamed = self.has_inf and not (self.has_nan and self.mantissa_bits)
        if above != taken or (self.has_nan and not above) or unnamed:
            got = f"{self.max:g} with {above} codes above it, has_inf={self.has_inf}, has_nan={self.has_nan}"
            needed = (
                "no code above max without infinity and NaN, at least one with NaN alone, "
                "those of the largest exponent, two or more, with infinity and NaN (never infinity alone)"
            )
            raise invalid_value("ElementFormat.max", got, needed)

    def _remedy(self) -> str:
        """A call that is accepted, as near as possible: with the same `max` or else the nearest bias and value."""
        if any(type(one) not in (int, float) for one in (*vars(self).values(),) if not isinstance(one, str | bool)):
            return ""
        exponent = min(max(self.exponent_bits, 1), 6)
        mantissa = min(max(self.mantissa_bits, 0), 6, 7 - exponent)
        exponent = max(exponent, 3 - mantissa)
        has_inf = self.has_inf and mantissa > 0 and exponent > 1
        has_nan, largest = self.has_nan or has_inf, 2.0**_LARGEST_EXPONENT
        top = (1 << exponent + mantissa) - 1 - ((1 << mantissa) if has_inf else has_nan)
        aim = min(float(self.max), largest) if abs(self.max) <= largest else largest
        *_, bias, value = min(
            (value != aim, abs(bias - self.bias), abs(value - aim), bias, value)
            for bias in range(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT + 1, 62 - mantissa))
            for code in range(1 << mantissa if has_nan and not has_inf else top, top + 1)
            if _LEAST_MAX
            <= (value := ((code % (1 << mantissa)) + (1 << mantissa)) * 2.0 ** ((code >> mantissa) - bias - mantissa))
            <= largest
        )
        return (
            f"Accepted: ElementFormat({self.name!r}, {exponent}, {mantissa}, bias={bias}, max={value!r}, "
            f"has_inf={has_inf}, has_nan={has_nan})."
        )

    def _magnitude(self, code: int) -> float:
        """The value of a positive code, were all codes numbers."""
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        whole = mantissa + (1 << self.mantissa_bits if exponent else 0)
        return whole * 2.0 ** (max(exponent, 1) - self.bias - self.mantissa_bits)

    @functools.cached_property
    def bits(self) -> int:
        """Width of a code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_code(self) -> int:
        """The sign bit of a code."""
        return 1 << (self.bits - 1)

    @property
    def emax(self) -> int:
        """Exponent of `max`: floor(log2(max))."""
        return math.frexp(self.max)[1] - 1

    @property
    def max_code(self) -> int:
        """The positive code of `max`."""
        fraction = self.max / 2.0**self.emax - 1.0
        return ((self.emax + self.bias) << self.mantissa_bits) + int(fraction * (1 << self.mantissa_bits))

    @property
    def nan_code(self) -> int:
        """The code written for NaN: all magnitude bits set where the format has NaN, else the code of `max`."""
        return self.sign_code - 1 if self.has_nan else self.max_code

    @property
    def min_normal(self) -> float:
        """Smallest normal magnitude, 2^(1 - bias)."""
        return 2.0 ** (1 - self.bias)

    @property
    def step(self) -> float:
        """The subnormal step, 2^(1 - bias - mantissa_bits): the smallest non-zero magnitude."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def codes_per_byte(self) -> int:
        """Two for 4-bit elements (packed in memory), one otherwise."""
        return 2 if self.bits == 4 else 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ScaleFormat:
    """The scale that one block shares, an unsigned float of a byte, or float32; it multiplies on the way out.

    Values are those of an ElementFormat without its sign, ``m * 2^(1 - bias - mb)`` at e = 0; without mantissa bits
    they are ``2^(e - bias)`` throughout, and there is no zero. The last code is NaN. ``ScaleFormat("UE5M3",
    exponent_bits=5, mantissa_bits=3, bias=15)`` is one of a user's own; `bits` are those that are stored. The names of
    the stock formats stand for their numbers. Raises InvalidTypeError and InvalidValueError, which name the field.
    Source: docs/numerics.md 1.3.
    """

    name: str
    bits: int | None = None
    exponent_bits: int | None = None
    mantissa_bits: int | None = None
    bias: int | None = None

    def __post_init__(self) -> None:
        check_name("ScaleFormat.name", self.name)
        given = {name: getattr(self, name) for name in ScaleFormat.__match_args__[1:]}
        for name, value in given.items():
            if value is not None:
                check_int(f"ScaleFormat.{name}", value, -127, 127)
        stock = _SCALES.get(self.name)
        if stock is not None:
            if any(one not in (None, known) for one, known in zip(given.values(), stock, strict=True)):
                got = f"{self.name!r} for other numbers than those of the stock scale, {stock}"
                raise invalid_value("ScaleFormat.name", got, "a name of its own")
            vars(self).update(zip(given, stock, strict=True))
            return
        exponent, mantissa, bias = self.exponent_bits, self.mantissa_bits, self.bias
        if exponent is None or mantissa is None or bias is None:
            needed = f"the numbers of a format of your own, or the name of a stock one, {', '.join(_SCALES)}"
            remedy = 'Accepted: ScaleFormat("UE5M3", exponent_bits=5, mantissa_bits=3, bias=15).'
            raise invalid_value("ScaleFormat.name", f"{self.name!r} with {given}", needed, remedy)
        if exponent < 1 or mantissa < 0 or not 3 <= exponent + mantissa <= 8:
            needed = "1 or more + 0 or more, 3 to 8 in all"
            raise invalid_value("ScaleFormat.exponent_bits + mantissa_bits", f"{exponent} + {mantissa}", needed)
        vars(self).update(bits=check_int("ScaleFormat.bits", self.bits or exponent + mantissa, exponent + mantissa, 8))
        top = (1 << exponent) - 1
        low, high = (top - 59, min(61 - mantissa, top)) if mantissa else (top - 127, 126)
        if low > high:
            needed = "6 or less with mantissa bits, 7 or less without them, or SCALE_E8M0 itself"
            raise invalid_value("ScaleFormat.exponent_bits", exponent, needed)
        check_int("ScaleFormat.bias", bias, low, high)

    @property
    def kind(self) -> str:
        """The kind of rules that write it: "ratio" for float32, "threshold" for powers of two, else "two_level"."""
        return "ratio" if self.bits == 32 else "two_level" if self.mantissa_bits else "threshold"

    @property
    def dtype(self) -> np.dtype:
        """NumPy dtype of stored scales: float32 for FP32, else uint8 bytes."""
        return np.dtype(np.float32 if self.bits == 32 else np.uint8)

    @functools.cached_property
    def element(self) -> ElementFormat:
        """The element whose magnitudes are the values of a scale with a mantissa, of up to 9 bits with its sign."""
        if self.name in ELEMENTS:
            return ELEMENTS[self.name]
        made = object.__new__(ElementFormat)  # unchecked, since it may have 9 bits
        fields = (f"scale {self.name}", self.exponent_bits, self.mantissa_bits, self.bias, 0.0, False, True)
        vars(made).update(zip(ElementFormat.__match_args__, fields, strict=True))
        object.__setattr__(made, "max", made._magnitude(made.sign_code - 2))
        return made

    @property
    def nan_code(self) -> int:
        """The code of NaN, the last one."""
        return (1 << (self.exponent_bits or 0) + (self.mantissa_bits or 0)) - 1

    @property
    def lowest(self) -> int:
        """Exponent field in float32 of code 0 of a power of two: of the code c it is ``c + lowest``."""
        return 127 - (self.bias or 0)

    def values(self, scales: np.ndarray) -> np.ndarray:
        """float32 values of stored scales; those of bytes that are no codes are NaN."""
        return scales if self.bits == 32 else self._table[scales]

    @functools.cached_property
    def _table(self) -> np.ndarray:
        codes = np.arange(256 if self.name in ELEMENTS else self.nan_code)
        known = np.ldexp(1.0, codes - (self.bias or 0)) if self.kind == "threshold" else decode(codes, self.element)
        return np.append(known, np.full(256 - len(codes), np.nan)).astype(np.float32)

    def __str__(self) -> str:
        return self.name


def contents_of_format(name: str, element: tuple, scale: tuple, block: tuple, tensor_scale: str | None) -> str:
    """The `contents` of a ScaledFormat as JSON; `element` and `scale` are pairs of names and values."""
    parts = {"name": name, "element": dict(element), "scale": dict(scale), "block": block, "tensor_scale": tensor_scale}
    return json.dumps(parts, sort_keys=True)


# Compiled code may build formats: Dynamo follows their constructor, and takes the function for a constant.
contents_of_format._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ScaledFormat:
    """Elements, the scale that a block of them shares, and the block's shape ``(rows, columns)``.

    Columns run along the contraction axis; ``None`` means the whole extent: ``(1, None)`` is one scale per row,
    ``(None, None)`` one per tensor. `tensor_scale` is None, "tensor" or "row": a second, FP32 scale.
    Raises InvalidValueError for a block or tensor_scale that cannot exist.
    """

    name: str
    element: ElementFormat
    scale: ScaleFormat
    block: tuple[int | None, int | None]
    tensor_scale: str | None = None

    def __post_init__(self) -> None:
        check_name("ScaledFormat.name", self.name)
        if not isinstance(self.element, ElementFormat):
            raise invalid_type("ScaledFormat.element", type(self.element), "an ElementFormat such as formats.E4M3")
        if not isinstance(self.scale, ScaleFormat):
            raise invalid_type("ScaledFormat.scale", type(self.scale), "a ScaleFormat such as formats.SCALE_E8M0")
        is_pair = isinstance(self.block, tuple | list) and len(self.block) == 2
        sizes_fine = is_pair and all(
            size is None or (isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= _LARGEST_BLOCK)
            for size in self.block
        )
        if not sizes_fine or (self.block[0] is None and self.block[1] is not None):
            needed = "(rows, columns) with positive sizes; (1, None) = per row, (None, None) = per tensor"
            raise invalid_value("ScaledFormat.block", self.block, needed)
        object.__setattr__(self, "block", tuple(self.block))
        if self.tensor_scale is not None:
            check_choice("ScaledFormat.tensor_scale", self.tensor_scale, ("tensor", "row"))
        if self.tensor_scale is not None and self.scale.kind != "two_level":
            raise invalid_value(
                "ScaledFormat.tensor_scale", repr(self.tensor_scale), "None for this scale format",
                "Only E4M3 block scales, and others with a mantissa, need a second scale.",
            )  # fmt: skip
        if self.tensor_scale == "row" and self.block[0] != 1:
            got, needed = "'row' with a tile of several rows", "a block of one row, such as (1, 16)"
            raise invalid_value("ScaledFormat.tensor_scale", got, needed)
        element, scale = (
            tuple([(name, getattr(part, name)) for name in type(part).__dataclass_fields__])
            for part in (self.element, self.scale)
        )
        if self.scale.name in _SCALES:
            scale = scale[:2]  # which say all of a stock one
        # Beside the fields, since Dynamo rebuilds a dataclass from its fields; it guards a string, but takes no
        # dataclass for a constant.
        contents = contents_of_format(self.name, element, scale, self.block, self.tensor_scale)
        object.__setattr__(self, "_contents", contents)

    @property
    def contents(self) -> str:
        """All numbers of the format, as JSON."""
        return self._contents  # type: ignore[attr-defined]

    @property
    def is_per_tensor(self) -> bool:
        """One scale for the whole tensor."""
        return self.block == (None, None)

    @property
    def is_tile(self) -> bool:
        """Blocks span several rows, so scales are 2-D over the flattened rows."""
        return self.block[0] is not None and self.block[0] > 1

    @property
    def transposes(self) -> bool:
        """The transposed tensor has the transposed codes and scales (square or per-tensor blocks)."""
        return self.block[0] == self.block[1]

    @property
    def default_scale_rule(self) -> str:
        """The rule that ``Cast(format)`` uses (docs/numerics.md, section 7.1)."""
        if self.scale.kind == "threshold":
            return "even" if self.element.bits == 4 else "rceil"
        if self.scale.kind == "two_level":
            stock = (self.element, self.scale) == (E2M1, SCALE_E4M3)
            return "two_level" if self.tensor_scale else "one_level_e4m3" if stock else "one_level"
        return "amax" if self.is_per_tensor else "amax_pow2"

    @property
    def bits_per_element(self) -> float:
        """Bits of an element and its share of the block's scale; scales of whole rows and tensors count nothing."""
        rows, cols = self.block
        return self.element.bits + ((self.scale.bits or 0) / (rows * cols) if rows and cols else 0.0)

    @property
    def block_text(self) -> str:
        """The block as people write it: "1x32", "row", "tensor"."""
        if self.is_per_tensor:
            return "tensor"
        return "row" if self.block == (1, None) else f"{self.block[0]}x{self.block[1]}"

    def __str__(self) -> str:
        return self.name


E4M3 = ElementFormat("E4M3", 4, 3, bias=7, max=448.0, has_inf=False, has_nan=True)
E5M2 = ElementFormat("E5M2", 5, 2, bias=15, max=57344.0, has_inf=True, has_nan=True)
E3M2 = ElementFormat("E3M2", 3, 2, bias=3, max=28.0, has_inf=False, has_nan=False)
E2M3 = ElementFormat("E2M3", 2, 3, bias=1, max=7.5, has_inf=False, has_nan=False)
E2M1 = ElementFormat("E2M1", 2, 1, bias=1, max=6.0, has_inf=False, has_nan=False)
ELEMENTS.update((element.name, element) for element in (E4M3, E5M2, E3M2, E2M3, E2M1))

SCALE_E8M0 = ScaleFormat("E8M0")
SCALE_E4M3 = ScaleFormat("E4M3")
SCALE_FP32 = ScaleFormat("FP32")

FP8_TENSOR = ScaledFormat("fp8_tensor", E4M3, SCALE_FP32, (None, None))
FP8_TENSOR_E5M2 = ScaledFormat("fp8_tensor_e5m2", E5M2, SCALE_FP32, (None, None))
FP8_ROW = ScaledFormat("fp8_row", E4M3, SCALE_FP32, (1, None))
FP8_ROW_E5M2 = ScaledFormat("fp8_row_e5m2", E5M2, SCALE_FP32, (1, None))
FP8_1x128 = ScaledFormat("fp8_1x128", E4M3, SCALE_FP32, (1, 128))
FP8_1x128_E5M2 = ScaledFormat("fp8_1x128_e5m2", E5M2, SCALE_FP32, (1, 128))
FP8_128x128 = ScaledFormat("fp8_128x128", E4M3, SCALE_FP32, (128, 128))
FP8_128x128_E5M2 = ScaledFormat("fp8_128x128_e5m2", E5M2, SCALE_FP32, (128, 128))
MXFP8 = ScaledFormat("mxfp8", E4M3, SCALE_E8M0, (1, 32))
MXFP8_E5M2 = ScaledFormat("mxfp8_e5m2", E5M2, SCALE_E8M0, (1, 32))
MXFP6_E2M3 = ScaledFormat("mxfp6_e2m3", E2M3, SCALE_E8M0, (1, 32))
MXFP6_E3M2 = ScaledFormat("mxfp6_e3m2", E3M2, SCALE_E8M0, (1, 32))
MXFP4 = ScaledFormat("mxfp4", E2M1, SCALE_E8M0, (1, 32))
NVFP4 = ScaledFormat("nvfp4", E2M1, SCALE_E4M3, (1, 16), "tensor")
NVFP4_ROW = ScaledFormat("nvfp4_row", E2M1, SCALE_E4M3, (1, 16), "row")
NVFP4_2D = ScaledFormat("nvfp4_2d", E2M1, SCALE_E4M3, (16, 16), "tensor")
FORMATS = {fmt.name: fmt for fmt in tuple(globals().values()) if isinstance(fmt, ScaledFormat)}


ELEMENT_NAME = re.compile(r"E([2-6])M([0-6])|INT([4-8])", re.IGNORECASE)


def get_element(element: ElementFormat | str, argument: str = "element") -> ElementFormat:
    """The ElementFormat itself, or the one of a name in any case: a stock one, or one that its name says.

    "E3M4" has 3 exponent and 4 mantissa bits, the bias 2^(3-1) - 1, and neither infinity nor NaN; "INT4" has the
    integers from -7 to 7 as sign and magnitude.
    """
    if isinstance(element, ElementFormat):
        return element
    if not isinstance(element, str):
        raise invalid_type(argument, type(element), "an ElementFormat or its name, such as 'E4M3'")
    name = element.upper()
    said = ELEMENT_NAME.fullmatch(name)
    exponent, mantissa = (int(said[1] or 1), int(said[2] or int(said[3] or 0) - 2)) if said else (0, 0)
    if name in ELEMENTS or not 3 <= exponent + mantissa <= 7:
        if name not in ELEMENTS:
            listed = f"{', '.join(ELEMENTS)}, EXMY with X from 2 to 6 and 4 to 8 bits in all, or INT4 to INT8"
            raise unknown_name(argument, element, [*ELEMENTS, "INT8"], listed=listed)
        return ELEMENTS[name]
    bias = (1 << exponent - 1) - 1 if exponent > 1 else 1 - mantissa
    largest = (2.0 - 2.0**-mantissa) * 2.0 ** ((1 << exponent) - 1 - bias)
    return ElementFormat(name, exponent, mantissa, bias, largest, False, False)


def get_scale(scale: str) -> ScaleFormat:
    """The stock ScaleFormat of a name in any case, or the one that it says: "UE5M3" has the bias 2^(5-1) - 1."""
    name = str(scale).upper()
    stock = name.removeprefix("U")
    said = re.fullmatch(r"U?E([2-7])M([0-6])", name)
    if stock not in _SCALES and not said:
        listed = f"{', '.join(_SCALES)}, or UEXMY with X from 2 to 7 and 3 to 8 bits in all"
        raise unknown_name("scale", scale, [*_SCALES, "UE5M3"], listed=listed)
    if stock in _SCALES or not said:
        return ScaleFormat(stock)
    return ScaleFormat(name, None, int(said[1]), int(said[2]), (1 << int(said[1]) - 1) - 1)


def get_format(name: str, argument: str = "name") -> ScaledFormat:
    """The stock ScaledFormat of a lower-case name such as "mxfp8", or the one that parts say.

    They are ELEMENT:SCALE:BLOCK, and perhaps the tensor scale: "int4:fp32:1x32", "e2m1:ue5m3:1x16:tensor",
    "e3m0:e8m0:row".
    """
    if not isinstance(name, str):
        raise invalid_type(argument, type(name), "a format name such as 'mxfp8'")
    if name in FORMATS:
        return FORMATS[name]
    if not 3 <= len(parts := name.split(":")) <= 4:
        raise unknown_name(argument, name, FORMATS, _PARTS if len(parts) > 1 or ELEMENT_NAME.fullmatch(name) else "")
    blocks: dict[str, tuple] = {"row": (1, None), "tensor": (None, None)}
    size = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", parts[2])
    if not size and parts[2] not in blocks:
        raise invalid_value("block", repr(parts[2]), "ROWSxCOLUMNS such as 1x32, row, or tensor", _PARTS)
    block = (int(size[1]), int(size[2])) if size else blocks[parts[2]]
    return ScaledFormat(name, get_element(parts[0]), get_scale(parts[1]), block, *parts[3:])


_PARTS = "The parts of a format are ELEMENT:SCALE:BLOCK[:tensor|row], such as int4:fp32:1x32 or e2m1:ue5m3:1x16:tensor."


def encode(values_f32: np.ndarray, element: ElementFormat | str) -> np.ndarray:
    """Round float32 values to codes: nearest, ties to the even code, saturating; NaN becomes `element.nan_code`.

    ``code = sign | min(round_to_even(|y| / step(y)), max_code)``, computed on integer bits, so the result does not
    depend on the floating-point environment. Input: numbers of any shape, converted to float32; output: uint8 codes of
    that shape, one per byte (unpacked). Raises InvalidTypeError for what is no number. Source: docs/numerics.md 1.2.
    """
    element = get_element(element)
    values = np.asarray(values_f32)
    if values.dtype.kind not in "fiu" and values.dtype != ml_dtypes.bfloat16:
        raise invalid_type("values_f32", values.dtype, "float32 values")
    with np.errstate(all="ignore"):  # float64 beyond the float32 range becomes infinity, then saturates
        return encode_bits(values.astype(np.float32), element, None)


def encode_bits(values_f32: np.ndarray, element: ElementFormat, random_bytes: np.ndarray | None) -> np.ndarray:
    """`encode` in integers, or stochastic rounding by `random_bytes`, 0..255 per value (docs/numerics.md 5.4)."""
    # Parts that stay in a processor's cache take a seventh of the time for millions of values.
    codes = np.empty(values_f32.shape, np.uint8)
    values, flat = values_f32.reshape(-1), codes.reshape(-1)
    noise = None if random_bytes is None else random_bytes.reshape(-1)
    for start in range(0, values.size, _PART):
        part = slice(start, start + _PART)
        flat[part] = _encode_part(values[part], element, None if noise is None else noise[part])
    return codes


_PART = 1 << 15  # values


def _encode_part(values_f32: np.ndarray, element: ElementFormat, random_bytes: np.ndarray | None) -> np.ndarray:
    mantissa_bits, bias = element.mantissa_bits, element.bias
    bits = values_f32.view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    exponent_field = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | ((exponent_field > 0).astype(np.int64) << 23)
    exponent = np.maximum(exponent_field, 1) - 127
    local = np.maximum(exponent, 1 - bias)
    shift = np.minimum(23 - mantissa_bits + (local - exponent), 62)
    if random_bytes is None:
        count = (significand + (np.int64(1) << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    else:
        fraction = (significand & ((np.int64(1) << shift) - 1)) >> (shift - 8)
        count = (significand >> shift) + (fraction + random_bytes.astype(np.int64) >= 256)
    code = np.where(count < (1 << mantissa_bits), count, ((local + bias - 1) << mantissa_bits) + count)
    code = np.where(magnitude >= 0x7F800000, element.max_code, np.minimum(code, element.max_code))
    code = code | np.where(bits >> 31 != 0, element.sign_code, 0)
    return np.where(magnitude > 0x7F800000, element.nan_code, code).astype(np.uint8)


def decode(codes: np.ndarray, element: ElementFormat | str) -> np.ndarray:
    """The exact float32 value of each unpacked code (uint8, any shape).

    Raises InvalidValueError for a byte with bits above the format's width, so packed data is never read as codes,
    and InvalidTypeError for anything but integers.
    """
    element = get_element(element)
    codes = np.asarray(codes)
    if codes.dtype.kind not in "ui":
        raise invalid_type("codes", codes.dtype, "uint8 codes", "View FP8 arrays as uint8 first.")
    if codes.size and (int(codes.max()) >> element.bits or int(codes.min()) < 0):
        raise invalid_value(
            "codes", f"a byte up to {int(codes.max()):#x}", f"unpacked {element.bits}-bit codes, one per byte",
            "Call reference.unpack_fp4 or unpack_fp6 on packed data first.",
        )  # fmt: skip
    return _value_table(element)[codes]


@functools.cache
def _value_table(element: ElementFormat) -> np.ndarray:
    codes = np.arange(1 << element.bits, dtype=np.int64)
    mantissa_bits = element.mantissa_bits
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes & (element.sign_code - 1)) >> mantissa_bits
    magnitude = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits)).astype(np.float64)
    values = np.ldexp(magnitude, np.maximum(exponent, 1) - element.bias - mantissa_bits)
    beyond = (codes & (element.sign_code - 1)) > element.max_code
    infinite = beyond & (mantissa == 0) if element.has_inf else np.zeros_like(beyond)
    values = np.where(infinite, np.inf, np.where(beyond & element.has_nan & ~infinite, np.nan, values))
    table = np.where(codes & element.sign_code, -values, values).astype(np.float32)
    table.setflags(write=False)
    return table
