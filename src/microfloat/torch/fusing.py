"""`convert(fuse=True)`: blocks of other people's models that run on the fused functions, in place.

| block | recognised by | what runs instead |
|---|---|---|
| decoder layer | transformers' Llama, Mistral, Qwen2 and Qwen3 classes | the steps of `TransformerLayer` |
| gated MLP | its four children and the forward that transformers gives it | the MLP with a cast activation |
| nn.Sequential | a norm or an activation right before a Linear | the two as one |

A block keeps its identity: its class becomes a subclass of its own, of the same name, whose forward is fused. Where its
parts are no longer what was recognised (a child was replaced or hooked, by PEFT for example, or its outputs are
recorded), the forward of its own class runs. `unfuse` puts the class back.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from microfloat.torch.fused import NormOf, activation_linear, mlp, norm_linear, project
from microfloat.torch.joined import can_join, is_bare, join_
from microfloat.torch.nn.attention import heads_of
from microfloat.torch.nn.linear import Linear

__all__ = ["fuse_blocks", "unfuse"]

_DECODERS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Classes of transformers and torch -> the activation that they compute.
_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "ReLU": "relu", "QuickGELUActivation": "qgelu",
    "ReLUSquaredActivation": "srelu",
}  # fmt: skip


class Fused:
    """First base of a block whose forward is fused; `_original`: its own class."""

    _original: type
    _children_types: tuple[tuple[str, type], ...]

    def __reduce_ex__(self, protocol: object) -> tuple:
        """Copies and pickles name the original class, which can be found again."""
        return _rebuilt, (self._original,), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__

    def _is_whole(self: Any) -> bool:
        """True while every part is what was recognised, and nobody listens to it."""
        for name, kind in self._children_types:
            part = self
            for step in name.split("."):
                part = part._modules.get(step)
                if part is None:
                    return False
            if type(part) is not kind or not is_bare(part):
                return False
        return True


def _rebuilt(original: type) -> object:
    kind: Any = _fused_class(original)
    return kind.__new__(kind)


def fuse_blocks(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Fuse every block of `model` that is known; gives (name, what was fused), and for known ones left alone why."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        children = {id(child) for child in module.modules()}
        if isinstance(module, Fused):
            inside |= children
            continue
        if id(module) in inside:
            continue
        made = _fused_class(type(module))
        if made is None:
            continue
        why = _why_not(module)
        if why:
            yield name, f"left as it is: {why}"
            continue
        parts = tuple((child, type(part)) for child, part in module.named_modules() if child)
        object.__setattr__(module, "_children_types", parts)
        module.__class__ = made
        if issubclass(made, _DecoderLayer):
            attention: Any = module.self_attn
            layers = attention.q_proj, attention.k_proj, attention.v_proj
            join_(layers)
            apart = "" if can_join(layers) else " (q/k/v as three products)"
            yield name, f"norms, q/k/v, rotary embedding and MLP{apart}"
            inside |= children
        else:
            yield name, "gated MLP" if issubclass(made, _GatedMLP) else "norms and activations before Linears"


def unfuse(model: nn.Module) -> None:
    """Give every fused block its own class back."""
    for module in model.modules():
        if isinstance(module, Fused):
            module.__class__ = module._original  # type: ignore[assignment]
            module.__dict__.pop("_children_types", None)


@functools.cache
def _fused_class(kind: type) -> type | None:
    """The class of a fused block of this class; None for classes that are not known."""
    if issubclass(kind, Fused):
        return kind
    path = kind.__module__.split(".")
    family = path[2] if path[:2] == ["transformers", "models"] and len(path) == 4 else ""
    base: type | None = None
    if family in _DECODERS and kind.__name__ == f"{_DECODERS[family]}DecoderLayer":
        base = _DecoderLayer
    elif family and kind.__name__.endswith("MLP") and _computes_gated_mlp(kind):
        base = _GatedMLP
    elif kind is nn.Sequential:
        base = _Sequential
    if base is None:
        return None
    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
                 "_original": kind}  # fmt: skip
    return type(kind.__name__, (base, Fused, kind), namespace)


def _gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _gated_with_a_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _computes_gated_mlp(kind: type) -> bool:
    """True if the forward of a class is one of the two above, by its bytecode: names alone would not tell a swap."""
    code = getattr(vars(kind).get("forward"), "__code__", None)
    return code is not None and any(
        (code.co_code, code.co_names) == (known.__code__.co_code, known.__code__.co_names)
        for known in (_gated, _gated_with_a_name)
    )


def _why_not(module: Any) -> str:
    """The reason not to fuse a block of a known class, "" if there is none."""
    if isinstance(module, nn.Sequential):
        return "" if any(_steps(module)) else "nothing here stands right before a Linear"
    holder = module.mlp if hasattr(module, "mlp") else module
    linears = [getattr(holder, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if holder is not module:
        attention = module.self_attn
        linears += [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
        for norm in (module.input_layernorm, module.post_attention_layernorm):
            if not hasattr(norm, "variance_epsilon"):
                return "its norms are not those of its model"
    if any(type(layer) is not Linear for layer in linears):
        return "not all of its Linears were converted"
    if type(holder.act_fn).__name__ not in _ACTIVATIONS:
        return f"its activation {type(holder.act_fn).__name__} has no fused form"
    return ""


def _norm_of(norm: Any) -> NormOf:
    """An RMSNorm of transformers; its value is rounded once here, and before and after the weight there."""
    return NormOf(norm, "rms", norm.variance_epsilon, norm.weight, None)


def _head_norm(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if torch.compiler.is_compiling():
        return norm
    return lambda x: F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


class _DecoderLayer(nn.Module):
    """``h = x + o_proj(attention(norm(x)));  y = h + mlp(norm(h))`` of a layer of transformers."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: object = None, position_ids: object = None,
        past_key_values: Any = None, use_cache: object = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None, **kwargs: object,
    ) -> torch.Tensor:  # fmt: skip
        """The arguments are those of the original layer."""
        me: Any = self
        x = hidden_states
        if not me._is_whole() or position_embeddings is None or not isinstance(x, torch.Tensor):
            return super().forward(
                hidden_states, attention_mask=attention_mask, position_ids=position_ids,
                past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
            )  # fmt: skip
        attn = me.self_attn
        source = sys.modules[type(attn).__module__]
        qkv = project(x, _norm_of(me.input_layernorm), (attn.q_proj, attn.k_proj, attn.v_proj), True)
        counts = attn.q_proj.out_features // attn.head_dim, attn.k_proj.out_features // attn.head_dim
        norms = (_head_norm(attn.q_norm), _head_norm(attn.k_norm)) if hasattr(attn, "q_norm") else (None, None)
        q, k, v = (part.transpose(1, 2) for part in heads_of(qkv, counts, attn.head_dim, position_embeddings, norms))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, attn.layer_idx)
        if hasattr(attn, "sliding_window"):
            kwargs["sliding_window"] = attn.sliding_window
        elif type(attn).__name__.startswith("Mistral"):
            kwargs["sliding_window"] = getattr(attn.config, "sliding_window", None)
        attend = source.ALL_ATTENTION_FUNCTIONS.get_interface(
            attn.config._attn_implementation, source.eager_attention_forward
        )
        y, _ = attend(
            attn, q, k, v, attention_mask, dropout=attn.attention_dropout if me.training else 0.0,
            scaling=attn.scaling, position_ids=position_ids, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        h = x + attn.o_proj(y.reshape(*x.shape[:-1], -1))
        inner = me.mlp
        kind = _ACTIVATIONS[type(inner.act_fn).__name__]
        return h + mlp(
            h, _norm_of(me.post_attention_layernorm), (inner.gate_proj, inner.up_proj), inner.down_proj, kind
        )


class _GatedMLP(nn.Module):
    """``y = down_proj(f(gate_proj(x)) * up_proj(x))``; the product is cast as it is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y in the shape of x."""
        me: Any = self
        if not me._is_whole():
            return super().forward(x)
        kind = _ACTIVATIONS[type(me.act_fn).__name__]
        return activation_linear(me.gate_proj(x), me.down_proj, up=me.up_proj(x), activation=kind)


def _steps(modules: nn.Sequential) -> Iterator[tuple[int, str]]:
    """Positions of norms ("norm") and activations (their names) right before a Linear of ours."""
    for index, (first, second) in enumerate(itertools.pairwise(modules)):
        if type(second) is not Linear or second.return_bias:
            continue
        if isinstance(first, (nn.LayerNorm, nn.RMSNorm)) and tuple(first.normalized_shape) == (second.in_features,):
            yield index, "norm"
        elif type(first) is nn.GELU:
            yield index, "gelu" if first.approximate == "none" else "gelu_tanh"
        elif type(first) in (nn.SiLU, nn.ReLU):
            yield index, type(first).__name__.lower()


class _Sequential(nn.Module):
    """The modules one after another, norms and activations with the Linear that follows them."""

    def forward(self, input: Any) -> Any:
        """The output of the last module."""
        me: Any = self
        if not me._is_whole():
            return super().forward(input)
        steps, parts, index, x = dict(_steps(me)), list(me), 0, input
        while index < len(parts):
            kind = steps.get(index)
            if kind is None:
                x = parts[index](x)
                index += 1
                continue
            first, layer = parts[index], parts[index + 1]
            x = norm_linear(x, first, layer) if kind == "norm" else activation_linear(x, layer, activation=kind)
            index += 2
        return x
