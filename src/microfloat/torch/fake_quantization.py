"""`fake_quantize`: a tensor as a format would hold it, with a straight-through gradient."""

from collections.abc import Sequence

import torch

from microfloat.formats import ScaledFormat
from microfloat.recipes import Cast
from microfloat.torch._checks import check_tensor
from microfloat.torch.ops import dequantize, quantize

__all__ = ["fake_quantize"]


def fake_quantize(
    x: torch.Tensor, cast: Cast | ScaledFormat | str, axis: int = -1,
    seed: int | Sequence[int] | torch.Tensor | None = None, *, backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """`x` as the format would hold it, ``dequantize(quantize(x, cast))``, in x's dtype; its gradient is dy unchanged.

    The straight-through estimate, in every order of differentiation, also where a value saturates. Arguments and errors
    are those of `quantize`.

    >>> x = torch.tensor([1.0, 2.3], requires_grad=True)
    >>> fake_quantize(x, "mxfp4").sum().backward()
    >>> fake_quantize(x, "mxfp4").tolist(), x.grad.tolist()
    ([1.0, 2.0], [1.0, 1.0])
    """
    check_tensor("x", x)
    return _straight_through(dequantize(quantize(x.detach(), cast, axis=axis, seed=seed, backend=backend)), x)


# An operator: torch.compile takes it as it is.
@torch.library.custom_op("microfloat::straight_through", mutates_args=())
def _straight_through(exact: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """`exact`, differentiated as `plain` is."""
    return exact.clone()


@_straight_through.register_fake
def _(exact: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(exact)


_straight_through.register_autograd(lambda ctx, dy: (None, dy))
