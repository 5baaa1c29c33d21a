"""FP4 of layers of transformers: the methods fp_quant and fouroversix, which are packages of their own.

* FP-Quant stores codes `qweight` beside `scales`, and global scales that divide. Most of its files hold weights that
  were multiplied by a Hadamard matrix, as inputs have to be; these are refused by name, and so is MXFP4 with another
  global scale than 1.
* fouroversix stores scales in the tiles that a GPU reads, and the largest weight in the place of a global scale. What
  that is divided by depends on the rule by which scales were chosen, which the configuration names.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from microfloat.checkpoint.container import Container, byte_shape
from microfloat.checkpoint.families.dialect import Announcement, Dialect, strings, unknown_entries
from microfloat.checkpoint.families.patterns import EXACT, PARTS, Patterns
from microfloat.checkpoint.families.row import BYTES, E8M0, Entry, Family, Scheme, block_grid, decode_parts
from microfloat.checkpoint.records import Finding, Record
from microfloat.formats import MXFP4, NVFP4
from microfloat.reference import unswizzle_scales

_FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4}


def read(file: str, config: dict[str, Any]) -> Announcement:
    """The configuration of either method; the entries of FP-Quant tell it where none is named."""
    method = str(config.get("quant_method") or ("fp_quant" if "forward_dtype" in config else "fouroversix"))
    return (_read_fp_quant if "quant" in method.lower() else _read_fouroversix)(file, config)


_OF_FP_QUANT = (
    "quant_method", "forward_dtype", "forward_method", "backward_dtype", "store_master_weights", "hadamard_group_size",
    "pseudoquantization", "transform_init", "modules_to_not_convert",
)  # fmt: skip
_MATRICES = ("forward_hadamard_matrix", "backward_hadamard_matrix")
_REMEDY = "Read it with transformers and the package fp_quant, which needs a GPU."


def _read_fp_quant(file: str, config: dict[str, Any]) -> Announcement:
    """One format for every layer that is not named, and for its inputs; plain where it stores master weights."""
    name = str(config.get("forward_dtype", "nvfp4"))[:40]
    words, ignore = f"quant_method 'fp_quant', {name}", Patterns(strings(config.get("modules_to_not_convert")), PARTS)
    findings, refusal, scheme = unknown_entries(file, config, _OF_FP_QUANT), "", None
    if name not in _FORMATS:
        refusal = f"forward_dtype {name!r} is not read; read are {', '.join(_FORMATS)}."
    elif config.get("store_master_weights") is not True:
        needs_scale = name == "nvfp4"
        scheme = Scheme((f"fp_quant:{name}",), None, "dynamic", _FORMATS[name], needs_scale=needs_scale)
        if config.get("pseudoquantization") is True:
            refusal = "pseudoquantization: `dqweight` holds no codes, but values that inputs have to be turned for."
    return Announcement(file, "fp_quant", words, general=scheme, ignore=ignore, refusal=refusal, findings=findings)


def _without_turn(entry: Entry, tensors: Container) -> Record:
    """The record of a weight that is not turned; scales out of their padding to 128 rows and 4 columns."""
    family, scale = entry.family, entry.tensors.get("scale")
    assert family.format is not None
    grid = block_grid(family.format, family.shape_of(entry.tensors["codes"]))
    padded = tuple(-(-size // unit) * unit for size, unit in zip(grid, (128, 4), strict=False))
    cropped = {} if scale is None or scale.shape != padded else {"scale": scale._replace(shape=grid)}
    record = decode_parts(replace(entry, extras={}), tensors, cropped)
    if scale is None or record.problem is not None:
        return record
    if cropped:
        record = replace(record, scale=tensors.raw(scale)[tuple(map(slice, grid))])
    matrix, level, problem = entry.extras.get(_MATRICES[0]), record.tensor_scale, ""
    turn = np.zeros((0, 0)) if matrix is None or not matrix.nbytes else np.atleast_2d(tensors.array(matrix))
    if matrix is not None and not np.array_equal(turn, np.eye(len(turn))):
        problem = f"{matrix.name} {list(matrix.shape)}: the weight is stored multiplied by it, and inputs have to be."
    elif family.format == MXFP4 and level is not None and level != 1:
        problem = f"{entry.tensors['tensor_scale'].name} divides by {1 / level:.3g}, and MXFP4 has no global scale."
    if problem:
        return replace(record, problem=Finding("unsupported", "error", entry.name, problem, _REMEDY))
    return record if family.format == NVFP4 else replace(record, tensor_scale=None)


_FP_QUANT = tuple(
    Family(
        f"fp_quant:{name}", fmt, (".qweight", BYTES), (".scales", E8M0 if name == "mxfp4" else ("U8", "F8_E4M3")),
        ".weight_global_scale", True, ("act_global_scale",) if name == "nvfp4" else (), _without_turn, leaf=".weight",
        more=(*_MATRICES, "act_global_scale", "weight", "dqweight"),
    )
    for name, fmt in _FORMATS.items()
)  # fmt: skip

_OF_FOUROVERSIX = (
    "quant_method", "activation_dtype", "activation_scale_rule", "dtype", "gradient_dtype", "gradient_scale_rule",
    "keep_master_weights", "matmul_backend", "quantize_backend", "output_dtype", "scale_rule", "weight_dtype",
    "weight_scale_2d", "weight_scale_rule", "module_config_overrides", "modules_to_not_convert",
)  # fmt: skip
# Family -> the rules of its scales, and the largest product of a code and a scale.
_RULES = {
    "fouroversix:nvfp4": (("mse", "mae", "abs_max"), 6 * 256), "fouroversix:static_6": (("static_6",), 6 * 448),
    "fouroversix:static_4": (("static_4",), 4 * 448),
}  # fmt: skip
_METADATA = "quantized_weight_metadata"


def _read_fouroversix(file: str, config: dict[str, Any]) -> Announcement:
    """One description for every layer that is not named, and for single layers entries that win."""
    single = config.get("module_config_overrides")
    single = single.items() if isinstance(single, dict) else ()
    rules = {name: _scheme(config | one) for name, one in single if isinstance(one, dict)}
    general = Scheme() if config.get("keep_master_weights") is True else _scheme(config)
    unread = ", ".join(dict.fromkeys(one.unread for one in (general, *rules.values()) if one.unread))
    rules_read = ", ".join(rule for names, _ in _RULES.values() for rule in names)
    refusal = f"{unread} is not read; read are mxfp4, and nvfp4 under {rules_read}." if unread else ""
    ignore, words = Patterns(strings(config.get("modules_to_not_convert")), EXACT), "quant_method 'fouroversix'"
    findings = unknown_entries(file, config, _OF_FOUROVERSIX)
    return Announcement(file, "fouroversix", words, rules, general, ignore, refusal=refusal, findings=findings)


def _scheme(config: dict[str, Any]) -> Scheme:
    """The scheme of a layer: the format of its weight with the rule of its scales, and that of its inputs."""
    every = config.get("dtype") or "nvfp4"
    name = str(config.get("weight_dtype") or every)
    rule = str(config.get("weight_scale_rule") or config.get("scale_rule") or "mse")
    of_inputs = _FORMATS.get(str(config.get("activation_dtype") or every))
    family = next((family for family, (names, _) in _RULES.items() if rule in names), "")
    family = "fouroversix:mxfp4" if name == "mxfp4" else family if name == "nvfp4" else ""
    if not family:
        unread = f"scale rule {rule[:40]!r} of nvfp4" if name == "nvfp4" else f"dtype {name[:40]!r}"
        return Scheme(unread=unread)
    return Scheme((family,), activation="dynamic" if of_inputs else "none", activation_format=of_inputs)


def _out_of_padding(entry: Entry, tensors: Container) -> Record:
    """The record of a weight, out of its padding. The metadata: both its shapes, 1, and whether scales are in tiles."""
    codes, scale = entry.tensors["codes"], entry.tensors.get("scale")
    stored, fmt, entry = entry.extras.get(_METADATA), entry.family.format, replace(entry, extras={})
    if scale is None or fmt is None:
        return decode_parts(entry, tensors)
    facts = [] if stored is None or stored.dtype[0] != "I" else tensors.array(stored).reshape(-1)[:6].tolist()
    rows, length, height, width, _, tiled = facts if len(facts) == 6 else [0] * 6
    blocks, rest = divmod(width, fmt.block[1] or 1)
    uneven = length % 2 or rest or (tiled and (height % 128 or blocks % 4))
    fits = 0 < rows <= height and 0 < length <= width and not uneven
    if not fits or byte_shape(codes) != (height, width // 2) or scale.nbytes != height * blocks:
        message = f"{_METADATA} is {facts}, which does not fit {codes.name} {list(codes.shape)} and its scales."
        problem = Finding("shape", "error", entry.name, message, "Convert it with its own library.")
        return replace(decode_parts(entry, tensors), problem=problem)
    grid = block_grid(fmt, (rows, length))
    inner = {"codes": codes._replace(shape=(rows, length // 2)), "scale": scale._replace(shape=grid)}
    record = decode_parts(entry, tensors, inner)
    if record.problem is not None:
        return record
    flat, level = tensors.raw(scale).reshape(-1), record.tensor_scale
    scales = unswizzle_scales(flat, height, blocks) if tiled else flat.reshape(height, blocks)
    if entry.family.name in _RULES and entry.family.name not in entry.scheme.families:
        divisors = " or ".join(f"{divisor} ({', '.join(rules)})" for rules, divisor in _RULES.values())
        message = f"the amax is divided by {divisors}, and no configuration names the scale rule of this layer."
        remedy = f"Put config.json beside the file, or name the family with format=: {', '.join(_RULES)}."
        return replace(record, problem=Finding("unsupported", "error", entry.name, message, remedy))
    return replace(
        record, codes=tensors.raw(codes)[:rows, : length // 2], scale=scales[tuple(map(slice, grid))],
        tensor_scale=None if level is None else np.asarray(level / np.float32(_RULES[entry.family.name][1])),
    )  # fmt: skip


_CODES, _SCALES = (".quantized_weight_values", BYTES), ".quantized_weight_scale_factors"
FAMILIES = (
    *_FP_QUANT,
    *(
        Family(
            name, NVFP4, _CODES, (_SCALES, ("F8_E4M3",)), ".quantized_weight_amax", decode=_out_of_padding,
            leaf=".weight", more=(_METADATA,),
        )
        for name in _RULES
    ),
    Family(
        "fouroversix:mxfp4", MXFP4, _CODES, (_SCALES, E8M0), decode=_out_of_padding, leaf=".weight",
        more=(_METADATA, "quantized_weight_amax"),
    ),
)  # fmt: skip
DIALECT = Dialect(FAMILIES, ("fp_quant", "fouroversix"), ("forward_dtype", "module_config_overrides"), read=read)
