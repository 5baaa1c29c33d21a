"""AMD Quark: MX, FP8 and NVFP4 codes beside `weight_scale`, each tensor of a layer described by an entry of its own."""

from typing import Any

import numpy as np

from microfloat.checkpoint.families.dialect import Announcement, Dialect, strings, tile_of, unknown_entries, unsupported
from microfloat.checkpoint.families.patterns import SHELL, Patterns
from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Family, Scheme
from microfloat.checkpoint.families.writing import Arrays, Configuration, Manifest, Written, encode_parts
from microfloat.checkpoint.records import Record
from microfloat.formats import FORMATS, ScaledFormat
from microfloat.recipes import Cast

_METHOD = "quark"
_MX = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_E4M3 = {"dtype": "fp8_e4m3"}
# The entries that describe a tensor of each format.
_TENSORS: dict[str, dict[str, Any]] = {
    "mxfp4": {"dtype": "fp4", **_MX}, "mxfp8": {**_E4M3, **_MX},
    "mxfp6_e2m3": {"dtype": "fp6_e2m3", **_MX}, "mxfp6_e3m2": {"dtype": "fp6_e3m2", **_MX},
    "fp8_tensor": {**_E4M3, "qscheme": "per_tensor"}, "fp8_row": {**_E4M3, "qscheme": "per_channel"},
    "fp8_1x128": {**_E4M3, "qscheme": "per_group", "group_size": 128}, "fp8_128x128": {**_E4M3, "qscheme": "per_block"},
    "nvfp4": {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
}  # fmt: skip
_KNOWN = (
    "quant_method", "global_quant_config", "layer_quant_config", "exclude", "export", "algo_config", "version",
    "quant_mode", "kv_cache_quant_config", "kv_cache_group",
)  # fmt: skip
_OF_LAYER = ("weight", "input_tensors", "output_tensors", "target_device")
_ONLINE = ("online_r1_rotation", "r3", "r4")  # rotations that stay in the model; the others are in the weights


def read(file: str, config: dict[str, Any]) -> Announcement:
    """A description of all layers, and those of single ones by pattern, which win."""
    layers = config.get("layer_quant_config")
    found = {name: one for name, one in layers.items() if isinstance(one, dict)} if isinstance(layers, dict) else {}
    every = config.get("global_quant_config")
    rules = {name: _scheme(one) for name, one in found.items()}
    general = _scheme(every) if isinstance(every, dict) else None
    findings = unknown_entries(file, config, _KNOWN)
    for one in (*found.values(), *([every] if isinstance(every, dict) else [])):
        findings += unknown_entries(file, one, _OF_LAYER)
    algorithms = config.get("algo_config")
    for one in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(one, dict) and (online := [key for key in _ONLINE if one.get(key)]):
            findings.append(unsupported(file, f"algo_config: {', '.join(online)}, a rotation of inputs, is not done."))
    refusal, schemes = "", [*rules.values(), *([general] if general else [])]
    if not any(scheme.families for scheme in schemes):
        unread = ", ".join(dict.fromkeys(one.unread for one in schemes if one.unread)) or "of no layer"
        refusal = f"the weights {unread} are not read; read are MX, FP8 and NVFP4 ones."
    ignore = Patterns(strings(config.get("exclude")), SHELL)
    return Announcement(
        file, _METHOD, f"quant_method {_METHOD!r}", rules, general, ignore, SHELL, refusal,
        list(dict.fromkeys(findings)),
    )  # fmt: skip


def _scheme(layer: dict[str, Any]) -> Scheme:
    """The scheme of a layer; without families where its weight is left alone, or is not read."""
    weight, inputs = layer.get("weight"), layer.get("input_tensors")
    name, of_input = _format_of(weight), _format_of(inputs)
    if not name:
        parts = weight if isinstance(weight, list) else [weight] if weight else []
        names = [f"{one.get('dtype')} {one.get('qscheme')}" if isinstance(one, dict) else str(one) for one in parts]
        return Scheme(unread=" of ".join(names)[:100])
    parts = inputs if isinstance(inputs, list) else [inputs]
    needs_scale = bool(inputs) and not all(isinstance(one, dict) and one.get("is_dynamic") for one in parts)
    activation = "none" if not inputs else "static" if needs_scale and of_input != "nvfp4" else "dynamic"
    tile = tile_of(weight.get("block_size")) if isinstance(weight, dict) else None
    family = "quark:fp8" if name.startswith("fp8") else f"quark:{name}"
    return Scheme((family,), tile, activation, FORMATS.get(of_input), None, needs_scale)


def _format_of(tensor: Any) -> str:
    """The name of the format of one description, or of NVFP4's two, of the blocks and of the tensor; "" for others."""
    found = []
    for part in tensor if isinstance(tensor, list) else [tensor]:
        one = part if isinstance(part, dict) else {}
        fits = (name for name, spec in _TENSORS.items() if all(one.get(key) == value for key, value in spec.items()))
        found.append(next(fits, ""))
    return "nvfp4" if found == ["nvfp4", "fp8_tensor"] else found[0] if len(found) == 1 and found != ["nvfp4"] else ""


def write(manifest: Manifest) -> Configuration:
    """The first kind of layer for all of them, the others by name; entries that vLLM asks for are there if empty."""
    first, *others = manifest.kinds.items()
    return Configuration({
        "quant_method": _METHOD, "quant_mode": "eager_mode", "exclude": manifest.ignore, "algo_config": None,
        "global_quant_config": _layer(*first[0]),
        "layer_quant_config": {name: _layer(*kind) for kind, names in others for name in sorted(names)},
        "layer_type_quant_config": {}, "kv_cache_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    })  # fmt: skip


def _layer(fmt: ScaledFormat, scheme: str, inputs: ScaledFormat | None) -> dict[str, Any]:
    """The description of a layer."""
    weight: dict[str, Any] = {**_TENSORS[fmt.name], "is_dynamic": False, "symmetric": True}
    if fmt.name == "fp8_row":
        weight["ch_axis"] = 0
    of_input = None if inputs is None or inputs.name == "nvfp4" else _TENSORS.get(inputs.name)
    if of_input is not None:
        of_input = {**of_input, "is_dynamic": scheme == "dynamic", "symmetric": True}
    return {"weight": weight, "input_tensors": of_input, "output_tensors": None, "bias": None}


def encode(family: Family, record: Record, dtype: np.dtype) -> Arrays:
    """The tensors of a record; the scales of rows stand on one axis."""
    made, scale = encode_parts(family, record, dtype), f"{record.name}{family.scale[0]}"
    rows = made[scale].shape == (*record.logical_shape[:-1], 1) and family.format is None
    return made | ({scale: made[scale].reshape(record.logical_shape[:-1])} if rows else {})


def _mx(name: str, codes: tuple[str, ...]) -> Family:
    fmt, name = FORMATS[name], f"quark:{name}"
    return Family(name, fmt, ("", codes), ("_scale", E8M0), writes={name: Written(Cast(fmt), "dynamic", fmt)})


_TENSOR, _ROW, _NVFP4 = FORMATS["fp8_tensor"], FORMATS["fp8_row"], FORMATS["nvfp4"]
FAMILIES = (
    _mx("mxfp4", BYTES), _mx("mxfp6_e2m3", ("U8",)), _mx("mxfp6_e3m2", ("U8",)), _mx("mxfp8", FP8),
    Family(
        "quark:fp8", None, ("", FP8), ("_scale", REAL), encode=encode, writes={
            "quark:fp8": Written(Cast(_TENSOR, "amax"), "dynamic", _ROW),
            "quark:fp8_ptpc": Written(Cast(_ROW, "amax"), "dynamic", _ROW),
        },
    ),
    Family("quark:nvfp4", _NVFP4, ("", BYTES), ("_scale", ("F8_E4M3",)), "_scale_2", False, ("input_scale_2",)),
)  # fmt: skip
DIALECT = Dialect(FAMILIES, (_METHOD,), ("global_quant_config",), read=read, write=write, mixed="quark:mixed")
