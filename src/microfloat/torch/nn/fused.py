"""`LayerNormLinear` and `LayerNormMLP`: a norm whose value is cast as it is computed, and the Linears that read it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.types import Device

from microfloat.arguments import check_choice, check_number
from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.recipes import Recipe
from microfloat.torch._typing import Maybe, Options, WithBias
from microfloat.torch.autocast import checkpoint
from microfloat.torch.nn.functional import mlp, project
from microfloat.torch.nn.linear import Linear
from microfloat.torch.nn.merged import Composite, call_layer, join_
from microfloat.torch.nn.norms import make_norm
from microfloat.torch.nn.options import LayerOptions, names_moved, options_of

# The settings of `LayerOptions` that every Linear has, and the settings of an MLP.
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
# The parameters of clamped SwiGLU in OpenAI's gpt-oss.
CLAMPED: Mapping[str, float] = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


def clamped_swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float = CLAMPED["limit"], alpha: float = CLAMPED["alpha"],
    glu_linear_offset: float = CLAMPED["glu_linear_offset"],
) -> torch.Tensor:  # fmt: skip
    """``g sigmoid(alpha g) (u + offset)``, g = min(gate, limit), u = up clamped to [-limit, limit]; float32 inside."""
    g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return (g * torch.sigmoid(alpha * g) * (u + glu_linear_offset)).to(gate.dtype)


def _checked_parameters(activation: str, parameters: Mapping[str, float] | None) -> dict[str, float]:
    """The parameters of an activation; raises where it has none, for unknown names and for no numbers."""
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

    Children `norm` and `linear`. `normalization`: "LayerNorm" or "RMSNorm". `split`: names and sizes of the outputs,
    adding up to `out_features`, for example ``{"q_proj": 4096, "k_proj": 1024}``; each is a Linear of its own in the
    state dict, and all are one product. `return_norm_output`: returns (y, norm(x)); the norm is then computed apart
    from its cast. `options`: with its `return_bias` returns (``norm(x) @ weight.T``, bias), and norm(x) behind them.
    Raises InvalidValueError for sizes that do not add up. Source: docs/modules.md.

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
        where: Options = {"device": device, "dtype": dtype}
        self.norm = make_norm(normalization, in_features, eps, options.zero_centered_gamma, **where)
        self._parts = tuple(parts)
        of_all = {name: getattr(options, name) for name in (*OF_LINEAR, "return_bias", "init_method")}
        for name, size in parts.items():
            self.add_module(name, Linear(in_features, size, bias, **where, recipe=recipe, **of_all))
        self._join()

    @property
    def layers(self) -> tuple[Linear, ...]:
        """The Linears that read the norm."""
        return tuple(getattr(self, name) for name in self._parts)

    def _join(self) -> None:
        if len(self._parts) > 1:
            join_(self.layers)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> WithBias:
        """y [..., N]; with `return_bias` and `return_norm_output` a tuple: y, bias [N], norm(x)."""
        value, biases = None, []
        if self.return_norm_output:
            value = self.norm(x)
            made = project(value, None, self.layers, False, is_first_microbatch, biases)
        else:
            made = project(x, self.norm, self.layers, True, is_first_microbatch, biases)
        y = made[0] if len(made) == 1 else torch.cat(made, -1)
        return _with_others(self, y, _side_by_side(biases, made), value)


def _side_by_side(found: list[Maybe], made: tuple[torch.Tensor, ...]) -> Maybe:
    """The biases of the parts one after another; zeros for a part that was replaced by one that adds its own."""
    biases = [bias for bias in found if bias is not None]
    if len(found) == 1 or not biases:
        return found[0]
    if len(biases) < len(found):  # then each part has an output of its own
        both = zip(found, made, strict=True)
        biases = [part.new_zeros(part.shape[-1]) if bias is None else bias for bias, part in both]
    return torch.cat(biases)


def _with_others(
    module: "LayerNormLinear | LayerNormMLP", y: torch.Tensor, bias: Maybe, norm_output: Maybe
) -> WithBias:
    """y, or a tuple of y and of the other outputs that the module returns."""
    asked = (module.return_bias, bias), (module.return_norm_output, norm_output)
    others = [other for is_asked, other in asked if is_asked]
    return (y, *others) if others else y


def _check_bias(bias: object) -> None:
    if not isinstance(bias, bool):  # signatures of TransformerEngine have `eps` in this position
        raise invalid_type("bias", type(bias), "True or False", "Give eps by keyword: eps=1e-5.")


class MLP(Composite):
    """``y = down_proj(f(gate_proj(x)) * up_proj(x))``, or ``down_proj(f(up_proj(x)))`` for activations without a gate.

    `forward` with `norm`: the MLP of norm(x), which is then cast as it is computed.
    """

    activation: str
    activation_params: dict[str, float]
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, bias: bool, *, activation: str, options: LayerOptions,
        norm: nn.Module | None = None, **of_all: Any,
    ) -> None:  # fmt: skip
        """`norm`: the first child, if any; `of_all`: keywords of all Linears."""
        super().__init__()
        _check_bias(bias)
        check_choice("activation", activation, ACTIVATIONS)
        self.activation, self.activation_params = activation, _checked_parameters(activation, options.activation_params)
        if norm is not None:
            self.norm = norm
        of_all |= {name: getattr(options, name) for name in OF_LINEAR}
        outer: Options = {**of_all, "init_method": options.init_method}
        down: Options = {"return_bias": options.return_bias, "init_method": options.output_layer_init_method}
        if ACTIVATIONS[activation].gated:
            self.gate_proj = Linear(hidden_size, ffn_hidden_size, bias, **outer)
        self.up_proj = Linear(hidden_size, ffn_hidden_size, bias, **outer)
        self.down_proj = Linear(ffn_hidden_size, hidden_size, bias, **of_all, **down)

    def forward(
        self, x: torch.Tensor, norm: nn.Module | None = None, is_first_microbatch: bool | None = None,
        biases: list[Maybe] | None = None,
    ) -> WithBias:  # fmt: skip
        """y in the shape of x. `biases`: as in `call_layer`, for the last Linear."""
        kind = ACTIVATIONS[self.activation]
        outer = (self.gate_proj, self.up_proj) if kind.gated else (self.up_proj,)
        if kind.function != "clamped":
            return mlp(x, norm, outer, self.down_proj, kind.function, is_first_microbatch, biases)
        gate, up = project(x, norm, outer, False, is_first_microbatch)
        value = clamped_swiglu(gate, up, **self.activation_params)
        return call_layer(self.down_proj, value, is_first_microbatch, biases)


class LayerNormMLP(MLP):
    """``y = down_proj(f(up_proj(norm(x))))``, or ``down_proj(f(gate_proj(h)) * up_proj(h))`` of h = norm(x).

    Children `norm`, `gate_proj` (gated activations), `up_proj`, `down_proj`. `activation`: gelu, gelu_tanh, qgelu,
    relu, srelu, silu, or gated: geglu, geglu_tanh, qgeglu, reglu, sreglu, swiglu, glu, clamped_swiglu. gelu is the
    exact one, as in torch; TransformerEngine's is gelu_tanh. `recompute`: keep x only, and run the forward again in
    backward. `return_norm_output`: returns (y, norm(x)). `options`: with its `return_bias` returns (y without the bias
    of `down_proj`, that bias), and norm(x) behind them; its `activation_params` are limit, alpha and glu_linear_offset
    of clamped_swiglu. Source: docs/modules.md.

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
        options = options_of(self, options, (*OF_MLP, "return_bias", "zero_centered_gamma"))
        where: Options = {"device": device, "dtype": dtype}
        norm = make_norm(normalization, hidden_size, eps, options.zero_centered_gamma, **where)
        of_all: Options = {"activation": activation, "options": options, "norm": norm, "recipe": recipe, **where}
        super().__init__(hidden_size, ffn_hidden_size, bias, **of_all)
        self.return_norm_output, self.recompute = return_norm_output, recompute
        self.return_bias = options.return_bias

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> WithBias:  # type: ignore[override]
        """y in the shape of x; with `return_bias` and `return_norm_output` a tuple: y, bias [N], norm(x)."""
        if self.recompute and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return checkpoint(self._run, x, is_first_microbatch)
        return self._run(x, is_first_microbatch)

    def _run(self, x: torch.Tensor, first: bool | None) -> WithBias:
        value, biases = self.norm(x) if self.return_norm_output else None, []
        y = super().forward(*((x, self.norm) if value is None else (value, None)), first, biases)
        return _with_others(self, y, biases[0], value)
