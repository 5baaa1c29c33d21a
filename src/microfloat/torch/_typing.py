"""Types that torch leaves open, and Protocols of classes that rooms above define: the lowest room of all."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

import torch

from microfloat.recipes import Cast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Takes = ParamSpec("Takes")  # what a decorated function takes, and what it returns
Result = TypeVar("Result")

Maybe: TypeAlias = torch.Tensor | None
TensorPart: TypeAlias = Any  # a tensor of an operand, or None where the operand has no such part
Group: TypeAlias = "ProcessGroup | None"
Seed: TypeAlias = int | Sequence[int] | Maybe
Arguments: TypeAlias = Sequence[Any]  # of an operator or a hook, as torch passes them
Options: TypeAlias = dict[str, Any]  # the same by name
WithBias: TypeAlias = Any  # y, or y and the bias that `return_bias` puts beside it
InitMethod: TypeAlias = Callable[[torch.Tensor], object]  # writes into the weight that it is given
StateDict: TypeAlias = dict[str, Any]  # a QuantizedTensor lies in one, or what another library put there


class Sink(Protocol):
    """The receiver of a weight's gradient in float32."""

    def add(self, dw: torch.Tensor, /) -> Maybe:
        """Take the gradient; returns the one that autograd passes on, or None."""
        ...


class Layer(Protocol):
    """A layer under a recipe, such as `nn.linear.RecipeLayer`."""

    backend: str
    return_bias: bool
    fuse_wgrad_accumulation: bool
    _path: str  # its name in its model
    _parameters: dict[str, torch.nn.Parameter | None]
    _load_state_dict_post_hooks: dict[int, Callable]

    @property
    def weight(self) -> torch.Tensor:
        """The weight, perhaps computed by a parametrization."""
        ...

    @property
    def bias(self) -> Maybe:
        """The bias, perhaps computed by a parametrization."""
        ...

    @property
    def added_bias(self) -> Maybe:
        """The bias that its product adds."""
        ...


class Runs(Protocol):
    """A forward and its backward, such as `linear.function.Run`."""

    path: str

    @property
    def forward(self) -> Callable:
        """A function of a `Context` and tensors, which gives the results."""
        ...

    @property
    def backward(self) -> Callable:
        """A function of a `Context` and gradients of the results, which gives those of the tensors."""
        ...


class Context(Protocol):
    """The `ctx` of an autograd Function: torch's part of it, and what the Functions of this library keep there."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    next_functions: tuple[tuple[torch.autograd.graph.Node | None, int], ...]
    wanted: list[bool]

    run: Runs
    dy_state: tuple  # encode scale and history of delayed scaling
    settings: tuple
    into: Sink
    stored: str
    bias_dtype: torch.dtype | None
    shape: torch.Size
    rows: list[int]
    split: Sequence[int] | None
    interleaved: bool
    route: Any  # of rows to their experts
    cast: Cast | None
    placed: Any  # the places of the parts of a DTensor

    def save_for_backward(self, *tensors: Maybe) -> None:
        """Keep tensors for backward."""
        ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Name results that have no gradient."""
        ...

    def set_materialize_grads(self, value: bool) -> None:
        """False: gradients that do not exist come as None."""
        ...
