"""Numbered experts of a file and the 3-D parameters of a model: joined when a model is loaded, taken apart to be saved.

Names and order are those of transformers: its conversion mapping of the model says which weights of an expert stand
one below the other in which parameter, and how the file calls everything else. Nothing is done for other models.

Legend: E = experts, R = rows, K = in features.
"""

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
from torch import nn

from microfloat.errors import CheckpointError
from microfloat.formats import FP8_ROW, FP8_TENSOR, NVFP4, NVFP4_ROW, ScaledFormat
from microfloat.torch.convert.experts import turned_in

if TYPE_CHECKING:
    from microfloat.checkpoint import Record
    from microfloat.checkpoint.records import Activation

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# The format of rows of which each has the one scale of its matrix, as matrices with different ones are joined.
BY_ROW = {FP8_TENSOR.name: FP8_ROW, NVFP4.name: NVFP4_ROW}


@dataclass(frozen=True)
class Joined:
    """The records of one parameter: those of each expert, in the order in which they stand one below the other."""

    name: str
    experts: tuple[tuple["Record", ...], ...]
    alternate: bool = False  # the rows of the matrices of an expert stand in turn
    is_turned: bool = False  # plain values are stored [E, K, N]


class Transform(Protocol):
    """A renaming of transformers, or a conversion, which has operations."""

    source_patterns: list[str]
    target_patterns: list[str]
    operations: list[object]


def _transforms(model: nn.Module, reverse: bool = False) -> tuple[list[Transform], list[Transform]] | None:
    """transformers' renamings of a model and its conversions of numbered experts; None for a model that has none.

    Other conversions, which join or turn matrices, are left out: their parameters keep the names of the model.
    """
    mapping, loading = (
        sys.modules.get(f"transformers.{name}") for name in ("conversion_mapping", "core_model_loading")
    )
    if mapping is None or loading is None or not hasattr(model, "base_model_prefix"):
        return None
    found = mapping.get_model_conversion_mapping(model, add_legacy=not reverse)
    found = [one for one in found if not isinstance(one, loading.WeightConverter) or _kinds(one) in _STACKED]
    if reverse:
        found = [one.reverse_transform() for one in found[::-1] if not isinstance(one, loading.PrefixChange)]
    converters = [one for one in found if isinstance(one, loading.WeightConverter)]
    return [one for one in found if one not in converters], converters


def _kinds(converter: Transform) -> list[tuple[str, int]]:
    return [(type(one).__name__, getattr(one, "dim", -1)) for one in converter.operations]


_STACKED = [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]


def alternate_in(model: nn.Module) -> bool | None:
    """For a model whose stacked experts transformers maps to no numbered ones, if rows of gate and up alternate."""
    from microfloat.checkpoint.families.patterns import STACKED

    return STACKED.get(str(getattr(getattr(model, "config", None), "model_type", None)))


def joined(
    model: nn.Module, loaded: Mapping[str, "Record"], existing: Mapping[str, torch.Tensor], strict: bool
) -> tuple[dict[str, "Record"], dict[str, Joined]]:
    """`loaded` under the names of the model, numbered experts as outlines without bytes, and what `join` makes of them.

    Raises CheckpointError that names all experts that are missing, and those that the model has not; where not
    `strict` their records keep their names, and the parameter stays as it is.
    """
    transforms = _transforms(model)
    if transforms is None:
        return dict(loaded), {}
    from microfloat.checkpoint.families.patterns import CACHE, parts_of_stacked, stacked_name

    rename = sys.modules["transformers.core_model_loading"].rename_source_key
    renamed: dict[str, Record] = {}
    found: dict[str, dict[str, dict[int, Record]]] = {}
    patterns = {
        one: list(converter.source_patterns) for converter in transforms[1] for one in converter.source_patterns
    }
    alternate = alternate_in(model)
    others = [name for name in sorted(loaded) if name not in existing]  # in the order in which transformers sees them
    targets = {name: rename(name, *transforms, model.base_model_prefix, existing) for name in others}
    for name, record in loaded.items():
        target, pattern = targets.get(name, (name, None))
        if alternate is not None and (place := stacked_name(target)) is not None:
            target, leaves = place[0], [part.partition("{}.")[2] for part in parts_of_stacked(place[0])]
            patterns |= dict.fromkeys(leaves, leaves)
            pattern = leaves[place[2]]
        numbers = _NUMBER.findall(name)
        if target not in existing or not numbers or pattern not in patterns:
            is_known = target in existing or (record.format is None and target.rpartition(".")[2] in CACHE)
            renamed[target if pattern is None and is_known else name] = record
        else:
            found.setdefault(target, {}).setdefault(pattern, {})[int(numbers[-1])] = record
    problems: list[str] = []
    parts: dict[str, Joined] = {}
    for target, by_pattern in found.items():
        own = patterns[next(iter(by_pattern))]
        number = existing[target].shape[0]
        wrong = _misfits(by_pattern, own, number)
        problems += wrong
        if wrong:
            renamed |= {one.name: one for records in by_pattern.values() for one in records.values()}
            continue
        rows = tuple(tuple(by_pattern[pattern][e] for pattern in own) for e in range(number))
        layer, _, key = target.rpartition(".")
        parts[target] = Joined(target, rows, bool(alternate), bool(turned_in(model.get_submodule(layer)).get(key)))
        renamed[target] = _outline(parts[target])
    if problems and strict:
        raise CheckpointError(
            f"load_quantized: got a checkpoint whose experts are not those of the {type(model).__name__}: "
            f"{'; '.join(problems)}. Needed every expert of the model once, and no other."
        )
    return renamed, parts


def _misfits(found: Mapping[str, Mapping[int, "Record"]], patterns: Sequence[str], number: int) -> list[str]:
    """The experts that are missing from a parameter, and those that are too many, by the names of their weights."""
    problems = []
    sample = next(record.name for records in found.values() for record in records.values())
    for pattern in patterns:
        have = found.get(pattern, {})
        like = next((record.name for record in have.values()), "")
        for e in sorted({*range(number), *have}):
            name = _numbered(like, e) if like else f"{pattern} of {_numbered(sample, e)}"
            if e not in have:
                problems.append(f"{name} is missing")
            elif e >= number:
                problems.append(f"{name} is one more than the model's {number}")
    return problems


def _numbered(name: str, e: int) -> str:
    last = list(_NUMBER.finditer(name))[-1]
    return f"{name[: last.start()]}{e}{name[last.end() :]}"


def _outline(parts: Joined) -> "Record":
    """A record with the shape and the format of joined experts, whose bytes are all one zero."""
    first, fmt = parts.experts[0][0], _format_of(parts)
    rows = sum(one.logical_shape[0] for one in parts.experts[0])
    shape = (len(parts.experts), rows, *first.logical_shape[1:])
    if fmt is None and parts.is_turned:
        shape = (shape[0], *shape[:0:-1])
    zeros = np.broadcast_to(np.zeros((), first.codes.dtype if fmt is first.format else np.float32), shape)
    extras = {key: array for row in parts.experts for one in row for key, array in one.extras.items()}
    scale = None if fmt is None else zeros
    return replace(
        first, name=parts.name, codes=zeros, scale=scale, format=fmt, logical_shape=shape, extras=extras, axis=-1,
        activation=_activation(parts),
    )  # fmt: skip


def _activation(parts: Joined) -> "Activation":
    """The input of a layer of experts: one static scale for all, the largest of theirs."""
    records = [one for row in parts.experts for one in row]
    scales = [one.activation.get("scale") for one in records]
    known = [np.asarray(scale).max() for scale in scales if scale is not None]
    return {  # type: ignore[return-value]
        **records[0].activation, "scale": np.float32(max(known)) if len(known) == len(scales) else None,  # type: ignore
    }  # fmt: skip


def _format_of(parts: Joined) -> ScaledFormat | None:
    """The format of joined experts; None where no format holds their codes as they are."""
    first = parts.experts[0][0]
    fmt = first.format
    if fmt is None or any(one.format != fmt for row in parts.experts for one in row):
        return None
    height = fmt.block[0] or 1
    is_cut = parts.alternate and height > 1 and len(parts.experts[0]) > 1
    if is_cut or any(one.logical_shape[0] % height for one in parts.experts[0][:-1]):
        return None  # a tile would reach over two matrices
    return fmt if all(_have_one_scale(row) for row in parts.experts) else BY_ROW.get(fmt.name)


def _have_one_scale(row: Sequence["Record"]) -> bool:
    """True if the matrices of one expert have no scale of a whole matrix, or the same."""
    for scales in ([one.scale for one in row], [one.tensor_scale for one in row]):
        whole = [np.asarray(scale) for scale in scales if scale is not None and np.ndim(scale) == 0]
        if any(scale != whole[0] for scale in whole):
            return False
    return True


def join(parts: Joined) -> "Record":
    """The record of a parameter of experts, of codes and scales as they are stored.

    Matrices of one scale each that stand one below the other and have different ones become rows with these scales.
    What no format holds becomes plain values, and a warning names it.
    """
    from microfloat.checkpoint._casting import joined_rows

    outline, fmt = _outline(parts), _format_of(parts)
    if fmt is None:
        if any(one.format is not None for row in parts.experts for one in row):
            text = "their formats or tiles do not fit one parameter"
            warnings.warn(f"load_quantized: {parts.name} is dequantized: {text}.", UserWarning, stacklevel=4)
        values = np.stack([joined_rows([one.dequantize() for one in row], parts.alternate) for row in parts.experts])
        return replace(outline, codes=values.swapaxes(1, 2) if parts.is_turned else values)

    def stacked(role: str) -> np.ndarray | None:
        made = []
        for row in parts.experts:
            arrays = [getattr(one, role) for one in row]
            if arrays[0] is None:
                return None
            if np.ndim(arrays[0]) or role == "codes":
                made.append(joined_rows(arrays, parts.alternate))
            elif fmt is row[0].format:
                made.append(np.asarray(arrays[0]).reshape(1, 1))
            else:
                scales = [np.full((one.logical_shape[0], 1), scale, np.float32)
                          for one, scale in zip(row, arrays, strict=True)]  # fmt: skip
                made.append(joined_rows(scales, parts.alternate))
        return np.stack(made)

    return replace(
        outline, codes=cast(np.ndarray, stacked("codes")), scale=stacked("scale"), tensor_scale=stacked("tensor_scale")
    )


def names_of_parts(model: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """By the name of each parameter, its name in a file; of experts those of their parts, a `*` for the number."""
    transforms = _transforms(model, reverse=True)
    if transforms is None:
        return {name: [name] for name in names}
    rename = sys.modules["transformers.core_model_loading"].rename_source_key
    patterns = {one: converter for converter in transforms[1] for one in converter.source_patterns}
    made = {}
    for name in names:
        target, pattern = rename(name, *transforms, reverse=True)
        parts = [target]
        if pattern is not None:
            own = patterns[pattern].target_patterns
            parts = [target.replace(own[0], other) for other in own] if own[0] in target else [name]
        made[name] = parts
    return made


def taken_apart(model: nn.Module, records: Sequence["Record"]) -> list["Record"]:
    """The records of a model's state under the names that files have, experts one by one."""
    from microfloat.checkpoint._casting import experts_apart, matrix_of

    alternate = alternate_in(model)
    named = names_of_parts(model, [record.name for record in records])
    made: list[Record] = []
    for record in records:
        names = named[record.name]
        parent, _, key = record.name.rpartition(".")
        turned = turned_in(model.get_submodule(parent))
        if alternate is not None and key.removesuffix("_bias") in turned:
            if record.format is None and len(record.logical_shape) == 3:
                record = replace(record, codes=record.codes.swapaxes(1, 2))
                record = replace(record, logical_shape=record.codes.shape)
            made += experts_apart(record, alternate)
            continue
        if "*" not in names[0] or len(record.logical_shape) != 3:
            made.append(replace(record, name=names[0] if "*" not in names[0] else record.name))
            continue
        if turned.get(key) and record.format is None:
            record = replace(record, codes=record.codes.swapaxes(1, 2))
        rows = record.codes.shape[1] // len(names)
        for e in range(record.codes.shape[0]):
            whole = matrix_of(record, e)
            for number, name in enumerate(names):
                part = whole.narrow(number * rows, (number + 1) * rows)
                made.append(replace(part, name=name.replace("*", str(e))))
    return made
