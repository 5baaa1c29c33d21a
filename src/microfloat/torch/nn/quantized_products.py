"""Functions of torch that read a quantized weight beside plain tensors: products by `linear`, and lookups of rows.

They are called above autograd, so that gradients too are those of `microfloat.torch.linear`. A product must contract
the axis along which the blocks run. Every other function is torch's own, which refuses a QuantizedTensor.
"""

import torch
import torch.nn.functional as F

from microfloat.errors import NotSupportedError
from microfloat.torch import context
from microfloat.torch._typing import Context
from microfloat.torch.compile.linear import abstract_linear
from microfloat.torch.linear.schedule import autocast_dtype
from microfloat.torch.nn.linear import linear
from microfloat.torch.tensor.checks import check_linear
from microfloat.torch.tensor.quantized_tensor import PRODUCTS, QuantizedTensor


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, QuantizedTensor)


def _is_weight(value: object, axis: int) -> bool:
    """True for a quantized matrix whose blocks run along `axis`, the one that is contracted."""
    return isinstance(value, QuantizedTensor) and value.dim() == 2 and value.axis == axis and value.hadamard is None


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **out: object
) -> torch.Tensor | None:
    if not (_is_plain(input) and _is_weight(weight, 1) and (bias is None or _is_plain(bias))) or out:
        return None
    if torch.compiler.is_compiling():
        return _traced(input, weight, bias)  # type: ignore[arg-type]
    return linear(input, weight, bias)


def _traced(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` in high precision as operators of a graph, whose guards do not see the autocast around a function."""
    if context.asked().RECIPE != context.PLAIN:
        raise NotSupportedError(
            "torch.compile: got a product with a quantized weight under an autocast, needed a call that names it. Use "
            "microfloat.torch.linear(x, weight, bias), or microfloat.torch.convert(model, recipe)."
        )
    check_linear(x, weight, bias)
    compute = autocast_dtype(x.device.type) or x.dtype
    return abstract_linear(x, weight, bias, context.HIGH_PRECISION, "auto", compute, origin="product")


def _matmul(input: torch.Tensor, other: torch.Tensor, **out: object) -> torch.Tensor | None:
    """``x @ w.T``, or ``w @ z`` as the transpose of ``z.T @ w.T``."""
    if out:
        return None
    if _is_plain(input) and _is_weight(other, 0) and input.dim():
        return _linear(input, other.t())
    if not (_is_weight(input, 1) and _is_plain(other) and other.dim()):
        return None
    y = _linear(other if other.dim() == 1 else other.mT, input)
    return y if y is None or other.dim() == 1 else y.mT


def _mm(input: torch.Tensor, mat2: torch.Tensor, **out: object) -> torch.Tensor | None:
    return _matmul(input, mat2, **out) if input.dim() == mat2.dim() == 2 else None


def _mv(input: torch.Tensor, vec: torch.Tensor, **out: object) -> torch.Tensor | None:
    return _matmul(input, vec, **out) if vec.dim() == 1 else None


def _addmm(
    input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1, **out: object
) -> torch.Tensor | None:
    is_bias = _is_plain(input) and input.dim() == 1 and _is_plain(mat1) and mat1.dim() == 2
    if not (is_bias and _is_weight(mat2, 0) and beta == alpha == 1):
        return None
    return _linear(mat1, mat2.t(), input, **out)


class _Rows(torch.autograd.Function):
    """Values of rows of a stored weight, which gets the gradient of a plain weight."""

    @staticmethod
    def forward(
        ctx: Context, weight: QuantizedTensor, ids: torch.Tensor, padding: int, by_frequency: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.settings = weight.shape[0], padding, by_frequency
        return weight.detach()[ids].dequantize()

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(gradients[0], ids, *ctx.settings), None, None, None


def _embedding(
    input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    if not (_is_weight(weight, 1) and _is_plain(input)) or max_norm is not None or sparse:
        return None
    return _Rows.apply(weight, input, -1 if padding_idx is None else padding_idx % weight.shape[0], scale_grad_by_freq)


PRODUCTS.update({
    F.embedding: _embedding,
    F.linear: _linear, torch.matmul: _matmul, torch.Tensor.matmul: _matmul, torch.Tensor.__matmul__: _matmul,
    torch.mm: _mm, torch.Tensor.mm: _mm, torch.mv: _mv, torch.Tensor.mv: _mv, torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
})  # fmt: skip
