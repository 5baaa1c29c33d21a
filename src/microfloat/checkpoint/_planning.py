"""The steps of a conversion, one for each parameter, decided before anything is written."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import ml_dtypes
import numpy as np

from microfloat.arguments import check_name
from microfloat.checkpoint._casting import Stack, experts_apart, outline, stacked
from microfloat.checkpoint._recoding import recodes
from microfloat.checkpoint._saving import SAVED, has_divisor, scale_dtype
from microfloat.checkpoint.families import WRITTEN, Family, unknown_target
from microfloat.checkpoint.families.patterns import CACHE, STACKED, ignored_by, module_of
from microfloat.checkpoint.families.readers import Layer, complaints
from microfloat.checkpoint.families.writing import Written
from microfloat.checkpoint.folder import has_cache
from microfloat.checkpoint.load import Checkpoint
from microfloat.checkpoint.records import NO_ACTIVATION, Activation, Record
from microfloat.errors import CheckpointError, PlacementError, checkpoint_error, invalid_value
from microfloat.recipes import Cast, Placement, Recipe
from microfloat.recipes.inference import as_stored
from microfloat.recipes.placement import DEFAULT_EXCLUDE, fused_group, gates_of_mlps, is_kept

PLAIN = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
_FLOATS = (*PLAIN.values(), np.dtype(np.float64))
MIXED = tuple(name for name, families in SAVED.items() if len(families) > 1 or name == "microfloat:native")
QUANTIZED = ("cast", "recoded", "carried")  # the actions whose result the target holds in its format


Notes = defaultdict[str, list[str]]  # remarks about a conversion, with the names that each is about


def lines_of(notes: Notes) -> list[str]:
    """One line for each kind of remark: the text, how many names it is about, and the first of them."""
    lines = []
    for text, names in notes.items():
        such_as = f": {len(names)} in all, such as {names[0]}" if len(names) > 1 else f": {names[0]}" if names else ""
        lines.append(text + such_as)
    return lines


@dataclass(frozen=True)
class Step:
    """One parameter of a conversion: its record, its action, and the cast, the family and the group of a tensor scale.

    `extras`: tensors of its module that are written beside the result. `activation`: the input of the layer in the
    result. `turned`: the values are written with their last two axes swapped.
    """

    record: Record
    action: str
    reason: str = ""
    family: Family | None = None
    cast: Cast | None = None
    dtype: np.dtype = PLAIN["f32"]
    group: str | None = None
    activation: Activation = field(default_factory=NO_ACTIVATION.copy)
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    turned: bool = False

    @cached_property
    def made(self) -> Record:
        """The record that will be written: the source itself, or one without data or of a plain tensor."""
        if self.cast is not None:
            return replace(outline(self.record, self.cast.format), activation=self.activation, extras=self.extras)
        return self.record if self.family is not None else replace(self.record, format=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a plain result."""
        shape = self.record.logical_shape
        return (shape[0], shape[2], shape[1]) if self.turned and not isinstance(self.record, Stack) else shape

    @property
    def beside(self) -> dict[str, np.ndarray]:
        """The tensors that a plain result has beside it, by name."""
        return {_sibling(self.record.name, last): array for last, array in self.extras.items()}

    def encode(self, record: Record) -> dict[str, np.ndarray]:
        """The tensors of a record, or of a slab of it, in the target's family."""
        if self.family is None:
            return {record.name: record.codes}
        if self.cast is not None:
            record = replace(record, activation=self.activation, extras=self.extras)
        return self.family.encode(self.family, record, self.dtype)


def _sibling(name: str, last: str) -> str:
    """The name of another tensor of the module of a parameter."""
    folder = name.rpartition(".")[0]
    return f"{folder}.{last}" if folder else last


@dataclass(frozen=True, eq=False)
class Target:
    """The format of a conversion: a family and a cast, or a plain dtype. `recodes`: no rule was named for scales, and
    values keep theirs where the format has them.
    """

    name: str
    family: Family | None = None
    written: Written | None = None
    dtype: np.dtype | None = None
    recodes: bool = True

    @property
    def cast(self) -> Cast | None:
        """The cast of the weights."""
        return None if self.written is None else self.written.cast


def target_of(to: str, scale_rule: str | None, four_over_six: bool, is_placed: bool = False) -> Target:
    """The target of a name such as "ct:nvfp4"; ValueError for an unknown one, or a scale rule that does not fit it.

    `is_placed`: a placement names the format of each layer, and the target the producer alone ("ct:mixed").
    """
    check_name("to", to)
    if is_placed:
        if to not in MIXED:
            raise unknown_target("to", to, MIXED, "A placement says the format of each layer.")
        if scale_rule is not None or four_over_six:
            raise invalid_value("scale_rule", scale_rule or "four_over_six", "None beside a placement of recipes")
        family = SAVED[to][0]
        return Target(to, family, next(iter(family.writes.values())))
    if to in PLAIN:
        if scale_rule is not None or four_over_six:
            raise invalid_value("scale_rule", scale_rule or "four_over_six", f"None, as {to} has no scales")
        return Target(to, dtype=PLAIN[to])
    if to not in WRITTEN:
        raise unknown_target("to", to, [*WRITTEN, *PLAIN], _hint_of(to))
    if four_over_six and scale_rule is not None:
        raise invalid_value("four_over_six", f"True with scale_rule={scale_rule!r}", "one of them")
    family, written = WRITTEN[to]
    rule = "four_over_six" if four_over_six else written.cast.scale_rule if scale_rule is None else scale_rule
    cast = Cast(written.cast.format, rule)
    if cast.tensor_scale != written.cast.tensor_scale:  # the format has a tensor for it, or has none
        needed = f"a rule with {'a' if written.cast.tensor_scale else 'no'} tensor scale, as {to} stores it"
        raise invalid_value("scale_rule", repr(rule), needed)
    return Target(to, family, written._replace(cast=cast), recodes=scale_rule is None and not four_over_six)


def _hint_of(to: str) -> str:
    """A hint for a format without its family, or for our own container without a format; "" for other names."""
    if to.lower() in ("native", "microfloat:native"):
        return "That is the container alone; its targets name the format in it, such as microfloat:nvfp4_row."
    if to in MIXED:
        return "It takes a placement, the format of each layer: --placement FILE, as `microfloat plan --out` writes it."
    *first, last = [repr(name) for name in WRITTEN if name.partition(":")[2] == to.lower()] or [""]
    return f"Did you mean {', '.join(first) + ' or ' if first else ''}{last}?" if last else ""


class Facts:
    """Facts about a source that decide about its parameters.

    `dtype`, `model_type`: the model's. `hidden`: its hidden size, if the configuration tells. `turned`: its plain
    experts are stored [E, K, N]. `alternate`: of experts that are one tensor of each kind, if gate and up alternate.
    `has_cache`: its configurations speak of scales for the KV cache. `gates`: `gates_of_mlps`.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        config, contents = checkpoint.config, checkpoint.contents
        named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        self.dtype = next((dtype for dtype in PLAIN.values() if dtype.name == named), PLAIN["bf16"])
        inner = config.get("text_config")
        self.hidden = (inner if isinstance(inner, Mapping) else config).get("hidden_size")
        self.model_type = str(config.get("model_type"))
        self.alternate = STACKED.get(self.model_type, True if "gptoss:hf" in contents.families else None)
        self.turned, self._has_conv1d = self.model_type in _TURNED_EXPERTS, self.model_type in _OF_CONV1D
        self.is_quantized = bool(contents.entries or contents.announcements)
        self.has_cache = has_cache(checkpoint.configs)
        shapes = {
            module_of(name): (stored.shape[0], stored.shape[1])
            for name, stored in contents.plain.items() if len(stored.shape) == 2
        }  # fmt: skip
        self.gates = gates_of_mlps(DEFAULT_EXCLUDE, shapes)
        self._has_codes = bool(contents.entries)
        self._first = next((one for one in contents.announcements if not one.refusal), None)

    def left(self, module: str) -> str:
        """The reason why the source leaves a module in high precision, or ""."""
        if self._has_conv1d and module.rpartition(".")[2] in _CONV1D:
            return _CONV1D_LEFT
        if not self._has_codes:
            return ""
        pattern = None if self._first is None else self._first.ignored(module)
        return "plain in the source, which is quantized" if pattern is None else f"left out by the source ({pattern!r})"


_OF_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
_CONV1D_LEFT = "a Conv1D stores it [in, out], which no reader of quantized layers expects"
_CONV1D = ("c_attn", "q_attn", "c_proj", "c_fc")  # their layers with weights stored [in, out]
_TURNED_EXPERTS = (*STACKED, "openai_privacy_filter")  # their experts are stored [E, K, N]


def decide(
    checkpoint: Checkpoint, target: Target, ignore: Sequence[str], fuse: Sequence[str], notes: Notes,
    placement: Placement | None = None,
) -> list[Step]:  # fmt: skip
    """A step for each parameter, in the order of the files.

    Raises InvalidValueError where nothing would be stored in the target's format, and CheckpointError where a source
    that shall be quantized holds codes of a layout that is not read.
    """
    _note_unread(checkpoint, target, notes)
    source = Facts(checkpoint)
    records = arranged(checkpoint.values(), target, source)
    modules = [module_of(record.name) for record in records]
    targets: list[Target | None] = [target] * len(records)
    if placement is not None:
        targets = _placed(records, target, placement, source)
    steps = [
        _left(record, target, source) if one is None else step_of(record, one, ignore, source)
        for record, one in zip(records, targets, strict=True)
    ]
    unused = [pattern for pattern in ignore if not any(ignored_by(module, [pattern]) for module in modules)]
    if unused:
        _ = notes[f"ignore: no parameter is covered by {', '.join(map(repr, unused))}"]
    if target.written is None:
        _note_plain(steps, target, notes)
        return steps
    groups: dict[tuple[str, Target], list[int]] = {}
    for index, step in enumerate(steps):
        key = fused_group(modules[index], fuse)
        its = targets[index]
        if key is not None and its is not None and step.action in QUANTIZED:
            groups.setdefault((key, its), []).append(index)
    for (key, its), members in groups.items():
        _share(steps, members, key, its, notes)
    if target.written.activation == "static":
        _keep_bare(steps, records, target, source, notes)
    if not any(step.action in QUANTIZED for step in steps):
        reasons = sorted({step.reason for step in steps if step.reason}) or ["it has no weight of a linear layer"]
        raise invalid_value(
            "src", f"{checkpoint.path} without a parameter to store as {target.name}",
            f"one that it has a place for ({'; '.join(reasons[:4])})",
            _NO_LINEAR if _CONV1D_LEFT in reasons else _NOTHING,
        )  # fmt: skip
    for step, record in zip(steps, records, strict=True):
        before, now = (one.get("scheme", "none") for one in (record.activation, step.activation))
        if step.action == "carried" and (before, now) == ("none", "dynamic"):
            notes[f"{target.name} quantizes inputs on the way, as the source does not"].append(record.name)
    for one in dict.fromkeys(targets):
        if one is not None:
            _note_readers([step for step, its in zip(steps, targets, strict=True) if its is one], one, source, notes)
    return steps


def _placed(records: Sequence[Record], target: Target, placement: Placement, source: Facts) -> list[Target | None]:
    """The target of each parameter: of a weight by the recipe of its layer, None to leave it as it is stored."""
    plan, made = as_stored(placement), dict[Recipe, Target]()
    held = {name: one for name, one in WRITTEN.items() if one[0] in SAVED[target.name]}
    for pattern, recipe in plan.rules:
        if recipe is None or recipe in made:
            continue
        w, search = recipe.fprop.rhs, getattr(recipe, "scale_search", None)
        assert w is not None
        name = next((name for name, (_, one) in held.items() if one.cast.format == w.format), None)
        if name is None or search == "mse":
            known = ", ".join(dict.fromkeys(one.cast.format.name for _, one in held.values()))
            needed = f"a format that {target.name} holds: {known}" if name is None else "None or 'four_over_six'"
            got = w.format.name if name is None else "scale_search='mse', which microfloat.torch.quantize_ carries out"
            raise PlacementError(f"{plan._source}: {pattern!r} got {got}, needed {needed}.")
        family, written = held[name]
        written = written._replace(cast=w) if search else written
        written = written if recipe.fprop.lhs else written._replace(activation="none", activation_format=None)
        made[recipe] = Target(name, family, written)
    names = [module_of(one.name) if one.format is not None or _is_weight(one) else "" for one in records]
    chosen = plan.resolve(dict.fromkeys(filter(None, names)))
    source.gates |= {pattern for pattern, _ in plan.rules}  # a layer that is named in full is not left out by default
    found = {name: None if recipe is None else made[recipe] for name, recipe in chosen.items()}
    return [found.get(name) for name in names]


def _left(record: Record, target: Target, source: Facts) -> Step:
    """A step that keeps a parameter as it is stored, where the target holds its format."""
    reason = "the placement leaves it as it is"
    if record.format is None:
        return Step(record, "kept", reason if _is_weight(record) else "")
    family = next((one for one in SAVED[target.name] if one.holds(record.format)), None)
    if family is None:
        return _dequantized(record, f"{target.name} has no place for {record.format}", source)
    return Step(record, "carried", reason, family, dtype=scale_dtype(record), activation=record.activation)


_NO_LINEAR = (
    "No target takes it: engines read [out, in]. In Python, microfloat.torch.quantize_(model, config) quantizes "
    "transformers' Conv1D, save_quantized(model, path) stores it, and load_quantized(path, model) reads it."
)
_NOTHING = "Choose another target; what a quantized source leaves plain is cast after a conversion to bf16."


def arranged(records: Iterable[Record], target: Target, source: Facts) -> list[Record]:
    """The records, with experts taken apart or put together as the readers of the target expect them."""
    if source.alternate is None or (target.written is not None and target.written.stacked):
        return list(records)
    if target.written is None:
        return stacked(records, source.alternate)
    split: list[tuple[Record, list[Record]]] = []
    for stored in records:
        record, shape = stored, stored.logical_shape
        if len(shape) == 3 and not _lies_turned(record, source):
            scale = record.scale if record.scale is None or record.scale.ndim < 3 else np.swapaxes(record.scale, 1, 2)
            codes, shape = np.swapaxes(record.codes, 1, 2), (shape[0], shape[2], shape[1])
            record = replace(record, codes=codes, scale=scale, logical_shape=shape)
        is_bias = len(shape) == 2 and record.name.endswith("_bias")
        split.append((stored, experts_apart(record, source.alternate) if len(shape) == 3 or is_bias else [record]))
    whole = {  # layers of which a tensor cannot be taken apart
        stored.name.rpartition(".")[0] for stored, (first, *_) in split
        if len(stored.logical_shape) == 3 and first.name == stored.name
    }  # fmt: skip
    return [one for stored, made in split for one in ([stored] if stored.name.rpartition(".")[0] in whole else made)]


def _note_unread(checkpoint: Checkpoint, target: Target, notes: Notes) -> None:
    """Notes about codes and entries of the source that are not read; CheckpointError for codes beside others."""
    found = [finding for finding in checkpoint.scale_findings if finding.id in ("unread-codes", "unknown-entry")]
    codes = [finding._replace(severity="error") for finding in found if finding.id == "unread-codes"]
    if codes and target.written is not None:  # its configuration would announce them
        raise checkpoint_error(checkpoint.path, codes)
    for finding in found:
        _ = notes[f"of the source: {finding.message} {finding.remedy}".rstrip()]


def _note_plain(steps: Sequence[Step], target: Target, notes: Notes) -> None:
    """Notes about a plain target: scales of a KV cache that it has no place for, and that nothing changes."""
    for step in steps:
        names = [step.record.name] if step.action == "dropped" else []
        if step.action == "dequantized":
            names = [_sibling(step.record.name, last) for last in step.record.extras if last in CACHE]
        for name in names:
            notes[f"scales of a KV cache are left out, as {target.name} has no configuration for them"].append(name)
    if all(step.action == "kept" for step in steps):
        _ = notes[f"nothing was converted: every parameter is as {target.name} has it"]


def _note_readers(steps: Sequence[Step], target: Target, source: Facts, notes: Notes) -> None:
    """Notes about layers that known readers of the target do not read, or wrongly."""
    assert target.written is not None
    layout, of_gptoss = target.written.stacked, source.turned or source.alternate is not None
    where = "any" if of_gptoss else "rows"
    able = [name for name, (_, one) in WRITTEN.items() if one.stacked == where and not name.startswith("microfloat:")]
    for step in steps:
        name = step.record.name
        if step.action not in QUANTIZED:
            continue
        if len(step.record.logical_shape) > 2 and (not layout or (layout == "rows" and of_gptoss)):
            notes[
                f"no known reader of {target.name} expects the experts of a layer as one tensor; {', '.join(able)} and "
                "microfloat's own families (such as microfloat:nvfp4) have a layout for them"
            ].append(name)
        assert step.family is not None
        fmt = step.record.format if step.cast is None else step.cast.format
        shape, kind, dtype = step.record.logical_shape, source.model_type, source.dtype.name
        for text in complaints(Layer(step.family.name, fmt, name, shape, kind, dtype=dtype)):
            notes[text].append(name)


def step_of(record: Record, target: Target, ignore: Sequence[str], source: Facts) -> Step:
    if isinstance(record, Stack):
        return Step(record, "dequantized", dtype=target.dtype or source.dtype, turned=True)
    module = module_of(record.name)
    pattern = ignored_by(module, ignore)
    if record.format is None:
        return _step_of_plain(record, target, module, pattern, source)
    if _LOW_RANK & set(record.extras):
        raise CheckpointError(
            f"{record.name}: a low-rank branch (SVDQuant) cannot be converted; no other format has it."
        )
    if target.written is None or target.cast is None:
        return _dequantized(record, "", source, target.dtype)
    unsuitable = _why_not(record, target, source) if pattern is None else f"ignored by {pattern!r}"
    if unsuitable:
        return _dequantized(record, unsuitable, source)
    if (
        record.format == target.cast.format
        and "pre_quant_scale" not in record.extras
        and has_divisor(record, target.family)
    ):
        activation = _activation_under(record, target)
        carried = _with_activation(record, activation)
        return Step(carried, "carried", family=target.family, dtype=scale_dtype(record), activation=activation)
    made = _cast_step(record, target, source.dtype)
    stored = made.dtype if target.family is not None and target.family.model_scales else PLAIN["f32"]
    if target.recodes and "pre_quant_scale" not in record.extras and recodes(record.format, target.cast.format, stored):
        return replace(made, action="recoded")
    return made


def _dequantized(record: Record, reason: str, source: Facts, dtype: np.dtype | None = None) -> Step:
    """A step to a plain tensor, in the layout that transformers stores: of some models the experts are [E, K, N].

    `dtype`: that of a plain target, which has no place for the scales of a KV cache.
    """
    extras = _cache_scales(record) if dtype is None else {}
    turned = _lies_turned(record, source)
    return Step(record, "dequantized", reason, dtype=dtype or source.dtype, turned=turned, extras=extras)


def _lies_turned(record: Record, source: Facts) -> bool:
    """True for codes [E, N, K] of experts that transformers stores as [E, K, N] when they are plain.

    Blocks and rows lie along K. One scale of a matrix or tile leaves it open, and other tools store such codes as the
    values were: there the side of the hidden size tells, which is N of `down_proj` and K of the others.
    """
    shape, fmt = record.logical_shape, record.format
    if len(shape) != 3 or fmt is None:
        return False
    if record.source is not None and record.source.family == "gptoss:hf":
        return True
    if not source.turned or ".experts." not in f".{record.name}.":
        return False
    if source.hidden not in shape[1:] or not (fmt.is_per_tensor or fmt.is_tile):
        return True
    return shape[1 if "down_proj" in record.name else 2] == source.hidden


_LOW_RANK = {"svdquant_lora_a", "svdquant_lora_b"}
_CAPACITY = {True: 2688.0, False: 448.0}  # of a format with a tensor scale, and of FP8


def _cache_scales(record: Record) -> dict[str, np.ndarray]:
    return {name: array for name, array in record.extras.items() if name in CACHE}


def _cast_step(record: Record, target: Target, dtype: np.dtype) -> Step:
    assert target.cast is not None
    activation = _activation_under(record, target)
    return Step(
        record, "cast", "", target.family, target.cast, dtype, activation=activation, extras=_cache_scales(record)
    )


def _activation_under(record: Record, target: Target) -> Activation:
    """The input of a layer as the target names it, or with the static scale of the source where the target has one."""
    assert target.written is not None
    cast, scheme, fmt = target.written.cast, target.written.activation, target.written.activation_format
    stored, of_input = record.activation.get("scale"), record.activation.get("format")
    takes = cast.format.tensor_scale is not None or cast.format.is_per_tensor
    if record.activation.get("scheme") == "static" and stored is not None and takes and record.format is not None:
        two_level = (of_input or record.format).tensor_scale is not None
        unit = np.float32(_CAPACITY[two_level] / _CAPACITY[cast.format.tensor_scale is not None])
        if unit == 1 and record.format == cast.format:
            return record.activation
        return {"scheme": "static", "scale": np.asarray(stored * unit, np.float32), "format": cast.format}
    if scheme == "static":  # but the source has no scale
        return NO_ACTIVATION.copy()
    return {"scheme": scheme, "scale": None, "format": fmt}


def _with_activation(record: Record, activation: Activation) -> Record:
    """The record with another scale of its input; a divisor that it was read with is none any more."""
    if activation is record.activation:
        return record
    source = record.source and record.source._replace(
        divisors={role: array for role, array in record.source.divisors.items() if role != "input_scale"}
    )
    return replace(record, activation=activation, source=source)


def _step_of_plain(record: Record, target: Target, module: str, pattern: str | None, source: Facts) -> Step:
    floating = record.codes.dtype in _FLOATS
    if target.cast is None:
        of_cache = record.name.rpartition(".")[2] in CACHE
        if of_cache and (source.has_cache or (source.is_quantized and record.codes.size == 1)):
            return Step(record, "dropped")
        same = not floating or record.codes.dtype == target.dtype
        return Step(record, "kept") if same else Step(record, "dequantized", dtype=target.dtype or PLAIN["f32"])
    if not _is_weight(record):
        return Step(record, "kept")
    turned = record
    if source.turned and record.codes.ndim == 3:
        codes = np.swapaxes(record.codes, 1, 2)
        turned = replace(record, codes=codes, logical_shape=codes.shape)
    reason = (
        "kept by default" if is_kept(module, source.gates) else source.left(module) or _why_not(turned, target, source)
    )
    if pattern is not None:
        reason = f"ignored by {pattern!r}"
    if reason:
        return Step(record, "kept", reason)
    return _cast_step(turned, target, record.codes.dtype if record.codes.dtype in PLAIN.values() else PLAIN["f32"])


def _is_weight(record: Record) -> bool:
    """True for plain values of a matrix, or of the experts of a layer."""
    stacked = record.codes.ndim == 3 and ".experts." in f".{record.name}."
    is_matrix = record.codes.ndim == 2 and record.name.rpartition(".")[2] == "weight"
    return record.format is None and record.codes.dtype in _FLOATS and (stacked or is_matrix)


def _why_not(record: Record, target: Target, source: Facts) -> str:
    """The reason why the target cannot store a parameter, or nothing."""
    assert target.cast is not None
    assert target.family is not None
    fmt, length = target.cast.format, record.logical_shape[-1]
    block = fmt.block[1]
    name, rank = target.family.name, target.family.rank
    if rank and len(record.logical_shape) != rank:
        return f"{name} quantizes {'stacked experts' if rank == 3 else 'matrices'} alone"
    if rank == 3 and source.model_type not in ("None", *_TURNED_EXPERTS):
        return f"{name} holds experts as gpt-oss stores them, {source.model_type} stores its own otherwise"
    if fmt.scale.bits == 8 and block is not None and length % block:
        return f"{length} columns are no multiple of {block}"
    return "it has no elements" if not record.codes.size else ""


_AGAIN = "members of a fused group had tensor scales of their own and were quantized again under one"


def _share(steps: list[Step], members: list[int], key: str, target: Target, notes: Notes) -> None:
    """Give the members of a fused group one tensor scale, or one scale, and one input scale."""
    assert target.cast is not None
    assert target.written is not None
    if target.cast.format.tensor_scale == "tensor":
        levels = {np.asarray(steps[i].record.tensor_scale).tobytes() for i in members if steps[i].action == "carried"}
        mixed = len({steps[i].action for i in members}) > 1
        if len(levels) > 1 or mixed:
            if any(steps[i].action == "carried" for i in members):
                notes[_AGAIN].append(key)
            for i in members:
                steps[i] = _cast_step(steps[i].record, target, steps[i].dtype)
    if target.written.joint or target.cast.format.tensor_scale == "tensor":
        for i in members:  # carried codes keep their scales, as another would round them twice
            steps[i] = replace(steps[i], group=key)
    scales = [steps[i].activation.get("scale") for i in members]
    found = [scale for scale in scales if scale is not None]
    if found and len({None if scale is None else scale.tobytes() for scale in scales}) > 1:
        largest = max(found, key=lambda scale: float(np.max(scale)))
        notes["members of a fused group had input scales of their own and share the largest"].append(key)
        holder = next(i for i, scale in zip(members, scales, strict=True) if scale is not None)
        fmt = steps[holder].activation.get("format")
        for i in members:
            activation = Activation(scheme="static", scale=largest, format=fmt)
            record = _with_activation(steps[i].record, activation)
            steps[i] = replace(steps[i], activation=activation, record=record)


def _keep_bare(steps: list[Step], records: Sequence[Record], target: Target, source: Facts, notes: Notes) -> None:
    """Layers without the static input scale of the target: plain beside others that have one, else weight-only."""
    bare = [i for i, step in enumerate(steps) if step.action in QUANTIZED and step.activation.get("scale") is None]
    if len(bare) == sum(step.action in QUANTIZED for step in steps):
        notes[
            f"{target.name} announces static input scales, of which the source has none, so that these layers are "
            "weight-only (ct:fp8_dynamic needs no such scales; mf.calibrate measures them)"
        ] += [steps[i].record.name for i in bare]
        return
    reason = f"it has no input scale, which {target.name} announces"
    for i in bare:
        record = records[i]
        steps[i] = _dequantized(record, reason, source) if record.format else Step(record, "kept", reason)
