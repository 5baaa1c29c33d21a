"""The operators of torch on a QuantizedTensor: a table from operator to function, and an error for the rest."""

from microfloat.torch.tensor import aten_reads as reads  # noqa: F401  # they fill the table
from microfloat.torch.tensor.aten_shapes import contraction_unit
from microfloat.torch.tensor.aten_table import dispatch
from microfloat.torch.tensor.aten_updates import requantized
from microfloat.torch.tensor.aten_writes import keep_init_val, quantize_stored, store, take

__all__ = ["contraction_unit", "dispatch", "keep_init_val", "quantize_stored", "requantized", "store", "take"]
