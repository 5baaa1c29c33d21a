"""FP8 of FBGEMM, of Llama 3.1 405B and transformers: E4M3 codes with a float32 scale for each row.

Experts of Llama 4 are one tensor of each kind, stored [E, K, N]; their scales are [E, 1, N] or [E, N, 1].
"""

from dataclasses import replace
from typing import Any

import numpy as np

from microfloat.checkpoint.container import Container
from microfloat.checkpoint.families.dialect import Announcement, Dialect, strings, unknown_entries
from microfloat.checkpoint.families.patterns import PARTS, Patterns
from microfloat.checkpoint.families.row import REAL, Entry, Family, Scheme, decode_parts
from microfloat.checkpoint.families.writing import Arrays, Configuration, Manifest, Written, encode_parts
from microfloat.checkpoint.records import Record
from microfloat.formats import FP8_ROW
from microfloat.recipes import Cast

_METHOD = "fbgemm_fp8"
_KNOWN = ("quant_method", "activation_scale_ub", "modules_to_not_convert")
_BOUND = 1200.0  # of the largest value of an input, which transformers writes unless told otherwise


def read(file: str, config: dict[str, Any]) -> Announcement:
    """Every layer that is not named is quantized, its inputs row by row as they come."""
    ignore = Patterns(strings(config.get("modules_to_not_convert")), PARTS)
    scheme = Scheme(("fbgemm:fp8",), activation="dynamic", activation_format=FP8_ROW)
    words, findings = f"quant_method {_METHOD!r}", unknown_entries(file, config, _KNOWN)
    return Announcement(file, _METHOD, words, general=scheme, ignore=ignore, findings=findings)


def write(manifest: Manifest) -> Configuration:
    """The words of transformers."""
    words = {"quant_method": _METHOD, "activation_scale_ub": _BOUND, "modules_to_not_convert": manifest.ignore}
    return Configuration(words)


def decode(entry: Entry, tensors: Container) -> Record:
    """The record of a matrix; that of experts [E, K, N] as [E, N, K]."""
    codes, scale = entry.tensors["codes"], entry.tensors.get("scale")
    shape = codes.shape
    if len(shape) != 3 or scale is None or scale.shape not in ((shape[0], 1, shape[2]), (shape[0], shape[2], 1)):
        return decode_parts(entry, tensors)
    experts, length, rows = shape
    turned = {"codes": codes._replace(shape=(experts, rows, length)), "scale": scale._replace(shape=(experts, rows, 1))}
    return replace(decode_parts(entry, tensors, turned), codes=np.swapaxes(tensors.raw(codes), 1, 2))


def encode(family: Family, record: Record, dtype: np.dtype) -> Arrays:
    """The tensors of a record; experts [E, N, K] are turned again, and the scales of all but `down_proj`."""
    made, scale = encode_parts(family, record, dtype), f"{record.name}{family.scale[0]}"
    if len(record.logical_shape) == 3:
        made[record.name] = np.swapaxes(made[record.name], 1, 2)
        made[scale] = made[scale] if record.name.endswith("down_proj") else np.swapaxes(made[scale], 1, 2)
    return made


FAMILIES = (
    Family(
        "fbgemm:fp8", None, ("", ("F8_E4M3",)), ("_scale", REAL), decode=decode, encode=encode,
        writes={"fbgemm:fp8": Written(Cast(FP8_ROW, "amax"), "dynamic", FP8_ROW)}, rank=2,
    ),
)  # fmt: skip
DIALECT = Dialect(FAMILIES, (_METHOD,), ("activation_scale_ub",), read=read, write=write)
