"""Names of modules: which of them stay in high precision by default, and which share one scale when served."""

import fnmatch
import re
from collections.abc import Iterable, Sequence

from microfloat.errors import invalid_type, invalid_value, kind_of, unknown_name

_PATTERNS = "names of modules, wildcards or 're:' patterns"

# Serving engines multiply the members of such a group as one matrix, under one global scale (vllm-project/vllm#54974).
# A group's key is its members' name with the part that differs replaced.
FUSED = {
    "qkv": ((r"(^|\.)[qkv]_proj$", r"\1qkv_proj"),),
    "gate_up": ((r"(^|\.)(?:gate|up)_proj$", r"\1gate_up_proj"), (r"(^|\.)w[13]$", r"\1w13")),
    "experts": ((r"(^|\.)experts\.\d+\.", r"\1experts.*."),),
}
DEFAULT_FUSE = ("qkv", "gate_up")
# Embeddings, output layers, routers and gates of experts, norms; `gate_proj` is an ordinary layer.
_KEPT = re.compile(
    r"(^|\.)(lm_head|(\w*_)?embed(ding)?s?(_\w+)?|wte|wpe|relative_attention_bias|gate|shared_expert_gate"
    r"|(\w*_)?(layer)?norm\d*(_\w+)?|ln_\w+)$|^(output|score)$|(^|\.)(\w*_)?router(\.|$)"
)


def module_of(name: str) -> str:
    """The module of a weight, as configurations name it: without the last part `weight`. Stacked experts, and a weight
    that is named nothing else, are named by themselves.
    """
    return name.removesuffix(".weight")


def check_fuse(fuse: Iterable[str] | str | None) -> tuple[str, ...]:
    """The kinds of fused groups as a tuple; InvalidValueError for one that is not in FUSED."""
    if fuse is not None and not isinstance(fuse, Iterable):
        raise invalid_type("fuse", kind_of(fuse), f"None, or names among {', '.join(FUSED)}")
    kinds = () if fuse is None else (fuse,) if isinstance(fuse, str) else tuple(fuse)
    for kind in kinds:
        if kind not in FUSED:
            raise unknown_name("fuse", kind, FUSED)
    return kinds


def fused_group(module: str, fuse: Sequence[str] = DEFAULT_FUSE) -> str | None:
    """The key that the members of a fused group have in common, None for a module that belongs to none."""
    key = module
    for kind in fuse:
        for pattern, replacement in FUSED[kind]:
            key = re.sub(pattern, replacement, key)
    return None if key == module else key


def is_kept(module: str) -> bool:
    """True for a module that stays in high precision unless asked for otherwise."""
    return _KEPT.search(module) is not None


def check_ignore(ignore: Iterable[str] | str) -> tuple[str, ...]:
    """The patterns of `ignore` as a tuple; InvalidValueError for a regular expression that is none."""
    if not isinstance(ignore, Iterable):
        raise invalid_type("ignore", kind_of(ignore), _PATTERNS, "Write ignore=() to ignore nothing more.")
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise invalid_type("ignore", kind_of(pattern), _PATTERNS)
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise invalid_value("ignore", f"{pattern!r} ({error})", "a regular expression after 're:'") from None
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
