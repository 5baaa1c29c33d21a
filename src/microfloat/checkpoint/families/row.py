"""The row of a family, the tensors of one parameter, and the decoding that the rows share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from microfloat.checkpoint.container import Container, byte_shape
from microfloat.checkpoint.families.writing import Arrays, Written, encode_parts, tensor_name
from microfloat.checkpoint.records import Finding, Record, Source, Stored
from microfloat.formats import E4M3, E5M2, FORMATS, SCALE_E8M0, SCALE_FP32, ElementFormat, ScaledFormat
from microfloat.layout import scale_grid

Shape = tuple[int, ...]
Fit = tuple[ScaledFormat, Shape] | None  # the format of a parameter and the shape of its record's scales; or none fits
BYTES = ("U8", "I8", "F4")
FP8 = ("F8_E4M3", "F8_E5M2")
E8M0 = ("U8", "F8_E8M0")
REAL = ("F32", "BF16", "F16", "F64")
_TILES = ((128, 128), (1, 128), (1, 32))  # of FP8 where no configuration says its tile
_LEFT_OUT = "An exporter left it out; export the model again."
_NO_SCALE = (
    "An exporter left it out, or the codes are the values themselves, cast without a scale, which is not read: export "
    "the model again, or write it in a dtype of 16 bits first."
)
_OTHER_ORDER = (
    "This order of scales is not read, which says nothing against the file; read are one scale for a tensor, a row, a "
    "tile or a block along the last axis of the weight. Convert it with its own library."
)


class Scheme(NamedTuple):
    """One module by its configuration: its families, the likeliest first, its tile, its activations.

    * `activation`: "none", "static" or "dynamic"; "" where no configuration says anything.
    * `needs_scale`: the activations need a scale that is stored.
    * `also`: other families that the words of the configuration stand for. `unread`: a format that is not read.
    """

    families: tuple[str, ...] = ()
    tile: tuple[int, int] | None = None
    activation: str = ""
    activation_format: ScaledFormat | None = None
    group: int | None = None
    needs_scale: bool = False
    also: tuple[str, ...] = ()
    unread: str = ""


NO_SCHEME = Scheme()


@dataclass(frozen=True)
class Entry:
    """The tensors of one parameter by role: "codes", "scale", "tensor_scale", "input_scale"; and its extras."""

    name: str
    family: "Family"
    tensors: Mapping[str, Stored]
    extras: Mapping[str, Stored] = field(default_factory=dict)
    scheme: Scheme = NO_SCHEME
    candidates: tuple[str, ...] = ()
    format: ScaledFormat | None = None  # where metadata states it
    shape: Shape | None = None
    swizzled: bool = False
    beside: tuple[Stored, ...] = ()  # other tensors of the module, where the scales that the family needs are missing

    @property
    def layout(self) -> Fit:
        """The format by codes and scales, and the shape of its record's scales; None where they do not fit."""
        scale = self.tensors.get("scale")
        return None if scale is None else self.family.layout_of(self.tensors["codes"], scale, self.scheme)


@dataclass(frozen=True)
class Family:
    """One row of the table: how a parameter P is stored.

    * `codes`, `scale`, `tensor_scale`: the suffix after P (after its module, where a scale begins with a point), and
      the dtypes; `tensor_scale` is None for one level.
    * `format`: None where codes and scales say it (FP8: tensor, row, tile). `divides`: global scales are divisors.
    * `input_scales`: last parts of the names of a static scale of the module's input.
    * `leaf`: the last part of P, where the codes of the file stand in its place (`up_proj.qweight`). `more`: last parts
      of the names of other tensors of the module, which `decode` reads or passes over.
    * `writes`: the casts that `convert` offers under names of targets; empty where the family is only read.
    * `scalars`: the shape of a scale of a whole tensor. `model_scales`: FP32 scales are stored in the model's dtype.
      `rank`: 3 where stacked experts alone are cast, 2 where matrices are; 0 for both.
    * `usual`: True for the shapes of scales that this producer writes, where tensors of several have the same names.
    """

    name: str
    format: ScaledFormat | None
    codes: tuple[str, tuple[str, ...]]
    scale: tuple[str, tuple[str, ...]]
    tensor_scale: str | None = None
    divides: bool = False
    input_scales: tuple[str, ...] = ("input_scale",)
    decode: "Callable[[Entry, Container], Record]" = field(default=lambda entry, tensors: decode_parts(entry, tensors))
    writes: Mapping[str, Written] = field(default_factory=dict)
    encode: "Callable[[Family, Record, np.dtype], Arrays]" = encode_parts
    scalars: Shape = ()
    model_scales: bool = False
    rank: int = 0
    usual: Callable[[Shape], bool] = lambda shape: False
    leaf: str = ""
    more: tuple[str, ...] = ()

    def holds(self, fmt: ScaledFormat) -> bool:
        """True where the family is written with this format, or with tiles of another size."""
        if self.format is not None:
            return self.format == fmt
        written = [one.cast.format for one in self.writes.values()]
        return fmt in written or any(
            other.is_tile and fmt.is_tile and (other.element, other.scale) == (fmt.element, fmt.scale)
            for other in written
        )

    def shape_of(self, codes: Stored) -> Shape:
        """Logical shape of stored codes."""
        shape = byte_shape(codes)
        bits = 8 if self.format is None else self.format.element.bits
        return (*shape[:-1], shape[-1] * 8 // bits) if shape else shape

    def layout_of(self, entry_codes: Stored, scale: Stored, scheme: Scheme) -> Fit:
        """The format of a parameter and the shape of its record's scales, or None where the shapes do not fit."""
        shape, stored = self.shape_of(entry_codes), byte_shape(scale)
        if self.format is None:
            return fp8_format(entry_codes.dtype, scale.dtype, shape, stored, scheme.tile)
        if not shape or byte_shape(entry_codes)[-1] * 8 % self.format.element.bits:
            return None
        grid = block_grid(self.format, shape)
        return (self.format, grid) if stored == grid else None


@lru_cache(4096)
def fp8_format(codes: str, scale: str, shape: Shape, stored: Shape, tile: tuple[int, int] | None) -> Fit:
    """The format of FP8 codes from the shape of their scales, and the shape that the scales of a record have.

    Tiles are those that a configuration names, counted with edges: a tile is never derived by division.
    """
    element = E5M2 if codes == "F8_E5M2" else E4M3
    bytewise = scale in E8M0
    leading, rows, length = shape[:-2], shape[-2] if len(shape) > 1 else 1, shape[-1] if shape else 1
    if len(stored) == len(leading) + 4 and stored[-3] == stored[-1] == 1:
        stored = (*stored[:-4], stored[-4], stored[-2])  # ModelOpt writes tiles as [rows, 1, columns, 1]
    count = math.prod(stored)

    def tiled(size: tuple[int, int]) -> Fit:
        grid = (*leading, -(-rows // size[0]), -(-length // size[1]))
        return (_format(element, size, bytewise), grid) if stored == grid else None

    if tile is not None and (made := tiled(tile)):
        return made
    if count == 1 or (leading and count == math.prod(leading)):
        return _format(element, (None, None), bytewise), () if count == 1 else (*leading, 1, 1)
    if stored in ((*leading, rows), (*leading, rows, 1)):
        return _format(element, (1, None), bytewise), (*leading, rows, 1)
    return next((made for size in _TILES if tile is None and (made := tiled(size))), None)


def _format(element: ElementFormat, block: tuple[int | None, int | None], bytewise: bool) -> ScaledFormat:
    """The stock format of these numbers, or one of its own name."""
    scale = SCALE_E8M0 if bytewise else SCALE_FP32
    for fmt in FORMATS.values():
        if (fmt.element, fmt.block, fmt.scale) == (element, block, scale):
            return fmt
    text = "tensor" if block == (None, None) else "row" if block == (1, None) else f"{block[0]}x{block[1]}"
    suffix = ("" if element == E4M3 else "_e5m2") + ("_e8m0" if bytewise else "")
    return ScaledFormat(f"fp8_{text}{suffix}", element, scale, block)


def decode_parts(entry: Entry, tensors: Container, read_as: Mapping[str, Stored] | None = None) -> Record:
    """The record of an entry by the numbers of its family's row; it names its `problem` where tensors do not fit.

    `read_as`: tensors of the entry by role as they are read, in another shape or dtype than they are stored in.
    """
    family, origin = entry.family, entry.tensors
    entry = replace(entry, tensors={**origin, **(read_as or {})})
    stored = entry.tensors
    codes, scale = stored["codes"], stored.get("scale")
    shape = entry.shape or family.shape_of(codes)
    divisors: Arrays = {}
    of_input = _global_scale(entry, tensors, "input_scale", divisors)
    scheme = "static" if of_input is not None else entry.scheme.activation or "none"
    record = Record(
        entry.name, tensors.raw(codes), None, None, entry.format or family.format, shape,
        activation={"scheme": scheme, "scale": of_input, "format": entry.scheme.activation_format},
        extras={name: tensors.array(extra) for name, extra in entry.extras.items()},
        source=Source(family.name, origin, divisors),
    )  # fmt: skip
    missing, fitting = missing_roles(replace(entry, tensors=origin)), None
    if scale is not None and not missing:
        fitting = _stated(entry, scale) if entry.format else family.layout_of(codes, scale, entry.scheme)
    if fitting is None or scale is None:
        problem = missing[0] if missing else misfit(entry, "scale", origin)
        return replace(record, format=record.format or FORMATS["fp8_tensor"], problem=problem)
    fmt, grid = fitting
    grid = byte_shape(scale) if entry.swizzled else grid
    level = _global_scale(entry, tensors, "tensor_scale", divisors)
    if level is not None:
        levels = (*shape[:-1], 1) if fmt.tensor_scale == "row" else (*shape[:-2], 1, 1) if level.ndim else ()
        if level.size != math.prod(levels):
            return replace(record, format=fmt, problem=misfit(entry, "tensor_scale", origin))
        level = level.reshape(levels)
    bytewise = fmt.scale.bits == 8
    scales = tensors.raw(scale) if bytewise else tensors.array(scale).astype(np.float32, copy=False)
    return replace(record, format=fmt, scale=scales.reshape(grid), tensor_scale=level)


def block_grid(fmt: ScaledFormat, shape: Shape) -> Shape:
    """Shape of the scales of a record: () per tensor, [.., R, 1] per row, else [.., one for each block]."""
    grid = scale_grid(fmt, *(1, 1, *shape)[-2:])
    return (*shape[:-2], *grid)[-max(len(shape), 1) :] if grid else ()


def _stated(entry: Entry, scale: Stored) -> Fit:
    """Format and shape of the scales where metadata states them, or None where codes or scales do not fit."""
    fmt, shape = entry.format, entry.shape or ()
    assert fmt is not None
    grid, stored, codes = block_grid(fmt, shape), byte_shape(scale), byte_shape(entry.tensors["codes"])
    width = (shape[-1] if shape else 1) * fmt.element.bits // 8
    fits = codes == (*shape[:-1], width) or (entry.family.name == "torchao" and codes == shape)
    if not shape or not fits or (fmt.scale.bits == 8) != (scale.dtype not in REAL):
        return None
    if entry.swizzled:
        return fmt, grid
    if not grid and stored == (*shape[:-2], 1, 1):
        return fmt, stored if len(shape) > 2 else ()
    return (fmt, grid) if stored == grid or (not grid and stored in ((1,), (1, 1))) else None


def _global_scale(entry: Entry, tensors: Container, role: str, divisors: Arrays) -> np.ndarray | None:
    """A multiplier of shape (), or [E, 1, 1] for experts; a stored divisor is kept in `divisors`."""
    if role not in entry.tensors:
        return None
    array = tensors.array(entry.tensors[role]).astype(np.float32, copy=False)
    array = array.reshape(()) if array.size == 1 else array.reshape(-1, 1, 1)
    if not entry.family.divides:
        return array
    divisors[role] = array
    with np.errstate(all="ignore"):
        return np.asarray(np.float32(1) / array)


def missing_roles(entry: Entry) -> list[Finding]:
    """A finding for each scale that the family needs and the checkpoint lacks; one where other tensors may hold it."""
    needed = {"scale": entry.family.scale[0], "tensor_scale": entry.family.tensor_scale}
    codes = entry.tensors["codes"]
    missing = [
        tensor_name(entry.name, suffix) for role, suffix in needed.items() if suffix and role not in entry.tensors
    ]
    if missing and entry.beside:
        shown = ", ".join(f"{one.name} {one.dtype}{list(one.shape)}" for one in entry.beside[:6])
        message = (
            f"{codes.name} {codes.dtype}{list(codes.shape)} holds codes, but none of the names of scales that are read "
            f"({missing[0]} and others) stands beside it with a dtype of scales; there are {shown}."
        )
        remedy = (
            "This layout is not known, which says nothing against the file. Convert it with its own library, or, where "
            f"one of them is the factor of the codes, rename it to {missing[0]} and name the family with format=."
        )
        return [Finding("unknown-layout", "error", entry.name, message, remedy)]
    words = f"{entry.family.name} codes ({codes.name}) without"
    remedy = _NO_SCALE if codes.dtype in FP8 and "scale" not in entry.tensors else _LEFT_OUT
    return [Finding("missing-scale", "error", entry.name, f"{words} {name}.", remedy) for name in missing]


def misfit(entry: Entry, role: str = "scale", origin: Mapping[str, Stored] | None = None) -> Finding:
    """The finding about scales of a shape that does not fit the codes; `origin`: the tensors as they are stored."""
    order = _other_order(entry, entry.tensors["codes"], entry.tensors[role])
    codes, scale = ((origin or entry.tensors)[one] for one in ("codes", role))
    tile = f", tiles of {list(entry.scheme.tile)}" if entry.scheme.tile else ""
    message = (
        f"{entry.family.name}: {scale.name} is {scale.dtype}{list(scale.shape)}, which fits no blocks of "
        f"{codes.name}, {codes.dtype}{list(codes.shape)}{tile}{order}."
    )
    return Finding("shape", "error", entry.name, message, _OTHER_ORDER)


def _other_order(entry: Entry, codes: Stored, scale: Stored) -> str:
    """The order in which scales would fit the codes, in words: turned, or padded for a kernel; or an empty text."""
    if len(scale.shape) < 2 or entry.format is not None:
        return ""
    turned = scale._replace(shape=(*scale.shape[:-2], scale.shape[-1], scale.shape[-2]))
    if entry.family.layout_of(codes, turned, entry.scheme):
        return "; they would with their last two axes swapped"
    fmt = entry.family.format
    grid = block_grid(fmt, entry.family.shape_of(codes)) if fmt else ()
    padded = tuple(-(-size // unit) * unit for size, unit in zip(grid[-2:], (128, 4), strict=False))
    return "; they seem to be padded to 128 rows and 4 columns for a kernel" if scale.shape == padded else ""
