"""`LayerOptions`: settings that the modules share beside sizes and recipe; errors for keywords that were removed."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ParamSpec

from microfloat.errors import invalid_type, invalid_value
from microfloat.torch._typing import InitMethod


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Settings of `LayerNormLinear`, `LayerNormMLP`, `MultiheadAttention` and `TransformerLayer` for ``options=``.

    A module refuses a setting that it does not have. `backend`, `fuse_wgrad_accumulation`, `return_bias` and
    `init_method` are those of `Linear`; `output_layer_init_method` draws the weights that write to the residual stream,
    `o_proj` and `down_proj`. `zero_centered_gamma`: norms store weights minus one. `activation_params`: parameters of
    clamped_swiglu. `dropout` and `hidden_dropout`: rates, in training, of the attention and of the outputs of blocks.
    `interleaved`: the rotation pairs elements 2 i and 2 i + 1. `head_dim`, `cross_attention` and `parallel` are those
    of `TransformerLayer`; `out_bias` of `o_proj` and `mlp_bias` of the MLP are `bias` where they are None.

    >>> LayerOptions(hidden_dropout=0.1).hidden_dropout
    0.1
    """

    backend: str = "auto"
    fuse_wgrad_accumulation: bool = False
    return_bias: bool = False
    init_method: InitMethod | None = None
    output_layer_init_method: InitMethod | None = None
    zero_centered_gamma: bool = False
    activation_params: Mapping[str, float] | None = None
    head_dim: int | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    dropout: float = 0.0
    hidden_dropout: float = 0.0
    interleaved: bool = False
    cross_attention: bool = False
    parallel: bool = False

    def only(self, names: tuple[str, ...]) -> "LayerOptions":
        """These settings alone, for a part of a module."""
        return LayerOptions(**{name: getattr(self, name) for name in names})


def options_of(module: object, options: LayerOptions | None, names: tuple[str, ...]) -> LayerOptions:
    """The options of a module that has the settings `names`; raises if another setting is not its default."""
    if options is None:
        return LayerOptions()
    if not isinstance(options, LayerOptions):
        raise invalid_type("options", type(options), "a microfloat.torch.LayerOptions, or None")
    for field in fields(LayerOptions):
        value = getattr(options, field.name)
        if field.name not in names and value != field.default:
            got = f"{field.name}={value!r} for a {type(module).__name__}"
            raise invalid_value("options", got, f"settings of it: {', '.join(names)}")
    return options


_SPLIT = "a backward in two halves, by torch.distributed.pipelining or autograd.grad (docs/training.md)"
_OWN_LAYER = "a layer of your own around MultiheadAttention and LayerNormMLP (docs/migration.md)"
_ATTENTION = "a function or module of your own as attention= (docs/modules.md)"
_GONE = {
    "delay_wgrad_compute": _SPLIT, "drop_path_rate": _OWN_LAYER, "output_layernorm": _OWN_LAYER,
    "apply_residual_connection_post_layernorm": _OWN_LAYER, "qk_norm_before_rope": _ATTENTION,
    "softmax_type": _ATTENTION,
}  # fmt: skip
_MOVED = {field.name: f"options=LayerOptions({field.name}=...)" for field in fields(LayerOptions)}
_P = ParamSpec("_P")


def names_moved(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor whose error for a removed keyword names the new place of the setting."""
    own = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(*args: _P.args, **keywords: _P.kwargs) -> None:
        for name in keywords:
            needed = None if name in own else _GONE.get(name, _MOVED.get(name) if "options" in own else None)
            if needed is not None:
                raise invalid_type(name, f"a keyword that {type(args[0]).__name__} does not have any more", needed)
        init(*args, **keywords)

    return checked
