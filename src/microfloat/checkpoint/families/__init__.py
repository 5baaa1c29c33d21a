"""The families of checkpoints, one row of data each: names and dtypes of tensors, words of configurations.

A row is read by `decode` and written by `encode`; nearly all share `decode_parts`, which reads the numbers of the row.
"""

from microfloat.checkpoint.families import compressed_tensors, huggingface, modelopt, torchao
from microfloat.checkpoint.families.row import Entry, Family, Scheme, decode_parts
from microfloat.checkpoint.families.writing import Written

__all__ = ["FAMILIES", "Entry", "Family", "Scheme", "WRITTEN", "Written", "decode_parts"]

FAMILIES: tuple[Family, ...] = tuple(
    family for module in (modelopt, compressed_tensors, huggingface, torchao) for family in module.FAMILIES
)
# What can be written: the name of a target -> its family, and how its weights are cast.
WRITTEN: dict[str, tuple[Family, Written]] = {
    name: (family, written) for family in FAMILIES for name, written in family.writes.items()
}
