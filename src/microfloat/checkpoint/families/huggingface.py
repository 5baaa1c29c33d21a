"""FP8 of DeepSeek-V3 and V4 and of transformers, whose MXFP8 has a method of its own.

`weight_scale_inv` multiplies, despite its name. The files of V4 call it `scale`, and hold experts of FP4 too.
"""

from typing import Any

from microfloat.checkpoint.families.dialect import Announcement, Dialect, strings, tile_of, unknown_entries, unsupported
from microfloat.checkpoint.families.patterns import PARTS, Patterns
from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Family, Scheme
from microfloat.checkpoint.families.writing import Configuration, Manifest, Written
from microfloat.formats import FP8_ROW, FP8_TENSOR, MXFP4, MXFP8, FP8_1x128, FP8_128x128
from microfloat.recipes import Cast

# The entries that only transformers writes.
_FINEGRAINED = (
    "scale_fmt", "expert_dtype", "modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize",
)  # fmt: skip
_KNOWN = ("quant_method", "activation_scheme", "weight_block_size", "fmt", "kv_cache_scheme", *_FINEGRAINED)
# The dialect of AutoFP8 and vLLM has the same method, and scales named weight_scale.
_OTHERS = (
    "deepseek:fp8", "hf:finegrained_fp8", "modelopt:fp8", "modelopt:fp8_pc_pt", "modelopt:fp8_pb_wo", "ct:fp8",
    "ct:naive", "deepseek:v4", "mistral:fp8",
)  # fmt: skip


def read(file: str, config: dict[str, Any]) -> Announcement:
    """DeepSeek-V3 and transformers share a method; keys that only transformers writes tell them apart."""
    static = config.get("activation_scheme") == "static"
    later = static or any(key in config for key in _FINEGRAINED)
    families: tuple[str, ...] = ("hf:finegrained_fp8" if later else "deepseek:fp8", "hf:ue8m0")
    if config.get("scale_fmt") == "ue8m0" or config.get("expert_dtype") == "fp4":
        families = families[::-1]
    tile = tile_of(config.get("weight_block_size"))
    fmt = FP8_TENSOR if tile is None or static else FP8_1x128
    method = str(config.get("quant_method") or "fp8").lower()
    if method == "mxfp8" or (tile == MXFP8.block and config.get("scale_fmt") == "ue8m0"):
        families, fmt, tile = ("hf:mxfp8", *families), MXFP8, tile or (1, 32)
    also = tuple(name for name in _OTHERS if name not in families)
    scheme = Scheme(families, tile, "static" if static else "dynamic", fmt, needs_scale=static, also=also)
    ignore = Patterns(strings(config.get("modules_to_not_convert")) or strings(config.get("ignored_layers")), PARTS)
    words = f"quant_method {method!r}, weight_block_size {list(tile) if tile else None}"
    findings = unknown_entries(file, config, _KNOWN)
    codes = config.get("fmt")
    if isinstance(codes, str) and "fnuz" in codes.lower():
        what = f"fmt {codes[:40]!r}: these codes mean half of what E4M3 says; they are not read."
        findings.append(unsupported(file, what))
    return Announcement(file, method, words, general=scheme, ignore=ignore, findings=findings)


def write(manifest: Manifest) -> Configuration:
    """The words of DeepSeek-V3, where modules in high precision are named if there are more than the output layer, or
    those of transformers.
    """
    kinds = list(manifest.kinds)
    tile = next((list(fmt.block) for fmt, _, _ in kinds if not fmt.is_per_tensor), None)
    scheme = "static" if all(scheme == "static" for _, scheme, _ in kinds) else "dynamic"
    made: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": tile}
    kept = manifest.ignore if set(manifest.ignore) - {"lm_head"} else None
    if manifest.family == "hf:mxfp8":
        made |= {"quant_method": "mxfp8", "weight_block_size": [1, 32], "fmt": "e4m3", "scale_fmt": "ue8m0"}
        return Configuration({**made, "ignored_layers": manifest.ignore})
    if manifest.family == "deepseek:fp8":
        named = {} if kept is None else {"modules_to_not_convert": kept}
        return Configuration({**made, "fmt": "e4m3", **named})
    made |= {"modules_to_not_convert": kept, "modules_to_convert": None, "dequantize": False}
    return Configuration({**made, "scale_fmt": "float", "expert_dtype": "fp8"})


_INV = "_scale_inv"
_TILES = Written(Cast(FP8_128x128, "amax"), "dynamic", FP8_1x128, stacked="rows")
_TENSOR = Written(Cast(FP8_TENSOR, "amax"), "dynamic", FP8_ROW)
FAMILIES = (
    Family(
        "deepseek:fp8", None, ("", FP8), (_INV, REAL), input_scales=("activation_scale", "input_scale"),
        writes={"deepseek:fp8": _TILES}, usual=lambda shape: len(shape) == 2,
    ),
    Family(
        "hf:finegrained_fp8", None, ("", FP8), (_INV, REAL), input_scales=("activation_scale", "input_scale"),
        writes={"hf:finegrained_fp8": _TILES, "hf:finegrained_fp8_tensor": _TENSOR},
        usual=lambda shape: len(shape) in (0, 2, 3),
    ),
    Family(
        "hf:mxfp8", MXFP8, ("", FP8), (_INV, E8M0), writes={"hf:mxfp8": Written(Cast(MXFP8), "dynamic", MXFP8)},
    ),
    Family("hf:ue8m0", None, ("", FP8), (_INV, E8M0), input_scales=("activation_scale",)),
    Family("hf:ue8m0", MXFP4, ("", BYTES), (_INV, E8M0), input_scales=("activation_scale",)),
    Family("deepseek:v4", None, ("", FP8), (".scale", (*E8M0, *REAL))),
    Family("deepseek:v4", MXFP4, ("", BYTES), (".scale", E8M0)),
)  # fmt: skip
DIALECT = Dialect(FAMILIES, ("fp8", "mxfp8"), ("weight_block_size", "activation_scheme"), read=read, write=write)
