"""Announcements of the configuration beside a checkpoint: a family for each module, in its producer's dialect."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from microfloat.checkpoint.families import FAMILIES, Scheme
from microfloat.checkpoint.records import Finding
from microfloat.formats import FP8_ROW, FP8_TENSOR, MXFP4, MXFP6_E2M3, MXFP8, NVFP4, FP8_1x128, ScaledFormat

__all__ = ["Announcement", "announced"]

Matcher = Callable[[str], bool]
_LONGEST_PATTERN = 300
_MOST_STARS = 8


class Rule(NamedTuple):
    """The scheme of the modules that a pattern names; `text` is the pattern as the configuration has it."""

    text: str
    matches: Matcher
    scheme: Scheme


@dataclass(frozen=True)
class Announcement:
    """One configuration: its file, its method, the modules that it leaves out, and a scheme for each other module."""

    file: str
    method: str
    words: str
    rules: list[Rule] = field(default_factory=list)
    ignore: list[tuple[str, Matcher]] = field(default_factory=list)
    refusal: str = ""
    findings: list[Finding] = field(default_factory=list)

    def ignored(self, module: str) -> str | None:
        """The pattern that leaves a module in high precision, or None."""
        return next((text for text, matches in self.ignore if matches(module)), None)

    def scheme_of(self, module: str) -> Scheme:
        """The scheme of a module; an empty one where it is left in high precision or not named."""
        if self.ignored(module) is not None:
            return Scheme()
        return next((rule.scheme for rule in self.rules if rule.matches(module)), Scheme())

    @property
    def families(self) -> list[tuple[str, ...]]:
        """The families of all rules, each once."""
        return list(dict.fromkeys(rule.scheme.families for rule in self.rules if rule.scheme.families))

    @property
    def text(self) -> str:
        """The line of evidence."""
        return f"{self.file}: {self.words}"


def announced(configs: Mapping[str, Any]) -> list[Announcement]:
    """The announcements of config.json and hf_quant_config.json, the first one to be believed first."""
    made = []
    config = configs.get("config.json")
    if isinstance(config, dict):
        inner = config.get("text_config")
        places = (config, inner if isinstance(inner, dict) else {})
        found = [place[key] for place in places for key in KEYS if isinstance(place.get(key), dict) and place[key]]
        if found:
            made.append(_announcement("config.json", found[0]))
    second = configs.get("hf_quant_config.json")
    if isinstance(second, dict) and isinstance(second.get("quantization"), dict):
        producer = second.get("producer")
        made.append(_modelopt("hf_quant_config.json", {"producer": producer, **second["quantization"]}))
    return made


KEYS = ("quantization_config", "compression_config")


def _announcement(file: str, config: dict[str, Any]) -> Announcement:
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    parse = {"modelopt": _modelopt, "compressed-tensors": _compressed, "fp8": _fp8, "mxfp4": _gptoss}
    if isinstance(method, str) and method in parse:
        return parse[method](file, config)
    refusal = f"quant_method {str(method)[:100]!r} is not read; read are {', '.join(map(repr, parse))}."
    return Announcement(file, str(method)[:100], f"quant_method {str(method)[:100]!r}", refusal=refusal)


# ---- patterns: shell patterns, exact names or regular expressions, parts of names --------------------------------


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _shell(pattern: str, *, part: bool = False) -> Matcher:
    """A shell pattern of ModelOpt over the whole name; `part`: anywhere in it, as older versions and HF mean it."""
    if pattern.count("*") > _MOST_STARS:
        return lambda module: False
    return lambda module: fnmatchcase(module, pattern) or (part and fnmatchcase(module, f"*{pattern}*"))


def _exact(pattern: str) -> Matcher:
    """An exact name of compressed-tensors, or a regular expression after "re:" that matches the beginning."""
    if not pattern.startswith("re:"):
        return lambda module: module == pattern
    compiled = safe_regex(pattern[3:])
    return lambda module: compiled is not None and compiled.match(module) is not None


def safe_regex(text: str) -> re.Pattern[str] | None:
    """A regular expression that cannot take exponential time, or None: few repeats, none of what repeats."""
    repeats = len(re.findall(r"[*+{]", text))
    nested = re.search(r"[*+}][^()]*\)[*+{?]", text) or re.search(r"\([^()]*\([^()]*\)[^()]*\)[*+{]", text)
    if len(text) > _LONGEST_PATTERN or repeats > 6 or nested or re.search(r"\\\d|\(\?P=", text):
        return None
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None


def _unread(file: str, patterns: Iterable[str]) -> list[Finding]:
    """A finding for each pattern that is not followed: no regular expression, or one that might take very long."""
    unread = [
        text for text in dict.fromkeys(patterns)
        if (safe_regex(text[3:]) is None if text.startswith("re:") else text.count("*") > _MOST_STARS)
    ]  # fmt: skip
    return [
        Finding(
            "config-disagrees", "warn", file,
            f"the pattern {text[:100]!r} is no regular expression, or might take very long; it covers nothing here.",
            "Name the modules, or write a simpler pattern.",
        )
        for text in unread
    ]  # fmt: skip


# ---- ModelOpt ----------------------------------------------------------------------------------------------------


class _Algorithm(NamedTuple):
    family: str
    activation: str
    format: ScaledFormat | None


_ALGORITHMS = {
    "NVFP4": _Algorithm("modelopt:nvfp4", "dynamic", NVFP4),
    "W4A16_NVFP4": _Algorithm("modelopt:nvfp4", "none", None),
    "NVFP4_AWQ": _Algorithm("modelopt:nvfp4", "dynamic", NVFP4),
    "NVFP4_SVD": _Algorithm("modelopt:nvfp4", "dynamic", NVFP4),
    "W4A8_NVFP4_FP8": _Algorithm("modelopt:w4a8_nvfp4_fp8", "static", FP8_TENSOR),
    "FP8": _Algorithm("modelopt:fp8", "static", FP8_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": _Algorithm("modelopt:fp8_pc_pt", "dynamic", FP8_ROW),
    "FP8_PB_WO": _Algorithm("modelopt:fp8_pb_wo", "none", None),
    "MXFP8": _Algorithm("modelopt:mxfp8", "dynamic", MXFP8),
    "MXFP4": _Algorithm("modelopt:mxfp4", "dynamic", MXFP4),
    "W4A16_MXFP4": _Algorithm("modelopt:mxfp4", "none", None),
    "W4A8_MXFP4_FP8": _Algorithm("modelopt:mxfp4", "dynamic", FP8_TENSOR),
}
_SUBSTRINGS_UNTIL = (0, 39)  # versions of ModelOpt that leave out what has a pattern in its name


def _modelopt(file: str, config: dict[str, Any]) -> Announcement:
    """Both configurations of ModelOpt: `ignore` or `exclude_modules`, and a table of layers where algorithms differ."""
    algorithm = config.get("quant_algo")
    producer = config.get("producer")
    is_own = isinstance(producer, dict) and producer.get("name") == "microfloat"  # whose versions say nothing of that
    version = str(producer.get("version", "")) if isinstance(producer, dict) and not is_own else ""
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    part = numbers is not None and tuple(map(int, numbers.groups())) < _SUBSTRINGS_UNTIL
    patterns = _strings(config.get("ignore")) or _strings(config.get("exclude_modules"))
    ignore = [(text, _shell(text, part=part)) for text in patterns]
    layers = config.get("quantized_layers")
    rows: list[tuple[str, Any, Any]] = [("*", algorithm, config.get("group_size"))]
    if algorithm == "MIXED_PRECISION":
        table = (
            {name: entry for name, entry in layers.items() if isinstance(entry, dict)}
            if isinstance(layers, dict)
            else {}
        )
        rows = [(name, entry.get("quant_algo"), entry.get("group_size")) for name, entry in table.items()]
    if algorithm == "FP8" and _is_weight_only(config.get("config_groups")):
        rule = Rule("*", lambda module: True, Scheme(("modelopt:fp8",)))
        return Announcement(
            file, "modelopt", "quant_method 'modelopt', quant_algo 'FP8' of weights alone", [rule], ignore
        )
    if algorithm is None:  # nothing but the KV cache is quantized
        rows = []
    unknown = sorted({str(one)[:60] for _, one, _ in rows if not isinstance(one, str) or one not in _ALGORITHMS})
    words = f"quant_method 'modelopt', quant_algo {str(algorithm)[:60]!r}"
    if unknown:
        refusal = f"quant_algo {', '.join(map(repr, unknown))} is not read; read are {', '.join(_ALGORITHMS)}."
        return Announcement(file, "modelopt", words, ignore=ignore, refusal=refusal)
    findings = _unread(file, [*patterns, *(name for name, _, _ in rows)])
    return Announcement(file, "modelopt", words, [_modelopt_rule(*row) for row in rows], ignore, findings=findings)


def _is_weight_only(groups: Any) -> bool:
    """True for groups that quantize weights and no inputs."""
    inner = list(groups.values()) if isinstance(groups, dict) else []
    return bool(inner) and all(
        isinstance(one, dict) and "weights" in one and not one.get("input_activations") for one in inner
    )


def _modelopt_rule(pattern: str, algorithm: str, group: Any) -> Rule:
    family, activation, fmt = _ALGORITHMS[algorithm]
    tile = (128, 128) if family == "modelopt:fp8_pb_wo" else None
    return Rule(
        pattern, _shell(pattern), Scheme((family,), tile, activation, fmt, group if type(group) is int else None)
    )


# ---- compressed-tensors ------------------------------------------------------------------------------------------

_BY_FORMAT = {word: family.name for family in FAMILIES if family.name.startswith("ct:") for word in family.announced}


def _compressed(file: str, config: dict[str, Any]) -> Announcement:
    """Groups of targets with a format each; a group that names a module wins over one that names a class of modules."""
    groups = config.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    named: list[Rule] = []
    general: list[Rule] = []
    refused = []
    top = config.get("format")
    for group in groups or [{"targets": ["Linear"]}]:
        word = group.get("format") or top
        if not isinstance(word, str) or word not in _BY_FORMAT:
            refused.append(str(word)[:60])
            continue
        scheme = _compressed_scheme(_BY_FORMAT[word], group)
        for target in _strings(group.get("targets")) or ["Linear"]:
            is_class = not target.startswith("re:") and "." not in target and target[:1].isupper()
            rule = Rule(target, (lambda module: True) if is_class else _exact(target), scheme)
            (general if is_class else named).append(rule)
    words = f"quant_method 'compressed-tensors', format {str(top)[:60]!r}"
    ignore = [(text, _exact(text)) for text in _strings(config.get("ignore"))]
    refusal = ""
    if refused and not named and not general:
        refusal = f"format {', '.join(map(repr, sorted(set(refused))))} is not read; read are {', '.join(_BY_FORMAT)}."
    findings = _unread(file, [text for text, _ in ignore] + [rule.text for rule in named])
    return Announcement(file, "compressed-tensors", words, named + general, ignore, refusal, findings)


def _compressed_scheme(family: str, group: dict[str, Any]) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    weights = weights if isinstance(weights, dict) else {}
    tile, group_size = _tile(weights.get("block_structure")), weights.get("group_size")
    own = group_size if type(group_size) is int else None
    if not isinstance(inputs, dict):
        return Scheme((family,), tile, group=own)
    size, bits = inputs.get("group_size"), inputs.get("num_bits")
    by_group = {16: NVFP4, 32: {4: MXFP4, 6: MXFP6_E2M3, 8: MXFP8}.get(bits if type(bits) is int else 0)}
    by_group[128] = FP8_1x128
    by_strategy = {"tensor": FP8_TENSOR, "token": FP8_ROW}
    strategy = inputs.get("strategy")
    fmt = by_strategy.get(strategy if isinstance(strategy, str) else "")
    fmt = fmt or by_group.get(size if type(size) is int else 0)
    return Scheme((family,), tile, "dynamic" if inputs.get("dynamic") else "static", fmt, own)


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


def _fp8(file: str, config: dict[str, Any]) -> Announcement:
    """DeepSeek-V3 and transformers share a method; keys that only transformers writes tell them apart."""
    static = config.get("activation_scheme") == "static"
    later = static or any(key in config for key in _FINEGRAINED)
    families = ("hf:finegrained_fp8", "deepseek:fp8", "hf:ue8m0") if later else ("deepseek:fp8", "hf:ue8m0")
    if config.get("scale_fmt") == "ue8m0" or config.get("expert_dtype") == "fp4":
        families = families[::-1]
    tile = _tile(config.get("weight_block_size"))
    fmt = FP8_TENSOR if tile is None or static else FP8_1x128
    scheme = Scheme(families, tile, "static" if static else "dynamic", fmt)
    patterns = _strings(config.get("modules_to_not_convert")) or _strings(config.get("ignored_layers"))
    words = f"quant_method 'fp8', weight_block_size {list(tile) if tile else None}"
    rules = [Rule("*", lambda module: True, scheme)]
    return Announcement(file, "fp8", words, rules, [(text, _shell(text, part=True)) for text in patterns])


def _gptoss(file: str, config: dict[str, Any]) -> Announcement:
    patterns = _strings(config.get("modules_to_not_convert"))
    rules = [Rule("*", lambda module: True, Scheme(("gptoss:hf",)))]
    ignore = [(text, _shell(text, part=True)) for text in patterns]
    return Announcement(file, "mxfp4", "quant_method 'mxfp4'", rules, ignore)
