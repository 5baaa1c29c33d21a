"""FP8 of DeepSeek-V3 and of transformers, and MXFP4 of gpt-oss. `weight_scale_inv` multiplies, despite its name."""

from dataclasses import replace

import numpy as np

from microfloat.checkpoint.container import Container, byte_shape
from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Entry, Family, decode_parts
from microfloat.checkpoint.families.writing import Arrays, Configuration, Manifest, Written, encode_parts
from microfloat.checkpoint.records import Record, Stored
from microfloat.formats import FP8_ROW, FP8_TENSOR, MXFP4, FP8_1x128, FP8_128x128
from microfloat.recipes import Cast

_INV = "_scale_inv"
_TILES = Written(Cast(FP8_128x128, "amax"), "dynamic", FP8_1x128, stacked="rows")
_TENSOR = Written(Cast(FP8_TENSOR, "amax"), "dynamic", FP8_ROW)
_NOT_EXPERTS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


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


def encode_blocks(family: Family, record: Record, dtype: np.dtype) -> Arrays:
    """The tensors of a record, the 16 bytes of each block on an axis of their own."""
    made = encode_parts(family, record, dtype)
    name = record.name + family.codes[0]
    codes = made[name]
    return {**made, name: codes.reshape(*codes.shape[:-1], codes.shape[-1] // 16, 16)}


def configure_deepseek(manifest: Manifest) -> Configuration:
    """The words of DeepSeek-V3; modules in high precision are named where there are more than the output layer."""
    kinds = list(manifest.kinds)
    tile = next((list(fmt.block) for fmt, _, _ in kinds if not fmt.is_per_tensor), None)
    scheme = "static" if all(scheme == "static" for _, scheme, _ in kinds) else "dynamic"
    made = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": tile, "fmt": "e4m3"}
    if set(manifest.ignore) - {"lm_head"}:
        made["modules_to_not_convert"] = manifest.ignore
    return Configuration(made, {})


def configure_finegrained(manifest: Manifest) -> Configuration:
    """The words of transformers."""
    made = configure_deepseek(manifest).quantization
    kept = made.get("modules_to_not_convert")
    del made["fmt"]
    return Configuration(
        {
            **made, "modules_to_not_convert": kept, "modules_to_convert": None, "dequantize": False,
            "scale_fmt": "float", "expert_dtype": "fp8",
        },
        {},
    )  # fmt: skip


def configure_gptoss(manifest: Manifest) -> Configuration:
    """Only experts are quantized; all else is named."""
    others = [name for name in manifest.ignore if name not in _NOT_EXPERTS]
    covered = (".self_attn.", ".router")
    others = [name for name in others if not any(part in f"{name}." for part in covered)]
    return Configuration({"quant_method": "mxfp4", "modules_to_not_convert": [*_NOT_EXPERTS, *others]}, {})


FAMILIES = (
    Family(
        "deepseek:fp8", None, ("", FP8), (_INV, REAL), input_scales=("activation_scale", "input_scale"), method="fp8",
        announced=("fp8",), writes={"deepseek:fp8": _TILES}, configure=configure_deepseek,
    ),
    Family(
        "hf:finegrained_fp8", None, ("", FP8), (_INV, REAL), input_scales=("activation_scale", "input_scale"),
        method="fp8", announced=("fp8",), configure=configure_finegrained,
        writes={"hf:finegrained_fp8": _TILES, "hf:finegrained_fp8_tensor": _TENSOR},
    ),
    Family("hf:ue8m0", None, ("", FP8), (_INV, E8M0), input_scales=("activation_scale",), method="fp8"),
    Family("hf:ue8m0", MXFP4, ("", BYTES), (_INV, E8M0), input_scales=("activation_scale",), method="fp8"),
    Family(
        "gptoss:hf", MXFP4, ("_blocks", ("U8",)), ("_scales", E8M0), method="mxfp4", announced=("mxfp4",),
        decode=decode_blocks, writes={"gptoss:hf": Written(Cast(MXFP4), stacked="any")}, encode=encode_blocks,
        configure=configure_gptoss, experts_only=True,
    ),
    Family("gptoss:original", MXFP4, (".blocks", ("U8",)), (".scales", E8M0), method="mxfp4", decode=decode_blocks),
)  # fmt: skip
