"""Types that torch leaves open, and Protocols of classes that rooms above define: the lowest room of all."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

import torch

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
Context: TypeAlias = Any  # the `ctx` of an autograd Function, on which a forward leaves what its backward reads
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
