"""The self-check digests of docs/numerics.md: input sets, the digest, and every pinned case, for any implementation.

A case names its Cast; `quantize` is given by the test, so the same pins serve every front end and backend.
"""

import functools
import hashlib

import ml_dtypes
import numpy as np

SEED = 0x89ABCDEF01234567
SETS = {"A": (107, 147), "B": (0, 254), "C": (0, 12)}
SET_DIGESTS = {"A": "71160c66205a", "B": "e7d677e4f009", "C": "71f050c46327"}
SHAPE = (64, 256)


@functools.cache
def input_set(name: str) -> np.ndarray:
    """float32 [64, 256] of set A, B or C; bfloat16 of set "Abf16"; set "N" (docs/numerics.md, appendices A and C)."""
    if name == "Abf16":
        array = input_set("A").astype(ml_dtypes.bfloat16)
    elif name == "N":
        array = input_set("A").copy()
        array[0, 0], array[20, 40], array[40] = np.nan, np.inf, -0.0
    else:
        low, high = SETS[name]
        index = np.arange(16384, dtype=np.uint64)
        u = ((index * 2654435761 + 12345) & 0xFFFFFFFF).astype(np.uint32)
        exponent = low + ((u >> 23) & 255) % (high - low + 1)
        array = ((u & 0x807FFFFF) | exponent.astype(np.uint32) << 23).view(np.float32).reshape(SHAPE)
    array.setflags(write=False)
    return array


def digest(*parts) -> str:
    """First 12 hex digits of sha256 over the bytes of the arrays, in order."""
    state = hashlib.sha256()
    for part in parts:
        array = np.ascontiguousarray(part)
        state.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return state.hexdigest()[:12]
