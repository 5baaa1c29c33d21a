"""`LayerOptions`: settings that modules share; errors for removed keywords, and for entries of state dicts."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ParamSpec

import torch
from torch import nn

from microfloat.errors import CheckpointError, invalid_type, invalid_value
from microfloat.torch._typing import InitMethod, StateDict
from microfloat.torch.tensor.checks import is_abstract


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


def drop_extra_state(module: nn.Module, state_dict: StateDict, prefix: str, load: list[str]) -> None:
    """Remove the entries that TransformerEngine's modules save beside their parameters, below `module` too.

    Entries of a submodule with a `set_extra_state` of its own stay.
    """
    names = [key for key in state_dict if key.startswith(prefix) and f".{key}".endswith("._extra_state")]
    children = dict(module.named_modules()) if names else {}
    takes = {f"{prefix}{name}." if name else prefix for name, child in children.items()
             if type(child).set_extra_state is not nn.Module.set_extra_state}  # fmt: skip
    dropped = [state_dict.pop(key) for key in names if key.removesuffix("_extra_state") not in takes]
    if any(value is not None for value in dropped):
        warn_once_per_load(load, "The checkpoint holds `_extra_state` blobs of another library; they were ignored.")


def check_scaling_entry(key: str, value: object) -> None:
    """Raise CheckpointError for a value that is no scale, or no history of amaxes, by the name of its key."""
    is_scale = key.endswith("_scale")
    scale = "a positive, finite number as a tensor of shape ()"
    needed = scale if is_scale else "a tensor [L >= 1] of amaxes >= 0, finite"
    if not isinstance(value, torch.Tensor):
        got = repr(value)
    elif not value.is_floating_point():
        got = f"a tensor of {value.dtype}"
    elif value.dim() != (0 if is_scale else 1) or value.numel() == 0:
        got = f"shape {tuple(value.shape)}"
    elif is_abstract(value):
        return
    else:
        values = value.detach().float()
        wrong = values[~(torch.isfinite(values) & (values > 0 if is_scale else values >= 0))]
        if not wrong.numel():
            return
        got = f"the value {float(wrong[0])}"
    raise CheckpointError(
        f"state_dict[{key!r}]: got {got}, needed {needed}. Remove the six scaling entries of the layer to start with "
        "fresh scaling state."
    )


# Text -> the list of error messages of its latest load, one object per load_state_dict call. There are two texts.
_WARNED_LOADS: dict[str, list[str]] = {}


def warn_once_per_load(load: list[str], text: str) -> None:
    """A UserWarning, once for each text in one call of load_state_dict."""
    if _WARNED_LOADS.get(text) is not load:
        _WARNED_LOADS[text] = load
        warnings.warn(text, UserWarning, stacklevel=2)
