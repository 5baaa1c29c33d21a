"""`microfloat formats`: the bits of every format, its values, and single codes decoded and encoded."""

import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from microfloat.cli.output import Column, Output, decibel, number, percent
from microfloat.errors import invalid_value, unknown_name
from microfloat.formats import ELEMENTS, FORMATS, ElementFormat, decode, encode, get_element, get_format

# OCP's power-of-two scale, which is no element: no sign, no zero, 255 is NaN.
E8M0 = "E8M0"

_ELEMENT_COLUMNS = (
    Column("name"), Column("bits", right=True), Column("layout"), Column("bias", right=True),
    Column("max", text=number, right=True), Column("min_normal", "min\nnormal", text=number, right=True),
    Column("min_subnormal", "min\nsubnormal", text=number, right=True), Column("infinity"), Column("nan", "NaN"),
)  # fmt: skip
_FORMAT_COLUMNS = (
    Column("name"), Column("element"), Column("block"), Column("scale"), Column("tensor_scale", "tensor\nscale"),
    Column("scale_rule", "scale\nrule"),
    Column("bits_per_element", "bits per\nelement", text=number, right=True),
)  # fmt: skip
_CODE_COLUMNS = (Column("code"), Column("bits"), Column("value", text=number, right=True), Column("kind"))
_VALUE_COLUMNS = (
    Column("input", text=number, right=True), *_CODE_COLUMNS,
    Column("relative_error", "error", text=percent, right=True), Column("below", text=number, right=True),
    Column("above", text=number, right=True), Column("saturated"),
)  # fmt: skip
_FIT_COLUMNS = (
    Column("format"), Column("scale_rule", "scale\nrule"),
    Column("bits_per_element", "bits per\nelement", text=number, right=True),
    Column("sqnr_db", "SQNR\ndB", text=decibel, right=True), Column("bias", text=percent, right=True),
    Column("underflow", text=percent, right=True), Column("clip", text=percent, right=True),
)  # fmt: skip
_MOST = 1 << 20  # values that are measured


def formats(
    output: Output,
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME | decode CODE... | encode VALUE...]", show_default=False,
                       help="A format or an element such as nvfp4 or e4m3; or codes to decode, or values to encode."),
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="List every value of the element.")] = False,
    as_: Annotated[
        str, typer.Option("--as", metavar="ELEMENT", help="Element to decode or encode: e2m1, e4m3, e8m0, ...")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the number lines, or the errors with --on.")
    ] = None,
    on: Annotated[
        Path | None, typer.Option("--on", metavar="FILE", help="Measure formats on an .npy file or a --tensor.")
    ] = None,
    tensor: Annotated[str, typer.Option("--tensor", metavar="NAME", help="The tensor of a checkpoint for --on.")] = "",
) -> None:  # fmt: skip
    """Show formats: bit layout, values, blocks and scales; decode and encode single codes; measure a tensor.

    \b
    microfloat formats
    microfloat formats nvfp4
    microfloat formats e4m3 --values --plot e4m3.png
    microfloat formats decode 0x3C --as e4m3
    microfloat formats encode 1.7 -0.3 --as e2m1
    microfloat formats nvfp4 int4:fp32:1x32 --on weights.npy --plot errors.png
    """
    first, *rest = what or [""]
    if stray := next((word for word in what or () if re.match(r"-(?![\d.]|inf|nan)", word, re.IGNORECASE)), None):
        raise invalid_value("option", stray, "--values, --as, --plot, --on, --tensor, --json, --no-color or --quiet")
    if on is not None or tensor:
        if on is None or values or as_:
            raise invalid_value("--on", "no file" if on is None else "--values or --as", "formats, and --on FILE alone")
        _compare(output, [name.lower() for name in what or FORMATS], on, tensor, plot)
        return
    if first in ("decode", "encode"):
        if values or plot:
            raise invalid_value(f"formats {first}", "--values or --plot", "codes or values, and --as ELEMENT")
        (_decode if first == "decode" else _encode)(output, rest, as_)
        return
    if as_:
        remedy = f"Try: microfloat formats decode 0x3C --as {as_}"
        raise invalid_value("--as", as_, "decode or encode before it", remedy)
    if rest:
        raise invalid_value("formats", " ".join(what or ()), "one name, or decode or encode before several codes")
    if first.upper() == E8M0 and (values or plot):
        remedy = "Try: decode 127 --as e8m0"
        raise invalid_value(f"formats {first}", "--values or --plot", "an element for them", remedy)
    shown = _overview(output, first)
    if values:
        _print_values(output, shown)
    if plot:
        from microfloat.pictures import relative_gaps, save

        output.drew(save(relative_gaps(shown), plot))


def _compare(output: Output, names: list[str], path: Path, tensor: str, plot: Path | None) -> None:
    """A table of what formats make of at most about 2^20 values of a tensor, and the picture."""
    from microfloat import checkpoint
    from microfloat.cli.survey import sampled
    from microfloat.pictures.comparison import compare

    if path.suffix.lower() == ".npy":
        try:
            array = np.load(path)
        except ValueError as error:
            raise invalid_value("--on", path, "an array of numbers", str(error)) from None
        record = checkpoint.Record(path.name, array, logical_shape=array.shape)
    else:
        found = checkpoint.load(path)
        if tensor not in found:
            raise unknown_name("--tensor", tensor, found)
        record = found[tensor]
    *_, columns = record.logical_shape or (1,)
    whole = len(record.logical_shape) < 2
    made = compare(record.dequantize(np.float32) if whole else sampled(record, max(128, _MOST // columns)), names)
    rows = [{key: value for key, value in one._asdict().items() if key != "values"} for one in made.fits]
    title = f"{record.name}: {made.x.size:,} of {int(np.prod(record.logical_shape)):,} values"
    output.table("comparison", rows, _FIT_COLUMNS, title)
    if plot:
        made.draw(plot)
        output.drew(plot)


def _overview(output: Output, name: str) -> list[ElementFormat]:
    """Show the tables of one name, or of all formats without a name; returns the elements."""
    scaled, elements = list(FORMATS.values()), list(ELEMENTS.values())
    if re.fullmatch(r"(e\d+m|int)\d+", name, re.IGNORECASE) and name.upper() != E8M0:
        element = get_element(name, "NAME")
        scaled, elements = [fmt for fmt in scaled if fmt.element == element], [element]
    elif name.lower() in FORMATS or ":" in name:
        scaled = [get_format(name.lower())]
        elements = [scaled[0].element]
    elif name.upper() == E8M0:
        scaled, elements = [fmt for fmt in scaled if fmt.scale.name == E8M0], []
    elif name:
        raise unknown_name("NAME", name, [*ELEMENTS, *FORMATS, E8M0])
    if elements:
        rows = [
            {
                "name": one.name, "bits": one.bits, "layout": _layout(one), "bias": one.bias, "max": one.max,
                "min_normal": one.min_normal, "min_subnormal": one.step, "infinity": one.has_inf, "nan": one.has_nan,
            }
            for one in elements
        ]  # fmt: skip
        output.table("elements", rows, _ELEMENT_COLUMNS, "Elements")
    else:
        output.put(elements=[])
        output.say("E8M0 is a scale: the byte b, 0 to 254, is 2^(b - 127); 255 is NaN. It has no sign and no zero.")
    rows = [
        {
            "name": fmt.name, "element": fmt.element.name, "block": fmt.block_text, "scale": fmt.scale.name,
            "tensor_scale": fmt.tensor_scale, "scale_rule": fmt.default_scale_rule,
            "bits_per_element": fmt.bits_per_element,
        }
        for fmt in scaled
    ]  # fmt: skip
    output.table("formats", rows, _FORMAT_COLUMNS, "Formats: elements and their scales")
    if name:
        output.say("value = element x scale x tensor scale; S sign, E exponent, M mantissa.")
    return elements


def _layout(element: ElementFormat) -> str:
    return f"S {'E' * element.exponent_bits} {'M' * element.mantissa_bits}"


def _print_values(output: Output, elements: list[ElementFormat]) -> None:
    """A line for each exponent and a column for each mantissa; in JSON a row for each code."""
    every = {element.name: [_code_row(code, element) for code in range(1 << element.bits)] for element in elements}
    output.put(values=every)
    for element in elements:
        codes = np.arange(element.sign_code, dtype=np.uint8).reshape(-1, 1 << element.mantissa_bits)
        rows = [
            {"exponent": f"{exponent:0{element.exponent_bits}b}", **{str(m): float(v) for m, v in enumerate(line)}}
            for exponent, line in enumerate(decode(codes, element))
        ]
        mantissas = [f"{mantissa:0{element.mantissa_bits}b}" for mantissa in range(codes.shape[1])]
        columns = [Column(str(m), bits, number, right=True) for m, bits in enumerate(mantissas)]
        title = f"{element.name}: exponents down, mantissas across; the sign bit is {element.sign_code:#04x}"
        output.table(None, rows, [Column("exponent"), *columns], title)


def _element(name: str) -> ElementFormat:
    """The element of that name, or the one of a scaled format."""
    if not name:
        raise invalid_value("--as", "nothing", "an element such as e4m3 or e2m1", "Add --as e4m3.")
    if name.lower() in FORMATS or ":" in name:
        return get_format(name.lower()).element
    return get_element(name, "--as")


def _decode(output: Output, texts: list[str], name: str) -> None:
    if not texts:
        raise invalid_value("formats decode", "no code", "codes such as 0x3C, 60 or 0b111100")
    if name.upper() == E8M0:
        codes = [_code(text, 8, E8M0) for text in texts]
        rows = [
            {"code": f"{c:#04x}", "bits": f"{c:08b}", "value": 2.0 ** (c - 127) if c < 255 else np.nan} for c in codes
        ]
        output.table("codes", rows, (Column("code"), Column("bits"), Column("value", text=number, right=True)), "E8M0")
        return
    element = _element(name)
    rows = [_code_row(_code(text, element.bits, element.name), element) for text in texts]
    output.table("codes", rows, _CODE_COLUMNS, f"{element.name}: {_layout(element)}")


def _code(text: str, bits: int, name: str) -> int:
    needed = f"a code of {name}, 0 to {(1 << bits) - 1:#x}, such as 0x2 or 0b101"
    try:
        code = int(text, 0)
    except ValueError:
        raise invalid_value("CODE", repr(text), needed) from None
    if not 0 <= code < 1 << bits:
        raise invalid_value("CODE", text, needed)
    return code


def _code_row(code: int, element: ElementFormat) -> dict[str, Any]:
    """The fields and the value of one code."""
    sign, magnitude = divmod(code, element.sign_code)
    exponent, mantissa = divmod(magnitude, 1 << element.mantissa_bits)
    value = float(decode(np.array([code], np.uint8), element)[0])
    if not np.isfinite(value):
        kind = "NaN" if np.isnan(value) else "infinity"
    else:
        kind = "normal" if exponent else "subnormal" if mantissa else "zero"
    return {
        "code": f"{code:#0{4 if element.bits > 4 else 3}x}",
        "bits": f"{sign} {exponent:0{element.exponent_bits}b} {mantissa:0{element.mantissa_bits}b}",
        "value": value, "kind": kind,
    }  # fmt: skip


def _encode(output: Output, texts: list[str], name: str) -> None:
    if not texts:
        raise invalid_value("formats encode", "no value", "values such as 1.7 or -0.3")
    if name.upper() == E8M0:
        fix = "Ask for an element, or decode 127 --as e8m0."
        raise invalid_value("--as", name, "an element: the scale rule of a cast chooses powers of two", fix)
    element = _element(name)
    rows = [_value_row(text, element) for text in texts]
    output.table("values", rows, _VALUE_COLUMNS, f"{element.name}, nearest, ties to even")


def _value_row(text: str, element: ElementFormat) -> dict[str, Any]:
    """The code of a value, its error, and the values of the format around it."""
    try:
        value = float(text)
    except ValueError:
        raise invalid_value("VALUE", repr(text), "a number such as 1.7, -3e-4, inf or nan") from None
    with np.errstate(over="ignore"):
        code = int(encode(np.array([value]).astype(np.float32), element)[0])
    row = _code_row(code, element)
    finite = decode(np.arange(1 << element.bits, dtype=np.uint8), element)
    # One zero, and a positive one: which of the two `unique` keeps depends on the processor's way of sorting.
    finite = np.unique(finite[np.isfinite(finite)] + 0.0).astype(np.float64)
    below, above = finite[finite <= value], finite[finite >= value]
    error = (row["value"] - value) / value if value and np.isfinite([value, row["value"]]).all() else None
    return {
        "input": value, **row, "relative_error": 0.0 if value == row["value"] else error,
        "below": float(below[-1]) if below.size else None, "above": float(above[0]) if above.size else None,
        "saturated": bool(abs(value) > element.max),
    }  # fmt: skip
