"""FP8 of DeepSeek-V3 and of transformers, and MXFP4 of gpt-oss. `weight_scale_inv` multiplies, despite its name."""

from dataclasses import replace

from microfloat.checkpoint.container import Container, byte_shape
from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Entry, Family, decode_parts
from microfloat.checkpoint.records import Record, Stored
from microfloat.formats import MXFP4

_INV = "_scale_inv"


def _joined(stored: Stored) -> Stored:
    """Codes [.., groups, 16] as [.., groups * 16]: the 16 bytes of a block stand on an axis of their own."""
    shape = byte_shape(stored)
    return stored._replace(dtype="U8", shape=(*shape[:-2], shape[-2] * shape[-1]))


def decode_blocks(entry: Entry, tensors: Container) -> Record:
    """The record of gpt-oss codes [E, rows, K / 32, 16], as [E, rows, K]."""
    codes = entry.tensors["codes"]
    joined = replace(entry, tensors={**entry.tensors, "codes": _joined(codes)}) if len(codes.shape) > 1 else entry
    record = decode_parts(joined, tensors)
    assert record.source is not None
    return replace(record, source=record.source._replace(tensors=entry.tensors))


FAMILIES = (
    Family(
        "deepseek:fp8", None, ("", FP8), (_INV, REAL), input_scales=("activation_scale", "input_scale"), method="fp8",
        announced=("fp8",), writes=True,
    ),
    Family(
        "hf:finegrained_fp8", None, ("", FP8), (_INV, REAL), input_scales=("activation_scale", "input_scale"),
        method="fp8", announced=("fp8",), writes=True,
    ),
    Family("hf:ue8m0", None, ("", FP8), (_INV, E8M0), input_scales=("activation_scale",), method="fp8"),
    Family("hf:ue8m0", MXFP4, ("", BYTES), (_INV, E8M0), input_scales=("activation_scale",), method="fp8"),
    Family(
        "gptoss:hf", MXFP4, ("_blocks", ("U8",)), ("_scales", E8M0), method="mxfp4", announced=("mxfp4",), writes=True,
        decode=decode_blocks,
    ),
    Family("gptoss:original", MXFP4, (".blocks", ("U8",)), (".scales", E8M0), method="mxfp4", decode=decode_blocks),
)  # fmt: skip
