"""The transformer of gpt/model.py in Flax nnx: the same sizes, the same arithmetic, the same places for rounding.

Parameters are float32. Every nnx.Linear computes in bfloat16 (``dtype=``), norms and the residual stream in float32,
which is what torch's autocast does with the twin. `microfloat.jax.nnx.convert` gives the linear layers of the blocks
their recipe; embedding, norms, attention scores and `lm_head` stay in high precision.

Legend: B = batch, T = positions, D = width, H = heads, E = width of one head, V = 256 byte values.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt.shape import VOCABULARY, Shape

__all__ = ["GPT", "set_weights", "weights_of"]

_LINEAR = partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16)
# torch's nn.RMSNorm adds this where nothing else is said.
_EPSILON = float(np.finfo(np.float32).eps)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; query, key and value come from one matrix product."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.heads = shape.heads
        self.qkv = _LINEAR(shape.dim, 3 * shape.dim, kernel_init=_normal(), rngs=rngs)
        self.out = _LINEAR(shape.dim, shape.dim, kernel_init=_normal(shape), rngs=rngs)

    def __call__(self, x_BTD: jax.Array, rotation_TE: tuple[jax.Array, jax.Array]) -> jax.Array:
        batch, length, dim = x_BTD.shape
        qkv = self.qkv(x_BTD).reshape(batch, length, 3, self.heads, dim // self.heads)
        q_BTHE, k_BTHE, v_BTHE = (qkv[:, :, index] for index in range(3))
        q_BTHE, k_BTHE = rotate(q_BTHE, rotation_TE), rotate(k_BTHE, rotation_TE)
        y_BTHE = jax.nn.dot_product_attention(q_BTHE, k_BTHE, v_BTHE, is_causal=True)
        return self.out(y_BTHE.reshape(batch, length, dim))


class FeedForward(nnx.Module):
    """SwiGLU: ``down(silu(gate) * up)``; gate and up come from one matrix product."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.gate_up = _LINEAR(shape.dim, 2 * shape.hidden, kernel_init=_normal(), rngs=rngs)
        self.down = _LINEAR(shape.hidden, shape.dim, kernel_init=_normal(shape), rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x_BTD), 2, axis=-1)
        return self.down(nnx.silu(gate) * up)


class Block(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(shape.dim, epsilon=_EPSILON, rngs=rngs)
        self.attention = Attention(shape, rngs)
        self.feed_forward_norm = nnx.RMSNorm(shape.dim, epsilon=_EPSILON, rngs=rngs)
        self.feed_forward = FeedForward(shape, rngs)

    def __call__(self, x_BTD: jax.Array, rotation_TE: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation_TE)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class GPT(nnx.Module):
    """Bytes in, logits over the next byte out: ``tokens [B, T] int -> logits [B, T, 256]``, T <= shape.context."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.shape = shape
        self.embedding = nnx.Embed(VOCABULARY, shape.dim, embedding_init=_normal(), rngs=rngs)
        self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.layers)])
        self.norm = nnx.RMSNorm(shape.dim, epsilon=_EPSILON, rngs=rngs)
        self.lm_head = _LINEAR(shape.dim, VOCABULARY, kernel_init=_normal(), rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        rotation_TE = rotation_tables(tokens_BT.shape[1], self.shape.dim // self.shape.heads)
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation_TE)
        return self.lm_head(self.norm(x_BTD))

    def loss(self, tokens_BT: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats per byte of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``, in float32."""
        logits = self(tokens_BT[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:]).mean()


def _normal(writes_residual: Shape | None = None) -> nnx.Initializer:
    """Normal(0, 0.02); the two matrices of a block that write to the residual stream are scaled by 1/sqrt(2 L)."""
    return nnx.initializers.normal(0.02 / (2 * writes_residual.layers) ** 0.5 if writes_residual else 0.02)


def rotation_tables(context: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of ``position * 10000^(-2i/E)``, both [context, 1, E/2] (rotary positions, arXiv 2104.09864)."""
    frequency = 10000.0 ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    angle = np.outer(np.arange(context, dtype=np.float32), frequency.astype(np.float32))[:, None]
    return jnp.asarray(np.cos(angle)), jnp.asarray(np.sin(angle))


def rotate(x_BTHE: jax.Array, rotation_TE: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn the pairs (i, i + E/2) of each head by their position's angle, in float32; the result has x's dtype."""
    cos, sin = rotation_TE
    first, second = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)
    return turned.astype(x_BTHE.dtype)


# ---------------------------------------------------------------- weights under the names of the torch model

# nnx leaf -> (torch leaf, whether torch keeps it transposed)
_LEAVES = {"kernel": ("weight", True), "embedding": ("weight", False), "scale": ("weight", False)}


def _parameters(model: GPT) -> dict[str, tuple[nnx.Param, bool]]:
    """Torch name -> (parameter, transposed)."""
    found = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf, transposed = _LEAVES[str(path[-1])]
        found[".".join([*map(str, path[:-1]), leaf])] = parameter, transposed
    return found


def weights_of(model: GPT) -> dict[str, np.ndarray]:
    """The parameters as float32 arrays of the torch model's names and shapes."""
    arrays = {name: (np.asarray(parameter.get_value()), flip) for name, (parameter, flip) in _parameters(model).items()}
    return {name: array.T if flip else array for name, (array, flip) in arrays.items()}


def set_weights(model: GPT, weights: Mapping[str, np.ndarray]) -> None:
    """The inverse of `weights_of`."""
    state = nnx.state(model, nnx.Param)
    flat = []
    for (path, parameter), (name, (_, flip)) in zip(nnx.to_flat_state(state), _parameters(model).items(), strict=True):
        array = weights[name].T if flip else weights[name]
        flat.append((path, parameter.replace(jnp.asarray(array))))
    nnx.update(model, nnx.from_flat_state(flat))
