"""Flattened tensor subclasses of torchao, and our own container: both describe their tensors in the file's metadata.

torchao writes a JSON list `tensor_names`, and JSON about each of these names; scales may be in the tiles that a GPU
reads. Our container writes `microfloat`: a version, and for each quantized parameter its format, shape and activations.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from microfloat.checkpoint.container import Container, byte_shape, read_json
from microfloat.checkpoint.families.row import (
    E8M0,
    FP8,
    NO_SCHEME,
    REAL,
    Entry,
    Family,
    Scheme,
    block_grid,
    decode_parts,
    fp8_format,
    misfit,
)
from microfloat.checkpoint.families.writing import Arrays, Written, encode_parts
from microfloat.checkpoint.records import Finding, Record, Stored
from microfloat.errors import InvalidValueError, MicrofloatError
from microfloat.formats import FORMATS, MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8, MXFP8_E5M2, NVFP4, ScaledFormat
from microfloat.recipes import Cast
from microfloat.recipes._serialize import format_from_data, format_to_data
from microfloat.reference import pack_fp6, unswizzle_scales

NATIVE_KEY = "microfloat"
NATIVE_VERSION = 1
_ROLES = {"qdata": "codes", "scale": "scale", "per_tensor_scale": "tensor_scale", "act_per_tensor_scale": "input_scale"}
_MX = {
    "float8_e4m3fn": MXFP8, "float8_e5m2": MXFP8_E5M2, "fp6_e2m3": MXFP6_E2M3, "fp6_e3m2": MXFP6_E3M2,
    "float4_e2m1fn_x2": MXFP4, "fp4_e2m1": MXFP4,
}  # fmt: skip
_UNREADABLE = "The metadata of the file is damaged; write it again with its own library."


def decode_flat(entry: Entry, tensors: Container) -> Record:
    """The record of a torchao tensor: its scales out of their tiles, 6-bit codes packed."""
    record, codes, scale, fmt = (
        decode_parts(entry, tensors),
        entry.tensors["codes"],
        entry.tensors["scale"],
        entry.format,
    )
    if record.problem is not None or fmt is None:
        return record
    if entry.swizzled:
        rows, cols = block_grid(fmt, record.logical_shape)
        if scale.nbytes != 512 * -(-rows // 128) * -(-cols // 4):
            return replace(record, problem=misfit(entry))
        record = replace(record, scale=unswizzle_scales(tensors.raw(scale).reshape(-1), rows, cols))
    if fmt.element.bits == 6 and record.codes.shape == record.logical_shape:
        if (record.codes > 63).any():
            message = f"{codes.name} has bytes above 63, but holds one 6-bit code in each."
            return replace(record, problem=Finding("shape", "error", entry.name, message, _UNREADABLE))
        record = replace(record, codes=pack_fp6(record.codes))
    return record


def encode_native(family: Family, record: Record, dtype: np.dtype) -> Arrays:
    """The tensors of a record, its scales in the shapes that the record has; a tensor scale multiplies."""
    made = encode_parts(family, record, dtype)
    scale = f"{record.name}_scale"
    if record.scale is not None:
        made[scale] = made[scale].reshape(record.scale.shape)
    if record.tensor_scale is not None:
        made[f"{record.name}_tensor_scale"] = np.asarray(record.tensor_scale, np.float32)
    return made


FAMILIES = (
    Family("torchao", None, ("_qdata", ()), ("_scale", (*REAL, *E8M0, "F8_E4M3")), decode=decode_flat),
    Family(
        "microfloat:native", None, ("", ()), ("_scale", (*REAL, *E8M0, "F8_E4M3")), encode=encode_native,
        writes={f"microfloat:{fmt.name}": Written(Cast(fmt), stacked="any") for fmt in FORMATS.values()},
    ),
)  # fmt: skip
_TORCHAO, NATIVE = FAMILIES


def entries_of(tensors: Container) -> tuple[list[Entry], list[Finding]]:
    """The parameters that the metadata describes, and what is wrong with the metadata."""
    found: list[Finding] = []
    entries = [*_flat_entries(tensors, found), *_native_entries(tensors, found)]
    return entries, found


def _parsed(tensors: Container, key: str, kind: type, found: list[Finding]) -> Any:
    """The JSON under a key of the metadata, an empty `kind` where it is none."""
    text = tensors.metadata.get(key)
    if text is None:
        return kind()
    value, problems = read_json(text.encode("utf-8", "replace"), key)
    found += problems
    if not isinstance(value, kind):
        found.append(_broken(key, f"is no JSON {'list' if kind is list else 'object'}"))
        return kind()
    return value


def _broken(name: str, what: str) -> Finding:
    return Finding("metadata", "error", name, f"the metadata of this tensor {what}.", _UNREADABLE)


def _flat_entries(tensors: Container, found: list[Finding]) -> Iterator[Entry]:
    for name in dict.fromkeys(map(str, _parsed(tensors, "tensor_names", list, found))):
        about = _parsed(tensors, name, dict, found)
        kind, data, parts = about.get("_type"), about.get("_data"), about.get("_tensor_data_names")
        if kind == "Tensor" or name not in tensors.metadata:
            continue
        if (
            not isinstance(data, dict)
            or not isinstance(parts, list)
            or not all(part in _ROLES for part in map(str, parts))
        ):
            found.append(_broken(name, f"describes a {str(kind)[:60]!r} that is not read"))
            continue
        folder, _, leaf = name.rpartition(".")
        prefix = f"{folder}._{leaf}_" if folder else f"_{leaf}_"
        stored = {_ROLES[part]: tensors.stored[prefix + part] for part in parts if prefix + part in tensors.stored}
        if "codes" not in stored or len(stored) < len(parts):
            absent = ", ".join(prefix + part for part in parts if prefix + part not in tensors.stored)
            found.append(
                Finding("missing-scale", "error", name, f"the file lacks {absent or 'its codes'}.", _UNREADABLE)
            )
            continue
        made = _flat_format(str(kind), data, stored)
        if made is None:
            found.append(_broken(name, f"describes a {str(kind)[:60]!r} that does not fit its tensors"))
            continue
        fmt, shape = made
        swizzled = data.get("is_swizzled_scales") is True and len(shape) == 2
        yield Entry(name, _TORCHAO, stored, candidates=("torchao",), format=fmt, shape=shape, swizzled=swizzled)


def _flat_format(kind: str, data: Mapping[str, Any], stored: Mapping[str, Stored]) -> tuple[ScaledFormat, Any] | None:
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
        made = fp8_format(codes.dtype, scale.dtype, shape, byte_shape(scale), None if plain else (size[-2], size[-1]))
        return (made[0], shape) if made else None
    return None


# ---- microfloat's own container ----------------------------------------------------------------------------------


def native_metadata(records: Mapping[str, Record]) -> str:
    """The value of the metadata key `microfloat` for quantized records."""
    about: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        if record.format is None:
            continue
        about[name] = {"format": format_to_data(record.format), "shape": list(record.logical_shape)}
        scheme, of_input = record.activation.get("scheme", "none"), record.activation.get("format")
        if scheme == "static" and record.activation.get("scale") is None:
            continue
        if scheme != "none" and of_input is not None:
            about[name]["activation"] = {"scheme": scheme, "format": format_to_data(of_input)}
    return json.dumps({"version": NATIVE_VERSION, "tensors": about}, sort_keys=True)


def _native_entries(tensors: Container, found: list[Finding]) -> Iterator[Entry]:
    about = _parsed(tensors, NATIVE_KEY, dict, found)
    if not about:
        return
    listed = about.get("tensors")
    if about.get("version") != NATIVE_VERSION or not isinstance(listed, dict):
        message = f"is of version {str(about.get('version'))[:20]}; this reader knows {NATIVE_VERSION}"
        found.append(_broken(NATIVE_KEY, message))
        return
    for name, entry in listed.items():
        codes, shape = tensors.stored.get(name), entry.get("shape") if isinstance(entry, dict) else None
        scheme = NO_SCHEME
        try:
            fmt, of_input = format_from_data(entry["format"]), entry.get("activation")
            if of_input is not None:
                scheme = _activation(of_input["scheme"], format_from_data(of_input["format"]))
        except (MicrofloatError, KeyError, TypeError) as error:
            found.append(_broken(name, f"names no format: {str(error)[:200]}"))
            continue
        if codes is None or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            found.append(_broken(name, "names no tensor of the file, or no shape"))
            continue
        roles = {"codes": name, "scale": f"{name}_scale", "tensor_scale": f"{name}_tensor_scale"}
        module = re.sub(r"(^|(?<=\.))weight$", "", name)
        roles["input_scale"] = f"{module}input_scale" if module != name else f"{name}_input_scale"
        stored = {role: tensors.stored[key] for role, key in roles.items() if key in tensors.stored}
        yield Entry(name, NATIVE, stored, scheme=scheme, candidates=(NATIVE.name,), format=fmt, shape=tuple(shape))


def _activation(scheme: object, fmt: ScaledFormat) -> Scheme:
    if scheme not in ("static", "dynamic"):
        raise InvalidValueError(f"activation scheme {str(scheme)[:20]!r}")
    return Scheme(activation=str(scheme), activation_format=fmt)
