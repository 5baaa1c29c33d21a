"""Announcements of the configuration beside a checkpoint: a family for each module, in its producer's dialect."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from microfloat.checkpoint.families import FAMILIES, Scheme
from microfloat.checkpoint.patterns import EXACT, PARTS, SHELL, SUBSTRING, Dialect, Patterns
from microfloat.checkpoint.records import Finding
from microfloat.errors import kind_of
from microfloat.formats import FP8_ROW, FP8_TENSOR, MXFP4, MXFP6_E2M3, MXFP8, NVFP4, FP8_1x128, ScaledFormat

__all__ = ["Announcement", "announced", "misread"]

_NOTHING = Scheme()


@dataclass(frozen=True)
class Announcement:
    """One configuration: its file, its method, a scheme for the modules that it names, and those that it leaves out.

    * `rules`: a scheme for each pattern of `dialect`. `general`: that of every module that none of them covers.
    * `ignore`: patterns of modules that stay in high precision; None where the configuration does not list them.
    * `refusal`: the reason for which nothing of it is read. `sparse`: the format of compressed sparse weights.
    """

    file: str
    method: str
    words: str
    rules: Mapping[str, Scheme] = field(default_factory=dict)
    general: Scheme | None = None
    ignore: Patterns | None = field(default_factory=lambda: Patterns((), EXACT))
    dialect: Dialect = EXACT
    refusal: str = ""
    findings: list[Finding] = field(default_factory=list)
    sparse: str = ""

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns(self.rules, self.dialect)

    @cached_property
    def _schemes(self) -> dict[str, Scheme]:
        return {}

    def ignored(self, module: str) -> str | None:
        """The pattern that leaves a module in high precision, or None."""
        return None if self.ignore is None else self.ignore.first(module)

    def leaves_plain(self, module: str) -> bool:
        """True where a plain layer is expected: the module or one around it is ignored, or nothing names it."""
        if self.ignore is None or self.ignored(module) is not None or self.ignore.around(module) is not None:
            return True
        return not self.scheme_of(module).families

    def scheme_of(self, module: str) -> Scheme:
        """The scheme of a module; an empty one where it is left in high precision or not named.

        A rule for the module wins over one for a module around it, and that over the general one.
        """
        if module not in self._schemes:
            self._schemes[module] = self._scheme_of(module)
        return self._schemes[module]

    def _scheme_of(self, module: str) -> Scheme:
        if self.ignored(module) is not None:
            return _NOTHING
        text = self._patterns.first(module) or self._patterns.around(module)
        return self.rules[text] if text is not None else self.general or _NOTHING

    @property
    def families(self) -> list[tuple[str, ...]]:
        """The families of all rules, each once."""
        schemes = [*self.rules.values(), *([self.general] if self.general else [])]
        return list(dict.fromkeys(scheme.families for scheme in schemes if scheme.families))

    @property
    def accepted(self) -> set[str]:
        """Every family that its words stand for."""
        schemes = [*self.rules.values(), *([self.general] if self.general else [])]
        return {name for scheme in schemes for name in (*scheme.families, *scheme.also)}

    @property
    def text(self) -> str:
        """The line of evidence."""
        return f"{self.file}: {self.words}"


KEYS = ("quantization_config", "compression_config")
_SECOND = "hf_quant_config.json"
_INNER = re.compile(r"(^|_)(text|llm|language|language_model|thinker|decoder|model)_config$")
_DEPTH = 3


def announced(configs: Mapping[str, Any]) -> list[Announcement]:
    """The announcements of config.json, of the models inside it, and of hf_quant_config.json, in this order."""
    made = [
        _announcement(place, config[key])
        for place, config in _places("config.json", configs.get("config.json"), _DEPTH)
        for key in KEYS if isinstance(config.get(key), dict) and config[key]
    ]  # fmt: skip
    second = configs.get(_SECOND)
    if isinstance(second, dict) and isinstance(second.get("quantization"), dict):
        made.append(_modelopt(_SECOND, {"producer": second.get("producer"), **second["quantization"]}))
    return made


def misread(configs: Mapping[str, Any]) -> list[Finding]:
    """A warning for each description of a quantization that is no object, so that nothing of it is read."""
    places = [
        (place, key, config[key])
        for place, config in _places("config.json", configs.get("config.json"), _DEPTH) for key in KEYS if key in config
    ]  # fmt: skip
    second = configs.get(_SECOND)
    if isinstance(second, dict):
        places.append((_SECOND, "quantization", second.get("quantization")))
    return [
        Finding("config-disagrees", "warn", place, f"{key} is {kind_of(value)}, needed an object; it is not read.")
        for place, key, value in places if value is not None and not isinstance(value, dict)
    ]  # fmt: skip


def _places(place: str, config: Any, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A configuration, and those of the models inside it."""
    if not isinstance(config, dict) or not depth:
        return
    yield place, config
    for key, inner in config.items():
        if _INNER.search(key):
            yield from _places(f"{place} ({key})" if place == "config.json" else place, inner, depth - 1)


def _announcement(file: str, config: dict[str, Any]) -> Announcement:
    method = config.get("quant_method")
    name = _method_of(config) if method is None else str(method).lower().replace("_", "-")
    parse = {
        "modelopt": _modelopt, "compressed-tensors": _compressed, "fp8": _fp8, "mxfp4": _gptoss, "torchao": _torchao,
    }  # fmt: skip
    if isinstance(method, str | None) and name.partition("-")[0] == "modelopt":  # modelopt_fp4 and others
        name = "modelopt"
    if isinstance(method, str | None) and name in parse:
        return parse[name](file, config)
    if method is None:
        keys = ", ".join(repr(key[:40]) for key in list(config)[:8])
        refusal = f"a quantization without quant_method is not read where its entries are {keys}."
        return Announcement(file, "unknown", "no quant_method", refusal=refusal)
    refusal = f"quant_method {str(method)[:100]!r} is not read; read are {', '.join(map(repr, parse))}."
    return Announcement(file, str(method)[:100], f"quant_method {str(method)[:100]!r}", refusal=refusal)


def _method_of(config: Mapping[str, Any]) -> str:
    """The method of a block that names none, by the entries that only one dialect has; "" for none of them."""
    producer = config.get("producer")
    if "quant_algo" in config or (isinstance(producer, dict) and producer.get("name") == "modelopt"):
        return "modelopt"
    if "config_groups" in config:
        return "compressed-tensors"
    return "fp8" if "weight_block_size" in config or "activation_scheme" in config else ""


def _strings(values: Any) -> list[str]:
    """The strings of a list, or of one that stands alone."""
    values = [values] if isinstance(values, str) else values
    return [value for value in values if isinstance(value, str) and value] if isinstance(values, list) else []


def _unread(file: str, patterns: Iterable[str]) -> list[Finding]:
    """A finding for each pattern that is not followed: no regular expression, or one that might take very long."""
    return [
        Finding(
            "config-disagrees", "warn", file,
            f"the pattern {text[:100]!r} is no regular expression, or might take very long; it covers nothing here.",
            "Name the modules, or write a simpler pattern.",
        )
        for text in patterns
    ]  # fmt: skip


def _unknown(file: str, config: Mapping[str, Any], known: Iterable[str]) -> list[Finding]:
    """A warning that names the entries of a configuration that are not read, if they say anything."""
    found = [f"{key[:60]!r}: {str(value)[:60]}" for key, value in config.items() if key not in known and value]
    if not found:
        return []
    message = f"{', '.join(found[:8])} {'is' if len(found) == 1 else 'are'} not read."
    remedy = "Values are read as if nothing of the kind stood there: find out what it means before you use them."
    return [Finding("unknown-entry", "warn", file, message, remedy)]


def _unsupported(file: str, what: str) -> Finding:
    remedy = "load(strict=False) reads the values as they are stored; they need an engine that carries it out."
    return Finding("unsupported", "error", file, what, remedy)


# ---- ModelOpt ----------------------------------------------------------------------------------------------------


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
_SUBSTRINGS_UNTIL = (0, 39)  # versions of ModelOpt that leave out what has a pattern in its name
_OF_MODELOPT = (
    "quant_method", "quant_algo", "quantization", "kv_cache_quant_algo", "kv_cache_scheme", "group_size", "producer",
    "exclude_modules", "ignore", "quantized_layers", "config_groups", "pre_quant_scale",
)  # fmt: skip


def _modelopt(file: str, config: dict[str, Any]) -> Announcement:
    """Both configurations of ModelOpt: `ignore` or `exclude_modules`, and a table of layers where algorithms differ."""
    inner = config.get("quantization")
    config = {**config, **inner} if isinstance(inner, dict) else config
    algorithm = config.get("quant_algo") or _algorithm_of(config.get("config_groups"))
    producer = config.get("producer")
    is_own = isinstance(producer, dict) and producer.get("name") == "microfloat"  # whose versions say nothing of that
    version = str(producer.get("version", "")) if isinstance(producer, dict) and not is_own else ""
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    part = numbers is not None and tuple(map(int, numbers.groups())) < _SUBSTRINGS_UNTIL
    patterns = _strings(config.get("ignore")) or _strings(config.get("exclude_modules"))
    ignore = Patterns(patterns, SUBSTRING if part else SHELL)
    layers = config.get("quantized_layers")
    rows: list[tuple[str, Any, Any]] = [("*", algorithm, config.get("group_size"))]
    if algorithm == "MIXED_PRECISION":
        table = layers.items() if isinstance(layers, dict) else ()
        rows = [(name, one.get("quant_algo"), one.get("group_size")) for name, one in table if isinstance(one, dict)]
    if algorithm is None:  # nothing but the KV cache is quantized
        rows = []
    unknown = sorted({str(one)[:60] for _, one, _ in rows if not isinstance(one, str) or one not in _ALGORITHMS})
    words = f"quant_method 'modelopt', quant_algo {str(algorithm)[:60]!r}"
    if unknown:
        refusal = f"quant_algo {', '.join(map(repr, unknown))} is not read; read are {', '.join(_ALGORITHMS)}."
        return Announcement(file, "modelopt", words, ignore=ignore, refusal=refusal)
    rules = {name: _modelopt_scheme(one, group) for name, one, group in rows}
    if "*" in rules and _is_weight_only(config.get("config_groups")):
        words += " of weights alone"
        rules["*"] = rules["*"]._replace(activation="none", activation_format=None, needs_scale=False)
    findings = _unread(file, [*ignore.unread, *Patterns(rules, SHELL).unread]) + _unknown(file, config, _OF_MODELOPT)
    return Announcement(
        file, "modelopt", words, rules if algorithm == "MIXED_PRECISION" else {}, rules.get("*"), ignore, SHELL,
        findings=findings,
    )  # fmt: skip


def _is_weight_only(groups: Any) -> bool:
    """True for groups that quantize weights and no inputs."""
    inner = list(groups.values()) if isinstance(groups, dict) else []
    return bool(inner) and all(
        isinstance(one, dict) and "weights" in one and not one.get("input_activations") for one in inner
    )


def _algorithm_of(groups: Any) -> str | None:
    """The algorithm of groups where no quant_algo names it; None where there are none."""
    group = next((one for one in groups.values() if isinstance(one, dict)), {}) if isinstance(groups, dict) else {}
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return None
    sizes = weights.get("num_bits"), weights.get("group_size")
    names = {(4, 16): "NVFP4", (8, None): "FP8", (8, 32): "MXFP8"}
    return next((name for pair, name in names.items() if pair == sizes), f"of groups with {sizes[0]} bits")


def _modelopt_scheme(algorithm: str, group: Any) -> Scheme:
    family, activation, fmt, needs_scale = _ALGORITHMS[algorithm]
    tile = (128, 128) if family == "modelopt:fp8_pb_wo" else None
    return Scheme((family,), tile, activation, fmt, group if type(group) is int else None, needs_scale)


# ---- compressed-tensors ------------------------------------------------------------------------------------------

_BY_FORMAT = {word: family.name for family in FAMILIES if family.name.startswith("ct:") for word in family.announced}
_OF_COMPRESSED = (
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


def _compressed(file: str, config: dict[str, Any]) -> Announcement:
    """Groups of targets with a format each; a group that names a module wins over one that names a class of modules."""
    groups = config.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    rules: dict[str, Scheme] = {}
    general: list[Scheme] = []
    refused = []
    top = config.get("format")
    findings = _unknown(file, config, _OF_COMPRESSED) + _online_transforms(file, config.get("transform_config"))
    for group in groups or [{"targets": ["Linear"]}]:
        if "weights" in group and not group["weights"]:  # of a KV cache, or of activations alone
            continue
        word = group.get("format") or top
        if word is None:
            scheme = _compressed_scheme(tuple(_BY_FORMAT.values()), group)
        elif isinstance(word, str) and word in _BY_FORMAT:
            scheme = _compressed_scheme((_BY_FORMAT[word],), group)
        else:
            refused.append(str(word)[:60])
            scheme = Scheme(unread=str(word)[:60])
        for target in _strings(group.get("targets")) or ["Linear"]:
            if not target.startswith("re:") and "." not in target and target[:1].isupper():
                general.append(scheme)
            else:
                rules.setdefault(target, scheme)
        findings += _unknown(file, group, _OF_GROUP)
        for part in ("weights", "input_activations"):
            if isinstance(group.get(part), dict):
                findings += _unknown(file, group[part], _OF_ARGUMENTS)
    words = f"quant_method 'compressed-tensors', format {str(top)[:60]!r}"
    ignore = Patterns(_strings(config.get("ignore")), EXACT)
    refusal = ""
    if refused and not any(scheme.families for scheme in (*rules.values(), *general)):
        refusal = f"format {', '.join(map(repr, sorted(set(refused))))} is not read; read are {', '.join(_BY_FORMAT)}."
    findings = _unread(file, [*ignore.unread, *Patterns(rules, EXACT).unread]) + list(dict.fromkeys(findings))
    sparsity = config.get("sparsity_config")
    sparse = str(sparsity.get("format") or "")[:60] if isinstance(sparsity, dict) else ""
    return Announcement(
        file, "compressed-tensors", words, rules, next(iter(general), None), ignore, EXACT, refusal, findings,
        "" if sparse in _DENSE else sparse,
    )  # fmt: skip


def _online_transforms(file: str, config: Any) -> list[Finding]:
    """An error for transforms of activations, without which the weights give other results.

    Those that were multiplied into the weights are only announced, and change nothing.
    """
    if not config:
        return []
    groups = config.get("config_groups") if isinstance(config, dict) else None
    places: dict[str, list[str]] = {}
    for name, scheme in groups.items() if isinstance(groups, dict) else [("transform_config", config)]:
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        for one in applied if isinstance(applied, list) else [None]:
            location = one.get("location") if isinstance(one, dict) else "an unknown place"
            if location not in _FOLDED:
                targets = ", ".join(_strings(one.get("targets"))[:4]) if isinstance(one, dict) else ""
                places.setdefault(name, []).append(str(location)[:40] + (f" of {targets[:200]}" if targets else ""))
    return [
        _unsupported(
            file, f"transform_config: {name[:60]} transforms activations ({', '.join(found[:4])}), which is not "
            "carried out; the weights alone give other results.",
        )
        for name, found in places.items()
    ]  # fmt: skip


def _compressed_scheme(families: tuple[str, ...], group: dict[str, Any]) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    is_said = isinstance(weights, dict) or isinstance(inputs, dict)
    weights = weights if isinstance(weights, dict) else {}
    tile, group_size = _tile(weights.get("block_structure")), weights.get("group_size")
    own = group_size if type(group_size) is int else None
    if not isinstance(inputs, dict):
        return Scheme(families, tile, "none" if is_said else "", group=own)
    size, bits = inputs.get("group_size"), inputs.get("num_bits")
    by_group = {16: NVFP4, 32: {4: MXFP4, 6: MXFP6_E2M3, 8: MXFP8}.get(bits if type(bits) is int else 0)}
    by_group[128] = FP8_1x128
    by_strategy = {"tensor": FP8_TENSOR, "token": FP8_ROW}
    strategy = inputs.get("strategy")
    fmt = by_strategy.get(strategy if isinstance(strategy, str) else "")
    fmt = fmt or by_group.get(size if type(size) is int else 0)
    dynamic = inputs.get("dynamic")
    needs_scale = not dynamic or dynamic == "local"
    return Scheme(families, tile, "dynamic" if dynamic else "static", fmt, own, needs_scale)


def _tile(sizes: Any) -> tuple[int, int] | None:
    """A pair of positive sizes, or None."""
    if (
        not isinstance(sizes, list | tuple)
        or len(sizes) != 2
        or not all(type(n) is int and 0 < n <= 1 << 20 for n in sizes)
    ):
        return None
    return sizes[0], sizes[1]


# ---- transformers ------------------------------------------------------------------------------------------------

_FINEGRAINED = (
    "scale_fmt",
    "expert_dtype",
    "modules_to_not_convert",
    "ignored_layers",
    "modules_to_convert",
    "dequantize",
)
_OF_FP8 = ("quant_method", "activation_scheme", "weight_block_size", "fmt", "kv_cache_scheme", *_FINEGRAINED)
# The dialect of AutoFP8 and vLLM has the same method, and scales named weight_scale.
_OTHER_FP8 = (
    "deepseek:fp8", "hf:finegrained_fp8", "modelopt:fp8", "modelopt:fp8_pc_pt", "modelopt:fp8_pb_wo", "ct:fp8",
    "ct:naive",
)  # fmt: skip


def _fp8(file: str, config: dict[str, Any]) -> Announcement:
    """DeepSeek-V3 and transformers share a method; keys that only transformers writes tell them apart."""
    static = config.get("activation_scheme") == "static"
    later = static or any(key in config for key in _FINEGRAINED)
    families = ("hf:finegrained_fp8" if later else "deepseek:fp8", "hf:ue8m0")
    if config.get("scale_fmt") == "ue8m0" or config.get("expert_dtype") == "fp4":
        families = families[::-1]
    tile = _tile(config.get("weight_block_size"))
    fmt = FP8_TENSOR if tile is None or static else FP8_1x128
    also = tuple(name for name in _OTHER_FP8 if name not in families)
    scheme = Scheme(families, tile, "static" if static else "dynamic", fmt, needs_scale=static, also=also)
    ignore = Patterns(_strings(config.get("modules_to_not_convert")) or _strings(config.get("ignored_layers")), PARTS)
    words = f"quant_method 'fp8', weight_block_size {list(tile) if tile else None}"
    findings = _unread(file, ignore.unread) + _unknown(file, config, _OF_FP8)
    codes = config.get("fmt")
    if isinstance(codes, str) and "fnuz" in codes.lower():
        what = f"fmt {codes[:40]!r}: these codes mean half of what E4M3 says; they are not read."
        findings.append(_unsupported(file, what))
    return Announcement(file, "fp8", words, general=scheme, ignore=ignore, findings=findings)


def _gptoss(file: str, config: dict[str, Any]) -> Announcement:
    ignore = Patterns(_strings(config.get("modules_to_not_convert")), PARTS)
    known = ("quant_method", "modules_to_not_convert", "dequantize")
    findings = _unread(file, ignore.unread) + _unknown(file, config, known)
    scheme = Scheme(("gptoss:hf",), activation="none")
    return Announcement(file, "mxfp4", "quant_method 'mxfp4'", general=scheme, ignore=ignore, findings=findings)


def _torchao(file: str, config: dict[str, Any]) -> Announcement:
    """The configuration of torchao, which says how it quantized; what it made is in the metadata of the file."""
    return Announcement(file, "torchao", "quant_method 'torchao'", general=Scheme(("torchao",)), ignore=None)
