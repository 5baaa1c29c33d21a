"""The random stream of stochastic rounding in JAX: Philox4x32-10 on 32-bit integers, the same bytes everywhere.

Source: Salmon et al. 2011; docs/numerics.md 5.3. JAX without x64 has no 64-bit product, so the high half of a 32 x
32 bit product is put together from 16-bit limbs.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from microfloat.errors import InvalidValueError, invalid_type, invalid_value
from microfloat.jax.transformations import in_common_variance
from microfloat.reference import _philox as reference


def _multiply_wide(a: Array, constant: int) -> tuple[Array, Array]:
    """(high, low) 32 bits of ``a * constant``."""
    high_b, low_b = np.uint32(constant >> 16), np.uint32(constant & 0xFFFF)
    high_a, low_a = a >> 16, a & np.uint32(0xFFFF)
    low_low = low_a * low_b
    cross_1, cross_2 = low_a * high_b, high_a * low_b
    middle = (low_low >> 16) + (cross_1 & np.uint32(0xFFFF)) + (cross_2 & np.uint32(0xFFFF))
    high = high_a * high_b + (cross_1 >> 16) + (cross_2 >> 16) + (middle >> 16)
    return high, a * np.uint32(constant)


Words = tuple[Array, Array, Array, Array]


@partial(jax.jit, inline=True)
def _round(counter: Words, key: tuple[Array, Array]) -> tuple[Words, tuple[Array, Array]]:
    c0, c1, c2, c3 = counter
    high_0, low_0 = _multiply_wide(c0, int(reference._MULTIPLIER_0))
    high_2, low_2 = _multiply_wide(c2, int(reference._MULTIPLIER_2))
    counter = (high_2 ^ c1 ^ key[0], low_2, high_0 ^ c3 ^ key[1], low_0)
    return counter, (key[0] + np.uint32(reference._WEYL_0), key[1] + np.uint32(reference._WEYL_1))


def _straight(counter: Words, key: tuple[Array, Array]) -> Words:
    for _ in range(reference._ROUNDS):
        counter, key = _round(counter, key)
    return counter


def _looped(counter: Words, key: tuple[Array, Array]) -> Words:
    return jax.lax.fori_loop(0, reference._ROUNDS, lambda _, carry: _round(*carry), (counter, key))[0]


def philox(counter: Words, key: tuple[Array, Array]) -> Words:
    """Ten rounds of Philox4x32: four uint32 counter words of one shape and two key words -> four random words."""
    # LLVM may compile ten rounds for minutes that XLA fuses on a CPU, where they are a loop.
    *counter_words, key0, key1 = in_common_variance(*counter, *key)
    return jax.lax.platform_dependent(tuple(counter_words), (key0, key1), cpu=_looped, default=_straight)


def random_bytes(
    rows: int, cols: int, words: Array | np.ndarray, stream: ArrayLike, batch: ArrayLike,
    origin: tuple[ArrayLike, ArrayLike] = (0, 0),
) -> Array:  # fmt: skip
    """One byte per element of a part of an operand form, that begins at `origin` (column: a multiple of 16). ``r(row,
    col) = byte (col % 16) of Philox(counter=(col // 16, row, stream, batch), key=words)``, little-endian."""
    groups = -(-cols // 16)
    shape = (rows, groups)
    first_row, first_col = (jnp.asarray(first, jnp.uint32) for first in origin)
    group = jax.lax.broadcasted_iota(jnp.uint32, shape, 1) + first_col // np.uint32(16)
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0) + first_row
    stream_word, batch_word = (jnp.broadcast_to(jnp.asarray(word, jnp.uint32), shape) for word in (stream, batch))
    key = (jnp.asarray(words[0], jnp.uint32), jnp.asarray(words[1], jnp.uint32))
    drawn = philox((group, row, stream_word, batch_word), key)
    parts = [jax.lax.bitcast_convert_type(word, jnp.uint8) for word in drawn]
    return jnp.concatenate(parts, axis=-1).reshape(rows, 16 * groups)[:, :cols]


def call_seed(seed: object, key: object, needed_by: str) -> Array | np.ndarray:
    """The two words of the call seed K, low first, from `seed` or `key`; `needed_by` is named in the error."""
    if seed is not None and key is not None:
        raise invalid_value("key", "a value beside seed", "seed or key, not both", "Leave one of them out.")
    if seed is not None:
        return seed_words(seed)
    if key is None:
        needed = f"key= (a jax.random key) or seed= for {needed_by}"
        raise invalid_value("key", "None, and no seed", needed, "Stochastic rounding never draws from a hidden state.")
    return jax.random.bits(check_key(key), (2,), "uint32")


def check_key(key: Any) -> Array:
    """A single typed key, or the raw uint32 array of one."""
    dtype = getattr(key, "dtype", None)
    if dtype is None:
        raise invalid_type("key", type(key), "a key made by jax.random.key", "An int belongs into seed=.")
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if np.shape(key) != ():
            raise invalid_value("key", f"shape {np.shape(key)}", "a single key", "Split it, and pass one.")
    elif dtype != jnp.uint32:
        raise invalid_type("key", dtype, "a key made by jax.random.key (or the uint32 words of one)")
    elif np.ndim(key) != 1 or np.shape(key) != np.shape(jax.eval_shape(jax.random.PRNGKey, 0)):
        raise invalid_value("key", f"uint32{list(np.shape(key))}", "the words of a single key", "Use jax.random.key.")
    return key


def seed_words(seed: object) -> Array | np.ndarray:
    """uint32 [2], low word first, from a Python int in [0, 2^64) or from the two words themselves (may be traced)."""
    shown = f"{seed.dtype}{list(seed.shape)}" if isinstance(seed, jax.Array | np.ndarray) else repr(seed)
    error = invalid_value(
        "seed", shown, "an int in [0, 2^64), or its two words as uint32[2], low first",
        "Under jit pass the two words: a 64-bit integer does not fit a traced argument without x64.",
    )  # fmt: skip
    dtype = getattr(seed, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise invalid_type("seed", "a jax.random key", "an int, or two uint32 words", "Pass the key as key=.")
    if isinstance(seed, jax.Array) and seed.shape == (2,) and seed.dtype == jnp.uint32:
        return seed
    if isinstance(seed, jax.Array) or np.ndim(seed) > 1:  # type: ignore[arg-type]
        raise error
    try:
        return np.array(reference.seed_words(seed), np.uint32)  # type: ignore[arg-type]
    except InvalidValueError:
        raise error from None
