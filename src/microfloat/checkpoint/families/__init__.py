"""The families of checkpoints, one row of data each: names and dtypes of tensors, words of configurations.

A row is read by `decode` and written by `encode`; nearly all share `decode_parts`, which reads the numbers of the row.
"""

from microfloat.checkpoint.families import compressed_tensors, huggingface, modelopt, torchao
from microfloat.checkpoint.families.row import Entry, Family, Scheme, decode_parts

__all__ = ["FAMILIES", "Entry", "Family", "Scheme", "decode_parts"]

FAMILIES: tuple[Family, ...] = tuple(
    family for module in (modelopt, compressed_tensors, huggingface, torchao) for family in module.FAMILIES
)
