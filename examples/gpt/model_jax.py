"""The transformer of gpt/model.py in Flax nnx: the same sizes, the same arithmetic, the same places for rounding.

Parameters are float32. Every nnx.Linear computes in bfloat16 (``dtype=``), norms and the residual stream in float32,
which is what torch's autocast does with the twin. `microfloat.jax.nnx.convert` gives the linear layers of the blocks
their recipe; embedding, norms, attention scores and `lm_head` stay in high precision.

Legend: B = batch, T = positions, D = width, H = heads, E = width of one head.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

normal = nnx.initializers.normal
linear = partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16)
norm = partial(nnx.RMSNorm, epsilon=float(np.finfo(np.float32).eps))  # what torch's adds where nothing else is said


class Block(nnx.Module):
    """Attention and a SwiGLU feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, sizes: Any, rngs: nnx.Rngs) -> None:
        self.heads = sizes.heads
        inner, last = normal(0.02), normal(0.02 / (2 * sizes.layers) ** 0.5)  # less for what writes to the stream
        self.attention_norm = norm(sizes.dim, rngs=rngs)
        self.qkv = linear(sizes.dim, 3 * sizes.dim, kernel_init=inner, rngs=rngs)
        self.out = linear(sizes.dim, sizes.dim, kernel_init=last, rngs=rngs)
        self.feed_forward_norm = norm(sizes.dim, rngs=rngs)
        self.gate_up = linear(sizes.dim, 2 * sizes.hidden, kernel_init=inner, rngs=rngs)
        self.down = linear(sizes.hidden, sizes.dim, kernel_init=last, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        batch, length, dim = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).reshape(batch, length, 3, self.heads, dim // self.heads)
        q_BTHE, k_BTHE, v_BTHE = (qkv[:, :, index] for index in range(3))
        y_BTHE = jax.nn.dot_product_attention(rotate(q_BTHE), rotate(k_BTHE), v_BTHE, is_causal=True)
        x_BTD = x_BTD + self.out(y_BTHE.reshape(batch, length, dim))
        gate, up = jnp.split(self.gate_up(self.feed_forward_norm(x_BTD)), 2, axis=-1)
        return x_BTD + self.down(nnx.silu(gate) * up)


class GPT(nnx.Module):
    """Bytes in, logits over the next byte out: ``tokens [B, T] int -> logits [B, T, 256]``."""

    def __init__(self, sizes: Any, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(256, sizes.dim, embedding_init=normal(0.02), rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = norm(sizes.dim, rngs=rngs)
        self.lm_head = linear(sizes.dim, 256, kernel_init=normal(0.02), rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.lm_head(self.norm(x_BTD))

    def loss(self, tokens_BT: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats per byte of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``, in float32."""
        logits = self(tokens_BT[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:]).mean()


def rotate(x_BTHE: jax.Array) -> jax.Array:
    """Turn the pairs (i, i + E/2) of each head by ``position * 10000^(-2i/E)``, in float32; result in x's dtype."""
    _, length, _, head_dim = x_BTHE.shape
    frequency = 10000.0 ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    angle = np.outer(np.arange(length, dtype=np.float32), frequency.astype(np.float32))[:, None]
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)
    return turned.astype(x_BTHE.dtype)


def parameters(model: GPT) -> Iterator[tuple[str, nnx.Param, bool]]:
    """Parameters by the torch model's names, and True for those that torch keeps transposed."""
    for path, parameter in nnx.iter_graph(model):
        if isinstance(parameter, nnx.Param):
            yield ".".join([*map(str, path[:-1]), "weight"]), parameter, path[-1] == "kernel"


def weights_of(model: GPT) -> dict[str, np.ndarray]:
    """The parameters as arrays of the torch model's names and shapes."""
    return {
        name: np.asarray(p.get_value()).T if flip else np.asarray(p.get_value()) for name, p, flip in parameters(model)
    }


def set_weights(model: GPT, weights: dict[str, np.ndarray]) -> None:
    """The inverse of `weights_of`."""
    for name, parameter, flip in parameters(model):
        parameter.set_value(jnp.asarray(weights[name].T if flip else weights[name]))
