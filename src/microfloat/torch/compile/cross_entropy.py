"""`linear_cross_entropy` for autograd: the reduced loss, of chunks that run in eager mode or as an opaque operator.

Legend: T = tokens, K = in features, N = out features (the vocabulary).
"""

from typing import Any

import torch

from microfloat.errors import NotSupportedError
from microfloat.torch import context
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.compile.linear import seed_for
from microfloat.torch.compile.operators import check_caller, describe, rebuilt
from microfloat.torch.launch.gemms import epilogue
from microfloat.torch.linear.cross_entropy import LossCall, Losses, default_chunk, run_chunks
from microfloat.torch.linear.function import refuse_batched
from microfloat.torch.tensor.checks import is_abstract
from microfloat.torch.tensor.custom_ops import define
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor


def loss_of(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, seen: torch.Tensor, call: LossCall
) -> torch.Tensor:
    """The reduced loss of x [T, K]. `labels` are classes everywhere; `seen` [T]: 1 for tokens that count, else 0."""
    seeds = None
    if context.is_stochastic(call.token):  # one for each chunk, as its call of a Linear would draw it
        rows = call.chunk or default_chunk(x.shape[0], weight.shape[0], call.compute)
        seeds = torch.stack([seed_for(x) for _ in range(0, max(x.shape[0], 1), rows)])
    if call.wants_dx or call.wants_dw:
        return _Loss.apply(x, weight, labels, seen, seeds, *call)  # type: ignore[no-any-return]
    loss_T, *_ = _chunks(call, x, weight, labels, None, seeds)
    return _reduced(loss_T, seen, call.reduction)


def _reduced(loss_T: torch.Tensor, seen: torch.Tensor, reduction: str) -> torch.Tensor:
    """The losses of tokens that count; their sum, or their mean (NaN where none counts)."""
    loss_T = torch.where(seen > 0, loss_T, 0.0)
    if reduction == "none":
        return loss_T
    return loss_T.sum() / seen.sum() if reduction == "mean" else loss_T.sum()


class _Loss(torch.autograd.Function):
    """The reduced loss, with gradients computed in forward, or in backward where that has to be.

    In forward, ``s`` of each token is the gradient of the reduced loss, and backward multiplies the results. In
    backward, the logits are made again by the same casts: for "none", where each token has a gradient of its own, and
    for float16, whose range needs the factor of a GradScaler before the gradient of the logits is rounded.
    """

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, seen: torch.Tensor, seeds: Maybe,
        *settings: object,
    ) -> torch.Tensor:  # fmt: skip
        call = LossCall(*settings)  # type: ignore[arg-type]
        ctx.settings = settings
        factors = torch.where(seen > 0, 1 / seen.sum(), 0.0) if call.reduction == "mean" else seen
        if call.is_late:
            ctx.save_for_backward(x, weight, labels, factors, seeds)
            loss_T, *_ = _chunks(call, x, weight, labels, None, seeds)
        else:
            loss_T, dx, dw = _chunks(call, x, weight, labels, factors, seeds)
            ctx.save_for_backward(dx, dw)
        return _reduced(loss_T, seen, call.reduction)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[Maybe, ...]:  # type: ignore[override]
        if not torch.compiler.is_compiling():
            refuse_batched(gradient)
            if torch.is_grad_enabled():
                raise NotSupportedError(
                    "linear_cross_entropy: got create_graph=True (a double backward), needed a single backward. Use "
                    "torch.nn.functional.linear and cross_entropy, in high precision, where a second derivative is "
                    "needed."
                )
        call = LossCall(*ctx.settings)
        if call.is_late:
            x, weight, labels, factors, seeds = ctx.saved_tensors
            factors = torch.where(factors > 0, factors * gradient.float(), 0.0)
            _, dx, dw = _chunks(call, x, weight, labels, factors, seeds)
        else:
            dx, dw = (_scaled(one, gradient) for one in ctx.saved_tensors)
        return dx, dw, None, None, None, *(None for _ in ctx.settings)


def _scaled(tensor: Maybe, factor: torch.Tensor) -> Maybe:
    """The product with one float32 number, rounded once, and without a float32 copy of the tensor on a GPU."""
    if tensor is None:
        return None
    if tensor.is_cuda and tensor.numel() and not (torch.compiler.is_compiling() or is_abstract(tensor)):
        finish = epilogue(tensor.shape[0], tensor.shape[1], ("tensor", None), None, tensor.dtype, tensor.device)
        return finish(tensor, factor.float(), None, None)  # in a quarter of the time that torch takes
    return torch.mul(tensor, factor.float().reshape(1), out=torch.empty_like(tensor))


def _chunks(
    call: LossCall, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, factors: Maybe, seeds: Maybe
) -> Losses:
    """`run_chunks`, by an operator where a compiler traces or there are no values."""
    if not (torch.compiler.is_compiling() or is_abstract(x)):
        return run_chunks(call, x, weight, labels, factors, seeds)
    wants = (call.wants_dx and factors is not None), (call.wants_dw and factors is not None)
    is_stored = isinstance(weight, QuantizedTensor)
    parts, stored = (weight.part_list(), describe(weight)) if is_stored else ([weight], "")  # type: ignore[attr-defined]
    settings = stored, call.token, call.origin, call.backend, call.compute, call.chunk
    made = torch.ops.microfloat.cross_entropy_chunks(x, parts, labels, factors, seeds, *wants, *settings)
    return made[0], made[1] if wants[0] else None, made[-1] if wants[1] else None


def _run(
    x: torch.Tensor, parts: list[torch.Tensor], labels: torch.Tensor, factors: Maybe, seeds: Maybe, wants_dx: bool,
    wants_dw: bool, stored: str, *settings: Any,
) -> list[torch.Tensor]:  # fmt: skip
    call = LossCall("", wants_dx, wants_dw, *settings)
    check_caller(call.token, call.origin)
    made = run_chunks(call, x, rebuilt(parts, stored), labels, factors, seeds)
    return [one for one in made if one is not None]


def _fake(
    x: torch.Tensor, parts: list[torch.Tensor], labels: torch.Tensor, factors: Maybe, seeds: Maybe, wants_dx: bool,
    wants_dw: bool, stored: str, *_: object,
) -> list[torch.Tensor]:  # fmt: skip
    weight = rebuilt(parts, stored)
    made = [x.new_empty(x.shape[0], dtype=torch.float32)]
    made += [x.new_empty(x.shape)] if wants_dx else []
    return made + ([x.new_empty(weight.shape, dtype=weight.dtype)] if wants_dw else [])


define(
    "cross_entropy_chunks(Tensor x, Tensor[] weight, Tensor labels, Tensor? factors, Tensor? seeds, bool wants_dx, "
    "bool wants_dw, str stored, str token, str origin, str backend, ScalarType compute, int chunk) -> Tensor[]",
    _run, _fake, batches=False,
)  # fmt: skip
