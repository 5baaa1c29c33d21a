"""`ExpertsLayer`: the experts that a model keeps as 3-D parameters, whose products run under a recipe.

    y_t = sum over the experts e of token t of  weight_te * down_e(act(up_e(x_t)))

A converted layer keeps its identity, its parameters and its keys: its class becomes a subclass of its own, of the same
name, whose forward is that of a `Form`. A form says which parameters are matrices of experts, and computes the layer
from their products; each product is a `GroupedLinear` that reads its weight from the layer. There is a form of
transformers' experts (`routed`), and `register_experts` for anybody else's.

Legend: T = tokens, S = rows (tokens once for each of their experts), E = experts, N = out features, K = in features.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import ClassVar, Protocol, Self

import torch
from torch import nn

from microfloat.errors import invalid_type, invalid_value, kind_of
from microfloat.recipes import Recipe
from microfloat.torch import backends
from microfloat.torch._typing import StateDict
from microfloat.torch.context import ambient
from microfloat.torch.linear.grouped import Groups
from microfloat.torch.linear.routing import Gate, Route
from microfloat.torch.nn.forward_rules import ACTIVATION_OF, instructions_of
from microfloat.torch.nn.grouped_linear import GroupedLinear
from microfloat.torch.nn.linear import UNPINNED, RecipeLayer, adapt_scaling_keys
from microfloat.torch.nn.merged import is_bare
from microfloat.torch.tensor.checks import is_abstract
from microfloat.torch.tensor.custom_ops import is_tracing, refuse_transforms
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor


class ExpertProduct(GroupedLinear):
    """The product of one parameter of a layer of experts: a `GroupedLinear` whose weight and bias are the layer's.

    It holds the state of delayed scaling for all experts, and the amax of its inputs.
    """

    def __init__(self, experts: "ExpertsLayer", name: str, is_turned: bool) -> None:
        nn.Module.__init__(self)
        self.name, self.is_turned = name, is_turned
        self.belong_to(experts)

    def belong_to(self, experts: "ExpertsLayer") -> None:
        """Read weight and bias from this layer. It owns its products, which must not keep it alive."""
        self.__dict__["_experts"] = weakref.ref(experts)

    @property
    def experts(self) -> "ExpertsLayer":
        """The layer that this product is one of."""
        return self._experts()  # type: ignore[return-value]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """[E, N, K], a view of the parameter where that is [E, K, N]."""
        weight = getattr(self.experts, self.name)
        return weight.transpose(1, 2) if self.is_turned else weight

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """[E, N], or None."""
        return getattr(self.experts, f"{self.name}_bias", None)

    @property
    def num_groups(self) -> int:  # type: ignore[override]
        """E, of this rank."""
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """N."""
        return self.weight.shape[1]

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """K."""
        return self.weight.shape[2]

    def reset_parameters(self) -> None:
        """Nothing: the layer of experts owns the parameters."""

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        state.pop("_experts", None)
        return state


@dataclass(frozen=True)
class Form:
    """The computation of a class of experts: its matrices, [E, N, K] or turned ([E, K, N]), and its forward.

    ``forward(experts, products, *arguments)``, where ``products[name](x, group_sizes)`` multiplies consecutive rows of
    x, first those of expert 0, with the matrices of that name, and adds the bias `name`_bias that the module may have.
    """

    turned: Mapping[str, bool]
    forward: Callable[..., torch.Tensor]


# By class, or by the name "module:Class" of one that may not be imported yet.
_FORMS: dict[type | str, Form] = {}


def register_experts(
    kind: type[nn.Module] | str, weights: Mapping[str, str], forward: Callable[..., torch.Tensor]
) -> None:
    """Tell `convert` and `quantize_` how modules of class `kind` compute experts that they keep as 3-D parameters.

    `kind`: the class itself, not its subclasses, or its name as "module:Class". `weights`: by the name of each
    parameter that holds a matrix for every expert its order in memory, "ENK" (experts, out, in) or "EKN".
    ``forward(experts, products, *arguments, **options)`` is the forward of the module, given its arguments:
    ``products[name](x, group_sizes)`` multiplies the rows of x [S, K], those of expert 0 first, with the matrices of
    that parameter, and adds the bias [E, N] that the module has under ``name + "_bias"``. `group_sizes`: rows of each
    expert, as in `GroupedLinear`. A later call replaces an earlier one. Raises InvalidTypeError and InvalidValueError
    for other arguments.
    """
    if not (isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, nn.Module))):
        raise invalid_type("kind", kind_of(kind), "a class of modules, or its name 'module:Class'")
    if isinstance(kind, str) and kind.count(":") != 1:
        raise invalid_value("kind", repr(kind), "a name 'module:Class'")
    if not isinstance(weights, Mapping) or not weights:
        raise invalid_type("weights", kind_of(weights), "a dictionary from names of parameters to 'ENK' or 'EKN'")
    for name, order in weights.items():
        if not isinstance(name, str) or order not in ("ENK", "EKN"):
            raise invalid_value("weights", f"{name!r}: {order!r}", "a name, and its order 'ENK' or 'EKN'")
    if not callable(forward):
        raise invalid_type("forward", kind_of(forward), "a function (experts, products, *arguments)")
    _FORMS[kind] = Form({name: order == "EKN" for name, order in weights.items()}, forward)


def form_of(module: nn.Module) -> Form | None:
    """The form of a module's class; None for a class that is not known to hold experts."""
    kind = module._original if isinstance(module, ExpertsLayer) else type(module)
    found = _FORMS.get(kind) or _FORMS.get(f"{kind.__module__}:{kind.__qualname__}")
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    # That of the choice which transformers' `use_experts_implementation` makes the forward.
    if found is not None or code is None or not {"experts_interface", "original_forward"} <= set(code.co_freevars):
        return found
    state = vars(module)
    if not {"has_gate", "has_bias", "is_transposed", "has_post_expert_norm"} <= state.keys():
        return None
    names = ("gate_up_proj" if state["has_gate"] else "up_proj", "down_proj")
    return Form(dict.fromkeys(names, bool(state["is_transposed"])), routed)


class ExpertsLayer(RecipeLayer):
    """First base of a converted layer of experts; `_original`: its own class, whose forward runs in high precision."""

    _original: ClassVar[type]
    _form: Form
    _measures: bool = False  # True while `calibrate` looks at the inputs of products
    products: Sequence[ExpertProduct]

    def begin(self, form: Form) -> None:
        """Make the products of a layer whose class has just become this one."""
        self._form = form
        products = nn.ModuleList(ExpertProduct(self, name, turned) for name, turned in form.turned.items())
        self.products = products  # type: ignore[assignment]
        for product in self.products:
            product.__dict__["_measured_amax"] = self.__dict__.get("_measured_amaxes", {}).get(product.name)
        self.__dict__.pop("_measured_amaxes", None)

    def end(self) -> None:
        """Drop everything that `begin` and `pin` have made; the class is the caller's to put back."""
        self.unpin()
        del self.products
        for name in ("_form", "_pinned", "_pin_token", "_path", "_number", "backend"):
            self.__dict__.pop(name, None)

    def extra_repr(self) -> str:
        """The original's words, and the pinned recipe."""
        return super().extra_repr().removeprefix(", ")

    @property
    def is_stored(self) -> bool:
        """True if a matrix of experts exists as codes only."""
        return any(isinstance(held_weight(product), QuantizedTensor) for product in self.products)

    def pin(self, recipe: Recipe | str | None) -> Self:
        """Fix the recipe of all products of the layer, as `Linear.pin` does."""
        for product in self.products:
            product.backend = self.backend
            product.pin(recipe)
            self._pinned, self._pin_token = product._pinned, product._pin_token
        return self

    def unpin(self) -> Self:
        """Follow the ambient autocast again."""
        for product in self.products:
            product.unpin()
        self._pinned, self._pin_token = UNPINNED, None
        return self

    def name_products(self, path: str) -> None:
        """Give the products their names for messages: those of their parameters."""
        self._path = path
        for product in self.products:
            product._path = f"{path}.{product.name}" if path else product.name

    def forward(self, *arguments: object, **options: object) -> torch.Tensor:
        """The output of the original layer, from products under the recipe; without one from the original forward."""
        if torch.compiler.is_compiling():
            is_plain = self._pinned is None
        else:
            state = ambient()
            is_plain = self._resolve(state) is None and not (state is not None and state.calibrating)
            is_plain = is_plain and not self._measures
        if is_plain and not self.is_stored:
            return super().forward(*arguments, **options)
        return self._form.forward(self, {one.name: one for one in self.products}, *arguments, **options)

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *arguments: list[str]) -> None:  # type: ignore[override]
        for number, product in enumerate(self.products):  # which see their own entries alone
            place = f"{prefix}products.{number}."
            adapt_scaling_keys(product, state_dict, place, arguments[-1], prefix + product.name)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def __reduce_ex__(self, protocol: object) -> tuple:
        """Copies and pickles name the original class, which can be found again."""
        return _rebuilt, (self._original,), self.__getstate__()

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        state.pop("_form", None)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._form = form_of(self)  # type: ignore
        for product in self.products:
            product.belong_to(self)
        self.name_products(self._path)


def place_of(layer: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the weight of a layer as a parameter, and its name there."""
    return (layer.experts, layer.name) if isinstance(layer, ExpertProduct) else (layer, "weight")


def held_weight(layer: nn.Module) -> torch.Tensor | None:
    """The weight of a layer as it is held: of experts that are turned it is not `layer.weight`, but its transpose."""
    module, key = place_of(layer)
    return module._parameters.get(key)


def products_of(layer: nn.Module) -> Sequence[RecipeLayer]:
    """The layers with a product each that a layer consists of: of experts two or more, else itself."""
    return layer.products if isinstance(layer, ExpertsLayer) else (layer,)  # type: ignore[return-value]


def _rebuilt(original: type) -> object:
    kind = experts_class(original)
    return kind.__new__(kind)


@functools.cache
def experts_class(original: type) -> type[ExpertsLayer]:
    """The class of converted layers of this class of experts."""
    namespace = {"__module__": original.__module__, "__qualname__": original.__qualname__,
                 "__doc__": original.__doc__, "_original": original}  # fmt: skip
    return type(original.__name__, (ExpertsLayer, original), namespace)


class Routed(Protocol):
    """The fields of a layer that carries transformers' `use_experts_implementation`; `has_gate` and
    `has_post_expert_norm` besides, which others lack."""

    act_fn: nn.Module
    post_expert_norm: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]


def groups_of_experts(ids: torch.Tensor, number: int) -> Groups:
    """The groups of rows of sorted expert numbers. Rows of a number that is none of an expert come behind the last
    group, as expert parallelism marks rows of other ranks: they reach neither outputs nor gradients.
    """
    ends = torch.searchsorted(ids, torch.arange(number, device=ids.device), right=True, out_int32=True)
    if torch.compiler.is_compiling() or is_abstract(ends) or ends.is_cuda:
        return Groups(ends, ids.shape[0])
    return Groups(ends, ids.shape[0], tuple(ends.diff(prepend=ends.new_zeros(1)).tolist()))


def routed(
    experts: Routed, products: Mapping[str, ExpertProduct], hidden_states: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """[T, K]: the contract of transformers' experts, with x [T, K], and numbers and weights [T, top_k] of experts."""
    act = gate_of(experts, hidden_states) if getattr(experts, "has_gate", True) else experts.act_fn
    norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
    return _by_expert(products, act, hidden_states, top_k_index, top_k_weights, norm)


def _plain_gate(experts: Routed, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def gate_of(experts: Routed, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gate of a layer: one launch each way where its code is that of `_plain_gate` and its activation is known."""
    plain, act = experts._apply_gate, getattr(experts, "act_fn", None)  # gpt-oss has none
    kind = None if is_tracing(x) else ACTIVATION_OF.get(type(act).__name__)
    if kind is None or act is None or not is_bare(act) or not isinstance(plain, MethodType):
        return plain
    kernels = backends.choose("auto", x.device).producers
    if kernels is None or instructions_of(plain.__func__) != instructions_of(_plain_gate):
        return plain
    return lambda h: Gate.apply(h, kind, kernels.gated_halves)


def _by_expert(
    products: Mapping[str, ExpertProduct], act: Callable[[torch.Tensor], torch.Tensor], x_TK: torch.Tensor,
    index: torch.Tensor, weights: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """The weighted sum over the experts of each token, computed over rows that are sorted by expert."""
    refuse_transforms("forward", x_TK)
    up, down = products.values()
    if index.dim() != 2 or (*index.shape[:1], *weights.shape) != (*x_TK.shape[:1], *index.shape):
        needed = "[T, top_k], top_k_weights of the same shape, and hidden_states [T, K]"
        got = f"shape {tuple(index.shape)}, top_k_weights {tuple(weights.shape)}, hidden_states {tuple(x_TK.shape)}"
        raise invalid_value("top_k_index", got, needed)
    # The remainder of a number below zero is large: it is nobody's, as every number that is too large.
    ids, order = torch.sort(index.reshape(-1) % torch.iinfo(index.dtype).max, stable=True)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device)).view_as(index)
    groups = groups_of_experts(ids, down.num_groups)
    of_up = groups if up.num_groups == down.num_groups else groups_of_experts(ids, up.num_groups)
    h = down(act(up(Route.apply(x_TK, place, of_up.ends, None, x_TK.dtype, True), of_up)), groups)
    return Route.apply(h if norm is None else norm(h), place, groups.ends, weights, x_TK.dtype, False)


def _longcat(
    experts: Routed, products: Mapping[str, ExpertProduct], hidden_states: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Experts behind which, in number, stand some that return their input: these have rows in gate_up_proj alone."""
    up, down = products.values()
    is_same = top_k_index >= down.num_groups
    index = top_k_index.masked_fill(is_same, up.num_groups)
    y = _by_expert(products, functools.partial(_plain_gate, experts), hidden_states, index, top_k_weights)
    return y + (hidden_states * (top_k_weights * is_same).sum(-1, keepdim=True)).to(y.dtype)


def _llama4(experts: Routed, products: Mapping[str, ExpertProduct], hidden_states: torch.Tensor) -> torch.Tensor:
    """Every expert over all tokens, whose scores are in their values already."""
    up, down = products.values()
    sizes = [hidden_states.shape[0] // up.num_groups] * up.num_groups
    gate, h = up(hidden_states, sizes).chunk(2, -1)
    return down(h * experts.act_fn(gate), sizes)


register_experts(
    "transformers.models.llama4.modeling_llama4:Llama4TextExperts", {"gate_up_proj": "EKN", "down_proj": "EKN"}, _llama4
)
register_experts(
    "transformers.models.step3p7.modeling_step3p7:Step3p7Experts", {"gate_up_proj": "ENK", "down_proj": "ENK"}, routed
)
register_experts(
    "transformers.models.longcat_flash.modeling_longcat_flash:LongcatFlashExperts",
    {"gate_up_proj": "ENK", "down_proj": "ENK"}, _longcat,
)  # fmt: skip
