"""A loop over chunks of tokens: products of a language model's head, losses of tokens by a softmax, both gradients.

    logits_CN = x_CK @ w_NK.T     loss = logsumexp(logits) - logits[label]     dy_CN = (softmax(logits) - onehot) * s

Each chunk is a call of a Linear: its rows are the matrix that is quantized. The weight is quantized once for all
chunks. dy is rounded to the dtype of the logits; `s` is the gradient of each token's loss. dx comes chunk by chunk, dw
is the sum over chunks in float32, rounded once. Logits exist for one chunk at a time, and a kernel writes dy over them.
Of float32 [N, K] there is that sum alone: the products of later chunks add to it. Source: docs/numerics.md, section 6.

Legend: T = tokens, C = tokens of a chunk, K = in features, N = out features (the vocabulary).
"""

import math
from types import ModuleType
from typing import NamedTuple

import torch

from microfloat.errors import invalid_value
from microfloat.passes import CastInputs
from microfloat.torch import context
from microfloat.torch._typing import Maybe
from microfloat.torch.backends.base import Operands
from microfloat.torch.linear.function import Run, find
from microfloat.torch.linear.observer import OBSERVERS, observed
from microfloat.torch.tensor.dispatch_modes import are_named

# The logits of a chunk, in the dtype of the product, take at most so many bytes.
_MOST_BYTES = 2**29
# Chunks that do not end the tokens are whole numbers of the largest block of a format.
_BLOCK = 128


class LossCall(NamedTuple):
    """All of a call besides its tensors. `chunk`: tokens at a time, 0 for `default_chunk`.

    `origin`: who has named the recipe (`compile.linear.check_caller`).
    """

    reduction: str
    wants_dx: bool
    wants_dw: bool
    token: str
    origin: str
    backend: str
    compute: torch.dtype
    chunk: int

    @property
    def is_late(self) -> bool:
        """True where gradients are computed in backward, from logits that are made again."""
        return self.reduction == "none" or self.compute == torch.float16


Losses = tuple[torch.Tensor, Maybe, Maybe]  # of every token, dx, dw


def default_chunk(tokens: int, vocabulary: int, compute: torch.dtype) -> int:
    """Tokens of a chunk: the fewest equal chunks, in multiples of 128, whose logits take 512 MiB at most.

    >>> default_chunk(8192, 128256, torch.bfloat16)
    2048
    """
    most = max(_MOST_BYTES // (vocabulary * compute.itemsize) // _BLOCK * _BLOCK, _BLOCK)
    chunks = max(math.ceil(tokens / most), 1)
    return max(math.ceil(tokens / chunks / _BLOCK) * _BLOCK, _BLOCK)


def run_chunks(
    call: LossCall, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, factors: Maybe, seeds: Maybe
) -> Losses:
    """The loss of every token [T] in float32 and, with `factors` [T] for ``s``, the gradients that are wanted.

    `labels`: in [0, N), of tokens that are left out too; `seeds`: a call seed for each chunk of a stochastic recipe.
    """
    tokens = x.shape[0]
    recipe, chunk = context.recipe_of(call.token), call.chunk or default_chunk(tokens, weight.shape[0], call.compute)
    _check_labels(labels, weight.shape[0])
    loss_T = torch.empty(tokens, dtype=torch.float32, device=x.device)
    wants_dx, wants_dw = call.wants_dx and factors is not None, call.wants_dw and factors is not None
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wants_dx else None
    sums = _Sum() if tokens > chunk else None
    dw = torch.zeros(weight.shape, dtype=weight.dtype, device=x.device) if wants_dw and not tokens else None
    needs = wants_dx, wants_dw, False
    made: tuple[tuple, Operands] | None = None  # operands of the weight, and all that they depend on besides it
    for number, start in enumerate(range(0, tokens, chunk)):
        rows = slice(start, start + chunk)
        x_CK = x[rows]
        key = (x_CK.shape, x_CK.stride(), x.dtype, x.get_device(), x_CK.data_ptr() & 15, x.is_neg())
        schedule = find(key, x_CK, weight, None, recipe, call.backend, call.compute, needs)
        assert schedule is not None
        if OBSERVERS:
            schedule = observed(schedule, (), weight)
        inputs = CastInputs(seed=None if seeds is None else seeds[number])
        with schedule.scope():
            if made is None or made[0] != schedule.weight_key:
                made = schedule.weight_key, schedule.quantize_weight(weight, inputs)
            if are_named():
                logits, kept = Run(schedule, *[inputs] * 3, kept=made[1]).forward_by_name(x_CK, weight, None)
            else:
                logits, kept = schedule.forward(x_CK, weight, None, inputs, inputs, made[1])
            made = made if start + chunk < tokens else None  # backward reads one orientation, which is kept
            s = None if factors is None else factors[rows]
            logits = _losses(schedule.backend.producers, logits, labels[rows], s, loss_T[rows])
            if logits is not None:
                operands = schedule.cast_dy(logits, inputs, wants_dx, wants_dw)
                del logits  # and with them their memory, where no product reads dy as it is
                saved = schedule.saved_operands(kept, inputs)
                dx_CK, dw_NK = schedule.gradients(operands, saved, wants_dx, wants_dw, sums)
                if dx is not None:
                    dx[rows] = dx_CK  # type: ignore
                dw, operands, saved = dw_NK if sums is None else dw, None, None
            kept = ()
    if sums is not None and sums.total is not None:
        dw = sums.total.to(weight.dtype)
    return loss_T, dx, dw


def _losses(
    kernels: ModuleType | None, logits: torch.Tensor, labels: torch.Tensor, s: Maybe, into: torch.Tensor
) -> Maybe:
    """Write the loss of each row of logits, by a softmax in float32; kernels make their gradient of their memory."""
    of_label = logits.gather(1, labels[:, None])  # a GPU asserts that the labels are in range
    if kernels is not None:
        kernels.cross_entropy_(logits, of_label, labels, s, into)
        return None if s is None else logits
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    log_p_of_label = log_p.gather(1, labels[:, None])
    torch.neg(log_p_of_label[:, 0], out=into)
    if s is None:
        return None
    p_of_label = log_p_of_label.exp_().mul_(s[:, None]).sub_(s[:, None])
    return log_p.exp_().mul_(s[:, None]).scatter_(1, labels[:, None], p_of_label).to(logits.dtype)


def _check_labels(labels: torch.Tensor, vocabulary: int) -> None:
    """Raise InvalidValueError for the first label that is no class. Not on a GPU, which would have to be waited for."""
    if labels.device.type != "cpu" or not labels.numel():
        return
    if int(labels.min()) < 0 or int(labels.max()) >= vocabulary:
        at = int(((labels < 0) | (labels >= vocabulary)).nonzero()[0, 0])
        place = f"for token {at} (of a causal model: counted after the shift of its labels by one)"
        got, needed = f"{int(labels[at])} {place}", f"classes in [0, {vocabulary}), or ignore_index"
        raise invalid_value("labels", got, needed)


class _Sum:
    """The sum of the weight's gradients in float32."""

    total: torch.Tensor | None = None

    def add(self, dw: torch.Tensor) -> None:
        self.total = dw if self.total is None or dw is self.total else self.total.add_(dw)
