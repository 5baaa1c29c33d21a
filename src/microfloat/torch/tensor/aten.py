"""The operators of torch on a QuantizedTensor: a table from operator to function, and an error for the rest."""

from microfloat.torch.tensor import aten_reads as reads  # noqa: F401  # fills the table, as aten_shapes and writes do
from microfloat.torch.tensor.aten_table import dispatch
from microfloat.torch.tensor.aten_writes import keep_init_val, quantize_stored, requantized, store, take

__all__ = ["dispatch", "keep_init_val", "quantize_stored", "requantized", "store", "take"]
