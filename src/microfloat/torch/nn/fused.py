"""`LayerNormLinear` and `LayerNormMLP`: a norm and the Linears that read it, cast as it is computed.

    LayerNormLinear    y = linear(norm(x))
    LayerNormMLP       y = down_proj(f(up_proj(h)))                    h = norm(x)
                       y = down_proj(f(gate_proj(h)) * up_proj(h))     gated activations

Where nothing can be fused (high precision, compiled code, which fuses by itself) the modules run one by one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.types import Device

from microfloat.arguments import check_number
from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.recipes import Recipe
from microfloat.torch._typing import Maybe, Options
from microfloat.torch.autocast import checkpoint
from microfloat.torch.nn.functional import activated, mlp, norm_of, project
from microfloat.torch.nn.linear import Linear
from microfloat.torch.nn.merged import Composite, call_layer, join_
from microfloat.torch.nn.norms import make_norm
from microfloat.torch.nn.options import LayerOptions, names_moved, options_of

__all__ = ["ACTIVATIONS", "MLP", "OF_LINEAR", "OF_MLP", "LayerNormLinear", "LayerNormMLP"]

# The settings of `LayerOptions` that every Linear has, and those of an MLP.
OF_LINEAR = "backend", "fuse_wgrad_accumulation"
OF_MLP = (*OF_LINEAR, "init_method", "output_layer_init_method", "activation_params")


class _Kind(NamedTuple):
    """An activation by its function in `microfloat.torch.fused`; `gated`: multiplied with a second Linear's output."""

    function: str
    gated: bool = False


ACTIVATIONS = {
    "gelu": _Kind("gelu"), "gelu_tanh": _Kind("gelu_tanh"), "qgelu": _Kind("qgelu"), "relu": _Kind("relu"),
    "srelu": _Kind("srelu"), "silu": _Kind("silu"), "geglu": _Kind("gelu", True),
    "geglu_tanh": _Kind("gelu_tanh", True), "qgeglu": _Kind("qgelu", True), "reglu": _Kind("relu", True),
    "sreglu": _Kind("srelu", True), "swiglu": _Kind("silu", True), "glu": _Kind("sigmoid", True),
    "clamped_swiglu": _Kind("clamped", True),
}  # fmt: skip
# Of clamped SwiGLU, as OpenAI's gpt-oss has it.
CLAMPED: Mapping[str, float] = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


def clamped_swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float = CLAMPED["limit"], alpha: float = CLAMPED["alpha"],
    glu_linear_offset: float = CLAMPED["glu_linear_offset"],
) -> torch.Tensor:  # fmt: skip
    """``g sigmoid(alpha g) (u + offset)``, g = min(gate, limit), u = up clamped to [-limit, limit]; float32 inside."""
    g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return (g * torch.sigmoid(alpha * g) * (u + glu_linear_offset)).to(gate.dtype)


def _checked_parameters(activation: str, parameters: Mapping[str, float] | None) -> dict[str, float]:
    """The parameters of an activation; raises for those of one that has none, for other names and for no numbers."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise invalid_type("activation_params", type(parameters), "a mapping of names to numbers")
    if parameters and ACTIVATIONS[activation].function != "clamped":
        raise invalid_value("activation_params", f"{dict(parameters)} for {activation!r}", "none: it has no parameters")
    for name, value in parameters.items():
        if name not in CLAMPED:
            raise unknown_name("activation_params", name, CLAMPED)
        low = 0.0 if name == "limit" else -3.4e38
        check_number(f"activation_params[{name!r}]", value, "a finite number, at least 0 for limit", low, 3.4e38)
    return {name: float(value) for name, value in parameters.items()}


class LayerNormLinear(Composite):
    """``y = norm(x) @ weight.T + bias``; the norm's value is cast as it is computed, and only its codes are kept.

    Children `norm` and `linear`: the state dict is that of the two modules. `normalization`: "LayerNorm" or "RMSNorm".
    `split`: names and sizes of the outputs, adding up to `out_features`, for example ``{"q_proj": 4096, "k_proj":
    1024}``; each is a Linear of its own in the state dict, and all are one product (`microfloat.torch.nn.merged`).
    `return_norm_output`: returns (y, norm(x)); the norm is then computed apart from its cast. `options`: with its
    `return_bias` returns (``norm(x) @ weight.T``, bias), before norm(x) where that is returned too. Raises
    InvalidValueError for sizes that do not add up. Source: docs/modules.md.

    >>> LayerNormLinear(8, 6, split={"q": 4, "k": 2})(torch.ones(3, 8)).shape
    torch.Size([3, 6])
    """

    @names_moved
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, normalization: str = "LayerNorm",
        eps: float = 1e-5, return_norm_output: bool = False, split: Mapping[str, int] | None = None,
        device: Device = None, dtype: torch.dtype | None = None, recipe: Recipe | str | None = None,
        options: LayerOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        options = options_of(self, options, (*OF_LINEAR, "return_bias", "init_method", "zero_centered_gamma"))
        _check_bias(bias)
        parts = {"linear": out_features} if split is None else dict(split)
        if sum(parts.values()) != out_features or not parts or min(parts.values()) < 1:
            raise invalid_value("split", f"{parts}", f"sizes >= 1 that add up to out_features = {out_features}")
        if "norm" in parts or any("." in name or hasattr(self, name) for name in parts):
            raise invalid_value("split", f"the names {list(parts)}", "names of submodules other than 'norm'")
        self.in_features, self.out_features = in_features, out_features
        self.return_norm_output, self.return_bias = return_norm_output, options.return_bias
        norm = normalization, in_features, eps, options.zero_centered_gamma
        self.norm = make_norm(*norm, device=device, dtype=dtype)
        self._parts = tuple(parts)
        for name, size in parts.items():
            layer = Linear(
                in_features, size, bias, device, dtype, recipe=recipe, backend=options.backend,
                fuse_wgrad_accumulation=options.fuse_wgrad_accumulation, return_bias=options.return_bias,
                init_method=options.init_method,
            )  # fmt: skip
            self.add_module(name, layer)
        self._join()

    @property
    def layers(self) -> tuple[Linear, ...]:
        """The Linears that read the norm."""
        return tuple(getattr(self, name) for name in self._parts)

    def _join(self) -> None:
        if len(self._parts) > 1:
            join_(self.layers)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """y [..., N], of several parts one after another; a tuple with what else is returned: bias [N], norm(x)."""
        value, found = None, [] if self.return_bias else None
        if self.return_norm_output:
            value = self.norm(x)
            made = tuple(call_layer(layer, value, is_first_microbatch, found) for layer in self.layers)
        else:
            made = project(x, norm_of(self.norm, x), self.layers, True, is_first_microbatch, found)
        y = made[0] if len(made) == 1 else torch.cat(made, -1)
        bias = None if found is None else _side_by_side(found, made)
        return _beside(y, (self.return_bias, bias), (self.return_norm_output, value))


def _side_by_side(found: list[Maybe], made: tuple[torch.Tensor, ...]) -> Maybe:
    """The biases of the parts one after another; zeros for a part that was replaced by one that adds its own."""
    biases = [bias for bias in found if bias is not None]
    if len(biases) < len(found) and biases:
        biases = [
            part.new_zeros(part.shape[-1]) if bias is None else bias for bias, part in zip(found, made, strict=True)
        ]
    return None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases)


def _beside(
    y: torch.Tensor, *others: tuple[bool, torch.Tensor | None]
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """y, or the tuple of y and of the others that are asked for."""
    asked = [other for is_asked, other in others if is_asked]
    return (y, *asked) if asked else y


def _check_bias(bias: object) -> None:
    if not isinstance(bias, bool):  # the place of `eps` in a signature of TransformerEngine
        raise invalid_type("bias", type(bias), "True or False", "Give eps by keyword: eps=1e-5.")


class _Projections(Composite):
    """The Linears of an MLP: `up_proj`, `down_proj`, and `gate_proj` for activations with a gate."""

    activation: str
    activation_params: dict[str, float]
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def _build(
        self, hidden_size: int, ffn_hidden_size: int, bias: bool, activation: str, options: LayerOptions, **of_all: Any
    ) -> None:
        """`of_all`: keywords of all Linears."""
        _check_bias(bias)
        if activation not in ACTIVATIONS:
            raise unknown_name("activation", activation, ACTIVATIONS)
        self.activation, self.activation_params = activation, _checked_parameters(activation, options.activation_params)
        of_all |= {name: getattr(options, name) for name in OF_LINEAR}
        outer: Options = {**of_all, "init_method": options.init_method}
        down: Options = {"return_bias": options.return_bias, "init_method": options.output_layer_init_method}
        if ACTIVATIONS[activation].gated:
            self.gate_proj = Linear(hidden_size, ffn_hidden_size, bias, **outer)
        self.up_proj = Linear(hidden_size, ffn_hidden_size, bias, **outer)
        self.down_proj = Linear(ffn_hidden_size, hidden_size, bias, **of_all, **down)

    def _project(
        self, x: torch.Tensor, norm: nn.Module | None, first: bool | None, biases: list[Maybe] | None = None
    ) -> torch.Tensor:
        """The MLP of x, or of norm(x); `biases`: as in `call_layer`, of the last Linear."""
        kind = ACTIVATIONS[self.activation]
        outer = (self.gate_proj, self.up_proj) if kind.gated else (self.up_proj,)
        if norm is not None and kind.function != "clamped":
            return mlp(x, norm_of(norm, x), outer, self.down_proj, kind.function, first, biases)
        if norm is None:
            made = tuple(call_layer(layer, x, first) for layer in outer)
        else:
            made = project(x, norm_of(norm, x), outer, False, first)
        if kind.function == "clamped":
            value = clamped_swiglu(made[0], made[1], **self.activation_params)
        else:
            value = activated(made[0], made[1] if kind.gated else None, kind.function)
        return call_layer(self.down_proj, value, first, biases)


class MLP(_Projections):
    """``y = down_proj(f(gate_proj(x)) * up_proj(x))``, or ``down_proj(f(up_proj(x)))`` for activations without a gate.

    `forward` with `norm`: of norm(x), which is then cast as it is computed.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, bias: bool, *, activation: str, options: LayerOptions,
        **of_all: Any,
    ) -> None:  # fmt: skip
        """`of_all`: keywords of all Linears."""
        super().__init__()
        self._build(hidden_size, ffn_hidden_size, bias, activation, options, **of_all)

    def forward(
        self, x: torch.Tensor, norm: nn.Module | None = None, is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        """y in the shape of x."""
        return self._project(x, norm, is_first_microbatch)


class LayerNormMLP(_Projections):
    """``y = down_proj(f(up_proj(norm(x))))``, or ``down_proj(f(gate_proj(h)) * up_proj(h))`` of h = norm(x).

    Children `norm`, `gate_proj` (gated activations), `up_proj`, `down_proj`. `activation`: gelu, gelu_tanh, qgelu,
    relu, srelu, silu, or gated: geglu, geglu_tanh, qgeglu, reglu, sreglu, swiglu, glu, clamped_swiglu. gelu is the
    exact one, as in torch; TransformerEngine's is gelu_tanh. `recompute`: keep x only, and run the forward again in
    backward. `return_norm_output`: returns (y, norm(x)). `options`: with its `return_bias` returns (y without the bias
    of `down_proj`, that bias), before norm(x); `activation_params` are limit, alpha and glu_linear_offset of
    clamped_swiglu. Source: docs/modules.md.

    >>> LayerNormMLP(8, 16, activation="swiglu")(torch.ones(3, 8)).shape
    torch.Size([3, 8])
    """

    @names_moved
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, bias: bool = True, *, activation: str = "gelu",
        normalization: str = "LayerNorm", eps: float = 1e-5, return_norm_output: bool = False, recompute: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, recipe: Recipe | str | None = None,
        options: LayerOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        options = options_of(self, options, (*OF_MLP, "return_bias", "zero_centered_gamma"))
        where: Options = {"device": device, "dtype": dtype}
        self.norm = make_norm(normalization, hidden_size, eps, options.zero_centered_gamma, **where)
        self._build(hidden_size, ffn_hidden_size, bias, activation, options, **where, recipe=recipe)
        self.return_norm_output, self.recompute = return_norm_output, recompute
        self.return_bias = options.return_bias

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """y in the shape of x; a tuple with what else is returned: bias, norm(x)."""
        if self.recompute and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return checkpoint(self._run, x, is_first_microbatch)
        return self._run(x, is_first_microbatch)

    def _run(self, x: torch.Tensor, first: bool | None) -> Any:
        value, biases = self.norm(x) if self.return_norm_output else None, []
        y = self._project(*((x, self.norm) if value is None else (value, None)), first, biases)
        return _beside(y, (self.return_bias, biases[0]), (self.return_norm_output, value))
