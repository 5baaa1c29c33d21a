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
    key_0, key_1 = seed.tolist() if seed.device.type == "cpu" else seed.unbind()
    for _ in range(_ROUNDS):
        product_0, product_2 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_2
        c0 = _mixed(product_2, c1, key_0)
        c2 = _mixed(product_0, c3, key_1)
        c1, c3 = product_2, product_0
        key_0, key_1 = (key_0 + _WEYL_0) & _LOW, (key_1 + _WEYL_1) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def _mixed(product: torch.Tensor, word: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """``high(product) ^ low(word) ^ key``."""
    high = product >> 32
    high = high.bitwise_xor_(word) if high.shape == word.shape else high ^ word
    return high.bitwise_xor_(key).bitwise_and_(_LOW)


def random_bytes(
    seed: torch.Tensor, rows: range, columns: range, *, stream: int = 0, batch: int = 0, contraction: int = 1
) -> torch.Tensor:
    """uint8 [rows, columns] of a matrix in memory, whose axis `contraction` is C of the operand form [R, C].

    Element (R, C) has byte ``C % 16`` of ``Philox((C // 16, R, stream, batch), seed)``. The range of C starts at a
    multiple of 16: a window of a larger matrix has that matrix's bytes.
    """
    device = seed.device
    other, along = (rows, columns) if contraction else (columns, rows)
    groups = torch.arange(along.start // 16, -(-along.stop // 16), dtype=torch.int64, device=device)
    others = torch.arange(other.start, other.stop, dtype=torch.int64, device=device).bitwise_and_(_LOW)
    constants = [torch.full((), value, dtype=torch.int64, device=device) for value in (stream, batch)]
    if contraction:
        words = torch.empty(len(other), groups.numel(), 4, dtype=torch.int32, device=device)
        for position, word in enumerate(philox((groups[None, :], others[:, None], *constants), seed)):
            words[..., position] = word  # keeps the low 32 bits
        return words.view(torch.uint8).flatten(1)[:, : len(along)]
    result = torch.empty(groups.numel(), 16, len(other), dtype=torch.uint8, device=device)
    for position, word in enumerate(philox((groups[:, None], others[None, :], *constants), seed)):
        word = word.to(torch.int32)
        for byte in range(4):  # the lowest first; of each, uint8 keeps the low 8 bits
            result[:, 4 * position + byte] = word >> 8 * byte
    return result.flatten(0, 1)[: len(along)]
