"""The family of a checkpoint, by the announcements of its configuration and by its tensors, with the evidence."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from microfloat.checkpoint.container import Container
from microfloat.checkpoint.families import DIALECTS, FAMILIES, Announcement, dialect_of, family_named, unknown_target
from microfloat.checkpoint.families.patterns import CACHE, module_of, parents_of
from microfloat.checkpoint.families.row import BYTES, FP8, REAL, Entry, Family, Scheme, missing_roles
from microfloat.checkpoint.families.writing import tensor_name
from microfloat.checkpoint.folder import Folder, announced, locate, misread
from microfloat.checkpoint.records import Detection, Finding, Stored, some

_LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")
_EXTRAS = {*CACHE, "pre_quant_scale", *_LOW_RANK}
_SCALE_SUFFIXES = ("_scale", "_scale_2", "_scale_inv", "_global_scale", "_scales", ".scales", "_zero_point", "_g_idx")
# Words in the names of tensors that many libraries store beside codes.
_SCALE_WORDS = re.compile(r"scale|zero|amax|absmax|g_idx|bitmask|codebook|quant_map|(^|_)scb$|(^|_)s$", re.IGNORECASE)
_NOT_CODES = (*REAL, "BOOL", "C64", "I64", "U64")  # integers of 64 bits are indices


@dataclass(frozen=True)
class Contents:
    """The parameters of a checkpoint and the findings about them; `format` is the family that the caller named."""

    entries: dict[str, Entry]
    plain: dict[str, Stored]
    findings: list[Finding]
    announcements: list[Announcement]
    format: str = "auto"

    @property
    def families(self) -> Counter[str]:
        """Number of parameters of each family."""
        return Counter(entry.family.name for entry in self.entries.values())


def detect(path: str | os.PathLike[str]) -> Detection:
    """The family of the checkpoint at `path`, a file or a directory, with the evidence in words.

    Evidence is read in this order: the quantization_config of config.json, hf_quant_config.json, the metadata of the
    file, and names, dtypes and shapes of the tensors; never the names of files. Raises CheckpointError for files that
    are damaged.
    """
    folder = locate(path)
    tensors = folder.open()
    return detection_of(tensors, contents_of(folder, tensors))


def contents_of(folder: Folder, tensors: Container, format: str = "auto") -> Contents:
    """Group the tensors of a checkpoint into parameters; `format` names the family where the evidence is ambiguous.

    Where configurations differ, the first one counts that the tensors agree with; it stands first in the result.
    """
    names, format = [family.name for family in FAMILIES], family_named(format)
    if format != "auto" and format not in names:
        raise unknown_target("format", format, ["auto", *names])
    announcements = announced(folder.configs)
    made = _Grouping(tensors, announcements, format).contents()
    if len(announcements) > 1 and (first := _contradictions(made)) != (0, 0):
        others = []
        for index in range(1, len(announcements)):
            order = [announcements[index], *announcements[:index], *announcements[index + 1 :]]
            others.append(_Grouping(tensors, order, format).contents())
        best = min(others, key=_contradictions)
        made = best if _contradictions(best) < first else made
    return replace(made, findings=[*folder.findings, *misread(folder.configs), *made.findings])


def _contradictions(contents: Contents) -> tuple[int, int]:
    """Number of parameters and scales that the first configuration says wrongly; more than all where it is not read."""
    first, entries = contents.announcements[0], contents.entries.values()
    if first.refusal or (first.families and not entries):
        return len(entries) + 1, 0
    return sum(bool(contradiction(first, entry)) for entry in entries), sum(map(lacks_input_scale, entries))


def lacks_input_scale(entry: Entry) -> bool:
    """True where the activations of a parameter are announced with a scale that the file does not hold."""
    return (entry.scheme.needs_scale or entry.scheme.activation == "static") and "input_scale" not in entry.tensors


def contradiction(first: Announcement, entry: Entry) -> str:
    """The contradiction between a configuration and the tensors of an entry, or an empty text."""
    module = module_of(entry.name)
    stored = ", ".join(f"{one.name} {one.dtype}{list(one.shape)}" for one in entry.tensors.values())
    ignored = first.ignored(module)
    if ignored is not None:
        return f"{first.file} ignores {module!r} ({ignored!r}), but it is quantized: {stored}."
    scheme = first.scheme_of(module)
    if not scheme.families:
        return f"{first.file} names no format for {module!r}, but it is quantized: {stored}."
    if entry.family.name not in (*scheme.families, *scheme.also):
        return f"{first.file} says {' or '.join(scheme.families)}, the tensors are {entry.family.name}: {stored}."
    block = entry.family.format.block[1] if entry.family.format else None
    if block and scheme.group and scheme.group != block:
        return f"{first.file} says group_size {scheme.group}, {entry.family.name} has blocks of {block}: {stored}."
    if scheme.tile and not entry.family.format and entry.layout and entry.layout[0].block != scheme.tile:
        block_text = entry.layout[0].block_text
        return f"{first.file} says tiles of {list(scheme.tile)}, the scales are for {block_text}: {stored}."
    return ""


class _Grouping:
    """Assigns every tensor to a parameter, by names and dtypes; configurations decide between equal matches."""

    def __init__(self, tensors: Container, announcements: list[Announcement], format: str) -> None:
        self.tensors, self.announcements, self.format = tensors, announcements, format
        self.stored = tensors.stored
        self.claimed: set[str] = set()
        self.entries: dict[str, Entry] = {}
        self.findings: list[Finding] = []
        self.unused: dict[str, list[str]] = {}  # input scales that are not used, by the scheme of the activations

    def contents(self) -> Contents:
        for dialect in DIALECTS:
            for entry in dialect.parameters(self.tensors, self.findings) if dialect.parameters is not None else ():
                self._add(entry)
        for name, stored in self.stored.items():
            if name not in self.claimed:
                self._match(name, stored)
        self._attach_extras()
        self._attach_unknown()
        left = {name: stored for name, stored in self.stored.items() if name not in self.claimed}
        states = [name for name in left if name.rpartition(".")[2] == "_extra_state"]
        if states:
            message = f"{len(states)} entries of TransformerEngine's _extra_state, which hold no weights, are ignored."
            self.findings.append(Finding("extra-state", "warn", states[0], message))
        for name in states:
            del left[name]
        shown = self._unread_codes(left) | {one.name for entry in self.entries.values() for one in entry.beside}
        self.findings += [
            Finding("orphan", "info", name, "a scale that belongs to no weight; it is read as a plain tensor.")
            for name in left
            if name.endswith(_SCALE_SUFFIXES) and name.rpartition(".")[2] not in _EXTRAS and name not in shown
        ]  # fmt: skip
        file = self.announcements[0].file if self.announcements else ""
        for scheme, names in self.unused.items():
            words = "leaves activations in high precision" if scheme == "none" else "scales activations as they come"
            are = "is" if len(names) == 1 else "are"
            message = f"{file} {words}: {some(names)}, stored all the same, {are} not used."
            self.findings.append(Finding("unused-input-scale", "info", names[0], message))
        return Contents(self.entries, left, self.findings, self.announcements, self.format)

    def _add(self, entry: Entry) -> None:
        self.entries[entry.name] = entry
        self.claimed.update(stored.name for stored in entry.tensors.values())

    def scheme_of(self, module: str) -> Scheme:
        """The scheme of a module by the first configuration, or by `format`."""
        scheme = self.announcements[0].scheme_of(module) if self.announcements else Scheme()
        return scheme if self.format == "auto" else scheme._replace(families=(self.format,))

    def _match(self, name: str, codes: Stored) -> None:
        best: list[tuple[tuple[int, ...], Entry]] = []
        for family in FAMILIES:
            suffix, dtypes = family.codes
            if codes.dtype in dtypes and name.endswith(suffix) and (parameter := name[: len(name) - len(suffix)]):
                made = self._as_family(family, f"{parameter}{family.leaf}", codes)
                if made is not None:
                    best.append(made)
        if not best:
            return
        score, entry = max(best, key=lambda one: one[0])
        scheme = entry.scheme
        if scheme.families and entry.family.name not in (*scheme.families, *scheme.also):  # of another family's tensors
            scheme = scheme._replace(activation="", activation_format=None, needs_scale=False)
        entry, unused = replace(entry, scheme=scheme), entry.tensors.get("input_scale")
        if unused is not None and scheme.activation and not scheme.needs_scale:  # a scale without use by the scheme
            self.claimed.add(unused.name)
            self.unused.setdefault(scheme.activation, []).append(unused.name)
            entry = replace(entry, tensors={role: one for role, one in entry.tensors.items() if one != unused})
        rivals = {other.family.name: 0 for rank, other in best if (*rank[:3], rank[4]) == (*score[:3], score[4])}
        self._add(replace(entry, candidates=(entry.family.name, *(one for one in rivals if one != entry.family.name))))

    def _as_family(self, family: Family, parameter: str, codes: Stored) -> tuple[tuple[int, ...], Entry] | None:
        """The entry of a parameter read as `family`, with its score; None where nothing speaks for it."""
        found = {"codes": codes}
        for role, suffix in (("scale", family.scale[0]), ("tensor_scale", family.tensor_scale)):
            if suffix is not None:
                named = tensor_name(parameter, suffix)
                stored = self.stored.get(named) or self.stored.get(f"{parameter}_weight{suffix}")
                if stored is not None:
                    found[role] = stored
        for last in family.input_scales:
            beside = last if parameter == "weight" else f"{module_of(parameter)}.{last}"
            stored = self.stored.get(beside) or self.stored.get(f"{parameter}_{last}")
            if stored is not None:
                found.setdefault("input_scale", stored)
        scheme = self.scheme_of(module_of(parameter))
        scale = found.get("scale")
        right = scale is not None and scale.dtype in family.scale[1]
        if not right:  # a tensor of another meaning, that is shown as one beside the codes
            found.pop("scale", None)
        preferred = family.name in scheme.families
        is_weight = parameter.rpartition(".")[2] == "weight"
        if not (right or "tensor_scale" in found or family.codes[0]):
            first = next(iter(self.announcements), None)
            is_ignored = first is not None and first.ignored(module_of(parameter)) is not None
            expected = preferred and not is_ignored  # bytes that are no codes are a plain tensor
            if not is_weight or not (codes.dtype in (*FP8, "F4") or (expected and codes.dtype in BYTES)):
                return None
            if scale is not None and codes.dtype in BYTES:
                return None
        fits = right and scale is not None and family.layout_of(codes, scale, scheme) is not None
        order = len(scheme.families) - scheme.families.index(family.name) + 1 if preferred else 0
        order = order or int(family.name in scheme.also)
        style = scale is not None and family.usual(scale.shape)
        score = (int(right), int(fits), int("tensor_scale" in found), order, int(style))
        return score, Entry(parameter, family, found, scheme=scheme)

    def _attach_unknown(self) -> None:
        """Give parameters that lack a scale the other tensors of their module, so that these can be named."""
        bare = [entry for entry in self.entries.values() if missing_roles(entry)]
        left: dict[str, list[Stored]] = {}
        for name, stored in self.stored.items() if bare else ():
            if name not in self.claimed and name.rpartition(".")[2] not in (*_EXTRAS, "bias", "_extra_state"):
                for parent in parents_of(name) or [""]:
                    left.setdefault(parent, []).append(stored)
        for entry in bare:
            module, _, leaf = entry.name.rpartition(".")
            module = module if leaf == "weight" else entry.name
            around = left.get(module.rpartition(".")[0], ())
            beside = [
                *(stored for last, stored in entry.extras.items() if last not in _EXTRAS), *left.get(module, ()),
                *(stored for stored in around if module and stored.name.startswith(f"{module}_")),
            ]  # fmt: skip
            found = [one for one in beside if _SCALE_WORDS.search(one.name[len(module) :])]
            found = found or [one for one in beside if "." not in one.name[len(module) + 1 :]]
            self.entries[entry.name] = replace(entry, beside=tuple(found))

    def _unread_codes(self, left: Mapping[str, Stored]) -> set[str]:
        """Findings about plain tensors that seem to be codes: FP8 ones, and integers beside a scale; their names."""
        shown: set[str] = set()
        kinds: dict[tuple[str, str], list[tuple[Stored, list[Stored]]]] = {}
        folders: dict[str, list[Stored]] = {}
        for name, stored in left.items():
            folders.setdefault(name.rpartition(".")[0], []).append(stored)
        for name, stored in left.items():
            folder, _, leaf = name.rpartition(".")
            if stored.dtype in _NOT_CODES or len(stored.shape) < 2 or leaf.endswith("_mask"):
                continue
            around = [*folders[folder], *folders.get(name, ())]
            scales = [
                one for one in around if one != stored and _SCALE_WORDS.search(one.name[len(folder) :])
                and one.name.rpartition(".")[2] not in CACHE
            ]  # fmt: skip
            if _SCALE_WORDS.search(leaf) or not (scales or stored.dtype.startswith("F")):
                continue
            kinds.setdefault((leaf, stored.dtype), []).append((stored, scales))
            shown.update(one.name for one in (stored, *scales))
        for (_, dtype), members in kinds.items():
            stored, scales = members[0]
            beside = f", beside {', '.join(f'{one.name} {one.dtype}{list(one.shape)}' for one in scales[:4])}"
            count = f"{len(members)} tensors such as " if len(members) > 1 else ""
            message = (
                f"{count}{stored.name} {dtype}{list(stored.shape)}{beside if scales else ''}: these seem to be codes "
                "in a layout that is not read; they are read as plain tensors of integers or FP8."
            )
            remedy = "Convert the checkpoint with its own library, or name the family with format=."
            severity = "error" if any(one.families for one in self.announcements[:1]) else "warn"
            self.findings.append(Finding("unread-codes", severity, stored.name, message, remedy))
        return shown

    def _attach_extras(self) -> None:
        """Give every quantized parameter the other tensors of its module that belong to it."""
        siblings: dict[str, list[str]] = {}
        for name in self.stored:
            if name not in self.claimed:
                siblings.setdefault(name.rpartition(".")[0], []).append(name)
        for parameter, entry in list(self.entries.items()):
            folder, _, leaf = parameter.rpartition(".")
            extras = {}
            for name in siblings.get(folder, ()):
                last = name.rpartition(".")[2]
                is_known = leaf == "weight" and (last in _EXTRAS or last in entry.family.more)
                if name not in self.claimed and (is_known or (last.startswith(f"{leaf}_") and last != f"{leaf}_bias")):
                    extras[last] = self.stored[name]
                    self.claimed.add(name)
                    if not is_known:
                        message = f"{entry.family.name} knows no {name}; it is kept with the extras of its module."
                        other = "Where values are multiplied by it, this is another layout: see format=."
                        severity, remedy = ("warn", other) if "scale" in last else ("info", "")
                        self.findings.append(Finding("orphan", severity, parameter, message, remedy))
            if extras:
                self.entries[parameter] = replace(entry, extras=extras)


def detection_of(tensors: Container, contents: Contents) -> Detection:
    """The Detection that contents and announcements amount to."""
    counts = contents.families
    evidence = [announcement.text for announcement in contents.announcements]
    found = (dialect.evidence for dialect in DIALECTS if dialect.evidence is not None)
    evidence += [words for key, words in found if key in tensors.metadata]
    for family, count in counts.most_common():
        entry = next(one for one in contents.entries.values() if one.family.name == family)
        parts = ", ".join(f"{one.name} {one.dtype}{list(one.shape)}" for one in entry.tensors.values())
        evidence.append(f"tensors: {count} x {family}, for instance {parts}")
    bare = [entry for entry in contents.entries.values() if missing_roles(entry)]
    if bare:
        names = some([entry.name for entry in bare])
        evidence.append(f"tensors: {len(bare)} x codes without a scale of a known name: {names}")
    first = contents.announcements[0] if contents.announcements else None
    if first is not None and first.refusal and contents.format == "auto":
        return Detection(first.method, None, [*evidence, first.refusal], 1.0, (first.method,))
    if not counts:
        families = tuple(name for group in (first.families if first else []) for name in group)
        if families:
            return Detection(families[0], None, [*evidence, "no tensor is quantized"], 0.3, families)
        return Detection("plain", None, [*evidence, "no tensor is quantized"], 1.0 if tensors else 0.5, ("plain",))
    if len(bare) == len(contents.entries):
        likely = tuple(dict.fromkeys(name for entry in bare for name in entry.candidates))
        return Detection("unknown", None, evidence, 0.0, likely)
    producers = {family.partition(":")[0] for family in counts}
    named = first.accepted if first else set()
    order = [family.name for family in FAMILIES]
    leading = max(counts, key=lambda name: (name in named, counts[name], -order.index(name)))
    likely = tuple(dict.fromkeys(name for entry in contents.entries.values() for name in entry.candidates))
    is_mixed = len(counts) > 1 and len(producers) == 1
    family = f"{leading.partition(':')[0]}:mixed" if is_mixed else leading
    formats = {one.format or (one.layout or [one.family.format])[0] for one in contents.entries.values()}
    fmt = formats.pop() if len(formats) == 1 else None
    if first is not None:
        confidence = 1.0 if set(counts) <= named and not bare else 0.5
    elif dialect_of(leading).parameters is not None:  # the metadata says it
        confidence = 1.0
    else:
        confidence = 0.9 if len(likely) == 1 else 0.5
    candidates = (family, *(name for name in likely if name != family)) if confidence < 1 else (family,)
    return Detection(family, fmt, evidence, confidence, candidates)
