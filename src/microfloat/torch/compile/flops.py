"""Floating-point operations of the library's operators, for ``torch.utils.flop_counter``.

    with FlopCounterMode(custom_mapping=mf.FLOP_FORMULAS) as counter: ...

A product of [M, K] and [K, N] counts 2 M N K, as it does in high precision: whatever the recipe, the backend, and how
sizes are filled up. Casts count nothing. Under a dispatch mode, which the counter is, eager calls are operators too
(`microfloat.torch.tensor.dispatch_modes`).
"""

import math
from collections.abc import Callable, Sequence

import torch

from microfloat.torch.compile import operators as compiled
from microfloat.torch.tensor import dispatch_modes as named
from microfloat.torch.tensor import ops

_DEFINING = ops, compiled, named  # the operators, when they are imported
Shape = Sequence[int]


def _as_given(x: object, weight: object, bias: object, flops: int, call: int, **_: object) -> int:
    return flops


def _of_backward(dy: Shape, *settings: object, out_shape: Sequence[Shape], **others: object) -> int:
    wants_dx, wants_dw, records = settings[-3:]
    products = int(bool(wants_dx)) + int(bool(wants_dw))
    return 2 * math.prod(dy) * out_shape[int(bool(records))][-1] * products if products else 0


# Operator -> the formula of the shapes of its arguments and results, as torch's counter takes them.
FLOP_FORMULAS: dict[object, Callable[..., int]] = {
    getattr(torch.ops.microfloat, name): formula
    for name, formula in {
        "multiply_operands": _as_given,
        "multiply_groups": _as_given,
        "scaled_matmul": lambda a, b, tokens, axes, a_shape, *_, out_shape, **others: (
            2 * math.prod(out_shape) * a_shape[axes[0]]
        ),
        "linear_forward": lambda x, *_, out_shape, **others: 2 * math.prod(out_shape[0]) * x[-1],
        "linear_backward": _of_backward,
    }.items()
}
