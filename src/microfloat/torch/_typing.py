"""Types of what torch itself leaves untyped, each written once. Type checkers alone read most of them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

import torch

if TYPE_CHECKING:
    from microfloat.recipes import Cast
    from microfloat.torch.distributed.expert_parallel import _Route
    from microfloat.torch.distributed.tp_dtensor import Placed
    from microfloat.torch.linear.function import Run
    from microfloat.torch.linear.fused_input import ActivationRun, NormRun

__all__ = [
    "Arguments", "Context", "InitMethod", "Maybe", "Options", "Result", "Seed", "Sink", "StateDict", "Takes",
    "WithBias",
]  # fmt: skip

Takes = ParamSpec("Takes")  # what a decorated function takes, and what it returns
Result = TypeVar("Result")

Maybe: TypeAlias = torch.Tensor | None
Seed: TypeAlias = int | Sequence[int] | Maybe
Arguments: TypeAlias = Sequence[Any]  # of an operator or a hook, as torch passes them
Options: TypeAlias = dict[str, Any]  # the same by name
WithBias: TypeAlias = Any  # y, or y and the bias that `return_bias` puts beside it
InitMethod: TypeAlias = Callable[[torch.Tensor], object]  # writes into the weight that it is given
StateDict: TypeAlias = dict[str, Any]  # a QuantizedTensor lies in one, or what another library put there


class Sink(Protocol):
    """The receiver of a weight's gradient in float32."""

    def add(self, dw: torch.Tensor, /) -> Maybe:
        """Take it; returns what autograd is to pass on."""
        ...


class Context(Protocol):
    """The `ctx` of an autograd Function: torch's part of it, and what the Functions of this library keep there."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    next_functions: tuple[tuple[torch.autograd.graph.Node | None, int], ...]
    wanted: list[bool]

    run: "Run | NormRun | ActivationRun"
    dy_state: tuple  # encode scale and history of delayed scaling
    settings: tuple
    into: Sink
    stored: str
    bias_dtype: torch.dtype | None
    shape: torch.Size
    rows: list[int]
    split: Sequence[int] | None
    interleaved: bool
    route: "_Route"
    cast: "Cast | None"
    placed: "Placed"

    def save_for_backward(self, *tensors: Maybe) -> None:
        """Keep tensors for backward."""
        ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Name results that have no gradient."""
        ...

    def set_materialize_grads(self, value: bool) -> None:
        """False: gradients that do not exist come as None."""
        ...
