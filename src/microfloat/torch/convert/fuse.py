"""`convert(fuse=True)`: layers, heads and losses of other people's models that run on the fused functions, in place.

| block | recognised by | what runs instead |
|---|---|---|
| decoder layer | transformers' Llama, Mistral, Qwen2, Qwen3 classes; known forwards | the steps of `TransformerLayer` |
| gated MLP | its four children and the forward that transformers gives it | the MLP with a cast activation |
| nn.Sequential | a norm or an activation right before a Linear | the two as one |
| causal model | the same families; a head with a recipe; known forward and loss | `linear_cross_entropy` in training |

A block keeps its identity: its class becomes a subclass of its own, of the same name, whose forward is fused. Where its
parts are no longer what was recognised (a child was replaced or hooked, by PEFT for example, or its outputs are
recorded), and where a call has an argument that the fused forward does not read, the forward of its own class runs, so
that what another version of a package adds is right without being known. `unfuse` puts the class back.
"""

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Container, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from microfloat.recipes import Recipe
from microfloat.torch._typing import Options
from microfloat.torch.autocast import autocast
from microfloat.torch.linear.gathered_weight import Gathered
from microfloat.torch.nn.attention import heads_of
from microfloat.torch.nn.forward_rules import ACTIVATION_OF, Forward, arguments_of, instructions_of, names_of
from microfloat.torch.nn.functional import NormOf, activation_linear, linear_cross_entropy, mlp, norm_linear, project
from microfloat.torch.nn.linear import UNPINNED, Linear
from microfloat.torch.nn.merged import can_join, is_bare, join_

_DECODERS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


_CACHES = ("cache", "past_key_values")  # the name of one argument, in newer and in older versions of transformers
_LAYER = Forward(
    names_of("self hidden_states attention_mask position_ids use_cache position_embeddings kwargs input_layernorm "
         "self_attn post_attention_layernorm mlp"),
    frozenset(_CACHES),
)  # fmt: skip
_ATTENTION = Forward(
    names_of("self hidden_states position_embeddings attention_mask kwargs shape head_dim q_proj k_proj v_proj o_proj "
         "transpose apply_rotary_pos_emb update layer_idx ALL_ATTENTION_FUNCTIONS get_interface config "
         "_attn_implementation eager_attention_forward training attention_dropout dropout scaling reshape"),
    names_of("view contiguous q_norm k_norm sliding_window getattr cache past_key_values"),
)  # fmt: skip
_NORM = Forward(
    names_of("self hidden_states variance_epsilon weight mean pow rsqrt dtype to"), names_of("float32 torch keepdim")
)
_ROTARY = Forward(names_of("q k cos sin unsqueeze_dim unsqueeze rotate_half"))
_HALF = Forward(names_of("x shape torch cat dim"))
_CAUSAL = Forward(
    names_of("self input_ids attention_mask position_ids inputs_embeds labels use_cache logits_to_keep kwargs model "
         "last_hidden_state lm_head loss_function logits loss vocab_size config CausalLMOutputWithPast hidden_states "
         "attentions"),
    names_of("cache past_key_values slice_logits_to_keep slice isinstance int"),
    ("transformers.utils.deprecation", "transformers.utils.generic"),
)  # fmt: skip
_CAUSAL_LOSS = Forward(
    names_of("logits labels vocab_size num_items_in_batch ignore_index shift_labels kwargs float nn functional pad "
         "value contiguous view to device fixed_cross_entropy"),
)  # fmt: skip
_MEAN_LOSS = Forward(
    names_of("source target num_items_in_batch ignore_index kwargs sum mean nn functional cross_entropy reduction"),
    names_of("torch is_tensor to device"),
)
# Arguments that every layer of transformers hands to the function of attention, or to nobody.
_PASSED_ON = names_of(
    "num_items_in_batch output_hidden_states output_attentions output_router_logits cu_seq_lens_q cu_seq_lens_k "
    "max_length_q max_length_k is_causal seq_idx"
)


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


def fuse_blocks(model: nn.Module, placed: Container[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Fuse every block of `model` that is known; gives (name, "fused" or "not fused", what or why).

    Of a block that is not known, a member of an nn.ModuleList with Linears of ours, says which of its parts are fused.
    `placed`: names of the layers that were decided about; other heads in high precision keep their logits.
    """
    inside: set[int] = set()
    found: list[tuple[str, str, str]] = []
    for name, module in model.named_modules():
        children = {id(child) for child in module.modules()}
        if isinstance(module, Fused):
            inside |= set() if isinstance(module, _CausalModel) else children
            continue
        if id(module) in inside:
            continue
        made = _fused_class(type(module))
        if made is None or (
            issubclass(made, _CausalModel) and not _is_head(module, f"{name}.lm_head".lstrip(".") in placed)
        ):
            continue
        why = _why_not(module)
        if why:
            found.append((name, "not fused", f"left as it is: {why}"))
            continue
        parts = tuple((child, type(part)) for child, part in module.named_modules() if child)
        object.__setattr__(module, "_children_types", parts)
        module.__class__ = made
        if issubclass(made, _DecoderLayer):
            attention: Any = module.self_attn
            layers = attention.q_proj, attention.k_proj, attention.v_proj
            join_(layers)
            apart = "" if can_join(layers) else " (q/k/v as three products)"
            found.append((name, "fused", f"norms, q/k/v, rotary embedding and MLP{apart}"))
            inside |= children
        elif issubclass(made, _CausalModel):
            object.__setattr__(module, "_children_types", (("lm_head", type(module.lm_head)),))
            found.append((name, "fused", "head and loss of training, whose logits are not returned"))
        else:
            what = "gated MLP" if issubclass(made, _GatedMLP) else "norms and activations before Linears"
            found.append((name, "fused", what))
    found += _unknown_blocks(model, found)
    yield from found or [("", "not fused", f"{type(model).__name__} has no block that is known")]


def _unknown_blocks(model: nn.Module, found: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """The outermost members of lists of modules that no row speaks of, and which of their parts are fused."""
    seen = {name for name, *_ in found}
    members = [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules() if isinstance(module, nn.ModuleList) for key in module._modules
    ]  # fmt: skip
    outer: list[str] = []
    for name in members:
        block = model.get_submodule(name)
        if any(name.startswith(f"{other}.") for other in outer) or isinstance(block, Linear):
            continue
        outer.append(name)
        if name in seen or isinstance(block, Fused) or not any(isinstance(part, Linear) for part in block.modules()):
            continue
        parts = sorted({what for part, action, what in found if action == "fused" and part.startswith(f"{name}.")})
        rest = f"; of its parts: {', '.join(parts)}" if parts else ""
        yield name, "not fused", f"{type(block).__name__} is not a block that is known{rest}"


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
    more: dict[str, object] = {}
    if family in _DECODERS and kind.__name__ == f"{_DECODERS[family]}DecoderLayer":
        base = _DecoderLayer
        arguments = arguments_of(kind.forward)[2:]  # type: ignore[attr-defined]  # behind self and hidden_states
        more["_arguments"], more["_reads"] = arguments, frozenset(arguments) | _PASSED_ON
        more["_cache_name"] = next((name for name in _CACHES if name in arguments), "")
        attention = getattr(sys.modules[kind.__module__], f"{_DECODERS[family]}Attention", None)
        more["_attention"] = attention
        constants = () if attention is None else inspect.unwrap(attention.forward).__code__.co_consts
        more["_tells_cache"] = any("kwargs" in one for one in constants if isinstance(one, tuple))  # passed by name
    elif family in _DECODERS and kind.__name__ == f"{_DECODERS[family]}ForCausalLM":
        base = _CausalModel
        more["_arguments"] = arguments_of(kind.forward)[1:]  # type: ignore[attr-defined]
        # Callers look at the signature, for the name of the labels.
        more["forward"] = functools.wraps(kind.forward)(lambda *args, **kwargs: _CausalModel.forward(*args, **kwargs))  # type: ignore[attr-defined]
    elif family and kind.__name__.endswith("MLP") and _computes_gated_mlp(kind):
        base = _GatedMLP
    elif kind is nn.Sequential:
        base = _Sequential
    if base is None:
        return None
    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
                 "_original": kind, **more}  # fmt: skip
    return type(kind.__name__, (base, Fused, kind), namespace)


def _gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _named_gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _computes_gated_mlp(kind: type) -> bool:
    """True if the forward of a class is one of the two above, by its bytecode: names alone would not tell a swap."""
    own = vars(kind).get("forward")
    return isinstance(own, FunctionType) and any(
        own.__code__.co_argcount == 2 and instructions_of(own) == instructions_of(one) for one in (_gated, _named_gated)
    )


def _why_not(module: Any) -> str:
    """The reason not to fuse a block of a known class, "" if there is none."""
    if hasattr(module, "lm_head"):
        return _why_not_causal(module)
    if isinstance(module, nn.Sequential):
        return "" if any(_steps(module)) else "nothing here stands right before a Linear"
    holder = getattr(module, "mlp", module)
    linears = [getattr(holder, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if holder is not module:
        if why := _why_not_layer(module):
            return why
        linears += [getattr(module.self_attn, f"{name}_proj", None) for name in "qkvo"]
    if any(type(layer) is not Linear for layer in linears):
        return "not all of its Linears were converted"
    if type(holder.act_fn).__name__ not in ACTIVATION_OF:
        return f"its activation {type(holder.act_fn).__name__} has no fused form"
    return ""


def _why_not_layer(layer: Any) -> str:
    """The reason why a decoder layer is not computed as the fused one computes it, "" if it is."""
    made = cast(type[_DecoderLayer], _fused_class(type(layer)))
    attention, mlp_of_it = layer.self_attn, layer.mlp
    source = vars(sys.modules[type(layer).__module__])
    if type(attention) is not made._attention:
        return f"its attention is a {type(attention).__name__} that is not of its model"
    forwards = [
        (_LAYER, type(layer).forward), (_ATTENTION, type(attention).forward),
        (_ROTARY, source["apply_rotary_pos_emb"]), (_HALF, source["rotate_half"]),
    ]  # fmt: skip
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    for norm in norms:
        if not hasattr(norm, "variance_epsilon"):
            return "its norms are not those of its model"
        forwards.append((_NORM, type(norm).forward))
    if why := next(filter(None, (known.why_not(forward) for known, forward in forwards)), ""):
        return why
    if _fused_class(type(mlp_of_it)) is None or not made._cache_name:
        return f"its MLP is a {type(mlp_of_it).__name__}" if made._cache_name else "its forward takes no cache"
    return ""


def _is_head(model: nn.Module, is_placed: bool = True) -> bool:
    """True if the head of a causal model has a recipe, or runs in high precision because it was placed there."""
    head = model._modules.get("lm_head")
    pinned = head._pinned if type(head) is Linear else None if type(head) is nn.Linear else UNPINNED
    return isinstance(pinned, Recipe) or (pinned is None and is_placed)


def _why_not_causal(model: "_CausalModel") -> str:
    """The reason why the head and the loss of a causal model are not computed in chunks, "" if they are."""
    recipe, loss = getattr(model.lm_head, "_pinned", None), model.loss_function
    if recipe is not None and (recipe.is_delayed or recipe.is_static):
        return f"{type(recipe).__name__} of its head keeps state between calls"
    if model.lm_head._parameters.get("bias") is not None:
        return "its head has a bias"
    fixed = getattr(loss, "__globals__", {}).get("fixed_cross_entropy")
    forwards = (_CAUSAL, type(model).forward), (_CAUSAL_LOSS, loss), (_MEAN_LOSS, fixed)
    return next(filter(None, (known.why_not(forward) for known, forward in forwards)), "")


def _norm_of(norm: Any) -> NormOf:
    """An RMSNorm of transformers; its value is rounded once here, and before and after the weight there."""
    return NormOf(norm, "rms", norm.variance_epsilon, norm.weight, None)


def _head_norm(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm of a head as one function of torch, which wants x and weight in one dtype; else the module."""
    if torch.compiler.is_compiling():
        return norm

    def value(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != norm.weight.dtype:
            return norm(x)
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

    return value


class _DecoderLayer(nn.Module):
    """``h = x + o_proj(attention(norm(x)));  y = h + mlp(norm(h))`` of a layer of transformers."""

    _arguments: tuple[str, ...]  # of the original's forward, behind the first
    _reads: frozenset[str]
    _cache_name: str
    _tells_cache: bool  # whether the original's attention hands its other arguments to the cache
    _attention: type

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """The arguments are those of the original layer, whose forward runs where one of them is not known here."""
        me: Any = self
        x = hidden_states
        given: Options = {**dict(zip(me._arguments, args, strict=False)), **kwargs}
        if (
            not me._is_whole() or given.get("position_embeddings") is None or not isinstance(x, torch.Tensor)
            or len(given) != len(args) + len(kwargs) or any(name not in me._reads for name in given)
        ):  # fmt: skip
            return super().forward(hidden_states, *args, **kwargs)
        position_embeddings, attention_mask = given.pop("position_embeddings"), given.pop("attention_mask", None)
        cache = given.pop(me._cache_name, None)
        others = {"position_ids": None, "use_cache": False, **given}
        attn = me.self_attn
        source = sys.modules[type(attn).__module__]
        qkv = project(x, _norm_of(me.input_layernorm), (attn.q_proj, attn.k_proj, attn.v_proj), True)
        counts = attn.q_proj.out_features // attn.head_dim, attn.k_proj.out_features // attn.head_dim
        norms = (_head_norm(attn.q_norm), _head_norm(attn.k_norm)) if hasattr(attn, "q_norm") else (None, None)
        q, k, v = (part.transpose(1, 2) for part in heads_of(qkv, counts, attn.head_dim, position_embeddings, norms))
        if cache is not None:
            k, v = cache.update(k, v, attn.layer_idx, **({"kwargs": others} if me._tells_cache else {}))
        window: Options = {}
        if hasattr(attn, "sliding_window"):
            window["sliding_window"] = attn.sliding_window
        elif type(attn).__name__.startswith("Mistral"):
            window["sliding_window"] = getattr(attn.config, "sliding_window", None)
        attend = source.ALL_ATTENTION_FUNCTIONS.get_interface(
            attn.config._attn_implementation, source.eager_attention_forward
        )
        y, _ = attend(
            attn, q, k, v, attention_mask, dropout=attn.attention_dropout if me.training else 0.0,
            scaling=attn.scaling, **window, **others,
        )  # fmt: skip
        h = x + attn.o_proj(y.reshape(*x.shape[:-1], -1))
        inner = me.mlp
        kind = ACTIVATION_OF[type(inner.act_fn).__name__]
        return h + mlp(
            h, _norm_of(me.post_attention_layernorm), (inner.gate_proj, inner.up_proj), inner.down_proj, kind
        )


class _CausalModel(nn.Module):
    """``loss = cross_entropy(lm_head(h), next tokens)`` in training, one chunk of tokens after the other."""

    _arguments: tuple[str, ...]  # of the original's forward
    _original: type
    model: nn.Module
    lm_head: nn.Linear
    config: SimpleNamespace
    loss_function: Callable

    def forward(self, *args: object, **kwargs: object) -> object:
        """The loss, without logits, in training with labels; else, and for an unknown argument, as the original."""
        given: Options = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        head = self.lm_head
        if (
            not self.training or given.get("labels") is None or len(given) != len(args) + len(kwargs)
            or not Fused._is_whole(self) or not _is_head(self) or _needs_logits(self, given)
        ):  # fmt: skip
            return super().forward(*args, **kwargs)
        labels, shifted = given.pop("labels"), given.pop("shift_labels", None)
        count, ignored = given.pop("num_items_in_batch", None), given.pop("ignore_index", -100)
        for name in ("logits_to_keep", "return_dict"):
            given.pop(name, None)
        outputs = self.model(**given)
        h = outputs.last_hidden_state
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        shifted, reduction = shifted.reshape(h.shape[:-1]).to(h.device), "mean" if count is None else "sum"
        recipe = getattr(head, "_pinned", None)
        options: Options = {"recipe": recipe, "ignore_index": ignored, "reduction": reduction}
        with autocast(enabled=False) if recipe is None else contextlib.nullcontext():
            loss = linear_cross_entropy(h, head.weight, shifted, **options)
        if count is not None:
            loss = loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return sys.modules[self._original.__module__].CausalLMOutputWithPast(loss=loss, **rest)


def _needs_logits(model: "_CausalModel", given: Options) -> bool:
    """True for a call that asks for logits of some tokens, for a tuple, or for a loss of the user's own."""
    keep, head = given.get("logits_to_keep", 0), model.lm_head
    weight, recipe = head._parameters.get("weight"), getattr(head, "_pinned", None)
    return (
        not isinstance(keep, int) or keep != 0 or given.get("return_dict") is False or not model.config.return_dict
        or (recipe is not None and (recipe.is_delayed or recipe.is_static)) or head._parameters.get("bias") is not None
        or (isinstance(head, Linear) and (head.fuse_wgrad_accumulation or head.return_bias or head.backend != "auto"))
        or weight is None or isinstance(weight, Gathered) or hasattr(weight, "placements")
        or model.loss_function is not sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
    )  # fmt: skip


class _GatedMLP(nn.Module):
    """``y = down_proj(f(gate_proj(x)) * up_proj(x))``; the product is cast as it is computed."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """y in the shape of x, the one argument; its name is that of the original."""
        me: Any = self
        if not me._is_whole() or len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)
        (x,) = args
        kind = ACTIVATION_OF[type(me.act_fn).__name__]
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
