"""The operators of torch on a QuantizedTensor: a table from operator to function, and an error for the rest."""

from microfloat.torch._tensor_ops import reads, shapes  # noqa: F401  # they fill the table
from microfloat.torch._tensor_ops.shapes import contraction_unit
from microfloat.torch._tensor_ops.table import dispatch
from microfloat.torch._tensor_ops.updates import requantized
from microfloat.torch._tensor_ops.writes import keep_init_val, quantize_stored, store, take

__all__ = ["contraction_unit", "dispatch", "keep_init_val", "quantize_stored", "requantized", "store", "take"]
