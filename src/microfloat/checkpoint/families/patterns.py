"""Names of modules, and patterns over them: those of a user, and each dialect's, matched as its engine matches it."""

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase, translate
from typing import NamedTuple

from microfloat.errors import invalid_type, invalid_value, kind_of

Matcher = Callable[[str], object]
# Scales and zero points of a KV cache and of attention, under the names of their producers.
CACHE = (
    "k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale", "k_zero_point", "v_zero_point",
    "q_zero_point",
)  # fmt: skip
# The weight of one expert, as `layer.experts.number.weight.weight`.
NUMBERED = re.compile(r"^(?:(?P<layer>.*)\.)?experts\.(?P<number>\d+)\.(?P<weight>.*)\.weight$")
# Models whose experts are stored as one tensor of each kind, with the inputs before the outputs: the type, and whether
# rows of gate and up alternate in `gate_up_proj`.
STACKED = {"gpt_oss": True, "llama4": False, "llama4_text": False}
_OF_EXPERT = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_PATTERNS = "names of modules, wildcards or 're:' patterns"
_LONGEST_PATTERN = 300
_MOST_STARS = 8
# A group that repeats and holds a repeat, or a group in a group: the time may be exponential; and references to groups.
_UNSAFE = (r"[*+}][^()]*\)[*+{?]", r"\([^()]*\([^()]*\)[^()]*\)[*+{]", r"\\\d|\(\?P=")


def module_of(name: str) -> str:
    """The module of a weight as configurations name it: without `weight`; stacked experts by their whole name."""
    return name.removesuffix(".weight")


def stacked_name(name: str) -> tuple[str, int, int] | None:
    """The stacked parameter of a numbered expert's matrix or bias, the expert, and the part (up: 1); or None."""
    found = _OF_EXPERT.fullmatch(name)
    if found is None:
        return None
    layer, number, part, leaf = found.groups()
    key = ("down_proj" if part == "down" else "gate_up_proj") + ("_bias" if leaf == "bias" else "")
    return f"{layer}.{key}", int(number), int(part == "up")


def parts_of_stacked(name: str) -> tuple[str, ...]:
    """The names of a stacked parameter's parts in the order of their rows, {} for the number of the expert; or none."""
    layer, _, key = name.rpartition(".")
    leaf = "bias" if key.endswith("_bias") else "weight"
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(key.removesuffix("_bias"), ())
    return tuple(f"{layer}.{{}}.{part}.{leaf}" for part in parts) if layer.endswith("experts") else ()


def safe_regex(text: str) -> re.Pattern[str] | None:
    """A regular expression that cannot take exponential time, or None: few repeats, and no repeat of a repeat."""
    repeats = len(re.findall(r"[*+{]", text))
    if len(text) > _LONGEST_PATTERN or repeats > 6 or any(re.search(one, text) for one in _UNSAFE):
        return None
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None


# Parts of an expression in the order in which they are removed: classes, repeated characters, marks without width.
_CLASS = re.compile(r"(?<!\\)\[\^?\]?[^]]*\]")
_REPEATED = re.compile(r"(?:\\.|[^\\()|^$?*+{}])(?:[*+]|\{\d*,\d*\})[?+]?")
_NO_WIDTH = re.compile(r"\(\?[:=!]|[()|^$?]")
_GROUP = re.compile(r"\((?:\?:)?((?:\\.|[^\\()])*)\)(?=[*+]|\{\d*,\d*\})")


def users_regex(argument: str, pattern: str) -> re.Pattern[str]:
    """The expression that a caller wrote, after "re:" or alone; InvalidValueError for one that is none or may not end.

    A group that repeats, and of which every part repeats, such as ``(.*.*)*``, has exponentially many ways to match.
    """
    text = pattern.removeprefix("re:")
    needed = "a regular expression after 're:'" if text != pattern else "a regular expression"
    for group in _GROUP.finditer(_CLASS.sub(".", text)):
        if _REPEATED.search(group[1]) and not _NO_WIDTH.sub("", _REPEATED.sub("", group[1])):
            fix = f"{group[0]} might take for ever where it repeats: write .* for (.*)*."
            raise invalid_value(argument, repr(pattern), f"{needed}, without repeats of nothing but repeats", fix)
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise invalid_value(argument, repr(pattern), needed, f"{error}.") from None


def check_ignore(ignore: Iterable[str] | str) -> tuple[str, ...]:
    """The patterns of `ignore` as a tuple; InvalidValueError for a regular expression that is none."""
    if not isinstance(ignore, Iterable):
        raise invalid_type("ignore", kind_of(ignore), _PATTERNS, "Write ignore=() to ignore nothing more.")
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise invalid_type("ignore", kind_of(pattern), _PATTERNS)
        if pattern.startswith("re:"):
            users_regex("ignore", pattern)
    return patterns


def ignored_by(module: str, ignore: Sequence[str]) -> str | None:
    """The first pattern that covers a module: a part of its name ("lm_head", "layers.0.mlp"), a wildcard for the name
    or for a parent ("*.layers.0.*", "model.visual*"), or "re:" and an expression that matches from the start.
    """
    for pattern in ignore:
        if pattern.startswith("re:"):
            found = re.match(pattern[3:], module) is not None
        elif any(sign in pattern for sign in "*?["):
            found = any(fnmatchcase(name, pattern) for name in (module, *parents_of(module)))
        else:
            found = f".{pattern}." in f".{module}."
        if found:
            return pattern
    return None


def parents_of(module: str) -> list[str]:
    """The modules around a module, the nearest first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


_WRAPPED = re.compile(r"(^|\.)(_orig_mod|language_model)\.|^module\.")
_OUTER = re.compile(r"(?:(?:module|model|language_model)\.)*(?=layers\.)")
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")


def _other_names(module: str) -> list[str]:
    """The names of a layer without wrappers (torch.compile, DDP), and in text and multimodal models."""
    bare = module.replace("_orig_mod.", "")
    outer = _OUTER.match(bare)
    return [bare] if outer is None else [prefix + bare[outer.end() :] for prefix in _PREFIXES]


class Syntax(NamedTuple):
    """One way to match: `is_name` of a pattern that is a whole name, and the matcher of any other (None: not safe)."""

    is_name: Callable[[str], bool]
    matcher: Callable[[str], Matcher | None]


def _shell(pattern: str) -> Matcher | None:
    if pattern.startswith("re:"):
        return _expression(pattern)
    return None if pattern.count("*") > _MOST_STARS else re.compile(translate(pattern)).match


def _expression(pattern: str) -> Matcher | None:
    compiled = safe_regex(pattern.removeprefix("re:"))
    return None if compiled is None else compiled.match


def _parts(pattern: str) -> Matcher | None:
    """The rule of transformers: an expression from the start to the end of a part, or the end of the name.

    As the names of a file may have other prefixes than those of a model: whole parts anywhere too, and a beginning
    without "model".
    """
    if re.fullmatch(r"[\w.-]*", pattern):
        inner = pattern.removeprefix("model.")
        return lambda module: (
            f".{pattern}." in f".{module}." or module.endswith(pattern) or f"{module}.".startswith(f"{inner}.")
        )
    if safe_regex(pattern) is None:
        return _shell(pattern) if pattern.startswith(("*", "?")) else None
    return re.compile(rf"(?:{pattern})(?=\.|$)").match


# ModelOpt (before version 0.39 a part of a name) and Quark: a shell pattern for a name, or "re:" and an expression.
SHELL = Syntax(lambda pattern: not pattern.startswith("re:") and not any(sign in pattern for sign in "*?["), _shell)
SUBSTRING = Syntax(lambda pattern: False, lambda pattern: _shell(f"*{pattern}*"))
# compressed-tensors: a whole name, or after "re:" an expression that matches from the start.
EXACT = Syntax(lambda pattern: not pattern.startswith("re:"), _expression)
PARTS = Syntax(lambda pattern: False, _parts)


class Patterns:
    """Patterns of one syntax. `unread`: patterns that are no regular expression, or might take very long."""

    def __init__(self, texts: Iterable[str], syntax: Syntax) -> None:
        self.texts = list(dict.fromkeys(texts))
        self.names = {text for text in self.texts if syntax.is_name(text)}
        found = {text: syntax.matcher(text) for text in self.texts if text not in self.names}
        self.matchers = [(text, matches) for text, matches in found.items() if matches is not None]
        self.unread = [text for text, matches in found.items() if matches is None]
        self._seen: dict[str, str | None] = {}

    def first(self, module: str) -> str | None:
        """The pattern that covers a module, its own name before others; None where none does.

        Expressions may cover whole models, and are compared with the other names of wrapped and text models alone.
        """
        if module not in self._seen:
            names = [module, *_other_names(module)]
            compared = names if _WRAPPED.search(module) else names[:1]
            others = (text for text, matches in self.matchers if any(map(matches, compared)))
            self._seen[module] = next((name for name in names if name in self.names), None) or next(others, None)
        return self._seen[module]

    def around(self, module: str) -> str | None:
        """The pattern of a module around this one, the nearest first; no expression, as one may cover whole models."""
        if not self.texts:
            return None
        found = (self.first(parent) for parent in parents_of(module))
        return next((text for text in found if text is not None and not text.startswith("re:")), None)
