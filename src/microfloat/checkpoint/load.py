"""`load`: a checkpoint as a lazy mapping of records over mapped memory."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np

from microfloat.arguments import as_bool, check_choice
from microfloat.checkpoint import integrity
from microfloat.checkpoint.container import Container
from microfloat.checkpoint.detect import Contents, contents_of, detection_of
from microfloat.checkpoint.families.patterns import users_regex
from microfloat.checkpoint.families.row import missing_roles
from microfloat.checkpoint.folder import Folder, locate
from microfloat.checkpoint.records import Detection, Finding, Record
from microfloat.errors import checkpoint_error, invalid_type, kind_of


class Checkpoint(Mapping[str, Record]):
    """Records by the names of their parameters; each is made when it is asked for, over mapped memory.

    * `detection`: the family with its evidence. `path`, `files`: where it was read.
    * `config`: the contents of config.json; `configs`: of every configuration, by file name. `metadata`: of the files.
    * `findings`: all that is wrong or worth knowing. The first access reads every code once.
    """

    def __init__(
        self, folder: Folder, tensors: Container, contents: Contents, pattern: str | None, dequantize: Any, nan: str
    ) -> None:
        self.path = folder.path
        self.files = list(folder.files)
        self.configs: dict[str, Any] = folder.configs
        self.config: dict[str, Any] = folder.configs.get("config.json") or {}
        self.metadata = tensors.metadata
        self.detection: Detection = detection_of(tensors, contents)
        self.tensors = tensors
        self.contents = contents
        matches = _matcher(pattern)
        order = {name: index for index, name in enumerate(tensors.stored)}
        first = {name: entry.tensors["codes"].name for name, entry in contents.entries.items()}
        names = [name for name in (*contents.entries, *contents.plain) if matches(name)]
        self._names = {name: None for name in sorted(names, key=lambda name: order[first.get(name, name)])}
        self._dequantize, self._nan = dequantize, nan

    def __getitem__(self, name: str) -> Record:
        if name not in self._names:
            raise KeyError(name)
        record = self._record(name)
        if self._nan == "zero":
            record = integrity.without_nan(record)
        if self._dequantize is False or record.format is None:
            return record
        values = record.dequantize(np.float32 if self._dequantize is True else self._dequantize)
        return Record(name, values, logical_shape=values.shape, extras=record.extras, activation=record.activation)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.detection.family}, {len(self)} records)"

    @cached_property
    def findings(self) -> list[Finding]:
        """Findings about names, shapes and scales, then about codes."""
        records = (self._record(name) for name in self._quantized())
        return [*self.scale_findings, *(one for record in records for one in integrity.code_findings(record))]

    @cached_property
    def scale_findings(self) -> list[Finding]:
        """The findings that need no look at codes; all errors are among them."""
        records = (self._record(name) for name in self._quantized())
        return [
            *integrity.structure_findings(self.contents, self._names), *self._expert_findings(),
            *integrity.scale_findings(records, self._nan),
        ]  # fmt: skip

    def _expert_findings(self) -> Iterator[Finding]:
        """Findings about the experts of whole checkpoints; one file of several may hold a part of them."""
        if any(finding.id == "part" for finding in self.contents.findings):
            return
        stored = {name: entry.tensors["codes"] for name, entry in self.contents.entries.items()} | self.contents.plain
        for finding in integrity.expert_findings({name: one.shape for name, one in stored.items()}, self.config):
            if any(name.startswith(finding.tensor) for name in self._names):
                yield finding

    def _quantized(self) -> Iterator[str]:
        return (name for name in self._names if name in self.contents.entries)

    def _record(self, name: str) -> Record:
        """One record, as it is stored."""
        entry = self.contents.entries.get(name)
        if entry is not None:
            return entry.family.decode(entry, self.tensors)
        array = self.tensors.array(self.contents.plain[name])
        return Record(name, array, logical_shape=array.shape)  # of the bytes, where an element has fewer than 8 bits


def load(
    path: str | os.PathLike[str], *, format: str = "auto", pattern: str | None = None, dequantize: Any = False,
    nan: str = "keep", strict: bool = True,
) -> Checkpoint:  # fmt: skip
    """Open the checkpoint at `path`: a safetensors file, an index, or a directory. Nothing large is read.

    * `format`: the family, such as "ct:nvfp4", where the evidence of `detect` is ambiguous; "auto" takes its first.
    * `pattern`: the records to show: a shell pattern over their names, or a regular expression after "re:".
    * `dequantize`: True, or a dtype, gives every record as a plain array of float32 or of that dtype.
    * `nan`: "zero" replaces NaN codes and NaN scales by zeros, "keep" leaves them.
    * `strict`: errors of integrity raise; False leaves them in `findings`, and records without usable scales raise when
      they are dequantized.

    Warns of entries that are ignored, and of activations that are announced with scales that the file does not hold:
    its weights can be read. Raises CheckpointError, which lists all findings, for damaged files, for unknown formats of
    others, and for configurations that ask for more than the values of the tensors.
    """
    checkpoint = opened(path, format=format, pattern=pattern, dequantize=dequantize, nan=nan, strict=strict)
    for finding in checkpoint.scale_findings:
        if finding.id in _SAID:
            warnings.warn(finding.message, stacklevel=2)
    return checkpoint


_SAID = ("extra-state", "missing-input-scale")


def opened(
    path: str | os.PathLike[str], *, format: str = "auto", pattern: str | None = None, dequantize: Any = False,
    nan: str = "keep", strict: bool = True,
) -> Checkpoint:  # fmt: skip
    """`load` without its warnings."""
    check_choice("nan", nan, ("keep", "zero"))
    strict = as_bool("strict", strict)
    folder = locate(path)
    tensors = folder.open()
    contents = contents_of(folder, tensors, format)
    first = next(iter(contents.announcements), None)
    if format == "auto" and first is not None and first.refusal:
        remedy, entries = "Convert it with its own library.", contents.entries.values()
        if entries and all(one.layout and not missing_roles(one) for one in entries):
            family = contents.families.most_common(1)[0][0]
            remedy = f'Its tensors have the names and shapes of {family}: format="{family}" reads them as such.'
        raise checkpoint_error(path, [Finding("unsupported", "error", first.file, first.refusal, remedy)])
    checkpoint = Checkpoint(folder, tensors, contents, pattern, dequantize, nan)
    found = checkpoint.scale_findings
    errors = [finding for finding in found if finding.severity == "error" and finding.id not in _SAID]
    if strict and errors:
        raise checkpoint_error(path, errors)
    return checkpoint


def _matcher(pattern: str | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda name: True
    if not isinstance(pattern, str):
        needed = "a shell pattern over names, 're:' and a regular expression, or None"
        raise invalid_type("pattern", kind_of(pattern), needed)
    if not pattern.startswith("re:"):
        return lambda name: fnmatchcase(name, pattern)
    compiled = users_regex("pattern", pattern)
    return lambda name: compiled.fullmatch(name) is not None
