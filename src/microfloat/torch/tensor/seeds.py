"""Call seeds of stochastic rounding: 64 bits as two words, low first, in an int64 [2] tensor on the operand's device.

Every forward call of a quantized layer draws one from torch's default generator of that device: `torch.manual_seed`
sets it, and activation checkpointing replays it. The rank of the process is folded in, so that ranks with the same
generator state draw different bits (docs/numerics.md 5.3).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from microfloat.arguments import as_int, check_int
from microfloat.errors import invalid_value
from microfloat.torch.reference._grid import mode_count, transforms_active
from microfloat.torch.tensor.custom_ops import define

_LOW = 0xFFFFFFFF
_ODD = 0x9E3779B97F4A7C15  # a product with an odd number mod 2^64 is another one for every rank
_NEEDED = "an int in [0, 2^64), or its two 32-bit words, low first"


def _draw_seed(
    *, device: torch.device, folds: bool = True, rank: int | None = None, apart: torch.Tensor | None = None
) -> torch.Tensor:
    draw = torch.empty(1, dtype=torch.int64, device=device)
    draw.random_(-(2**63), None)  # all 2^64 patterns; randint(-2**63, 2**63 - 1) would miss one
    if folds:
        fold_rank_(draw, rank)
    return draw.view(torch.uint32).to(torch.int64)  # both words, low first: little-endian


# Opaque to compilers, since Inductor would replace the random call by a generator of its own; the tag says that it may
# not be recomputed. AOTAutograd merges calls with equal arguments, whatever their tag, except for torch.empty: its
# result, `apart`, keeps two draws apart.
define(
    "draw_seed(*, Device device, bool folds=True, int? rank=None, Tensor? apart=None) -> Tensor",
    _draw_seed, lambda *, device, **_: torch.empty(2, dtype=torch.int64, device=device),
    batches=None, tags=[torch.Tag.nondeterministic_seeded],
)  # fmt: skip


def draw_seed(device: torch.device | str, *, folds: bool = True, rank: int | None = None) -> torch.Tensor:
    """A new call seed from the default generator of `device`: int64 [2], words below 2^32, low first.

    `folds`: fold the rank in (`rank`, if it is given); False where replicas must round alike.
    """
    device = torch.device(device)
    # Under a mode of torch's dispatcher the call may become a node of a graph.
    apart = torch.empty(0, device=device) if mode_count() else None
    return torch.ops.microfloat.draw_seed(device=device, folds=folds, rank=rank, apart=apart)


# True where there is a default process group, whose rank is folded in; some builds of torch have no groups.
has_ranks: Callable[[], bool] = getattr(torch.distributed, "is_initialized", lambda: False)


class Rank:
    """The rank that is folded into call seeds: the one that was set, else that of the default process group.

    One setting and one pair for each process. The pair saves asking torch for the rank in every draw.
    """

    chosen: int | None = None
    known: tuple[Any, int] = (lambda: None, 0)  # the last process group, and the mask of its rank


def set_seed_rank(rank: int | None) -> None:
    """Fold `rank` into the seeds of stochastic rounding that this process draws, in place of its rank.

    By default it is the rank in the default process group, and nothing is folded where there is none. Ranks that must
    round alike need one value: with tensor parallelism pass the data-parallel rank; 0 on every rank folds nothing, and
    leaves it to `torch.manual_seed`. None goes back to the default. Raises InvalidTypeError and InvalidValueError for
    anything but an int in [0, 2^32) or None. Source: docs/numerics.md 5.3.
    """
    Rank.chosen = None if rank is None else check_int("rank", rank, 0, _LOW)


def fold_rank_(draw: torch.Tensor, rank: int | None = None) -> None:
    """``draw ^= rank * 0x9E3779B97F4A7C15 mod 2^64`` in place; int64 [1]. Rank 0 changes nothing.

    `rank`: another than this process's own, whose data it rounds as a replica.
    """
    rank = rank if Rank.chosen is None else Rank.chosen
    if rank is not None:
        mask = _mask(rank)
    elif has_ranks():
        world = torch.distributed.group.WORLD
        if Rank.known[0]() is not world:
            Rank.known = (weakref.ref(world), _mask(torch.distributed.get_rank()))
        mask = Rank.known[1]
    else:
        return
    if mask:
        draw.bitwise_xor_(mask)


def _mask(rank: int) -> int:
    """The 64 bits of a rank, as a number that int64 holds."""
    bits = rank * _ODD & 0xFFFFFFFFFFFFFFFF
    return bits - (1 << 64) if bits >> 63 else bits


def seed_words(seed: int | Sequence[int] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A call seed as int64 [2] on `device`, from an int in [0, 2^64), or from its two words, low first.

    Words may be a sequence, or an array or tensor of integers, such as the uint32 [2] of the other front ends. Raises
    InvalidValueError for anything else. The words of a tensor on an accelerator are not read back to check them.
    """
    if isinstance(seed, torch.Tensor) and seed.dim() == 1:
        return _checked_words(seed, torch.device(device))
    error = invalid_value("seed", repr(seed), _NEEDED, "Leave it out to draw one from torch's default generator.")
    as_list = None if isinstance(seed, torch.Tensor) else getattr(seed, "tolist", None)  # of an array
    seed = seed if as_list is None else as_list()
    if isinstance(seed, Sequence) and not isinstance(seed, str | bytes):
        words = [as_int(word, error) for word in seed]
    else:
        value = as_int(seed, error)
        words = [value & _LOW, value >> 32]
    if len(words) != 2 or not all(0 <= word <= _LOW for word in words):
        raise error
    return torch.tensor(words, dtype=torch.int64, device=device)


def _checked_words(seed: torch.Tensor, device: torch.device) -> torch.Tensor:
    if seed.dtype not in (torch.int64, torch.uint32):
        raise invalid_value("seed", f"a tensor of {seed.dtype}", f"{_NEEDED}, as int64 or uint32 [2]")
    if seed.shape != (2,):
        raise invalid_value("seed", f"shape {tuple(seed.shape)}", "shape (2,): its two 32-bit words, low first")
    seed = seed.to(torch.int64)
    hidden = torch.compiler.is_compiling() or transforms_active()
    if seed.device.type == "cpu" and not hidden and bool(((seed < 0) | (seed > _LOW)).any()):
        raise invalid_value("seed", seed.tolist(), "two words in [0, 2^32), low first")
    return seed.to(device)
