"""`TransformerLayer`: attention and an MLP, each after a norm, around a residual stream.

    h = x + self_attn(input_layernorm(x))
    h = h + cross_attn(cross_attention_layernorm(h), context)     where there is a context
    y = h + mlp(post_attention_layernorm(h))

Every norm is cast as it is computed, unless the residual stream takes its value.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torch.types import Device

from microfloat.arguments import check_bool, check_number
from microfloat.errors import invalid_value
from microfloat.recipes import Recipe
from microfloat.torch._typing import InitMethod, Options
from microfloat.torch.attention import piece_of
from microfloat.torch.joined import Composite
from microfloat.torch.nn.attention import KVCache, MultiheadAttention
from microfloat.torch.nn.fused import MLP
from microfloat.torch.nn.norms import make_norm

__all__ = ["TransformerLayer"]


class TransformerLayer(Composite):
    """A layer of a transformer with the keys of transformers' Llama decoder layer.

    ``input_layernorm, self_attn.{q,k,v,o}_proj, post_attention_layernorm, mlp.{gate,up,down}_proj``: state dicts of
    Llama, Mistral, Qwen2 (`bias`) and Qwen3 (`qk_norm`) layers load strictly, both ways. Both norms are cast as they
    are computed. `parallel`: the MLP reads x beside the attention, ``y = x + self_attn(input_layernorm(x)) +
    mlp(post_attention_layernorm(x))``. `cross_attention`: a second attention reads `context`. `output_layernorm`: the
    norm stands behind the MLP, as child of this name, in place of `input_layernorm`.
    `apply_residual_connection_post_layernorm`: each block adds to what its norm gives, ``h = n + self_attn(n)`` of n =
    input_layernorm(x). `hidden_dropout`: of what attention and MLP add to the residual stream, in training;
    `drop_path_rate`: the share of sequences to which a block then adds nothing (stochastic depth, arXiv 1603.09382).
    The other arguments are those of `MultiheadAttention` and `LayerNormMLP`. Source: docs/modules.md.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_heads: int, num_kv_heads: int | None = None, *,
        head_dim: int | None = None, bias: bool = False, mlp_bias: bool | None = None, out_bias: bool | None = None,
        normalization: str = "RMSNorm", activation: str = "swiglu", eps: float = 1e-6,
        zero_centered_gamma: bool = False, qk_norm: bool = False, window: int | None = None, causal: bool = True,
        cross_attention: bool = False, parallel: bool = False, dropout: float = 0.0, hidden_dropout: float = 0.0,
        interleaved: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, recipe: Recipe | str | None = None,
        backend: str = "auto", fuse_wgrad_accumulation: bool = False,
        output_layernorm: bool = False,
        apply_residual_connection_post_layernorm: bool = False, drop_path_rate: float = 0.0,
        activation_params: Mapping[str, float] | None = None, init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None, qk_norm_before_rope: bool = True,
        softmax_type: str = "vanilla",
    ) -> None:  # fmt: skip
        super().__init__()
        check_number("hidden_dropout", hidden_dropout, "a probability in [0, 1]", 0.0, 1.0)
        check_number("drop_path_rate", drop_path_rate, "a probability in [0, 1)", 0.0, math.nextafter(1.0, 0.0))
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        others = {
            "output_layernorm": output_layernorm,
            "apply_residual_connection_post_layernorm": apply_residual_connection_post_layernorm,
        }  # fmt: skip
        for name, value in others.items():
            check_bool(name, value)
            if value and parallel:
                raise invalid_value(name, "True beside parallel=True", "one of the two")
        where = {"device": device, "dtype": dtype}
        options: Options = {
            **where, "recipe": recipe, "backend": backend, "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }  # fmt: skip
        attention: Options = {
            "head_dim": head_dim, "bias": bias, "out_bias": out_bias, "dropout": dropout, "eps": eps, **options,
            "init_method": init_method, "output_layer_init_method": output_layer_init_method,
            "softmax_type": softmax_type,
        }  # fmt: skip
        norm = normalization, hidden_size, eps, zero_centered_gamma
        self.parallel = parallel
        self.input_layernorm = None if output_layernorm else make_norm(*norm, **where)
        self.self_attn = MultiheadAttention(
            hidden_size, num_heads, num_kv_heads, qk_norm=qk_norm, window=window, causal=causal,
            interleaved=interleaved, qk_norm_before_rope=qk_norm_before_rope, **attention,
        )  # fmt: skip
        if cross_attention:
            self.cross_attention_layernorm = make_norm(*norm, **where)
            self.cross_attn = MultiheadAttention(hidden_size, num_heads, num_kv_heads, causal=False, **attention)
        self.post_attention_layernorm = make_norm(*norm, **where)
        self.mlp = MLP(
            hidden_size, ffn_hidden_size, bias if mlp_bias is None else mlp_bias, activation=activation,
            activation_params=activation_params, init_method=init_method,
            output_layer_init_method=output_layer_init_method, **options,
        )  # fmt: skip
        self.output_layernorm = make_norm(*norm, **where) if output_layernorm else None

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None, context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None, cache: KVCache | None = None,
        is_first_microbatch: bool | None = None, cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen: int | None = None, max_seqlen_kv: int | None = None,
        cu_seqlens_padded: torch.Tensor | None = None, cu_seqlens_kv_padded: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """y in the shape of hidden_states [B, S, hidden], or [T, hidden] with `cu_seqlens`: `MultiheadAttention`.

        `cu_seqlens_kv`: the sequences of a packed context, each of which the sequence of x with its number sees.
        Padding between sequences (`cu_seqlens_padded`) gets nothing from attention; norms and the MLP apply to it.
        """
        x = hidden_states
        if context is not None and not hasattr(self, "cross_attn"):
            remedy = "Make the layer with cross_attention=True."
            raise invalid_value("context", "a tensor", "None for a layer without cross attention", remedy)
        of_context = {
            "cu_seqlens_kv": cu_seqlens_kv, "max_seqlen_kv": max_seqlen_kv, "cu_seqlens_kv_padded": cu_seqlens_kv_padded
        }  # fmt: skip
        for name, value in of_context.items():
            if context is None and value is not None:
                got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                raise invalid_value(name, got, "None without a context")
        of_x: Options = {
            "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "cu_seqlens_padded": cu_seqlens_padded,
            "is_first_microbatch": is_first_microbatch,
        }  # fmt: skip
        starts = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        keep = self._kept(x, starts)
        h, read, norm = self._entered(x, self.input_layernorm)
        h = self._sum(h, keep, self.self_attn(
            read, attention_mask=attention_mask, position_embeddings=position_embeddings, cache=cache, norm=norm,
            **of_x,
        ))  # fmt: skip
        if context is not None:
            h, read, norm = self._entered(h, self.cross_attention_layernorm)
            h = self._sum(h, self._kept(x, starts), self.cross_attn(
                read, context=context, attention_mask=context_mask, norm=norm, **of_x, **of_context,
            ))  # fmt: skip
        if self.parallel:  # one block, which a sequence takes or leaves
            read, norm = x, self.post_attention_layernorm
        else:
            keep = self._kept(x, starts)
            h, read, norm = self._entered(h, self.post_attention_layernorm)
        y = self._sum(h, keep, self.mlp(read, norm, is_first_microbatch))
        return y if self.output_layernorm is None else self.output_layernorm(y)

    def _entered(self, h: torch.Tensor, norm: nn.Module | None) -> tuple[torch.Tensor, torch.Tensor, nn.Module | None]:
        """The residual of a block, its input, and the norm that has yet to be applied to that input."""
        if norm is None or not self.apply_residual_connection_post_layernorm:
            return h, h, norm
        value = norm(h)
        return value, value, None

    def _kept(self, x: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor | None:
        """1 for the sequences that a block adds to, else 0, [B, 1, 1] or [T, 1]; None where it adds to all."""
        if not self.training or not self.drop_path_rate:
            return None
        if starts is not None and not (isinstance(starts, torch.Tensor) and starts.numel() > 1):
            return None  # there are no sequences, or attention will refuse what is no tensor
        count = x.shape[0] if x.dim() == 3 else 1 if starts is None else starts.numel() - 1
        keep = x.new_empty((count, *[1] * (x.dim() - 1))).bernoulli_(1.0 - self.drop_path_rate)
        if x.dim() == 2 and starts is not None:  # padding is kept or left out with the sequence before it
            keep = keep[piece_of(starts, x.shape[0]).clamp(max=count - 1)]
        return keep

    def _sum(self, h: torch.Tensor, keep: torch.Tensor | None, added: torch.Tensor) -> torch.Tensor:
        """h, and what a block adds to it."""
        if self.training and self.hidden_dropout:
            added = F.dropout(added, self.hidden_dropout)
        return h + (added if keep is None else added * keep / (1.0 - self.drop_path_rate))
