"""ModelOpt, the format of TensorRT-LLM, also read by vLLM and SGLang. Global scales multiply: amax / (448 * 6)."""

import re
from typing import Any, NamedTuple

from microfloat.checkpoint.families.dialect import Announcement, Dialect, strings, unknown_entries
from microfloat.checkpoint.families.patterns import SHELL, SUBSTRING, Patterns
from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Family, Scheme
from microfloat.checkpoint.families.writing import Configuration, Manifest, Written
from microfloat.errors import invalid_value
from microfloat.formats import FP8_ROW, FP8_TENSOR, MXFP4, MXFP8, NVFP4, ScaledFormat
from microfloat.recipes import Cast

_METHOD = "modelopt"


class _Algorithm(NamedTuple):
    family: str
    activation: str
    format: ScaledFormat | None
    needs_scale: bool = False


_ALGORITHMS = {
    "NVFP4": _Algorithm("modelopt:nvfp4", "dynamic", NVFP4, True),
    "W4A16_NVFP4": _Algorithm("modelopt:nvfp4", "none", None),
    "NVFP4_AWQ": _Algorithm("modelopt:nvfp4", "dynamic", NVFP4, True),
    "NVFP4_SVD": _Algorithm("modelopt:nvfp4", "dynamic", NVFP4, True),
    "W4A8_NVFP4_FP8": _Algorithm("modelopt:w4a8_nvfp4_fp8", "static", FP8_TENSOR, True),
    "FP8": _Algorithm("modelopt:fp8", "static", FP8_TENSOR, True),
    "FP8_PER_CHANNEL_PER_TOKEN": _Algorithm("modelopt:fp8_pc_pt", "dynamic", FP8_ROW),
    "FP8_PB_WO": _Algorithm("modelopt:fp8_pb_wo", "none", None),
    "MXFP8": _Algorithm("modelopt:mxfp8", "dynamic", MXFP8),
    "MXFP4": _Algorithm("modelopt:mxfp4", "dynamic", MXFP4),
    "W4A16_MXFP4": _Algorithm("modelopt:mxfp4", "none", None),
    "W4A8_MXFP4_FP8": _Algorithm("modelopt:mxfp4", "dynamic", FP8_TENSOR),
}
_SUBSTRINGS_UNTIL = (0, 39)  # until this version a pattern covers every name that contains it
_KNOWN = (
    "quant_method", "quant_algo", "quantization", "kv_cache_scheme", "group_size", "producer",
    "exclude_modules", "ignore", "quantized_layers", "config_groups", "pre_quant_scale",
)  # fmt: skip


def read(file: str, config: dict[str, Any]) -> Announcement:
    """Both configurations of ModelOpt: `ignore` or `exclude_modules`, and a table of layers where algorithms differ."""
    inner = config.get("quantization")
    config = {**config, **inner} if isinstance(inner, dict) else config
    algorithm = config.get("quant_algo") or _algorithm_of(config.get("config_groups"))
    producer = config.get("producer")
    is_own = isinstance(producer, dict) and producer.get("name") == "microfloat"  # its versions count otherwise
    version = str(producer.get("version", "")) if isinstance(producer, dict) and not is_own else ""
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    part = numbers is not None and tuple(map(int, numbers.groups())) < _SUBSTRINGS_UNTIL
    patterns = strings(config.get("ignore")) or strings(config.get("exclude_modules"))
    ignore = Patterns(patterns, SUBSTRING if part else SHELL)
    layers = config.get("quantized_layers")
    rows: list[tuple[str, Any, Any]] = [("*", algorithm, config.get("group_size"))]
    if algorithm == "MIXED_PRECISION":
        table = layers.items() if isinstance(layers, dict) else ()
        rows = [(name, one.get("quant_algo"), one.get("group_size")) for name, one in table if isinstance(one, dict)]
    if algorithm is None:  # nothing but the KV cache is quantized
        rows = []
    unknown = sorted({str(one)[:60] for _, one, _ in rows if not isinstance(one, str) or one not in _ALGORITHMS})
    words = f"quant_method {_METHOD!r}, quant_algo {str(algorithm)[:60]!r}"
    if unknown:
        refusal = f"quant_algo {', '.join(map(repr, unknown))} is not read; read are {', '.join(_ALGORITHMS)}."
        return Announcement(file, _METHOD, words, ignore=ignore, refusal=refusal)
    rules = {name: _scheme(one, group) for name, one, group in rows}
    groups = config.get("config_groups")
    inner = [one if isinstance(one, dict) else {} for one in groups.values()] if isinstance(groups, dict) else []
    if "*" in rules and inner and all("weights" in one and not one.get("input_activations") for one in inner):
        words += " of weights alone"
        rules["*"] = rules["*"]._replace(activation="none", activation_format=None, needs_scale=False)
    known = (*_KNOWN, "kv_cache_quant_algo") if config.get("kv_cache_quant_algo") == "FP8" else _KNOWN
    return Announcement(
        file, _METHOD, words, rules if algorithm == "MIXED_PRECISION" else {}, rules.get("*"), ignore, SHELL,
        findings=unknown_entries(file, config, known),
    )  # fmt: skip


def _algorithm_of(groups: Any) -> str | None:
    """The algorithm of groups where no quant_algo names it; None where there are none."""
    group = next((one for one in groups.values() if isinstance(one, dict)), {}) if isinstance(groups, dict) else {}
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return None
    sizes = weights.get("num_bits"), weights.get("group_size")
    names = {(4, 16): "NVFP4", (8, None): "FP8", (8, 32): "MXFP8"}
    return next((name for pair, name in names.items() if pair == sizes), f"of groups with {sizes[0]} bits")


def _scheme(algorithm: str, group: Any) -> Scheme:
    family, activation, fmt, needs_scale = _ALGORITHMS[algorithm]
    tile = (128, 128) if family == "modelopt:fp8_pb_wo" else None
    return Scheme((family,), tile, activation, fmt, group if type(group) is int else None, needs_scale)


_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}


def _algorithm(fmt: ScaledFormat, scheme: str) -> dict[str, Any]:
    """The words for the layers of a format: its quant_algo, and its group size where blocks have one."""
    if fmt == NVFP4:
        return {"quant_algo": "W4A16_NVFP4" if scheme == "none" else "NVFP4", "group_size": 16}
    return {"quant_algo": "MXFP8", "group_size": 32} if fmt == MXFP8 else {"quant_algo": "FP8"}


def write(manifest: Manifest) -> Configuration:
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
        "modelopt:nvfp4", NVFP4, ("", BYTES), ("_scale", ("F8_E4M3",)), "_scale_2",
        writes={"modelopt:nvfp4": Written(Cast(NVFP4))},
    ),
    Family("modelopt:w4a8_nvfp4_fp8", NVFP4, ("", BYTES), ("_scale", ("F8_E4M3",)), "_scale_2"),
    Family(
        "modelopt:fp8", None, ("", FP8), ("_scale", REAL), usual=lambda shape: not shape,
        writes={"modelopt:fp8": Written(Cast(FP8_TENSOR, "amax"), "static", FP8_TENSOR, joint=True)},
    ),
    Family(
        "modelopt:fp8_pc_pt", None, ("", FP8), ("_scale", REAL),
        usual=lambda shape: len(shape) == 1 and shape != (1,),
    ),
    Family(
        "modelopt:fp8_pb_wo", None, ("", FP8), ("_scale", REAL),
        usual=lambda shape: len(shape) >= 2 and shape[-1] != 1,
    ),
    Family(
        "modelopt:mxfp8", MXFP8, ("", FP8), ("_scale", E8M0),
        writes={"modelopt:mxfp8": Written(Cast(MXFP8), "dynamic", MXFP8)},
    ),
    Family("modelopt:mxfp4", MXFP4, ("", BYTES), ("_scale", E8M0)),
)  # fmt: skip
DIALECT = Dialect(
    FAMILIES, (_METHOD, "modelopt-*"), ("quant_algo",), ("hf_quant_config.json", "quantization"), read, write,
    mixed="modelopt:mixed",
)  # fmt: skip
