"""MXFP4 of the experts of gpt-oss, as transformers and OpenAI store them."""

from typing import Any

import numpy as np

from microfloat.checkpoint.container import Container, byte_shape
from microfloat.checkpoint.families.dialect import Announcement, Dialect, strings, unknown_entries
from microfloat.checkpoint.families.patterns import PARTS, Patterns
from microfloat.checkpoint.families.row import E8M0, Entry, Family, Scheme, decode_parts
from microfloat.checkpoint.families.writing import Arrays, Configuration, Manifest, Written, encode_parts
from microfloat.checkpoint.records import Record
from microfloat.formats import MXFP4
from microfloat.recipes import Cast

_METHOD = "mxfp4"
_KNOWN = ("quant_method", "modules_to_not_convert", "dequantize")
_NOT_EXPERTS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def read(file: str, config: dict[str, Any]) -> Announcement:
    """Every layer that is not named is quantized, without its inputs."""
    ignore = Patterns(strings(config.get("modules_to_not_convert")), PARTS)
    findings = unknown_entries(file, config, _KNOWN)
    scheme = Scheme(("gptoss:hf",), activation="none")
    return Announcement(file, _METHOD, f"quant_method {_METHOD!r}", general=scheme, ignore=ignore, findings=findings)


def write(manifest: Manifest) -> Configuration:
    """Only experts are quantized; all else is named."""
    covered = (".self_attn.", ".router")
    others = [
        name for name in manifest.ignore if name not in _NOT_EXPERTS and not any(part in f"{name}." for part in covered)
    ]
    return Configuration({"quant_method": _METHOD, "modules_to_not_convert": [*_NOT_EXPERTS, *others]})


def decode(entry: Entry, tensors: Container) -> Record:
    """The record of codes [E, rows, K / 32, 16], whose blocks stand on an axis of their own, as [E, rows, K]."""
    codes, shape = entry.tensors["codes"], byte_shape(entry.tensors["codes"])
    if len(shape) > 1:
        codes = codes._replace(dtype="U8", shape=(*shape[:-2], shape[-2] * shape[-1]))
    return decode_parts(entry, tensors, {"codes": codes})


def encode(family: Family, record: Record, dtype: np.dtype) -> Arrays:
    """The tensors of a record, the 16 bytes of each block on an axis of their own."""
    made = encode_parts(family, record, dtype)
    name = record.name + family.codes[0]
    codes = made[name]
    return {**made, name: codes.reshape(*codes.shape[:-1], codes.shape[-1] // 16, 16)}


FAMILIES = (
    Family(
        "gptoss:hf", MXFP4, ("_blocks", ("U8",)), ("_scales", E8M0), decode=decode, encode=encode,
        writes={"gptoss:hf": Written(Cast(MXFP4), stacked="any")}, rank=3,
    ),
    Family("gptoss:original", MXFP4, (".blocks", ("U8",)), (".scales", E8M0), decode=decode),
)  # fmt: skip
DIALECT = Dialect(FAMILIES, (_METHOD,), read=read, write=write)
