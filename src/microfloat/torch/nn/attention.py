"""`MultiheadAttention`: projections under a recipe, attention itself by torch in the activations' dtype.

    q, k, v = heads of q_proj(x), k_proj(x), v_proj(x)      one product, where the weights lie next to each other
    q, k    = rotary(norms of the heads)                     one launch
    y       = o_proj(softmax(q k^T / sqrt(D) + mask) v)

Legend: B = sequences, S = tokens of a sequence, T = tokens of all sequences, H = heads, G = heads of k and v, D = size
of a head.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.types import Device

from microfloat.arguments import check_choice, check_int, check_number
from microfloat.errors import invalid_type, invalid_value, kind_of
from microfloat.formats import FP8_TENSOR
from microfloat.recipes import Cast, Delayed, Recipe, as_cast
from microfloat.torch._typing import Maybe, Options, WithBias
from microfloat.torch.nn.functional import project
from microfloat.torch.nn.fused import OF_LINEAR
from microfloat.torch.nn.linear import Linear
from microfloat.torch.nn.merged import Composite, call_layer, join_
from microfloat.torch.nn.norms import RMSNorm
from microfloat.torch.nn.options import LayerOptions, names_moved, options_of
from microfloat.torch.nn.sdpa import attend, check_together, rotate_heads
from microfloat.torch.tensor.ops import quantize
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

Attention = Callable[..., torch.Tensor]

# The settings of `LayerOptions` that attention in a layer has.
OF_ATTENTION = (*OF_LINEAR, "init_method", "output_layer_init_method", "out_bias", "dropout", "interleaved")


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions times frequencies: ``angle[s, i] = position[s] * theta^(-2 i / R)``.

    `size`: R, the elements of a head that are rotated (even). A call with positions [S] or [B, S], or a number of
    tokens, gives cos and sin [.., S, R], each frequency twice, as `MultiheadAttention` takes them. Source: arXiv
    2104.09864.

    >>> cos, sin = RotaryEmbedding(8)(4)
    >>> cos.shape
    torch.Size([4, 8])
    """

    frequencies: torch.Tensor

    def __init__(
        self, size: int, theta: float = 10000.0, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if isinstance(size, bool) or not isinstance(size, int) or size < 2 or size % 2:
            raise invalid_value("size", repr(size), "an even number of elements of a head")
        self.size, self.dtype = size, dtype
        self.theta = check_number("theta", theta, "a positive finite number", 2.0**-126, 3.4e38)
        self.register_buffer("frequencies", self._made(device), persistent=False)

    def _made(self, device: Device) -> torch.Tensor:
        return self.theta ** (-torch.arange(0, self.size, 2, dtype=torch.float32, device=device) / self.size)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "RotaryEmbedding":
        super()._apply(fn, recurse)
        if not self.frequencies.is_meta:  # float32 in every model; computed anew, since to_empty leaves no values
            self.frequencies = self._made(self.frequencies.device)
        return self

    def forward(self, positions: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions."""
        if not isinstance(positions, torch.Tensor):
            needed = "a tensor of positions, or a number of tokens"
            # To Dynamo a length that it leaves open is an int without attributes; integers of NumPy have this one.
            if not (isinstance(positions, int) or hasattr(positions, "__index__")):
                raise invalid_type("positions", type(positions), needed)
            if isinstance(positions, int) and positions < 0:
                raise invalid_value("positions", positions, needed)
            positions = torch.arange(positions, device=self.frequencies.device)
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)
        dtype = self.dtype or angles.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


class KVCache:
    """Keys and values of the tokens so far, for generation: fixed memory [B, length, G, D], filled from the left.

    `update(k, v)` appends tokens [B, S, G, D] and returns all tokens so far, in `dtype` (None: torch's default).
    `format` None stores values unchanged; "fp8" stores E4M3 codes with a float32 scale for each token and head, or with
    the scales `k_scale` and `v_scale` (a checkpoint may hold such), of which values beyond 448 times saturate; "mxfp8",
    "mxfp6_e2m3", "mxfp6_e3m2" and "mxfp4" have a scale for each 32 elements of a head. Raises InvalidTypeError for
    another dtype and InvalidValueError for shapes that do not fit and for more tokens than there is space for.

    >>> cache = KVCache(1, 8, 2, 16, format="fp8")
    >>> cache.update(torch.ones(1, 3, 2, 16), torch.ones(1, 3, 2, 16))[0].shape
    torch.Size([1, 3, 2, 16])
    """

    def __init__(
        self, batch: int, length: int, num_kv_heads: int, head_dim: int, *, device: Device = None,
        dtype: torch.dtype | None = None, format: str | None = None, k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if format is not None:
            check_choice("format", format, _CACHED)
        if (k_scale is None) != (v_scale is None) or (k_scale is not None and format != "fp8"):
            raise invalid_value("k_scale", f"{k_scale!r} beside v_scale {v_scale!r}", 'both, of format="fp8", or none')
        self.format, self.dtype = format, torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise invalid_type("dtype", dtype, "a floating-point torch.dtype, that of the model's activations")
        sizes = {"batch": batch, "length": length, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        shape = tuple(check_int(name, size, 0, 1 << 31) for name, size in sizes.items())
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                _check_scale(name, scale)
        self._k, self._v = (_Stored(shape, device, self.dtype, format, scale) for scale in (k_scale, v_scale))
        self.count = 0

    def reset(self) -> None:
        """Forget every token."""
        self.count = 0

    @property
    def keys(self) -> torch.Tensor:
        """All of the memory for keys, [B, length, G, D] in `dtype`."""
        return self._k.read(self._k.shape[1])

    @property
    def values(self) -> torch.Tensor:
        """All of the memory for values."""
        return self._v.read(self._v.shape[1])

    @property
    def nbytes(self) -> int:
        """The bytes of memory that keys, values and their scales take."""
        return sum(part.nbytes for stored in (self._k, self._v) for part in stored.parts)

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values so far, the new ones last."""
        batch, length, *heads = self._k.shape
        for name, new in (("k", k), ("v", v)):
            if not isinstance(new, torch.Tensor):
                raise invalid_type(name, type(new), "a tensor [B, S, G, D]")
            if new.dtype != self.dtype:
                got = f"one of {self.dtype} for a {name} of {new.dtype}"
                remedy = "Make it with dtype= of the model's activations."
                raise invalid_type("cache", got, f"one of {new.dtype}", remedy)
            if new.device != self._k.device:
                raise invalid_value("cache", f"one on {self._k.device}", f"one on {new.device}, where x is")
            if new.shape != (batch, k.shape[1], *heads):
                needed = f"{[batch, k.shape[1], *heads]}, S being that of k"
                raise invalid_value("cache", f"a {name} of shape {tuple(new.shape)}", needed)
        end = self.count + k.shape[1]
        if end > length:
            got = f"space for {length} tokens"
            raise invalid_value("cache", got, f"space for {end}", "Make it longer, or call reset().")
        self._k.write(self.count, k.detach())
        self._v.write(self.count, v.detach())
        self.count = end
        return self._k.read(end), self._v.read(end)


def _check_scale(name: str, scale: float | torch.Tensor) -> None:
    """Raise for anything but one number that is normal in float32, and whose reciprocal is normal too."""
    needed = "one number in [2^-126, 2^126]"
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise invalid_value(name, f"shape {tuple(scale.shape)}", needed)
        scale = scale.item()
    check_number(name, scale, needed, 2.0**-126, 2.0**126)


# The formats of a cache and the casts of its tokens.
_CACHED = {"fp8": "fp8_row", **{name: name for name in ("mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4")}}


class _Stored:
    """Memory of keys or values [B, length, G, D]: the values, or the parts of a QuantizedTensor."""

    def __init__(
        self, shape: tuple[int, ...], device: Device, dtype: torch.dtype, format: str | None,
        scale: float | torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.scale_enc = shape, dtype, None
        self.cast = None if format is None else as_cast(_CACHED[format])
        zeros = torch.zeros(shape, device=device, dtype=dtype)
        self.device, self.parts = zeros.device, [zeros]
        if scale is not None:
            scale = torch.as_tensor(scale, dtype=torch.float32, device=self.device).reshape(())
            self.cast, self.scale_enc = Cast(FP8_TENSOR, scaling=Delayed()), 1.0 / scale
        if self.cast is not None:
            q = quantize(zeros, self.cast, scale_enc=self.scale_enc)
            # The caller's own scale: the reciprocal of its reciprocal may be another number.
            self.parts = [q.codes, q.scale if scale is None else scale]

    def write(self, start: int, new: torch.Tensor) -> None:
        """Store tokens [B, S, G, D] from `start` on."""
        end = start + new.shape[1]
        if self.cast is None:
            self.parts[0][:, start:end] = new
            return
        q = quantize(new, self.cast, scale_enc=self.scale_enc)
        self.parts[0][:, start:end] = q.codes
        if self.scale_enc is None:
            self.parts[1][:, start:end] = q.scale

    def read(self, end: int) -> torch.Tensor:
        """The tokens before `end`."""
        codes = self.parts[0][:, :end]
        if self.cast is None:
            return codes
        scale = self.parts[1] if self.scale_enc is not None else self.parts[1][:, :end]
        shape = (self.shape[0], end, *self.shape[2:])
        return QuantizedTensor(codes, scale, None, self.cast, axis=3, shape=shape, dtype=self.dtype).dequantize()


class MultiheadAttention(Composite):
    """Attention with `num_heads` heads, which share `num_kv_heads` heads of keys and values (None: as many).

    Children `q_proj`, `k_proj`, `v_proj`, `o_proj`, and with `qk_norm` `q_norm` and `k_norm` (RMSNorm over a head,
    before the rotation): the keys of transformers' Llama and Qwen3 attention. `head_dim` None: hidden_size / num_heads.
    `window`: a token sees the nearest `window` tokens only. `causal`: it sees no later tokens. `kv_hidden_size`: width
    of a context. `options`: with its `return_bias` returns (y without the bias of `o_proj`, that bias). `attention`: a
    function of (q, k, v, causal=, mask=, window=, dropout=) in place of torch's scaled_dot_product_attention: q [B, S,
    H, D] and k, v [B, S', G, D], normed and rotated, to [B, S, H, D]; a call with packed sequences passes on its
    `cu_seqlens` and `max_seqlen`. An nn.Module becomes a child, with parameters of its own. Raises
    InvalidValueError where heads do not divide. Source: docs/modules.md.
    """

    @names_moved
    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int | None = None, *, head_dim: int | None = None,
        kv_hidden_size: int | None = None, bias: bool = False, qk_norm: bool = False, window: int | None = None,
        causal: bool = True, eps: float = 1e-6, attention: Attention | None = None, device: Device = None,
        dtype: torch.dtype | None = None, recipe: Recipe | str | None = None, options: LayerOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        options = options_of(self, options, (*OF_ATTENTION, "return_bias"))
        if attention is not None and not callable(attention):
            raise invalid_type("attention", kind_of(attention), "a function of q, k and v, or None")
        self.attention = attention
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise invalid_value("num_kv_heads", str(num_kv_heads), f"a divisor of num_heads = {num_heads}")
        if head_dim is None and hidden_size % num_heads:
            needed = f"a divisor of hidden_size = {hidden_size}"
            raise invalid_value("num_heads", str(num_heads), needed, "Or give head_dim.")
        if window is not None:
            check_int("window", window, 1, 1 << 31)
        check_number("dropout", options.dropout, "a probability in [0, 1]", 0.0, 1.0)
        size = hidden_size // num_heads if head_dim is None else head_dim
        self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim = hidden_size, num_heads, num_kv_heads, size
        self.window, self.causal = window, causal
        self.dropout, self.interleaved = options.dropout, options.interleaved
        source = hidden_size if kv_hidden_size is None else kv_hidden_size
        of_all: Options = {"device": device, "dtype": dtype, "recipe": recipe}
        of_all |= {name: getattr(options, name) for name in OF_LINEAR}
        inner: Options = {**of_all, "init_method": options.init_method}
        self.q_proj = Linear(hidden_size, num_heads * size, bias, **inner)
        self.k_proj = Linear(source, num_kv_heads * size, bias, **inner)
        self.v_proj = Linear(source, num_kv_heads * size, bias, **inner)
        out_bias = bias if options.out_bias is None else options.out_bias
        of_all |= {"return_bias": options.return_bias, "init_method": options.output_layer_init_method}
        self.o_proj = Linear(num_heads * size, hidden_size, out_bias, **of_all)
        self.return_bias = options.return_bias
        if qk_norm:
            self.q_norm = RMSNorm(size, eps=eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(size, eps=eps, device=device, dtype=dtype)
        self._join()

    def _join(self) -> None:
        if self.q_proj.in_features == self.k_proj.in_features:
            join_((self.q_proj, self.k_proj, self.v_proj))

    def forward(
        self, hidden_states: torch.Tensor, *, context: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None, cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None, cache: KVCache | None = None, norm: nn.Module | None = None,
        is_first_microbatch: bool | None = None,
    ) -> WithBias:  # fmt: skip
        """y in the shape of hidden_states [B, S, hidden], or [T, hidden] with `cu_seqlens`; `return_bias`: (y, bias).

        `context` [B, S', hidden]: the source of keys and values (cross attention, never causal). `attention_mask`:
        True where a token is seen, or added to the scores; [B, S'] (padding), [S, S'] or [B, 1 or H, S, S'].
        `position_embeddings`: cos and sin of `RotaryEmbedding`. `cu_seqlens` int32 [n + 1]: tokens of n sequences one
        after another, of x and of a context alike, and `max_seqlen` the most tokens of one, which spares the host a
        wait for the GPU. `cache`: a `KVCache`, or an object with its `update`. `norm`: applied to hidden_states first,
        and cast as it is computed. `is_first_microbatch`: as in `Linear`, for all projections.
        """
        if hidden_states.dim() not in (2, 3):
            raise invalid_value("hidden_states", f"shape {tuple(hidden_states.shape)}", "[B, S, hidden] or [T, hidden]")
        if isinstance(cache, type) or not (cache is None or callable(getattr(cache, "update", None))):
            raise invalid_type("cache", kind_of(cache), "a KVCache, or anything with its update(k, v)")
        packed: Options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        check_together(cu_seqlens, max_seqlen)
        if cu_seqlens is not None and context is not None and context.shape[:-1] != hidden_states.shape[:-1]:
            got, needed = f"shape {tuple(context.shape)} beside cu_seqlens", "the tokens of x, in the same sequences"
            remedy = "Pad the sequences to rows: x [B, S, hidden], context [B, S', hidden] and a mask of the context."
            raise invalid_value("context", got, needed, remedy)
        qkv = self.projected(hidden_states, context, norm, is_first_microbatch)
        q, k, v = self.rotated(qkv, position_embeddings)
        count = cache.count if isinstance(cache, KVCache) else 0
        if cache is not None:
            k, v = cache.update(k, v)
        try:
            y = (attend if self.attention is None else self.attention)(
                q, k, v, causal=self.causal and context is None, mask=attention_mask, window=self.window,
                dropout=self.dropout if self.training else 0.0,
                **{name: value for name, value in packed.items() if value is not None},
            )  # fmt: skip
            # Not in the shape of hidden_states: where they are sharded by their sequence, y has more rows.
            y = y.flatten(-2) if hidden_states.dim() == 3 else y.flatten(-2).squeeze(0)
            biases: list[Maybe] = []
            y = call_layer(self.o_proj, y, is_first_microbatch, biases)
            return (y, *biases) if self.return_bias else y
        except Exception:
            if isinstance(cache, KVCache):  # a call that fails leaves it as it was
                cache.count = count
            raise

    def projected(
        self, x: torch.Tensor, context: torch.Tensor | None, norm: nn.Module | None, first: bool | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of `q_proj`, `k_proj` and `v_proj`; one tensor where they are one product."""
        layers = self.q_proj, self.k_proj, self.v_proj
        if context is None:
            return project(x, norm, layers, True, first)
        return *project(x, norm, layers[:1], False, first), *project(context, None, layers[1:], False, first)

    def rotated(
        self, qkv: tuple[torch.Tensor, ...], position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, ...]:
        """q [B, S, H, D], k and v [B, S', G, D], normed and rotated."""
        heads = self.num_heads, self.num_kv_heads
        norms = getattr(self, "q_norm", None), getattr(self, "k_norm", None)
        return heads_of(qkv, heads, self.head_dim, position_embeddings, norms, self.interleaved)

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, causal={self.causal}{window}"


HeadNorm = Callable[[torch.Tensor], torch.Tensor] | None


def heads_of(
    qkv: tuple[torch.Tensor, ...], counts: tuple[int, int], size: int,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None, norms: tuple[HeadNorm, HeadNorm],
    interleaved: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q [B, S, H, D], k and v [B, S', G, D], normed and rotated.

    `qkv`: three tensors, or one of all heads; `counts`: H and G; `norms`: of the heads of q and k, or None.
    """
    split = [counts[0], counts[1], counts[1]]
    parts = [(part if part.dim() == 3 else part.unsqueeze(0)).unflatten(-1, (-1, size)) for part in qkv]
    is_joint = len(parts) == 1
    if is_joint and (position_embeddings is None or norms[0] is not None):
        parts, is_joint = list(parts[0].split(split, 2)), False
    if norms[0] is not None and norms[1] is not None:
        parts[:2] = norms[0](parts[0]), norms[1](parts[1])
    if position_embeddings is None:
        return tuple(parts)
    if not isinstance(position_embeddings, tuple | list) or len(position_embeddings) != 2:
        needed = "the pair (cos, sin) that RotaryEmbedding gives for positions"
        raise invalid_type("position_embeddings", type(position_embeddings), needed)
    cos, sin = position_embeddings
    return rotate_heads(parts, split if is_joint else None, cos, sin, interleaved)
