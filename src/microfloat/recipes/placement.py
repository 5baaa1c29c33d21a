"""Which layer gets which recipe, or is excluded: name patterns, and the report of a conversion in every front end.

Names of layers stand here alone: those that stay in high precision, and those that engines join.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from microfloat.arguments import check_keys
from microfloat.errors import MicrofloatError, PlacementError, invalid_type, invalid_value, kind_of, unknown_name
from microfloat.operands import GEMMS
from microfloat.recipes.core import CustomRecipe, Gemm, Recipe
from microfloat.recipes.names import as_recipe
from microfloat.support import Printed, alike, text_table, wrapped


def _anywhere(*names: str) -> tuple[str, ...]:
    return tuple(pattern for name in names for pattern in (name, f"*.{name}"))


# Layers that published low-precision recipes keep in high precision, as shell patterns over dotted names: heads, the
# routers of mixtures of experts (`gate`, but neither `gate_proj` nor the `gate` beside an `up` of its shape,
# `report.gates_of_mlps`), and adapters, whose rank is too small to gain. `output` and `proj_out` are heads at the top
# of a model only, or under the name that a wrapper gives it.
FILTERED = "filter returned False"
DEFAULT_EXCLUDE = (
    *_anywhere("lm_head", "lm_head.*", "embed_out", "classifier", "score", "head", "qa_outputs", "output_projection"),
    *_anywhere("predictions.decoder"),
    *(prefix + name for name in ("output", "proj_out") for prefix in ("", "model.", "module.", "_orig_mod.")),
    *_anywhere("router", "router.*", "*_router", "*_router.*", "gate", "gate.wg", "shared_expert_gate"),
    *_anywhere("lora_*"),
)
# Embeddings and norms, for readers of files, who see names and no classes. `shared` is the embedding of T5 and BART.
_NO_LINEAR = re.compile(
    r"(^|\.)((\w*_)?embed(ding)?s?(_\w+)?|(\w*_)?emb|wte|wpe|shared|relative_attention_bias"
    r"|(\w*_)?(layer)?norm\d*(_\w+)?|ln_\w+)$"
)

# Serving engines multiply the members of such a group as one matrix, under one global scale (vllm-project/vllm#54974):
# the packed_modules_mapping and stacked_params_mapping of their models. The key of a group is the name of its members
# with the part that differs replaced; the first pattern that matches a name decides.
FUSED = {
    "qkv": (
        (r"(^|\.)(?:[qkv]|b|f_a)_proj$", r"\1qkv_proj"),  # b and f_a beside them: Kimi's linear attention
        (r"(^|\.)(?:q_a_proj|kv_a_proj_with_mqa)$", r"\1fused_qkv_a_proj"),
        (r"(^|\.)compressor\.(?:wkv|wgate)$", r"\1compressor.fused_wkv_wgate"),
        (r"(^|\.)indexer\.(?:wk|weights_proj)$", r"\1indexer.wk_weights_proj"),
        (r"(^|\.)(?:wq_a|wkv|wkv_a|wkv_a_with_mqa)$", r"\1fused_wqa_wkv"),
        (r"(^|\.)w[qkv]$", r"\1wqkv"),
        (r"(^|\.)to_[qkv]$", r"\1to_qkv"),
        (r"(^|\.)add_[qkv]_proj$", r"\1to_added_qkv"),
        (r"(^|\.)(?:query|key|value)$", r"\1qkv"),
        (r"(^|\.)in_proj_(?:qkv|z)$", r"\1in_proj_qkvz"),
        (r"(^|\.)in_proj_[ba]$", r"\1in_proj_ba"),
    ),
    "gate_up": (
        (r"(^|\.)(?:gate|up)_proj$", r"\1gate_up_proj"),
        (r"(^|\.)(h\.\d+\.mlp)\.w[12]$", r"\1\2.w12"),  # Qwen 1, whose down projection is c_proj
        (r"(^|\.)w[13]$", r"\1w13"),
        (r"(^|\.)c_fc_[01]$", r"\1c_fc"),
        (r"(^|\.)fc1[12]$", r"\1fc1"),
    ),
    "experts": ((r"(^|\.)experts\.\d+\.", r"\1experts.*."),),
}
DEFAULT_FUSE = ("qkv", "gate_up")


@dataclass(frozen=True)
class Placement:
    """``Placement([(pattern, Recipe | None), ...])``: the first pattern that matches a module's name decides.

    A pattern is a shell pattern over the dotted name ("blocks.0.*", "*.mlp.*"; "*" also crosses dots), or a regular
    expression after "re:" that must match the whole name. None means high precision. Layers that no pattern matches
    are left as they are. Raises PlacementError, in `resolve`, for patterns that match nothing.

    "first:2" and "last:2" match the layers of the first and of the last two blocks: the first number in a name counts
    them ("model.layers.0.mlp.up_proj"), each numbered list for itself. `first_last` writes such rules.

    A pattern that ends in ":fprop", ":dgrad" or ":wgrad" decides only about that GEMM of the layers that it matches,
    and takes it from the recipe: ``("blocks.3.*:wgrad", None)`` runs their wgrad in high precision. The first match
    decides for each GEMM separately; GEMMs that no pattern matches stay as they are.
    """

    rules: tuple[tuple[str, Recipe | None], ...]
    _not_a_recipe: ClassVar[str] = "A Placement goes to convert."  # where one is given as a recipe
    _source: ClassVar[str] = "placement"  # in errors; of one that was read, its file

    def __init__(self, rules: Sequence[tuple[str, Recipe | str | None]] | Mapping[str, Recipe | str | None]) -> None:
        checked = []
        rules = list(rules.items()) if isinstance(rules, Mapping) else rules
        if not isinstance(rules, list | tuple):
            raise invalid_type("rules", type(rules), "a list of pairs (pattern, Recipe or None), or a dictionary")
        if not rules:
            raise PlacementError("rules: got none, needed at least one pair (pattern, Recipe or None).")
        for index, rule in enumerate(rules):
            if not (isinstance(rule, tuple | list) and len(rule) == 2):
                raise invalid_type(f"rules[{index}]", repr(rule), "a pair (pattern, Recipe or None)")
            pattern, recipe = rule
            if not isinstance(pattern, str):
                raise invalid_type(f"rules[{index}][0]", type(pattern), "a pattern string")
            if recipe is not None:
                recipe = as_recipe(recipe, f"rules[{index}][1]")
            if pattern.startswith("re:"):
                try:
                    re.compile(parted(pattern)[0][3:])
                except re.error as error:
                    got, needed = f"{pattern!r} ({error})", "a regular expression after 're:'"
                    raise PlacementError(f"rules[{index}][0]: got {got}, needed {needed}.") from error
            checked.append((pattern, recipe))
        object.__setattr__(self, "rules", tuple(checked))

    def resolve(
        self, names: Iterable[str], current: Mapping[str, Recipe | None] | None = None
    ) -> dict[str, Recipe | None]:
        """Name -> recipe for every name that a pattern matches; PlacementError lists patterns that match no name.

        `current`: the recipes that layers have, for the GEMMs that no pattern matches; high precision where they have
        none. A layer whose GEMMs follow several recipes gets a CustomRecipe of them.
        """
        names = list(names)
        rules = [(written, parted(written), recipe) for written, recipe in self.rules]
        matched = {pattern: _matched(pattern, names) for _, (pattern, _), _ in rules}
        unmatched = {
            repr(written) + (f" (rules[{index}])" if "_source" in vars(self) else ""): pattern
            for index, (written, (pattern, _), _) in enumerate(rules) if not matched[pattern]
        }  # fmt: skip
        if unmatched:
            shown = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
            hint = "".join(dict.fromkeys(_hint(written, pattern) for written, pattern in unmatched.items()))
            raise PlacementError(
                f"{self._source}: got patterns that match no layer: {', '.join(unmatched)}; needed patterns over these "
                f"names: {shown or 'none'}. Correct or remove them.{hint}"
            )
        chosen: dict[str, Recipe | None] = {}
        for name in names:
            found: dict[str, Recipe | None] = {}
            for _, (pattern, gemms), recipe in rules:
                if name in matched[pattern]:
                    found = {**dict.fromkeys(gemms, recipe), **found}
            if found:
                rest = (current or {}).get(name)
                chosen[name] = _combined([found.get(gemm, rest) for gemm in GEMMS])
        return chosen

    @classmethod
    def first_last(cls, n: int, inner: Recipe | str, outer: Recipe | str | None = None) -> "Placement":
        """`outer` for the first n and the last n blocks of a model, `inner` for all other layers.

        `outer` = None: high precision, as NVFP4 is trained in arXiv 2509.25149 (section 4.1).
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise invalid_value("n", f"{n!r} ({type(n).__name__})", "a number of blocks >= 1, an int")
        return cls([(f"first:{n}", outer), (f"last:{n}", outer), ("*", inner)])  # type: ignore[list-item]

    def to_dict(self) -> dict:
        """``{"rules": [[pattern, Recipe.to_dict() or None], ...]}``, JSON-ready; `from_dict` makes an equal one."""
        return {"rules": [[pattern, recipe and recipe.to_dict()] for pattern, recipe in self.rules]}

    @classmethod
    def from_dict(cls, data: dict) -> "Placement":
        """The Placement that `to_dict` described; a recipe may be a name too. Raises as the constructor does, and
        InvalidValueError for other keys.
        """
        if isinstance(data, Mapping) and "recipe" in data:
            remedy = "Read it by Recipe.from_dict, which gives what is accepted here as Placement([('*', recipe)])."
            raise invalid_value("data", "the dictionary of a Recipe", "that of a Placement", remedy)
        check_keys("data", data, ("rules",))
        rules = data["rules"].items() if isinstance(data["rules"], dict) else data["rules"]
        if not isinstance(rules, list | tuple | ItemsView):
            return cls(rules)  # which says what is wrong
        return cls([_read(index, rule) for index, rule in enumerate(rules)])

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """`to_dict` as JSON text, also written to `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "Placement":
        """The Placement in a file that `to_json` or ``microfloat plan --out`` wrote."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise invalid_value("placement", str(path), f"a JSON file of Placement.to_json ({error})") from None
        try:
            made = cls.from_dict(data)
        except MicrofloatError as error:
            raise type(error)(f"{path}: {error}") from None
        object.__setattr__(made, "_source", str(path))
        return made

    def of_gemms(self, name: str, names: Iterable[str] = ()) -> str:
        """The GEMMs of a layer about which patterns of their own decide, in words; "" where there are none.

        `names`: of all layers, which "first:" and "last:" count.
        """
        found: dict[str, str] = {}
        for pattern, recipe in self.rules:
            plain, gemms = parted(pattern)
            if name in _matched(plain, [name, *names]):
                runs = "high precision" if recipe is None else recipe.label
                said = {gemm: "" if plain == pattern else f"{gemm}: {runs} by {pattern!r}" for gemm in gemms}
                found = {**said, **found}
        return "; ".join(filter(None, (found.get(gemm) for gemm in GEMMS)))

    def __str__(self) -> str:
        width = max((len(pattern) for pattern, _ in self.rules), default=0)
        return "\n".join(
            f"{pattern.ljust(width)}  {repr(recipe) if recipe else 'high precision'}" for pattern, recipe in self.rules
        )


def as_placement(value: Any) -> Any:
    """The Placement in a file, whose name ends in .json where it is text; any other argument as it is."""
    is_file = isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".json"))
    return Placement.from_json(value) if is_file else value


def _read(index: int, rule: Any) -> Any:
    """A rule of `Placement.to_dict` with its recipe; anything else as it is, for the constructor to refuse."""
    if not (isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[1], dict)):
        return rule
    try:
        return rule[0], Recipe.from_dict(rule[1])
    except MicrofloatError as error:
        raise type(error)(f"rules[{index}][1]: {error}") from None


def _hint(written: str, pattern: str) -> str:
    """The likely reason why a pattern matches no name, as a sentence after a space; "" where none is known."""
    if end := re.fullmatch(r"(first|last):(.*)", pattern):
        if re.fullmatch(r"0*[1-9]\d*", end[2]):
            return " There are no names with numbered blocks."
        return f" Needed a number >= 1 after {end[1]}:."
    return " After a colon stands one of fprop, dgrad, wgrad." if ":" in written else ""


def parted(pattern: str) -> tuple[str, tuple[str, ...]]:
    """The pattern of names, and the GEMMs that the pattern decides about."""
    names, _, gemm = pattern.rpartition(":")
    return (names, (gemm,)) if gemm in GEMMS and names not in ("", "re") else (pattern, GEMMS)


def _combined(recipes: Sequence[Recipe | None]) -> Recipe | None:
    """The recipe with fprop of the first recipe, dgrad of the second, wgrad of the third; None = high precision."""
    first = recipes[0]
    if all(recipe == first for recipe in recipes):
        return first
    return CustomRecipe(
        *(Gemm(None, None) if one is None else getattr(one, gemm) for gemm, one in zip(GEMMS, recipes, strict=True))
    )


def _matched(pattern: str, names: Sequence[str]) -> set[str]:
    """The names that a pattern matches."""
    if pattern.startswith("re:"):
        return {name for name in names if re.fullmatch(pattern[3:], name)}
    end = re.fullmatch(r"(first|last):(\d+)", pattern)
    if end is None:
        return {name for name in names if fnmatchcase(name, pattern)}
    blocks: dict[str, dict[int, list[str]]] = {}  # the name of a list -> number of a block -> its layers
    for name in names:
        if number := re.match(r"(|.*?\.)(\d+)(\.|$)", name):
            blocks.setdefault(number[1], {}).setdefault(int(number[2]), []).append(name)
    count = int(end[2])
    if count == 0:
        return set()
    chosen = [sorted(one)[:count] if end[1] == "first" else sorted(one)[-count:] for one in blocks.values()]
    return {name for one, numbers in zip(blocks.values(), chosen, strict=True) for n in numbers for name in one[n]}


class _Cells(NamedTuple):
    """One line of a report as text; `layers`: the number of layers that share it."""

    layer: str
    layers: str
    shape: str
    action: str
    recipe: str
    reason: str


# The header of a report, and the texts that say nothing: a column of them alone is left out.
_HEADER = _Cells("layer", "layers", "in -> out", "action", "recipe", "reason")
_SAYS_NOTHING = {"layers": "1", "reason": ""}


@dataclass(frozen=True)
class ConversionRow:
    """The outcome for one layer; `shape` is (out features, in features), or None for a layer without such a shape.

    `action`: "converted", "repinned", "quantized", "loaded", "dequantized", "kept" (left out, and still runs the recipe
    of an earlier `convert`), "high precision", "skipped", "not seen" (weights that belong to no linear layer), or, for
    blocks, "fused" and "not fused".
    """

    name: str
    shape: tuple[int, int] | None
    action: str
    recipe: Recipe | None
    reason: str

    @property
    def cells(self) -> _Cells:
        """The row as text, for people."""
        shape = f"{self.shape[1]} -> {self.shape[0]}" if self.shape else "-"
        recipe = self.recipe.label if self.recipe else "-"
        return _Cells(self.name or "(root)", "1", shape, self.action, recipe, self.reason)


@dataclass(frozen=True, repr=False)
class ConversionReport(Printed):
    """One row per linear layer that was examined, and weights that `convert` cannot see.

    `share`: the fraction of the model's parameters in layers that run a recipe. `blocks`: those that ``fuse=True``
    found. Prints as a table, in which layers that differ only by numbers in their names are one row.
    """

    rows: tuple[ConversionRow, ...]
    share: float = 0.0
    unseen: tuple[ConversionRow, ...] = ()
    blocks: tuple[ConversionRow, ...] = ()

    @property
    def converted(self) -> list[str]:
        """Names of the layers that now run a recipe."""
        return [row.name for row in self.rows if row.recipe is not None]

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> reason of the layers left in high precision."""
        return {row.name: row.reason for row in self.rows if row.recipe is None}

    def __iter__(self) -> Iterator[ConversionRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if not (self.rows or self.unseen or self.blocks):
            return "No linear layers found: nothing runs in low precision."
        rows = (*self.rows, *self.unseen, *self.blocks)
        groups = alike(rows, lambda row: row.cells)
        cells = [_HEADER, *(group[0].cells._replace(layer=name, layers=str(len(group))) for name, group in groups)]
        columns = [column for column in zip(*cells, strict=True) if set(column[1:]) - {_SAYS_NOTHING.get(column[0])}]
        lines = text_table(list(zip(*columns, strict=True)))
        if self.blocks:
            left = [row for row in self.blocks if row.action != "fused"]
            why = "; ".join(dict.fromkeys(row.reason for row in left))
            fused = f"{len(self.blocks) - len(left)} of {len(self.blocks)} blocks are fused"
            lines += wrapped(f"{fused}{': ' if why else ''}{why}.")
        total = f"{len(self.converted)} of {len(self.rows)} linear layers run in low precision"
        return "\n".join([*lines, f"{total}: {self.share:.1%} of the model's parameters."])


def check_exclude(exclude: object) -> tuple[str, ...]:
    """The name patterns in `exclude`; InvalidTypeError for anything else."""
    remedy = "Write exclude=() to exclude nothing."
    if isinstance(exclude, str):
        remedy = f"Write exclude=({exclude!r},)."
    elif callable(exclude):
        remedy = "A function goes to filter=."
    elif isinstance(exclude, Iterable) and getattr(exclude, "ndim", 1):
        patterns = tuple(exclude)
        wrong = next((pattern for pattern in patterns if not isinstance(pattern, str)), None)
        if wrong is None:
            return patterns
        raise invalid_type("exclude", f"{wrong!r} in it", "a sequence of name patterns, such as ('*.lm_head',)")
    raise invalid_type("exclude", type(exclude), "a sequence of name patterns", remedy)


def check_filter(keep: object) -> None:
    """InvalidTypeError for a filter that is neither None nor callable, or that is written as (module, name)."""
    needed = "a callable (name, module) -> bool"
    if keep is not None and not callable(keep):
        raise invalid_type("filter", type(keep), needed, "Name patterns go to exclude=.")
    try:
        names = list(inspect.signature(keep).parameters) if keep is not None else []
    except (TypeError, ValueError):  # a callable written in C
        return
    if len(names) == 2 and names[1] in ("name", "fqn"):  # comparing a module with names would keep every layer
        raise invalid_type("filter", f"a callable ({', '.join(names)})", needed, "The name comes first.")


def check_fuse(fuse: Iterable[str] | str | None) -> tuple[str, ...]:
    """The kinds of fused groups as a tuple; InvalidValueError for one that is not in FUSED."""
    if fuse is not None and not isinstance(fuse, Iterable):
        raise invalid_type("fuse", kind_of(fuse), f"None, or names among {', '.join(FUSED)}")
    kinds = () if fuse is None else (fuse,) if isinstance(fuse, str) else tuple(fuse)
    for kind in kinds:
        if kind not in FUSED:
            raise unknown_name("fuse", kind, FUSED)
    return kinds


def fused_group(name: str, fuse: Sequence[str] = DEFAULT_FUSE) -> str | None:
    """The key that the members of a fused group have in common, None for a layer that belongs to none."""
    key = name
    for kind in fuse:
        for pattern, replacement in FUSED[kind]:
            key, count = re.subn(pattern, replacement, key)
            if count:
                break
    return None if key == name else key


def is_kept(name: str, gates: frozenset[str] = frozenset()) -> bool:
    """True for a matrix of a file that stays in high precision by default: a layer that DEFAULT_EXCLUDE covers, an
    embedding, or a norm. `gates`: `gates_of_mlps`, which stay in.
    """
    excluded = name not in gates and any(fnmatchcase(name, pattern) for pattern in DEFAULT_EXCLUDE)
    return excluded or _NO_LINEAR.search(name) is not None


def gates_of_mlps(exclude: Sequence[str], shapes: Mapping[str, tuple[int, int] | None]) -> frozenset[str]:
    """Layers called `gate` beside an `up` of the same shape: gates of MLPs that default patterns would exclude."""
    if tuple(exclude) != DEFAULT_EXCLUDE:
        return frozenset()
    gates = {}
    for name, shape in shapes.items():
        path, _, last = name.rpartition(".")
        if last == "gate" and shape is not None:
            gates[name] = [f"{path}.{up}" if path else up for up in ("up", "up_proj")], shape
    return frozenset(name for name, (ups, shape) in gates.items() if any(shapes.get(up) == shape for up in ups))


def nothing_left(model: object, verb: str, reasons: Iterable[str], layers: Sequence[str], fix: str = "") -> Exception:
    """The error of a function that finds no layer to work on; `layers`: what a model may have, short and in full."""
    reasons = list(dict.fromkeys(reasons)) or [f"it has no {layers[0]}"]
    if FILTERED in reasons:
        fix = fix or "The filter is called as filter(name, module), the name first."
    elif any("exclude=()" in reason for reason in reasons):
        fix = fix or "exclude=() excludes nothing."
    return invalid_value(
        "model", f"a {type(model).__name__} without a layer to {verb} ({'; '.join(reasons[:4])})",
        f"{layers[1]} that filter and exclude leave in", fix,
    )  # fmt: skip


def why_left_out(
    name: str, module: Any, exclude: Sequence[str], keep: Callable[[str, Any], object] | None,
    gates: frozenset[str] = frozenset(),
) -> str | None:  # fmt: skip
    """The reason why patterns or the filter leave a layer out, or None. `gates`: `gates_of_mlps`, which stay in."""
    for pattern in exclude:
        if fnmatchcase(name, pattern) and name not in gates:
            rule = "default rule: " if pattern in DEFAULT_EXCLUDE else ""
            return f"{rule}name matches {pattern!r} (exclude=() converts it)"
    if keep is None:
        return None
    try:
        return None if keep(name, module) else FILTERED
    except (AttributeError, TypeError) as error:
        raise invalid_type(
            "filter", f"{type(error).__name__} ({error}) for the layer {name!r}", "a callable (name, module) -> bool",
            "The name comes first.",
        ) from error  # fmt: skip
