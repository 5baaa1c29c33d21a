"""The families of checkpoints, one row of data each: names and dtypes of tensors, words of configurations.

A row is read by `decode` and written by `encode`; nearly all share `decode_parts`, which reads the numbers of the row.
"""

from collections.abc import Iterable

from microfloat.checkpoint.families import compressed_tensors, huggingface, modelopt, torchao
from microfloat.checkpoint.families.row import Entry, Family, Scheme, decode_parts
from microfloat.checkpoint.families.writing import Written
from microfloat.errors import InvalidValueError, unknown_name

__all__ = [
    "FAMILIES", "Entry", "Family", "Scheme", "WRITTEN", "Written", "decode_parts", "family_named", "unknown_target",
]  # fmt: skip

FAMILIES: tuple[Family, ...] = tuple(
    family for module in (modelopt, compressed_tensors, huggingface, torchao) for family in module.FAMILIES
)
# What can be written: the name of a target -> its family, and how its weights are cast.
WRITTEN: dict[str, tuple[Family, Written]] = {
    name: (family, written) for family in FAMILIES for name, written in family.writes.items()
}


def family_named(name: str) -> str:
    """The name of the family that a name means: its own, or that of a target such as "ct:fp8_dynamic"."""
    return WRITTEN[name][0].name if name in WRITTEN else name


def unknown_target(argument: str, got: str, known: Iterable[str], remedy: str = "") -> InvalidValueError:
    """The error for a name that is neither a family nor a target: the known ones, those of each producer together."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(known):
        producer, colon, last = name.partition(":")
        groups.setdefault(producer + colon, []).append(last)
    listed = (f"{key}{{{', '.join(lasts)}}}" if key.endswith(":") else key for key, lasts in groups.items())
    return unknown_name(argument, got, known, remedy, listed=", ".join(listed))
