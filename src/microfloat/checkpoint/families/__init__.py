"""The dialects of checkpoints, one file each, and the names of targets; an unknown target is refused here.

A row is read by `decode` and written by `encode`; nearly all share `decode_parts` and `encode_parts`, which go by the
numbers of the row. A new dialect is one more file here, and one line in `DIALECTS`.
"""

from collections.abc import Iterable

from microfloat.checkpoint.families import (
    compressed_tensors,
    fbgemm,
    gptoss,
    huggingface,
    huggingface_fp4,
    microfloat,
    mistral,
    modelopt,
    quark,
    torchao,
)
from microfloat.checkpoint.families.dialect import Announcement, Dialect, Read
from microfloat.checkpoint.families.row import Entry, Family, Scheme, decode_parts
from microfloat.checkpoint.families.writing import Written
from microfloat.errors import InvalidValueError, unknown_name

__all__ = [
    "DIALECTS", "FAMILIES", "WRITTEN", "Announcement", "Dialect", "Entry", "Family", "Read", "Scheme",
    "Written", "decode_parts", "dialect_of", "family_named", "unknown_target",
]  # fmt: skip

# The first one counts where tensors fit several.
DIALECTS: tuple[Dialect, ...] = tuple(module.DIALECT for module in (
    modelopt, compressed_tensors, huggingface, gptoss, quark, mistral, fbgemm, huggingface_fp4, torchao, microfloat)
)  # fmt: skip
FAMILIES: tuple[Family, ...] = tuple(family for dialect in DIALECTS for family in dialect.families)
# Names of targets -> the family that is written, and the cast of its weights.
WRITTEN: dict[str, tuple[Family, Written]] = {
    name: (family, written) for family in FAMILIES for name, written in family.writes.items()
}


def dialect_of(family: str) -> Dialect:
    """The dialect of a family; one that writes no configurations for other names."""
    found = (dialect for dialect in DIALECTS if any(one.name == family for one in dialect.families))
    return next(found, Dialect(()))


def family_named(name: str) -> str:
    """The name of a family, given by itself or by a target such as "ct:fp8_dynamic"."""
    return WRITTEN[name][0].name if name in WRITTEN else name


def unknown_target(argument: str, got: str, known: Iterable[str], remedy: str = "") -> InvalidValueError:
    """The error for a name that is neither a family nor a target; it lists the known names by producer."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(known):
        producer, colon, last = name.partition(":")
        groups.setdefault(producer + colon, []).append(last)
    listed = (f"{key}{{{', '.join(lasts)}}}" if key.endswith(":") else key for key, lasts in groups.items())
    return unknown_name(argument, got, known, remedy, listed=", ".join(listed))
