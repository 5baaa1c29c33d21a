"""What stands around the products of experts, in one launch each way: rows to the experts and back, and their gate.

    spread  rows[place[t, k]] = x[t]                             dx[t] = sum over k of drows[place[t, k]]
    sum     y[t] = sum over k of w[t, k] * rows[place[t, k]]     drows[place[t, k]] = w[t, k] * dy[t]
                                                                 dw[t, k] = dy[t] . rows[place[t, k]]

Sums over k run in float32, k = 0 first, and are rounded once, so that they are the same on every device; the dots of dw
are sums of float32 in any order. Rows from ``ends[-1]`` on are those of no expert here: whatever they hold, they count
as zeros, and have zeros as gradients.

Legend: T = tokens, K = experts of a token, S = T * K rows sorted by expert, H = features, F = features of a gate.
"""

import functools
from collections.abc import Callable

import torch

from microfloat.torch import backends
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.linear.function import refuse_double_backward
from microfloat.torch.tensor.custom_ops import define


class Route(torch.autograd.Function):
    """(x, place [T, K], ends, weights [T, K] or None, dtype, spreads) -> rows [S, H] of x [T, H], or y of rows x."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, weights: Maybe, dtype: torch.dtype,
        spreads: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(place, ends, weights, x if ctx.needs_input_grad[3] else None)
        ctx.settings = x.dtype, not spreads
        return torch.ops.microfloat.route_rows(x, place, ends, weights, None, dtype, spreads)[0]

    @staticmethod
    def backward(ctx: Context, dy: torch.Tensor) -> tuple[Maybe, ...]:  # type: ignore[override]
        refuse_double_backward()
        place, ends, weights, rows = ctx.saved_tensors
        dx, *dots = torch.ops.microfloat.route_rows(dy, place, ends, weights, rows, *ctx.settings)
        return dx, None, None, dots[0].to(weights.dtype) if dots else None, None, None


def _route_rows(
    x: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, weights: Maybe, rows: Maybe, dtype: torch.dtype,
    spreads: bool, is_fake: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """The rows or the sums, and with `rows` their dots with x."""
    made = x.new_empty((place.numel() if spreads else place.shape[0], x.shape[1]), dtype=dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    dots = [] if rows is None else [x.new_empty(place.shape, dtype=wide)]
    kernels = None if is_fake else backends.choose("auto", x.device).producers
    if is_fake or (kernels is not None and made.numel() and wide == torch.float32):
        if kernels is not None:
            kernels.route_rows(spreads, x, place, ends, weights, rows, *(dots or [None]), made)
        return [made, *dots]
    total, is_dead = torch.zeros_like(made, dtype=wide), place >= ends[-1]
    for k, at in enumerate(place.unbind(1)):
        value = (x if spreads else x[at]).to(wide)
        value = value if weights is None else value * weights[:, k, None].to(wide)
        value = value.masked_fill(is_dead[:, k, None], 0)
        if spreads:
            total[at] = value
        else:
            total += value
        if rows is not None:
            dots[0][:, k] = (x.to(wide) * rows[at].to(wide)).sum(1).masked_fill(is_dead[:, k], 0)
    return [total.to(dtype), *dots]


define(
    "route_rows(Tensor x, Tensor place, Tensor ends, Tensor? weights, Tensor? rows, ScalarType dtype, bool spreads)"
    " -> Tensor[]",
    _route_rows, functools.partial(_route_rows, is_fake=True), batches=False,
)  # fmt: skip


class Gate(torch.autograd.Function):
    """(h = (gate, up) [S, 2 F], activation, kernel) -> f(gate) * up [S, F]."""

    @staticmethod
    def forward(ctx: Context, h: torch.Tensor, activation: str, kernel: Callable) -> torch.Tensor:
        ctx.save_for_backward(h)
        ctx.settings = kernel, activation
        return kernel(h, None, activation)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[Maybe, ...]:  # type: ignore[override]
        refuse_double_backward()
        kernel, activation = ctx.settings
        return kernel(*ctx.saved_tensors, grad, activation), None, None
