"""Flattened tensor subclasses of torchao, which the metadata of the file describes.

It holds a JSON list `tensor_names`, and JSON about each of these names; scales may be in the tiles that a GPU reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from microfloat.checkpoint.container import Container, byte_shape
from microfloat.checkpoint.families import row
from microfloat.checkpoint.families.dialect import UNREADABLE, Announcement, Dialect, broken_metadata, metadata_of
from microfloat.checkpoint.families.row import E8M0, FP8, REAL, Entry, Family, Scheme
from microfloat.checkpoint.records import Finding, Record, Stored
from microfloat.formats import FORMATS, NVFP4, ScaledFormat
from microfloat.reference import pack_fp6, unswizzle_scales

_ROLES = {"qdata": "codes", "scale": "scale", "per_tensor_scale": "tensor_scale", "act_per_tensor_scale": "input_scale"}
_ELEMENTS = {
    "float8_e4m3fn": "mxfp8", "float8_e5m2": "mxfp8_e5m2", "fp6_e2m3": "mxfp6_e2m3", "fp6_e3m2": "mxfp6_e3m2",
    "float4_e2m1fn_x2": "mxfp4", "fp4_e2m1": "mxfp4",
}  # fmt: skip
_MX = {name: FORMATS[fmt] for name, fmt in _ELEMENTS.items()}
_INPUTS = {**_MX, "PerRow": FORMATS["fp8_row"], "PerTensor": FORMATS["fp8_tensor"]}
_READ = "NVFP4Tensor, MXTensor, Float8Tensor"


def read(file: str, config: dict[str, Any]) -> Announcement:
    """The configuration of torchao, which names the method alone; the metadata of the file describes the tensors."""
    return Announcement(file, "torchao", "quant_method 'torchao'", general=Scheme(("torchao",)), ignore=None)


def decode(entry: Entry, tensors: Container) -> Record:
    """The record of a torchao tensor: its scales out of their tiles, 6-bit codes packed."""
    record, fmt = row.decode_parts(entry, tensors), entry.format
    codes, scale = entry.tensors["codes"], entry.tensors["scale"]
    if record.problem is not None or fmt is None:
        return record
    if entry.swizzled:
        rows, cols = row.block_grid(fmt, record.logical_shape)
        if scale.nbytes != 512 * -(-rows // 128) * -(-cols // 4):
            return replace(record, problem=row.misfit(entry))
        record = replace(record, scale=unswizzle_scales(tensors.raw(scale).reshape(-1), rows, cols))
    if fmt.element.bits == 6 and record.codes.shape == record.logical_shape:
        if (record.codes > 63).any():
            message = f"{codes.name} has bytes above 63, but holds one 6-bit code in each."
            return replace(record, problem=Finding("shape", "error", entry.name, message, UNREADABLE))
        record = replace(record, codes=pack_fp6(record.codes))
    return record


def parameters(tensors: Container, found: list[Finding]) -> Iterator[Entry]:
    """The tensors that `tensor_names` lists, each described by JSON under its own name."""
    listed = map(str, metadata_of(tensors, "tensor_names", list, found))  # of the last file, where each has its own
    others = (key for key, text in tensors.metadata.items() if '"_tensor_data_names"' in text)
    for name in dict.fromkeys((*listed, *others)):
        about = metadata_of(tensors, name, dict, found)
        kind, data, parts = about.get("_type"), about.get("_data"), about.get("_tensor_data_names")
        if kind == "Tensor" or name not in tensors.metadata:
            continue
        if not isinstance(data, dict) or not isinstance(parts, list):
            found.append(broken_metadata(name, f"says nothing of the parts of a {str(kind)[:60]!r}"))
            continue
        if kind not in _READ.split(", ") or not all(part in _ROLES for part in map(str, parts)):
            message = f"a {str(kind)[:60]!r} of {', '.join(map(str, parts))[:100]} is not read; read are {_READ}."
            found.append(Finding("unsupported", "error", name, message, "Convert it with its own library."))
            continue
        folder, _, leaf = name.rpartition(".")
        prefix = f"{folder}._{leaf}_" if folder else f"_{leaf}_"
        stored = {_ROLES[part]: tensors.stored[prefix + part] for part in parts if prefix + part in tensors.stored}
        if "codes" not in stored or len(stored) < len(parts):
            absent = ", ".join(prefix + part for part in parts if prefix + part not in tensors.stored)
            message = f"the file lacks {absent or 'its codes'}."
            found.append(Finding("missing-scale", "error", name, message, UNREADABLE))
            continue
        made = _format_of(str(kind), data, stored)
        if made is None:
            found.append(broken_metadata(name, f"describes a {str(kind)[:60]!r} that does not fit its tensors"))
            continue
        fmt, shape = made
        swizzled = data.get("is_swizzled_scales") is True and len(shape) == 2
        yield Entry(
            name, FAMILIES[0], stored, scheme=_scheme(data.get("act_quant_kwargs"), fmt), candidates=("torchao",),
            format=fmt, shape=shape, swizzled=swizzled,
        )  # fmt: skip


def _scheme(inputs: Any, fmt: ScaledFormat) -> Scheme:
    """The activations of a tensor: as they come, in the format that its `act_quant_kwargs` describe, or none."""
    if not isinstance(inputs, dict):
        return Scheme(activation="none")
    described = inputs.get("_data")
    described = described if isinstance(described, dict) else {}
    parts = (described.get("elem_dtype"), described.get("granularity"))
    names = [str(one.get(key)) for one, key in zip(parts, ("_data", "_type"), strict=True) if isinstance(one, dict)]
    of_input = next((_INPUTS[name] for name in names if name in _INPUTS), fmt)
    return Scheme(activation="dynamic", activation_format=of_input)


def _format_of(kind: str, data: Mapping[str, Any], stored: Mapping[str, Stored]) -> tuple[ScaledFormat, Any] | None:
    """Format and logical shape of a torchao tensor, or None where metadata and tensors do not fit."""
    codes, scale = stored["codes"], stored.get("scale")
    shape = byte_shape(codes)
    if scale is None or not shape:
        return None
    if kind == "NVFP4Tensor":
        fits = data.get("block_size") == 16 and scale.dtype == "F8_E4M3" and codes.dtype in ("U8", "F4")
        return (NVFP4, (*shape[:-1], 2 * shape[-1])) if fits else None
    if kind == "MXTensor":
        element = data.get("elem_dtype")
        element = element.get("_data") if isinstance(element, dict) else element
        fmt = _MX.get(element) if isinstance(element, str) else None
        if fmt is None or data.get("block_size") != 32 or scale.dtype not in E8M0:
            return None
        if codes.dtype not in (FP8 if fmt.element.bits == 8 else ("U8", "F4")):
            return None
        return fmt, (*shape[:-1], 2 * shape[-1]) if fmt.element.bits == 4 else shape
    if kind == "Float8Tensor" and codes.dtype in FP8 and scale.dtype in REAL:
        size = data.get("block_size")
        if not isinstance(size, list) or len(size) != len(shape) or not all(type(n) is int and n > 0 for n in size):
            return None
        plain = len(shape) < 2 or (size[-1] >= shape[-1] and (size[-2] == 1 or size[-2] >= shape[-2]))
        tile = None if plain else (size[-2], size[-1])
        made = row.fp8_format(codes.dtype, scale.dtype, shape, byte_shape(scale), tile)
        return (made[0], shape) if made else None
    return None


FAMILIES = (Family("torchao", None, ("_qdata", ()), ("_scale", (*REAL, *E8M0, "F8_E4M3")), decode=decode),)
DIALECT = Dialect(
    FAMILIES, ("torchao",), read=read, parameters=parameters,
    evidence=("tensor_names", "metadata: tensor_names, as torchao writes it"),
)  # fmt: skip
