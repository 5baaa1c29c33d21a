"""The library's own container, for formats without a public layout; metadata of the file says what each tensor is."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from microfloat.checkpoint.container import Container, byte_shape, read_json
from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Entry, Family, decode_parts, misfit
from microfloat.checkpoint.families.writing import Written
from microfloat.checkpoint.records import Finding, Record
from microfloat.errors import MicrofloatError
from microfloat.formats import FORMATS, ElementFormat, ScaledFormat, ScaleFormat
from microfloat.layout import scale_grid
from microfloat.recipes import Cast

NAME, METADATA = "microfloat:native", "microfloat"
_VERSION = 1


def metadata_of(records: Iterable[Record]) -> dict[str, str]:
    """The metadata that describes records: the numbers of each format, and the format and shape of each parameter."""
    formats, parameters = {}, {}
    for record in records:
        if record.format is not None:
            formats[record.format.name] = json.loads(record.format.contents)
            parameters[record.name] = {"format": record.format.name, "shape": list(record.logical_shape)}
    return {METADATA: json.dumps({"version": _VERSION, "formats": formats, "parameters": parameters}, sort_keys=True)}


def entries_of(tensors: Container) -> tuple[list[Entry], list[Finding]]:
    """The parameters that the metadata describes, and what is wrong with it."""
    if METADATA not in tensors.metadata:
        return [], []
    data, found = read_json(tensors.metadata[METADATA].encode(), METADATA)
    try:
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']!r} is not read, {_VERSION} is")
        formats = {name: _format(numbers) for name, numbers in data["formats"].items()}
        entries = [
            _entry(tensors, name, formats[one["format"]], one["shape"]) for name, one in data["parameters"].items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError, MicrofloatError) as error:
        message = f"the description of the tensors is damaged: {type(error).__name__} {str(error)[:200]}."
        return [], [*found, Finding("header", "error", METADATA, message, "Write the file again.")]
    return [entry for entry in entries if entry is not None], found


def _format(numbers: dict[str, Any]) -> ScaledFormat:
    element, scale = ElementFormat(**numbers["element"]), ScaleFormat(**numbers["scale"])
    return ScaledFormat(numbers["name"], element, scale, tuple(numbers["block"]), numbers["tensor_scale"])


def _entry(tensors: Container, name: str, fmt: ScaledFormat, shape: list[int]) -> Entry | None:
    family = FAMILIES[0]
    if name not in tensors.stored:
        return None
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name} has the shape {shape}")
    suffixes = {"codes": "", "scale": family.scale[0], "tensor_scale": family.tensor_scale}
    found = {role: tensors.stored[f"{name}{end}"] for role, end in suffixes.items() if f"{name}{end}" in tensors.stored}
    if fmt.tensor_scale is None:
        found.pop("tensor_scale", None)
    return Entry(name, family, found, format=fmt, shape=tuple(shape))


def decode(entry: Entry, tensors: Container) -> Record:
    """The record of an entry, whose arrays have the shapes that its format asks for."""
    fmt, shape, scale = entry.format, entry.shape, entry.tensors.get("scale")
    assert fmt is not None
    assert shape is not None
    family = replace(entry.family, tensor_scale=entry.family.tensor_scale if fmt.tensor_scale else None)
    record = decode_parts(replace(entry, family=family), tensors)
    if scale is None or record.problem is not None or not shape:
        return record
    rows = (1, *shape)[-2]
    grid = (*shape[:-2], *(scale_grid(fmt, rows, shape[-1]) or ((1, 1) if shape[:-2] else ())))
    packed = (*shape[:-1], -(-shape[-1] * fmt.element.bits // 8))
    right = scale.dtype in ({"E8M0": E8M0, "E4M3": ("F8_E4M3",), "FP32": ("F32",)}[fmt.scale.name])
    if not right or byte_shape(entry.tensors["codes"]) != packed or np.prod(scale.shape) != np.prod(grid):
        return replace(record, problem=misfit(entry))
    return replace(record, scale=None if record.scale is None else record.scale.reshape(grid))


FAMILIES = (
    Family(
        NAME, None, ("", (*BYTES, *FP8)), ("_scale", (*E8M0, "F8_E4M3", *REAL)), "_tensor_scale", decode=decode,
        writes={f"microfloat:{fmt.name}": Written(Cast(fmt)) for fmt in FORMATS.values() if fmt.tensor_scale != "row"},
    ),
)  # fmt: skip
