"""The random stream of stochastic rounding: Philox4x32-10 of (seed, element index), never of shape or thread.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; docs/numerics.md 5.3.
"""

from collections.abc import Sequence

import numpy as np

from microfloat.arguments import as_int, check_int, check_word
from microfloat.errors import invalid_value

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_2 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
Seed = int | Sequence[int] | np.ndarray
_DERIVE_DOMAIN = 0x5EED0001  # the last counter word of `derive`, which keeps it apart from element counters


def philox(counter: Sequence[int | np.ndarray], key: Sequence[int]) -> np.ndarray:
    """Ten rounds of Philox4x32: four 32-bit counter words and two key words -> four random words.

    Each counter word is an integer or an integer array; they broadcast. Returns uint32 [4, ...].
    """
    for name, given, count in (("counter", counter, 4), ("key", key, 2)):
        if len(given) != count or any(np.asarray(word).dtype.kind not in "iu" for word in given):
            raise invalid_value(name, given, f"{count} words, each an integer" + " or an array of them" * (count == 4))
    words = np.broadcast_arrays(*(np.asarray(word).astype(np.uint64) & _LOW for word in counter))
    c0, c1, c2, c3 = words
    key0, key1 = (int(word) & 0xFFFFFFFF for word in key)
    for _ in range(_ROUNDS):
        product_0, product_2 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_2  # 32 x 32 bits never exceed 64
        c0 = (product_2 >> _32) ^ c1 ^ np.uint64(key0)
        c2 = (product_0 >> _32) ^ c3 ^ np.uint64(key1)
        c1, c3 = product_2 & _LOW, product_0 & _LOW
        key0, key1 = (key0 + _WEYL_0) & 0xFFFFFFFF, (key1 + _WEYL_1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def random_bytes(rows: int, cols: int, seed: Seed, stream: int = 0, batch: int = 0) -> np.ndarray:
    """One random byte per element of an operand form: uint8 [rows, cols].

    ``r(row, col) = byte (col % 16) of Philox(counter=(col // 16, row, stream, batch), key=seed)``, little-endian. A
    matrix that is larger, or cut otherwise, has the same bytes at the same (row, col).
    """
    key = seed_words(seed)
    rows, cols = check_int("rows", rows, 0, 1 << 32), check_int("cols", cols, 0, 1 << 36)
    groups = -(-cols // 16)
    upper = check_word("stream", stream), check_word("batch", batch)
    counter = (np.arange(groups)[None, :], np.arange(rows)[:, None], *upper)
    words = np.moveaxis(philox(counter, key), 0, -1)  # [rows, groups, 4]
    shifts = np.arange(0, 32, 8, dtype=np.uint32)
    return (words[..., None] >> shifts & 255).astype(np.uint8).reshape(rows, 16 * groups)[:, :cols]


def derive(seed64: Seed, step: int, site: int, shard: int) -> tuple[int, int]:
    """A call seed that every front end can compute: two words, low first, a valid `seed`.

    ``(w0, w1) = first words of Philox(counter=(step, site, shard, 0x5EED0001), key=seed64)``; `site` is the layer's
    index, `shard` the data-parallel rank.
    """
    counter = (check_word("step", step), check_word("site", site), check_word("shard", shard), _DERIVE_DOMAIN)
    words = philox(counter, seed_words(seed64))
    return int(words[0]), int(words[1])


def seed_words(seed: Seed) -> tuple[int, int]:
    """The two 32-bit words of a call seed, low first; InvalidValueError for anything that is not one."""
    error = invalid_value(
        "seed", repr(seed), "an int in [0, 2^64), or its two 32-bit words, low first",
        "Draw one, for example int(numpy.random.default_rng().integers(2**64, dtype='uint64')).",
    )  # fmt: skip
    try:
        words = [as_int(word, error) for word in seed]  # type: ignore[union-attr]
    except TypeError:  # not iterable: a number
        value = as_int(seed, error)
        words = [value & 0xFFFFFFFF, value >> 32]  # the sign of a negative value stays in the high word
    if len(words) != 2 or not all(0 <= word < 1 << 32 for word in words):
        raise error
    return words[0], words[1]
