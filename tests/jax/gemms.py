"""The three GEMMs of a recipe as the oracle computes them, from x, w and dy."""

import numpy as np

from microfloat import reference
from microfloat.recipes import Delayed

STREAMS = {("fprop", "lhs"): 0, ("fprop", "rhs"): 1, ("dgrad", "lhs"): 2,
           ("dgrad", "rhs"): 3, ("wgrad", "lhs"): 4, ("wgrad", "rhs"): 5}  # fmt: skip


def _operand(recipe, tensors, operand, seed, scale_enc):
    """The quantized operand of a GEMM, or the array itself where the recipe has no Cast."""
    name = {("fprop", "lhs"): "x", ("fprop", "rhs"): "w", ("dgrad", "lhs"): "dy",
            ("dgrad", "rhs"): "w", ("wgrad", "lhs"): "dy", ("wgrad", "rhs"): "x"}[operand]  # fmt: skip
    second_use = operand[0] == "wgrad" or operand == ("dgrad", "rhs")
    array = tensors[name].T if second_use else tensors[name]
    cast = recipe.cast(*operand)
    if cast is None:
        return array
    arguments = {"seed": seed, "stream": STREAMS[operand]} if cast.is_stochastic else {}
    if isinstance(cast.scaling, Delayed):
        arguments["scale_enc"] = scale_enc[name]
    quantized = reference.quantize(np.ascontiguousarray(array), cast, **arguments)
    folds = getattr(recipe, operand[0]).path == "folded" and cast.format.scale.name == "E4M3"
    return reference.fold(quantized, (1, 128) if operand[1] == "lhs" else (128, 128))[0] if folds else quantized


def oracle_gemms(recipe, x_MK, w_NK, dy_MN, *, seed=None, scale_enc=None):
    """(y_MN, dx_MK, dw_NK) in float64, unrounded."""
    tensors = {"x": x_MK, "w": w_NK, "dy": dy_MN}
    scale_enc = scale_enc or dict.fromkeys(tensors, 1.0)
    results = []
    for gemm in ("fprop", "dgrad", "wgrad"):
        sides = [_operand(recipe, tensors, (gemm, side), seed, scale_enc) for side in ("lhs", "rhs")]
        if sum(isinstance(side, np.ndarray) for side in sides) == 1:
            sides = [side if isinstance(side, np.ndarray) else reference.dequantize(side) for side in sides]
        results.append(reference.scaled_matmul(*sides))
    return tuple(results)
