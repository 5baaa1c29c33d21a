"""A Linear on an input that is quantized already: its codes are those that fprop would make, so they are multiplied.

Forward alone: dx would be for nobody, and dw contracts the rows of x, along which these codes have no blocks.
"""

import torch

from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.recipes import Recipe
from microfloat.torch.tensor.ops import quantize, scaled_matmul
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor


def multiply(
    x: QuantizedTensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, backend: str
) -> torch.Tensor:
    """``x @ weight.T + bias`` of a quantized x [..., K] and a weight [N, K], in x's dtype, as fprop of `recipe` has it.

    Raises InvalidTypeError where the recipe leaves activations in high precision, InvalidValueError for codes that are
    not those of its fprop, NotSupportedError under delayed scaling and where the weight is to get a gradient.
    """
    lhs, rhs = recipe.fprop.casts
    got = f"a QuantizedTensor ({x.format}) with blocks along axis {x.axis} of shape {tuple(x.shape)}"
    if lhs is None or rhs is None:
        raise invalid_type("x", got, "a plain tensor: this recipe does not cast activations", "Call x.dequantize().")
    if recipe.is_delayed or lhs.hadamard is not None or rhs.hadamard is not None:
        raise NotSupportedError(
            f"x: got {got}, needed a plain tensor under delayed scaling, whose scale is the layer's, or a Hadamard "
            "transform. Call x.dequantize()."
        )
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)):
        raise NotSupportedError(
            f"x: got {got} where a gradient is wanted, needed a plain tensor: dw contracts the rows of x. Call the "
            "layer under torch.no_grad(), freeze it, or pass x.dequantize()."
        )
    stored = weight.format if isinstance(weight, QuantizedTensor) else rhs.format
    fits = x.dim() > 0 and x.axis == x.dim() - 1 and x.hadamard is None and x.shape[-1] == weight.shape[1]
    if (x.format, stored) != (lhs.format, rhs.format) or not fits:
        raise invalid_value(
            "x", f"{got} beside a weight in {stored}",
            f"{lhs.format} with blocks along the last axis ({weight.shape[1]}), beside {rhs.format}, as fprop casts",
            "Quantize x so: microfloat.torch.quantize(x, recipe.fprop.lhs), or pass x.dequantize().",
        )  # fmt: skip
    codes = weight if isinstance(weight, QuantizedTensor) else quantize(weight, rhs, backend=backend)
    y = scaled_matmul(x, codes, bias=bias, accumulate=recipe.fprop.accumulate, backend=backend)
    return y.view(*x.shape[:-1], weight.shape[0])
