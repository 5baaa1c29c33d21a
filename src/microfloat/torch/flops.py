"""Floating-point operations of the library's operators, as ``torch.utils.flop_counter`` counts those of torch's own.

A product of [M, K] and [K, N] counts 2 M N K, as it does in high precision: whatever the recipe, the backend, and how
sizes are filled up. Casts count nothing. Under a dispatch mode, which the counter is, eager calls are operators too
(`microfloat.torch.named`).
"""

import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

__all__ = ["FORMULAS", "register_formulas"]

_COUNTER = "torch.utils.flop_counter"
Shape = Sequence[int]


def _as_given(x: object, weight: object, bias: object, flops: int, call: int, **_: object) -> int:
    return flops


def _of_scaled_matmul(
    a: object, token: str, axis: int, shape: Shape, *_: object, out_shape: Shape, **others: object
) -> int:
    return 2 * math.prod(out_shape) * shape[axis]


def _of_forward(x: Shape, *_: object, out_shape: Sequence[Shape], **others: object) -> int:
    return 2 * math.prod(out_shape[0]) * x[-1]


def _of_backward(dy: Shape, *settings: object, out_shape: Sequence[Shape], **others: object) -> int:
    wants_dx, wants_dw, records = settings[-3:]
    products = int(bool(wants_dx)) + int(bool(wants_dw))
    return 2 * math.prod(dy) * out_shape[int(bool(records))][-1] * products if products else 0


# Operator -> its formula, of the shapes of its arguments and results.
FORMULAS: dict[str, Callable[..., int]] = {
    "multiply_operands": _as_given,
    "multiply_groups": _as_given,
    "scaled_matmul": _of_scaled_matmul,
    "linear_forward": _of_forward,
    "linear_backward": _of_backward,
    "grouped_forward": _of_forward,
    "grouped_backward": _of_backward,
}


def _register(counter: ModuleType) -> None:
    for name, formula in FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.microfloat, name))(formula)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers the formulas when somebody imports the counter, which imports Triton: too early for this library."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, which registers the formulas after it has run."""
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def register_formulas() -> None:
    """Tell torch's counter of the formulas, now or once it is imported."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _AfterImport())
