"""Checks of records: scales that are missing, NaN, infinite or zero, shapes, fused groups, codes that are NaN.

Everything is read in pieces, so that no file, however large its header says it is, has anything large allocated.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from microfloat.checkpoint._arrays import pieces_of
from microfloat.checkpoint._casting import experts_of, matrix_of
from microfloat.checkpoint.detect import Contents, contradiction, lacks_input_scale
from microfloat.checkpoint.families import Announcement, Entry
from microfloat.checkpoint.families.patterns import NUMBERED, module_of
from microfloat.checkpoint.records import Finding, Record, some
from microfloat.formats import ScaledFormat, decode
from microfloat.recipes.placement import fused_group

Findings = Iterator[Finding]
_REEXPORT = "Quantize or export the layer again; microfloat.checkpoint.convert does so from the original weights."


def structure_findings(contents: Contents, names: Container[str]) -> Findings:
    """Findings about names of tensors, and about configurations that contradict the tensors or each other."""
    yield from contents.findings
    shown = {name: entry for name, entry in contents.entries.items() if name in names}
    yield from _missing_input_scales(contents, shown)
    if not contents.announcements:
        return
    first = contents.announcements[0]
    yield from first.remarks
    yield from _sparse(first, contents)
    for other in contents.announcements[1:]:
        yield from _other_words(first, other, [module_of(name) for name in (*contents.entries, *contents.plain)])
    for name, entry in shown.items() if not first.refusal else ():  # the caller has named the family of a refused one
        if message := contradiction(first, entry):
            remedy = "The tensors are believed; correct the configuration before an engine reads it."
            yield Finding("config-disagrees", "warn", name, message, remedy)
    if not contents.entries and first.families and not any(one.id == "unread-codes" for one in contents.findings):
        message = f"{first.text}, but no tensor is quantized."
        yield Finding("config-disagrees", "warn", first.file, message, "Remove the configuration, or quantize.")
    quantized = {_kind(name) for name in contents.entries}
    for name, stored in contents.plain.items():
        module = module_of(name)
        is_layer = name.endswith(".weight") and len(stored.shape) == 2 and _kind(name) in quantized
        if is_layer and name in names and not first.leaves_plain(module):
            message = f"{first.file} does not ignore {module!r}, but {name} is plain {stored.dtype}."
            yield Finding("config-disagrees", "warn", name, message, "Add the module to the list of ignored ones.")


def _missing_input_scales(contents: Contents, entries: Mapping[str, Entry]) -> Findings:
    """One finding about the activations that are announced with a scale, and have none."""
    file = contents.announcements[0].file if contents.announcements else "the metadata of the file"
    kinds: dict[str, list[Entry]] = {}
    for entry in entries.values():
        if lacks_input_scale(entry):
            kinds.setdefault(entry.family.input_scales[0], []).append(entry)
    for last, found in kinds.items():
        count = f"{len(found)} layers" if len(found) > 1 else "a layer"
        folder = found[0].name.rpartition(".")[0]
        names = [name for name in contents.plain if name.rpartition(".")[0] == folder and _OF_INPUT.search(name)]
        others = f" (there are {some(names)}, which are not read)" if names else ""
        message = (
            f"{file} announces activations whose global scale is stored, but no {last} stands beside {count}: "
            f"{some([entry.name for entry in found])}{others}. The weights can be read; an engine would scale the "
            "inputs by memory that nobody wrote."
        )
        remedy = (
            "Measure the scales and write them (mf.calibrate), or announce dynamic activations, or none where the "
            "weights alone are quantized."
        )
        yield Finding("missing-input-scale", "error", found[0].name, message, remedy)


_OF_INPUT = re.compile(r"(act|inp|(^|\.)a_|_x)[^.]*$")
_SPARSE_PARTS = (".bitmask", ".compressed", ".row_offsets", "_bitmask")


def _sparse(first: Announcement, contents: Contents) -> Findings:
    """An error where the tensors are compressed sparse ones, and for groups of a format that is not read."""
    parts = [name for name in contents.plain if name.endswith(_SPARSE_PARTS)]
    if first.sparse and parts:
        message = f"sparsity_config has the format {first.sparse!r}, by which {parts[0]} and others are compressed."
        remedy = "Sparse weights are not read: decompress the checkpoint with its own library."
        yield Finding("unsupported", "error", first.file, message, remedy)
    elif first.sparse:
        message = f"sparsity_config has the format {first.sparse!r}, but no tensor is compressed by it."
        yield Finding("config-disagrees", "warn", first.file, message, "The tensors are believed.")
    unread: dict[str, list[str]] = {}
    for name, stored in contents.plain.items():
        word = "" if stored.dtype in _PLAIN else first.scheme_of(name.rpartition(".")[0]).unread
        if word:
            unread.setdefault(word, []).append(name)
    for word, names in unread.items():
        message = f"format {word!r} of a group is not read; it covers {some(names)}, which are read as plain tensors."
        remedy = "Convert the checkpoint with its own library."
        yield Finding("unsupported", "error", first.file, message, remedy)


_PLAIN = ("F64", "F32", "F16", "BF16", "BOOL", "I64", "C64")


def _other_words(first: Announcement, other: Announcement, modules: list[str]) -> Findings:
    """A finding where another configuration says something else about a module of the file."""
    remedy = f"{first.file} is believed, with which the tensors agree; correct or remove the other."
    if other.refusal:
        message = f"it says {other.words}, which is not read; {first.file} says {first.words}."
        yield Finding("config-disagrees", "warn", other.file, message, remedy)
        return
    said = [{module: _said(one, module) for module in modules} for one in (first, other)]
    differing = [module for module in modules if said[0][module] != said[1][module]]
    if differing:
        module = differing[0]
        sides = [f"{one.file} says {words[module]}" for one, words in zip((first, other), said, strict=True)]
        message = f"of {some(differing)}, {', '.join(sides)}."
        yield Finding("config-disagrees", "warn", other.file, message, remedy)


def _said(announcement: Announcement, module: str) -> str:
    """The family and the activations of a module by one configuration, in words."""
    scheme = announcement.scheme_of(module)
    if not scheme.families:
        return "high precision"
    return f"{scheme.families[0]}, activations {scheme.activation or 'unsaid'}"


def _kind(name: str) -> str:
    """The last part of the name of a parameter's module: the same in every block of a model."""
    return module_of(name).rpartition(".")[2]


def scale_findings(records: Iterable[Record], nan: str = "keep") -> Findings:
    """Findings about scales, one record at a time, then about groups of records that an engine fuses.

    Under ``nan="zero"`` NaN scales and global scales of zero are warnings: their values become zeros.
    """
    softened = "warn" if nan == "zero" else "error"
    groups: dict[str, dict[str, Mapping[str, np.ndarray | None]]] = {}
    for record in records:
        if record.problem is not None:
            yield record.problem
            continue
        fmt = record.format
        if fmt is None or record.scale is None:
            continue
        levels = {"tensor_scale": record.tensor_scale, "input_scale": record.activation.get("scale")}
        if fmt.is_per_tensor:
            levels["scale"] = fmt.scale.values(record.scale)
        else:
            yield from _nonfinite(record, "block scales" if fmt.block[1] else "scales", record.scale, fmt, softened)
        for role, level in levels.items():
            if level is not None:
                yield from _global_findings(record, role, level, softened)
        for name, extra in record.extras.items():
            if name.endswith("_scale") and extra.dtype.kind in "fV":
                yield from _nonfinite(record, name, extra.astype(np.float32), None, softened)
        yield from _reordered(record)
        rows, columns = (fmt.block[0] or 1), (fmt.block[1] or 1)
        if fmt.is_tile and (record.logical_shape[-2] % rows or record.logical_shape[-1] % columns):
            words = f"{list(record.logical_shape)} ends in part of a {fmt.block_text} tile"
            yield Finding("ragged-tile", "info", record.name, f"{words}; some readers scale it wrongly.")
        group = fused_group(module_of(record.name))
        if group is not None:
            if fmt.tensor_scale == "row":  # which no engine could share
                levels = {**levels, "tensor_scale": None}
            groups.setdefault(group, {})[record.name] = levels
    for group, members in groups.items():
        for role in ("tensor_scale", "input_scale"):
            yield from _mismatch(group, role, {name: levels[role] for name, levels in members.items()})


def _global_findings(record: Record, role: str, level: np.ndarray, severity: str) -> Findings:
    """Findings about a scale of whole matrices as it is stored: a divisor of 0 is no infinite scale.

    A multiplier of 0 is right for a matrix of zeros.
    """
    source = record.source
    shown = source.tensors[role].name if source and role in source.tensors else role
    divisor = source.divisors.get(role) if source else None
    stored = level if divisor is None else divisor
    yield from _nonfinite(record, shown, stored, None, severity)
    lost = (stored == 0).reshape(-1)
    if divisor is None and role != "input_scale" and len(lost) == experts_of(record):
        lost = _with_values(record, lost)
    if lost.any():
        outcome = "so every value is" if divisor is None else "and values are divided by it"
        found = severity if divisor is None else "error"
        which = _of_experts(record, lost)
        yield Finding("zero-global", found, record.name, f"the scale {shown}{which} is 0, {outcome}.", _REEXPORT)


def _of_experts(record: Record, is_so: np.ndarray) -> str:
    """The experts in words for which something is so, where a record has several."""
    if len(record.logical_shape) < 3 or len(is_so) != experts_of(record):
        return ""
    return " of experts " + some([str(number) for number in np.flatnonzero(is_so)], 16)


def _with_values(record: Record, lost: np.ndarray) -> np.ndarray:
    """Of the experts in question those with a code that is finite and not 0."""
    assert record.format is not None
    element, found = record.format.element, np.zeros_like(lost)
    for expert in np.flatnonzero(lost):
        pieces = pieces_of(matrix_of(record, int(expert)).codes)
        mask = 0x77 if element.bits == 4 else 0xFF  # two codes in a byte, whose signs say nothing
        values = (decode(piece, element) if element.bits == 8 else piece & mask for piece in pieces)
        found[expert] = any(bool(np.any(np.isfinite(piece) & (piece != 0))) for piece in values)
    return found


def _nonfinite(record: Record, what: str, scale: np.ndarray, fmt: ScaledFormat | None, severity: str) -> Findings:
    """Findings about NaN and infinity: `scale` as a record of `fmt` has it, or float32 without one."""
    experts, table = max(experts_of(record), 1), None
    if fmt is not None and fmt.scale.bits == 8:
        table = fmt.scale.values(np.arange(256))
    for id, word, is_bad, weight in (
        ("nan-scale", "NaN", np.isnan, severity), ("inf-scale", "infinite", np.isinf, "error"),
    ):  # fmt: skip
        test = is_bad if table is None else is_bad(table).take
        if count := sum(np.count_nonzero(test(piece)) for piece in pieces_of(scale)):
            bad = np.asarray(test(scale)).reshape(experts if scale.size % experts == 0 else 1, -1).any(-1)
            which = _of_experts(record, np.asarray(bad))
            message = f"{count} of {scale.size} {what} are {word}{which}." if scale.size > 1 else f"{what} is {word}."
            remedy = f'{_REEXPORT} load(..., nan="zero") reads them as zeros.' if word == "NaN" else _REEXPORT
            yield Finding(id, weight, record.name, message, remedy)


def _reordered(record: Record) -> Findings:
    """Errors about zero points and orders of columns, which change the meaning of codes and are not applied."""
    remedy = "Convert the checkpoint with its own library; load(strict=False) reads the values without it."
    for name, extra in record.extras.items():
        if name.endswith("zero_point") and "input" not in name and np.any(extra.astype(np.float32) != 0):
            message = f"{name} is not 0, but zero points are not read."
            yield Finding("unsupported", "error", record.name, message, remedy)
        if name.endswith("g_idx") and np.any(np.diff(extra.reshape(-1).astype(np.int64)) < 0):
            message = f"{name} puts the columns into another order, which is not read."
            yield Finding("unsupported", "error", record.name, message, remedy)


def _mismatch(group: str, role: str, levels: Mapping[str, np.ndarray | None]) -> Findings:
    """A finding where the members of a fused group have different global scales."""
    numbers = {name: float(np.max(level)) for name, level in levels.items() if level is not None and level.size}
    if len(set(numbers.values())) < 2 or not all(np.isfinite(value) and value > 0 for value in numbers.values()):
        return
    folder, _, joined = group.rpartition(".")
    ratio = max(numbers.values()) / min(numbers.values())
    listed = ", ".join(f"{module_of(name).rpartition('.')[2]} {value:.6g}" for name, value in numbers.items())
    message = f"the {role} of the fused group {joined} differs by a factor of {ratio:.4g}: {listed}."
    remedy = "Engines that fuse these layers use one of them for all; convert with fuse= to share one."
    yield Finding("fused-mismatch", "warn", folder or next(iter(numbers)), message, remedy)


def code_findings(record: Record) -> Findings:
    """Findings that take a look at every code."""
    fmt = record.format
    if fmt is None or record.problem is not None or record.scale is None:
        return
    if count := sum(np.count_nonzero(is_nan) for is_nan in map(_nan_codes(fmt), pieces_of(record.codes))):
        message = f"{count} of {record.codes.size} codes are NaN."
        yield Finding("nan-codes", "warn", record.name, message, 'load(..., nan="zero") reads them as zeros.')
    if fmt.element.bits == 4 and fmt.scale.name == "E8M0":
        yield from _tie_style(record)
    silenced = _silenced(record, fmt)
    if silenced:
        message = f"{silenced} blocks have a scale of 0, or one that underflows, but codes that are not 0."
        yield Finding("zero-block-nonzero-codes", "warn", record.name, message, "Their values are lost.")


def _nan_codes(fmt: ScaledFormat) -> Callable[[np.ndarray], np.ndarray]:
    """The function that tells which codes of an array are NaN.

    NaN has the largest bits of each sign. The largest code, read as a signed and as an unsigned integer, therefore
    tells quickly that there is none.
    """
    is_nan = np.isnan(decode(np.arange(256), fmt.element)) if fmt.element.has_nan else np.zeros(256, bool)
    least = int(np.argmax(is_nan)) if fmt.element.has_nan else 256

    def tell(codes: np.ndarray) -> np.ndarray:
        if not codes.size or max(int(codes.view(np.int8).max()), int(codes.max()) & 0x7F) < least:
            return np.zeros(codes.shape, bool)
        return is_nan[codes]

    return tell


def _tie_style(record: Record) -> Findings:
    """MXFP4 that writes every zero as -0, as ModelOpt does, which also breaks ties downward."""
    negative = False
    for piece in pieces_of(record.codes):
        low, high = piece & 15, piece >> 4
        if not (low.all() and high.all()):
            return
        negative = negative or bool((low == 8).any() or (high == 8).any())
    if negative:
        yield Finding("tie-style", "info", record.name, "every zero is written as -0, which ModelOpt's MXFP4 does.")


def _silenced(record: Record, fmt: ScaledFormat) -> int:
    """Number of blocks with an effective scale of zero and a code that is not zero."""
    if fmt.scale.name == "E8M0" and record.tensor_scale is None:
        return 0
    assert record.scale is not None
    smallest = np.float32(1) if record.tensor_scale is None else record.tensor_scale.min()
    if all((fmt.scale.values(piece) * smallest).all() for piece in pieces_of(record.scale)):
        return 0
    magnitude = np.uint8(0x77 if fmt.element.bits == 4 else 0x7F)
    return sum(bool((codes & magnitude).any()) for codes in _blocks(record, fmt, lambda factor: factor == 0))


def _blocks(record: Record, fmt: ScaledFormat, has: Callable[[np.ndarray], np.ndarray]) -> Iterator[np.ndarray]:
    """Views of the codes of each block whose effective scale passes the test `has`."""
    for expert in range(experts_of(record)):
        matrix = matrix_of(record, expert)
        assert matrix.scale is not None
        height, width = fmt.block[0] or max(len(matrix.codes), 1), matrix.codes.shape[-1]
        if fmt.block[1] is not None:
            width = fmt.block[1] * fmt.element.bits // 8
        level = np.float32(1) if matrix.tensor_scale is None else matrix.tensor_scale
        for row, column in np.argwhere(has(fmt.scale.values(np.atleast_2d(matrix.scale)) * level)):
            yield matrix.codes[row * height : (row + 1) * height, column * width : (column + 1) * width]


def without_nan(record: Record) -> Record:
    """The record with zeros in place of NaN codes and of blocks with a NaN scale."""
    fmt, scale, level, source = record.format, record.scale, record.tensor_scale, record.source
    if fmt is None or scale is None or record.problem is not None:
        return record
    codes, is_nan = record.codes, _nan_codes(fmt)
    if any(is_nan(piece).any() for piece in pieces_of(codes)):
        codes = np.where(is_nan(codes), np.uint8(0), codes)
    if level is not None and np.isnan(level).any():
        level = np.where(np.isnan(level), np.float32(0), level)
        source = source._replace(divisors={}) if source else None
    if any(np.isnan(fmt.scale.values(piece)).any() for piece in pieces_of(scale)):
        if fmt.scale.name == "E8M0":  # which has no zero
            codes = codes.copy()
            for block in _blocks(replace(record, codes=codes), fmt, np.isnan):
                block[...] = 0
        scale = np.where(np.isnan(fmt.scale.values(scale)), scale.dtype.type(0), scale)
    return replace(record, codes=codes, scale=scale, tensor_scale=level, source=source)


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RESTORE = "Copy or export the checkpoint again, or correct the number in config.json. load(strict=False) reads it."


def expert_findings(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, object]) -> Findings:
    """Findings about experts that are missing, too many, or there twice: all of a layer in one finding.

    They are errors where the configuration tells how many there are; else the largest number of the layer counts.
    `shapes`: of the stored codes or values of every parameter, by its name.
    """
    layers: dict[str, dict[str, set[int]]] = {}
    for found in filter(None, map(NUMBERED.match, shapes)):
        experts = f"{found['layer']}.experts" if found["layer"] else "experts"
        layers.setdefault(experts, {}).setdefault(found["weight"], set()).add(int(found["number"]))
    counts = set(_counts(config))
    said = counts.pop() if len(counts) == 1 else None
    for layer, weights in layers.items():
        every = set().union(*weights.values())
        count = max(every) + 1 if said is None else said
        named = f"of {count}" if said is None else f"of the {count} of config.json"
        for id, words, chosen in (
            ("missing-expert", "are missing", {weight: set(range(count)) - have for weight, have in weights.items()}),
            ("extra-expert", "are too many", {weight: have - set(range(count)) for weight, have in weights.items()}),
        ):
            groups: dict[tuple[int, ...], list[str]] = {}
            for weight, wrong in chosen.items():
                if numbers := tuple(sorted(wrong)):
                    groups.setdefault(numbers, []).append(weight)
            if groups:
                parts = [f"{', '.join(names)} of {_ranges(numbers)}" for numbers, names in groups.items()]
                severity = "warn" if said is None else "error"
                yield Finding(id, severity, layer, f"{'; '.join(parts)} {words}, {named} experts.", _RESTORE)
    joined: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        layer, _, last = name.removesuffix(".weight").rpartition(".")
        if len(shape) > 2 and (layer == "experts" or layer.endswith(".experts")):
            joined.setdefault(layer, []).append(last)
    both = [layer for layer in layers if layer in joined]
    if both:
        message = (
            f"experts are there twice, numbered and as one tensor ({', '.join(joined[both[0]])}), in {some(both)}."
        )
        yield Finding("two-layouts", "error", both[0], message, "Remove one of the two.")
    elif layers and joined:
        message = (
            f"the experts of {some(list(layers))} are numbered, those of {some(list(joined))} are one tensor each."
        )
        yield Finding("two-layouts", "warn", next(iter(joined)), message, "Engines expect one layout in a model.")


def _counts(config: object) -> Iterator[int]:
    """The numbers of experts that a configuration and those inside it name."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in _COUNTS and type(value) is int and value > 0:
                yield value
            elif key.endswith("_config") and key != "quantization_config":
                yield from _counts(value)


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in words, runs of them by their ends."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[1]}" for run in runs)
