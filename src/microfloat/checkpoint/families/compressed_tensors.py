"""compressed-tensors, the format of llm-compressor and vLLM. Global scales are divisors: 448 * 6 / amax."""

from collections.abc import Iterable
from typing import Any

from microfloat.checkpoint.families.dialect import Announcement, Dialect, strings, tile_of, unknown_entries, unsupported
from microfloat.checkpoint.families.patterns import EXACT, Patterns
from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Family, Scheme
from microfloat.checkpoint.families.writing import Configuration, Manifest, Written
from microfloat.checkpoint.records import Finding
from microfloat.formats import FORMATS, FP8_ROW, FP8_TENSOR, MXFP4, MXFP6_E2M3, MXFP8, NVFP4, ScaledFormat
from microfloat.recipes import Cast

_METHOD = "compressed-tensors"
_FAMILY_OF = {
    "nvfp4-pack-quantized": "ct:nvfp4",
    "mxfp4-pack-quantized": "ct:mxfp4",
    "mxfp6-pack-quantized": "ct:mxfp6",
    "mxfp8-quantized": "ct:mxfp8",
    "float-quantized": "ct:fp8",
    "naive-quantized": "ct:naive",
}


_KNOWN = (
    "quant_method", "format", "quantization_status", "global_compression_ratio", "ignore", "kv_cache_scheme",
    "moe_sparsity_config", "config_groups", "sparsity_config", "transform_config", "version", "run_compressed",
)  # fmt: skip
_OF_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_OF_ARGUMENTS = (
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
_DENSE = ("dense", "", "none")
_FOLDED = ("weight_input", "weight_output")  # transforms that were multiplied into the weights


def read(file: str, config: dict[str, Any]) -> Announcement:
    """Groups of targets with a format each; a group that names a module wins over one that names a class of modules."""
    groups = config.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    rules: dict[str, Scheme] = {}
    general: list[Scheme] = []
    refused = []
    top = config.get("format")
    findings = unknown_entries(file, config, _KNOWN) + _online_transforms(file, config.get("transform_config"))
    for group in groups or ([] if top in _DENSE else [{"targets": ["Linear"]}]):  # none: of a KV cache alone
        if "weights" in group and not group["weights"]:  # of a KV cache, or of activations alone
            continue
        word = group.get("format") or top
        if word is None:
            scheme = _scheme(tuple(_FAMILY_OF.values()), group)
        elif isinstance(word, str) and word in _FAMILY_OF:
            scheme = _scheme((_FAMILY_OF[word],), group)
        else:
            refused.append(str(word)[:60])
            scheme = Scheme(unread=str(word)[:60])
        for target in strings(group.get("targets")) or ["Linear"]:
            if not target.startswith("re:") and "." not in target and target[:1].isupper():
                general.append(scheme)
            else:
                rules.setdefault(target, scheme)
        findings += unknown_entries(file, group, _OF_GROUP)
        for part in ("weights", "input_activations"):
            if isinstance(group.get(part), dict):
                findings += unknown_entries(file, group[part], _OF_ARGUMENTS)
    words = f"quant_method {_METHOD!r}, format {str(top)[:60]!r}"
    ignore = Patterns(strings(config.get("ignore")), EXACT)
    refusal = ""
    if refused and not any(scheme.families for scheme in (*rules.values(), *general)):
        refusal = f"format {', '.join(map(repr, sorted(set(refused))))} is not read; read are {', '.join(_FAMILY_OF)}."
    sparsity = config.get("sparsity_config")
    sparse = str(sparsity.get("format") or "")[:60] if isinstance(sparsity, dict) else ""
    return Announcement(
        file, _METHOD, words, rules, next(iter(general), None), ignore, EXACT, refusal, list(dict.fromkeys(findings)),
        "" if sparse in _DENSE else sparse,
    )  # fmt: skip


def _online_transforms(file: str, config: Any) -> list[Finding]:
    """An error for transforms of activations; those that were multiplied into the weights change nothing."""
    if not config:
        return []
    groups = config.get("config_groups") if isinstance(config, dict) else None
    places: dict[str, list[str]] = {}
    for name, scheme in groups.items() if isinstance(groups, dict) else [("transform_config", config)]:
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        for one in applied if isinstance(applied, list) else [None]:
            location = one.get("location") if isinstance(one, dict) else "an unknown place"
            if location not in _FOLDED:
                targets = ", ".join(strings(one.get("targets"))[:4]) if isinstance(one, dict) else ""
                places.setdefault(name, []).append(str(location)[:40] + (f" of {targets[:200]}" if targets else ""))
    return [
        unsupported(
            file, f"transform_config: {name[:60]} transforms activations ({', '.join(found[:4])}), which is not "
            "carried out; the weights alone give other results.",
        )
        for name, found in places.items()
    ]  # fmt: skip


def _scheme(families: tuple[str, ...], group: dict[str, Any]) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    is_said = isinstance(weights, dict) or isinstance(inputs, dict)
    weights = weights if isinstance(weights, dict) else {}
    tile, group_size = tile_of(weights.get("block_structure")), weights.get("group_size")
    own = group_size if type(group_size) is int else None
    if not isinstance(inputs, dict):
        return Scheme(families, tile, "none" if is_said else "", group=own)
    size, bits = inputs.get("group_size"), inputs.get("num_bits")
    by_group = {16: NVFP4, 32: {4: MXFP4, 6: MXFP6_E2M3, 8: MXFP8}.get(bits if type(bits) is int else 0)}
    by_group[128] = FORMATS["fp8_1x128"]
    by_strategy = {"tensor": FP8_TENSOR, "token": FP8_ROW}
    strategy = inputs.get("strategy")
    fmt = by_strategy.get(strategy if isinstance(strategy, str) else "")
    fmt = fmt or by_group.get(size if type(size) is int else 0)
    dynamic = inputs.get("dynamic")
    needs_scale = not dynamic or dynamic == "local"
    return Scheme(families, tile, "dynamic" if dynamic else "static", fmt, own, needs_scale)


_SCALE_DTYPES = {"E4M3": "torch.float8_e4m3fn", "E8M0": "torch.uint8"}


def _arguments(fmt: ScaledFormat, dynamic: bool | str, of_input: bool) -> dict[str, Any]:
    """The entry of a group about its weights or its inputs; the package refuses keys that it does not know."""
    rows, columns = fmt.block
    strategy = "group" if fmt.tensor_scale is None else "tensor_group"
    if fmt.is_tile:
        strategy = "block"
    elif columns is None:
        strategy = "tensor" if rows is None else "token" if of_input else "channel"
    made: dict[str, Any] = {
        "num_bits": fmt.element.bits, "type": "float", "symmetric": True,
        "group_size": columns if "group" in strategy else None, "strategy": strategy, "dynamic": dynamic,
    }  # fmt: skip
    if strategy == "block":
        made["block_structure"] = [rows, columns]
    if fmt.scale.bits == 8:
        made["scale_dtype"] = _SCALE_DTYPES[fmt.scale.name]
    if of_input and dynamic is not True:
        made["observer"] = "static_minmax"
    return made


# Prefixes of multimodal models in files, and in transformers 5, with whose modules the package compares whole names.
_PREFIXES = (("language_model.model.", "model.language_model."), ("model.", "model.language_model."), ("", "model."))


def _under_both_names(modules: Iterable[str]) -> list[str]:
    """The modules as files call them, and as transformers does."""
    others = (next(new + name[len(old) :] for old, new in _PREFIXES if name.startswith(old)) for name in modules)
    return sorted({*modules, *others})


def write(manifest: Manifest) -> Configuration:
    """One group for each kind of layer; modules are named only where there are several kinds."""
    every = [*manifest.ignore, *(name for modules in manifest.kinds.values() for name in modules)]
    is_multimodal = any(name.startswith(("language_model.", "visual.")) for name in every)
    named = _under_both_names if is_multimodal else sorted
    word_of = {family.format: word for word, name in _FAMILY_OF.items() for family in FAMILIES if family.name == name}
    groups = {}
    for number, ((fmt, scheme, inputs), modules) in enumerate(manifest.kinds.items()):
        made = None
        if inputs is not None:
            # The block scales of NVFP4 inputs are always computed on the way, their global scale is stored.
            made = _arguments(inputs, "local" if inputs.tensor_scale else scheme == "dynamic", True)
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(manifest.kinds) == 1 else named(modules),
            "format": word_of.get(fmt, "float-quantized"),
            "weights": _arguments(fmt, False, False), "input_activations": made, "output_activations": None,
        }  # fmt: skip
    words = {group["format"] for group in groups.values()}
    return Configuration({
        "quant_method": _METHOD, "format": words.pop() if len(words) == 1 else "mixed-precision",
        "quantization_status": "compressed", "global_compression_ratio": None, "ignore": named(manifest.ignore),
        "kv_cache_scheme": _arguments(FP8_TENSOR, False, False) if manifest.kv_cache else None,
        "moe_sparsity_config": None, "config_groups": groups,
    })  # fmt: skip


def _is_usual(shape: tuple[int, ...]) -> bool:
    return shape == (1,) or len(shape) >= 2


FAMILIES = (
    Family(
        "ct:nvfp4", NVFP4, ("_packed", BYTES), ("_scale", ("F8_E4M3",)), "_global_scale", divides=True,
        input_scales=("input_global_scale",), writes={"ct:nvfp4": Written(Cast(NVFP4))}, scalars=(1,),
    ),
    Family("ct:mxfp4", MXFP4, ("_packed", BYTES), ("_scale", E8M0), writes={"ct:mxfp4": Written(Cast(MXFP4))}),
    Family(
        "ct:mxfp6", MXFP6_E2M3, ("_packed", ("U8",)), ("_scale", E8M0), writes={"ct:mxfp6": Written(Cast(MXFP6_E2M3))},
    ),
    Family(
        "ct:mxfp8", MXFP8, ("", FP8), ("_scale", E8M0),
        writes={"ct:mxfp8": Written(Cast(MXFP8), "dynamic", MXFP8)},
    ),
    Family(
        "ct:fp8", None, ("", FP8), ("_scale", REAL), usual=_is_usual,
        writes={
            "ct:fp8": Written(Cast(FP8_TENSOR, "amax"), "dynamic", FP8_ROW),
            "ct:fp8_dynamic": Written(Cast(FP8_ROW, "amax"), "dynamic", FP8_ROW),
            "ct:fp8_block": Written(Cast(FORMATS["fp8_128x128"], "amax"), "dynamic", FORMATS["fp8_1x128"]),
        },
        scalars=(1,), model_scales=True,
    ),
    Family("ct:naive", None, ("", FP8), ("_scale", REAL), usual=_is_usual),
)  # fmt: skip
DIALECT = Dialect(FAMILIES, (_METHOD,), ("config_groups",), read=read, write=write, mixed="ct:mixed")
