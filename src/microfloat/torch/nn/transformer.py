"""`TransformerLayer`: attention and an MLP, each after a norm, around a residual stream.

    h = x + self_attn(input_layernorm(x))
    h = h + cross_attn(cross_attention_layernorm(h), context)     where there is a context
    y = h + mlp(post_attention_layernorm(h))

Every norm is cast as it is computed.
"""

from dataclasses import fields

import torch
import torch.nn.functional as F
from torch.types import Device

from microfloat.arguments import check_number
from microfloat.errors import invalid_value
from microfloat.recipes import Recipe
from microfloat.torch._typing import Options
from microfloat.torch.nn.attention import OF_ATTENTION, Attention, KVCache, MultiheadAttention
from microfloat.torch.nn.fused import MLP, OF_MLP
from microfloat.torch.nn.merged import Composite
from microfloat.torch.nn.norms import make_norm
from microfloat.torch.nn.options import LayerOptions, names_moved, options_of


class TransformerLayer(Composite):
    """A layer of a transformer with the keys of transformers' Llama decoder layer.

    ``input_layernorm, self_attn.{q,k,v,o}_proj, post_attention_layernorm, mlp.{gate,up,down}_proj``: state dicts of
    Llama, Mistral, Qwen2 (`bias`) and Qwen3 (`qk_norm`) layers load strictly, both ways. `attention`: for the self
    attention alone. `options`: with `parallel` the MLP reads x beside the
    attention, ``y = x + self_attn(input_layernorm(x)) + mlp(post_attention_layernorm(x))``; with `cross_attention` a
    second attention reads `context`. The other arguments are those of `MultiheadAttention` and `LayerNormMLP`. Source:
    docs/modules.md.
    """

    @names_moved
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_heads: int, num_kv_heads: int | None = None, *,
        bias: bool = False, normalization: str = "RMSNorm", activation: str = "swiglu", eps: float = 1e-6,
        qk_norm: bool = False, window: int | None = None, causal: bool = True, attention: Attention | None = None,
        device: Device = None, dtype: torch.dtype | None = None, recipe: Recipe | str | None = None,
        options: LayerOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        names = (field.name for field in fields(LayerOptions) if field.name != "return_bias")
        options = options_of(self, options, tuple(names))
        check_number("hidden_dropout", options.hidden_dropout, "a probability in [0, 1]", 0.0, 1.0)
        self.hidden_dropout, self.parallel = options.hidden_dropout, options.parallel
        where: Options = {"device": device, "dtype": dtype}
        norm = normalization, hidden_size, eps, options.zero_centered_gamma
        heads = hidden_size, num_heads, num_kv_heads
        of_attention: Options = {
            "head_dim": options.head_dim, "bias": bias, "eps": eps, "recipe": recipe, **where,
            "options": options.only(OF_ATTENTION),
        }  # fmt: skip
        self.input_layernorm = make_norm(*norm, **where)
        self.self_attn = MultiheadAttention(
            *heads, qk_norm=qk_norm, window=window, causal=causal, attention=attention, **of_attention
        )
        if options.cross_attention:
            self.cross_attention_layernorm = make_norm(*norm, **where)
            self.cross_attn = MultiheadAttention(*heads, causal=False, **of_attention)
        self.post_attention_layernorm = make_norm(*norm, **where)
        mlp_bias = bias if options.mlp_bias is None else options.mlp_bias
        of_mlp: Options = {"options": options.only(OF_MLP), "recipe": recipe, **where}
        self.mlp = MLP(hidden_size, ffn_hidden_size, mlp_bias, activation=activation, **of_mlp)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None, context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None, cache: KVCache | None = None,
        is_first_microbatch: bool | None = None, max_seqlen: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """y in the shape of hidden_states [B, S, hidden], or [T, hidden] with `cu_seqlens`, as in `MultiheadAttention`.

        A context of packed sequences has those of x.
        """
        x = hidden_states
        if context is not None and not hasattr(self, "cross_attn"):
            remedy = "Make the layer with options=LayerOptions(cross_attention=True)."
            raise invalid_value("context", "a tensor", "None for a layer without cross attention", remedy)
        of_x: Options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "is_first_microbatch": is_first_microbatch}
        h = self._sum(x, self.self_attn(
            x, attention_mask=attention_mask, position_embeddings=position_embeddings, cache=cache,
            norm=self.input_layernorm, **of_x,
        ))  # fmt: skip
        if context is not None:
            h = self._sum(h, self.cross_attn(
                h, context=context, attention_mask=context_mask, norm=self.cross_attention_layernorm, **of_x,
            ))  # fmt: skip
        return self._sum(h, self.mlp(x if self.parallel else h, self.post_attention_layernorm, is_first_microbatch))

    def _sum(self, h: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """h plus the output of a block."""
        if self.training and self.hidden_dropout:
            added = F.dropout(added, self.hidden_dropout)
        return h + added
