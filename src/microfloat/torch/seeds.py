"""Call seeds of stochastic rounding: 64 bits as two words, low first, in an int64 [2] tensor on the operand's device.

One draw per forward call of a quantized layer, from torch's default generator of that device: `torch.manual_seed`
governs it, every step gets a new one, and activation checkpointing replays it (docs/numerics.md 5.3).
"""

import operator
from collections.abc import Sequence

import torch

from microfloat.errors import InvalidValueError, invalid_value
from microfloat.torch.backends.reference._random import philox

__all__ = ["derive", "draw_seed", "seed_words"]

_LOW = 0xFFFFFFFF
_DERIVE_DOMAIN = 0x5EED0001  # the last counter word of `derive`, which keeps it apart from element counters
_NEEDED = "an int in [0, 2^64), or its two 32-bit words, low first"

_library = torch.library.Library("microfloat", "FRAGMENT")
# Opaque to compilers, since Inductor would replace the random call by a generator of its own; the tag says that it may
# be neither merged nor recomputed.
_library.define("draw_seed(*, Device device) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])


def _draw_seed(*, device: torch.device) -> torch.Tensor:
    draw = torch.empty(1, dtype=torch.int64, device=device)
    draw.random_(-(2**63), None)  # all 2^64 patterns; randint(-2**63, 2**63 - 1) would miss one
    return draw.view(torch.uint32).to(torch.int64)  # both words, low first: little-endian


_library.impl("draw_seed", _draw_seed, "CompositeExplicitAutograd")


@torch.library.register_fake("microfloat::draw_seed", lib=_library)
def _(*, device: torch.device) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


def draw_seed(device: torch.device | str) -> torch.Tensor:
    """A new call seed from the default generator of `device`: int64 [2], words below 2^32, low first."""
    return torch.ops.microfloat.draw_seed(device=torch.device(device))


def seed_words(seed: int | Sequence[int] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A given call seed as int64 [2] on `device`: an int in [0, 2^64), or its two words, low first.

    Raises InvalidValueError for anything else. The words of a tensor on an accelerator are not read back to check them.
    """
    if isinstance(seed, torch.Tensor) and seed.dim() == 1:
        return _checked_words(seed, torch.device(device))
    error = invalid_value("seed", repr(seed), _NEEDED, "Leave it out to draw one from torch's default generator.")
    if isinstance(seed, Sequence) and not isinstance(seed, str | bytes):
        words = [_as_int(word, error) for word in seed]
        if len(words) != 2 or not all(0 <= word <= _LOW for word in words):
            raise error
    else:
        value = _as_int(seed, error)
        if not 0 <= value < 1 << 64:
            raise error
        words = [value & _LOW, value >> 32]
    return torch.tensor(words, dtype=torch.int64, device=device)


def derive(seed64: int | Sequence[int] | torch.Tensor, step: int, site: int, shard: int) -> torch.Tensor:
    """A call seed that every front end can compute, int64 [2] on the CPU: the same words as `reference.derive`.

    ``(w0, w1) of Philox((step, site, shard, 0x5EED0001), seed64)``; `site` is the layer's index, `shard` the
    data-parallel rank, each in [0, 2^32).
    """
    counter = []
    for name, value in (("step", step), ("site", site), ("shard", shard)):
        error = invalid_value(name, repr(value), "an int in [0, 2^32)")
        word = _as_int(value, error)
        if not 0 <= word <= _LOW:
            raise error
        counter.append(torch.tensor(word, dtype=torch.int64, device="cpu"))
    counter.append(torch.tensor(_DERIVE_DOMAIN, dtype=torch.int64, device="cpu"))
    return torch.stack(philox(tuple(counter), seed_words(seed64, "cpu"))[:2])


def _checked_words(seed: torch.Tensor, device: torch.device) -> torch.Tensor:
    if seed.dtype != torch.int64:
        raise invalid_value("seed", f"a tensor of {seed.dtype}", f"{_NEEDED}, as int64 [2]")
    if seed.shape != (2,):
        raise invalid_value("seed", f"shape {tuple(seed.shape)}", "shape (2,): its two 32-bit words, low first")
    if seed.device.type == "cpu" and not torch.compiler.is_compiling() and bool(((seed < 0) | (seed > _LOW)).any()):
        raise invalid_value("seed", seed.tolist(), "two words in [0, 2^32), low first")
    return seed.to(device)


def _as_int(value: object, error: InvalidValueError) -> int:
    if isinstance(value, bool):
        raise error
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise error from None
