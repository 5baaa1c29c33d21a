"""Casts and products as operators with names, where a mode of torch's dispatcher is on.

    quantize_operands   all casts of a forward
    multiply_operands   one product: y, dx or dw
    multiply_groups     the forward of groups of rows, casts and products

A mode sees operators by their names: a policy of selective checkpointing keeps the results of some, and
``FlopCounterMode`` counts their products (`compile.flops`). Without a mode launches bypass torch's dispatcher.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from microfloat.torch._typing import Maybe
from microfloat.torch.backends.base import Operands, Parts
from microfloat.torch.reference._grid import mode_count
from microfloat.torch.tensor.checks import is_abstract
from microfloat.torch.tensor.custom_ops import define

# True, as a number, where a mode is on.
are_named = mode_count
_NOTHING = contextlib.nullcontext()

# Functions are no arguments of operators: they travel as numbers. An entry lives as long as its call.
_CALLS: dict[int, Callable[..., object]] = {}
_NUMBERS = itertools.count()


def outside_of_modes() -> contextlib.AbstractContextManager:
    """A context without modes of torch's dispatcher, such as a policy of selective checkpointing."""
    return _disable_current_modes() if are_named() else _NOTHING


def quantize_operands(
    cast: Callable[[], tuple[Operands, Operands]], x: torch.Tensor, weight: list[torch.Tensor]
) -> tuple[Operands, Operands]:
    """The operands that ``cast()`` makes of x and of the parts of a weight."""
    with _numbered(lambda: _without_none([part for both in cast() for part in both.flat()], x)) as number:
        parts = _with_none(torch.ops.microfloat.quantize_operands(x, weight, number))
    return Operands.of(parts), Operands.of(parts[len(parts) // 2 :])


def multiply(product: Callable[..., torch.Tensor], a: Parts, b: Parts, bias: Maybe, flops: int) -> torch.Tensor:
    """``product(a, b, bias)``, counted as `flops` floating-point operations."""
    if is_abstract(a.codes):
        return product(a, b, bias)
    with _numbered(product) as number:
        return torch.ops.microfloat.multiply_operands([*a], [*b], bias, flops, number)


def multiply_groups(
    forward: Callable[[], Sequence[Maybe]], x: torch.Tensor, weight: list[torch.Tensor], bias: Maybe, flops: int
) -> list:
    """The results of ``forward()``, tensors or None, made of x and of the parts of a weight."""
    with _numbered(lambda: _without_none(forward(), x)) as number:
        return _with_none(torch.ops.microfloat.multiply_groups(x, weight, bias, flops, number))


@contextlib.contextmanager
def _numbered(call: Callable[..., object]) -> Iterator[int]:
    number = next(_NUMBERS)
    _CALLS[number] = call
    try:
        yield number
    finally:
        del _CALLS[number]


def _without_none(parts: Sequence[Maybe], x: torch.Tensor) -> list[torch.Tensor]:
    """Empty tensors in place of None, which operators cannot return."""
    return [x.new_empty(0) if part is None else part for part in parts]


def _with_none(parts: list[torch.Tensor]) -> list:
    return [part if part.numel() else None for part in parts]


define("quantize_operands(Tensor x, Tensor[] weight, int call) -> Tensor[]",
       lambda x, weight, call: _CALLS[call](), batches=False)  # fmt: skip
define("multiply_operands(Tensor?[] x, Tensor?[] w, Tensor? bias, int flops, int call) -> Tensor",
       lambda a, b, bias, flops, call: _CALLS[call](Parts(*a), Parts(*b), bias), batches=False)  # fmt: skip
define("multiply_groups(Tensor x, Tensor[] weight, Tensor? bias, int flops, int call) -> Tensor[]",
       lambda x, weight, bias, flops, call: _CALLS[call](), batches=False)  # fmt: skip
