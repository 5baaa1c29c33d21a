"""Our own container, for every format: the metadata of the file describes its tensors.

Its key `microfloat` holds a version, and for each quantized parameter its format, shape and activations.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from microfloat.checkpoint.container import Container
from microfloat.checkpoint.families.dialect import Dialect, broken_metadata, metadata_of
from microfloat.checkpoint.families.row import E8M0, NO_SCHEME, REAL, Entry, Family, Scheme
from microfloat.checkpoint.families.writing import Arrays, Written, encode_parts
from microfloat.checkpoint.records import Finding, Record
from microfloat.errors import InvalidValueError, MicrofloatError
from microfloat.formats import FORMATS, ScaledFormat
from microfloat.recipes import Cast
from microfloat.recipes._serialize import format_from_data, format_to_data

_KEY, _VERSION = "microfloat", 1


def parameters(tensors: Container, found: list[Finding]) -> Iterator[Entry]:
    """The tensors that the metadata describes."""
    about = metadata_of(tensors, _KEY, dict, found)
    if not about:
        return
    listed = about.get("tensors")
    if about.get("version") != _VERSION or not isinstance(listed, dict):
        message = f"is of version {str(about.get('version'))[:20]}; this reader knows {_VERSION}"
        found.append(broken_metadata(_KEY, message))
        return
    for name, entry in listed.items():
        codes, shape = tensors.stored.get(name), entry.get("shape") if isinstance(entry, dict) else None
        scheme = NO_SCHEME
        try:
            fmt, of_input = format_from_data(entry["format"]), entry.get("activation")
            if of_input is not None:
                scheme = _activation(of_input["scheme"], format_from_data(of_input["format"]))
        except (MicrofloatError, KeyError, TypeError) as error:
            found.append(broken_metadata(name, f"names no format: {str(error)[:200]}"))
            continue
        if codes is None or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            found.append(broken_metadata(name, "names no tensor of the file, or no shape"))
            continue
        roles = {"codes": name, "scale": f"{name}_scale", "tensor_scale": f"{name}_tensor_scale"}
        module = re.sub(r"(^|(?<=\.))weight$", "", name)
        roles["input_scale"] = f"{module}input_scale" if module != name else f"{name}_input_scale"
        stored = {role: tensors.stored[key] for role, key in roles.items() if key in tensors.stored}
        yield Entry(
            name, FAMILIES[0], stored, scheme=scheme, candidates=(FAMILIES[0].name,), format=fmt, shape=tuple(shape)
        )


def _activation(scheme: object, fmt: ScaledFormat) -> Scheme:
    if scheme not in ("static", "dynamic"):
        raise InvalidValueError(f"activation scheme {str(scheme)[:20]!r}")
    return Scheme(activation=str(scheme), activation_format=fmt)


def metadata(records: Iterable[Record]) -> dict[str, str]:
    """The metadata of a file with these records; it describes the quantized ones."""
    about: dict[str, dict[str, Any]] = {}
    for record in records:
        name = record.name
        if record.format is None:
            continue
        about[name] = {"format": format_to_data(record.format), "shape": list(record.logical_shape)}
        scheme, of_input = record.activation.get("scheme", "none"), record.activation.get("format")
        if scheme == "static" and record.activation.get("scale") is None:
            continue
        if scheme != "none" and of_input is not None:
            about[name]["activation"] = {"scheme": scheme, "format": format_to_data(of_input)}
    return {_KEY: json.dumps({"version": _VERSION, "tensors": about}, sort_keys=True)}


def encode(family: Family, record: Record, dtype: np.dtype) -> Arrays:
    """The tensors of a record, its scales in the shapes that the record has; a tensor scale multiplies."""
    made = encode_parts(family, record, dtype)
    scale = f"{record.name}_scale"
    if record.scale is not None:
        made[scale] = made[scale].reshape(record.scale.shape)
    if record.tensor_scale is not None:
        made[f"{record.name}_tensor_scale"] = np.asarray(record.tensor_scale, np.float32)
    return made


FAMILIES = (
    Family(
        "microfloat:native", None, ("", ()), ("_scale", (*REAL, *E8M0, "F8_E4M3")), encode=encode,
        writes={f"microfloat:{fmt.name}": Written(Cast(fmt), stacked="any") for fmt in FORMATS.values()},
    ),
)  # fmt: skip
DIALECT = Dialect(FAMILIES, parameters=parameters, metadata=metadata)
