"""The random bytes of stochastic rounding: Philox4x32-10 of (seed, element index), in plain torch ops on any device.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; docs/numerics.md 5.3.
"""

import torch

__all__ = ["philox", "random_bytes"]

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_2 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox(counter: tuple[torch.Tensor, ...], seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Ten rounds of Philox4x32: four int64 counter words below 2^32, seed int64 [2] -> four words below 2^32.

    The words may be of any shapes that broadcast; as long as they differ (the first rounds see one axis at a time), so
    do the intermediate ones. A product of two 32-bit numbers wraps in int64, but both of its halves are right all the
    same; what an arithmetic shift leaves above them is masked away where a word is next multiplied.
    """
    c0, c1, c2, c3 = counter
    for key_0, key_1 in zip(*_key_schedule(seed), strict=True):
        product_0, product_2 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_2
        c0 = _mixed(product_2, c1, key_0)
        c2 = _mixed(product_0, c3, key_1)
        c1, c3 = product_2, product_0
    return c0, c1 & _LOW, c2, c3 & _LOW


def _key_schedule(seed: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The two key words of every round: ``(seed + round * weyl) mod 2^32``."""
    rounds = torch.arange(_ROUNDS, dtype=torch.int64, device=seed.device)
    return ((seed[0] + rounds * _WEYL_0) & _LOW).unbind(), ((seed[1] + rounds * _WEYL_1) & _LOW).unbind()


def _mixed(product: torch.Tensor, word: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``high(product) ^ low(word) ^ key``."""
    high = product >> 32
    if high.shape == torch.broadcast_shapes(high.shape, word.shape):
        return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(_LOW)
    return (high ^ word).bitwise_xor_(key).bitwise_and_(_LOW)


def random_bytes(seed: torch.Tensor, rows: range, columns: range, *, stream: int = 0, batch: int = 0) -> torch.Tensor:
    """uint8 [rows, columns]: byte ``col % 16`` of ``Philox((col // 16, row, stream, batch), seed)``.

    `rows` and `columns` are ranges of the operand form, `columns` starting at a multiple of 16: a window of a larger
    matrix has that matrix's bytes.
    """
    device = seed.device
    groups = torch.arange(columns.start // 16, -(-columns.stop // 16), dtype=torch.int64, device=device)
    row_index = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device).bitwise_and_(_LOW)
    constants = [torch.full((), value, dtype=torch.int64, device=device) for value in (stream, batch)]
    words = torch.empty(len(rows), groups.numel(), 4, dtype=torch.int32, device=device)
    for position, word in enumerate(philox((groups[None, :], row_index[:, None], *constants), seed)):
        words[..., position] = word  # keeps the low 32 bits
    return words.view(torch.uint8).flatten(1)[:, : len(columns)]
