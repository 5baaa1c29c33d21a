"""The interface of a dialect, and the announcement that the reading of its configuration gives."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from microfloat.checkpoint.container import Container, read_json
from microfloat.checkpoint.families.patterns import EXACT, Patterns, Syntax
from microfloat.checkpoint.families.row import NO_SCHEME, Entry, Family, Scheme
from microfloat.checkpoint.families.writing import Configuration, Manifest
from microfloat.checkpoint.records import Finding, Record


@dataclass(frozen=True)
class Announcement:
    """One configuration: its file, its method, schemes for modules, and the modules in high precision.

    * `rules`: a scheme for each pattern, in `syntax`. `general`: the scheme of every module that no pattern covers.
    * `ignore`: patterns of modules that stay in high precision; None where the configuration does not list them.
    * `refusal`: the reason for which nothing of it is read. `sparse`: the format of compressed sparse weights.
    """

    file: str
    method: str
    words: str
    rules: Mapping[str, Scheme] = field(default_factory=dict)
    general: Scheme | None = None
    ignore: Patterns | None = field(default_factory=lambda: Patterns((), EXACT))
    syntax: Syntax = EXACT
    refusal: str = ""
    findings: list[Finding] = field(default_factory=list)
    sparse: str = ""

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns(self.rules, self.syntax)

    @cached_property
    def _schemes(self) -> list[Scheme]:
        return [*self.rules.values(), *([self.general] if self.general else [])]

    def ignored(self, module: str) -> str | None:
        """The pattern that leaves a module in high precision, or None."""
        return None if self.ignore is None else self.ignore.first(module)

    def leaves_plain(self, module: str) -> bool:
        """True where a plain layer is expected: the module or one around it is ignored, or nothing names it."""
        if self.ignore is None or self.ignored(module) is not None or self.ignore.around(module) is not None:
            return True
        return not self.scheme_of(module).families

    def scheme_of(self, module: str) -> Scheme:
        """The scheme of a module; an empty one where it is left in high precision or not named.

        A rule for the module wins over one for a module around it, and that over the general one.
        """
        text = self._patterns.first(module) or self._patterns.around(module)
        scheme = self.rules[text] if text is not None else self.general or NO_SCHEME
        return NO_SCHEME if self.ignored(module) is not None else scheme

    @property
    def families(self) -> list[tuple[str, ...]]:
        """The families of all rules, each once."""
        return list(dict.fromkeys(scheme.families for scheme in self._schemes if scheme.families))

    @property
    def accepted(self) -> set[str]:
        """Every family that its words stand for."""
        return {name for scheme in self._schemes for name in (*scheme.families, *scheme.also)}

    @property
    def remarks(self) -> list[Finding]:
        """Its findings, after one for each pattern that is no regular expression, or might take very long."""
        unread = [*(self.ignore.unread if self.ignore else ()), *self._patterns.unread]
        remedy = "Name the modules, or write a simpler pattern."
        return [
            Finding(
                "config-disagrees", "warn", self.file, f"the pattern {text[:100]!r} is no regular expression, or might "
                "take very long; it covers nothing here.", remedy,
            )
            for text in unread
        ] + self.findings  # fmt: skip

    @property
    def text(self) -> str:
        """The line of evidence."""
        return f"{self.file}: {self.words}"


Read = Callable[[str, dict[str, Any]], Announcement]


@dataclass(frozen=True)
class Dialect:
    """One dialect of checkpoints: the rows of its families, and how its configurations are read and written.

    * `methods`: its values of quant_method, first the one of most families, and shell patterns. `entries`: those
      of a configuration without quant_method that no other dialect has. `document`: a file beside config.json, and its
      entry, that describe the same quantization.
    * `read`: the announcement of a configuration, by the name of its file and its entries. `write`: the configurations
      of what is written; None where nothing is announced outside the metadata of the files.
    * `mixed`: the target that stands for records of several formats.
    * `parameters`: those that the metadata of the files describes; findings about it go into the list. `metadata`: that
      of files with these records. `evidence`: an entry of the metadata, and the words for it.
    """

    families: tuple[Family, ...]
    methods: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    document: tuple[str, str] | None = None
    read: Read | None = None
    write: Callable[[Manifest], Configuration] | None = None
    mixed: str = ""
    parameters: Callable[[Container, list[Finding]], Iterator[Entry]] | None = None
    metadata: Callable[[Iterable[Record]], dict[str, str]] | None = None
    evidence: tuple[str, str] | None = None


def strings(values: Any) -> list[str]:
    """The strings of a list, or of one that stands alone."""
    values = [values] if isinstance(values, str) else values
    return [value for value in values if isinstance(value, str) and value] if isinstance(values, list) else []


def unknown_entries(file: str, config: Mapping[str, Any], known: Iterable[str]) -> list[Finding]:
    """A warning that names the entries of a configuration that are not read, if they say anything."""
    found = [f"{key[:60]!r}: {str(value)[:60]}" for key, value in config.items() if key not in known and value]
    if not found:
        return []
    message = f"{', '.join(found[:8])} {'is' if len(found) == 1 else 'are'} not read."
    remedy = "Values are read as if nothing of the kind stood there: find out what it means before you use them."
    return [Finding("unknown-entry", "warn", file, message, remedy)]


def unsupported(file: str, what: str) -> Finding:
    """An error about an entry that changes the meaning of values."""
    remedy = "load(strict=False) reads the values as they are stored; they need an engine that carries it out."
    return Finding("unsupported", "error", file, what, remedy)


def tile_of(sizes: Any) -> tuple[int, int] | None:
    """A pair of positive sizes, or None."""
    is_pair = isinstance(sizes, list | tuple) and len(sizes) == 2
    return (sizes[0], sizes[1]) if is_pair and all(type(n) is int and 0 < n <= 1 << 20 for n in sizes) else None


UNREADABLE = "It is of another version, or damaged: write the file again with a version of its library that is read."


def metadata_of(tensors: Container, key: str, kind: type, found: list[Finding]) -> Any:
    """The JSON under a key of the metadata, an empty `kind` where it is none."""
    text = tensors.metadata.get(key)
    if text is None:
        return kind()
    value, problems = read_json(text.encode("utf-8", "replace"), key)
    found += [one._replace(remedy=UNREADABLE) for one in problems]
    if not problems and not isinstance(value, kind):
        found.append(broken_metadata(key, f"is no JSON {'list' if kind is list else 'object'}"))
    return value if isinstance(value, kind) else kind()


def broken_metadata(name: str, what: str) -> Finding:
    """An error about the metadata of a tensor."""
    return Finding("metadata", "error", name, f"the metadata of this tensor {what}.", UNREADABLE)
