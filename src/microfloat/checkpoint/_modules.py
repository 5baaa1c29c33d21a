"""Names of modules, and the patterns that keep them in high precision."""

import fnmatch
import re
from collections.abc import Iterable, Sequence

from microfloat.checkpoint.families.patterns import users_regex
from microfloat.errors import invalid_type, kind_of

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
    parts = module.split(".")
    parents = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    for pattern in ignore:
        if pattern.startswith("re:"):
            found = re.match(pattern[3:], module) is not None
        elif any(sign in pattern for sign in "*?["):
            found = any(fnmatch.fnmatchcase(name, pattern) for name in parents)
        else:
            found = f".{pattern}." in f".{module}."
        if found:
            return pattern
    return None
