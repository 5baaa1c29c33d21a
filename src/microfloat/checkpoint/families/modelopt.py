"""ModelOpt, the format of TensorRT-LLM, also read by vLLM and SGLang. Global scales multiply: amax / (448 * 6)."""

from typing import Any

from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Family
from microfloat.checkpoint.families.writing import Configuration, Manifest, Written
from microfloat.errors import invalid_value
from microfloat.formats import FP8_TENSOR, MXFP4, MXFP8, NVFP4, ScaledFormat
from microfloat.recipes import Cast

_METHOD = "modelopt"
_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}


def _algorithm(fmt: ScaledFormat, scheme: str) -> dict[str, Any]:
    """The words for the layers of a format: its quant_algo, and its group size where blocks have one."""
    if fmt == NVFP4:
        return {"quant_algo": "W4A16_NVFP4" if scheme == "none" else "NVFP4", "group_size": 16}
    return {"quant_algo": "MXFP8", "group_size": 32} if fmt == MXFP8 else {"quant_algo": "FP8"}


def configure(manifest: Manifest) -> Configuration:
    """config.json and hf_quant_config.json, which say the same twice; a table of layers where formats differ.

    The algorithm FP8 means static inputs, but for groups in config.json that name none: weight-only FP8 is announced
    there alone, and cannot stand beside other algorithms.
    """
    bare = [modules for (fmt, scheme, _), modules in manifest.kinds.items() if fmt == FP8_TENSOR and scheme != "static"]
    if bare and len(manifest.kinds) > 1:
        raise invalid_value(
            bare[0][0], "FP8 weights without a static input scale, beside others",
            "such a scale, which modelopt:fp8 announces",
            "Measure it with mf.calibrate, or store the layer in high precision.",
        )  # fmt: skip
    algorithms = [(_algorithm(fmt, scheme), modules) for (fmt, scheme, _), modules in manifest.kinds.items()]
    words: dict[str, Any] = dict(algorithms[0][0]) if len(algorithms) == 1 else {"quant_algo": "MIXED_PRECISION"}
    if len(algorithms) > 1:
        words["quantized_layers"] = {name: made for made, modules in algorithms for name in sorted(modules)}
    second = {
        "quant_algo": words["quant_algo"], "kv_cache_quant_algo": "FP8" if manifest.kv_cache else None,
        **{key: value for key, value in words.items() if key != "quant_algo"}, "exclude_modules": manifest.ignore,
    }  # fmt: skip
    first: dict[str, Any] = {"ignore": manifest.ignore, "quant_algo": words["quant_algo"]}
    if manifest.kv_cache:
        first["kv_cache_scheme"] = _CACHE
    if len(algorithms) > 1:
        first["quantized_layers"] = words["quantized_layers"]
    elif words["quant_algo"] != "MXFP8":
        size = {key: value for key, value in words.items() if key == "group_size"}
        made = {"dynamic": False, "num_bits": 4 if size else 8, "type": "float", **size}
        groups = {"weights": made, "targets": ["Linear"]}
        if words["quant_algo"] != "W4A16_NVFP4" and not bare:
            groups["input_activations"] = dict(made)
        first["config_groups"] = {"group_0": groups}
    producer = dict(manifest.producer)
    return Configuration(
        {**first, "producer": producer, "quant_method": _METHOD},
        {} if bare else {"hf_quant_config.json": {"producer": producer, "quantization": second}},
    )


FAMILIES = (
    Family(
        "modelopt:nvfp4", NVFP4, ("", BYTES), ("_scale", ("F8_E4M3",)), "_scale_2", method=_METHOD,
        announced=("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD"),
        writes={"modelopt:nvfp4": Written(Cast(NVFP4))}, configure=configure,
    ),
    Family(
        "modelopt:w4a8_nvfp4_fp8", NVFP4, ("", BYTES), ("_scale", ("F8_E4M3",)), "_scale_2", method=_METHOD,
        announced=("W4A8_NVFP4_FP8",),
    ),
    Family(
        "modelopt:fp8", None, ("", FP8), ("_scale", REAL), method=_METHOD, announced=("FP8",),
        writes={"modelopt:fp8": Written(Cast(FP8_TENSOR, "amax"), "static", FP8_TENSOR, joint=True)},
        configure=configure,
    ),
    Family(
        "modelopt:fp8_pc_pt", None, ("", FP8), ("_scale", REAL), method=_METHOD,
        announced=("FP8_PER_CHANNEL_PER_TOKEN",),
    ),
    Family("modelopt:fp8_pb_wo", None, ("", FP8), ("_scale", REAL), method=_METHOD, announced=("FP8_PB_WO",)),
    Family(
        "modelopt:mxfp8", MXFP8, ("", FP8), ("_scale", E8M0), method=_METHOD, announced=("MXFP8",),
        writes={"modelopt:mxfp8": Written(Cast(MXFP8), "dynamic", MXFP8)}, configure=configure,
    ),
    Family(
        "modelopt:mxfp4", MXFP4, ("", BYTES), ("_scale", E8M0), method=_METHOD,
        announced=("MXFP4", "W4A8_MXFP4_FP8", "W4A16_MXFP4"),
    ),
)  # fmt: skip
