"""Block scales in tiles of 128 x 4, the layout of Blackwell's block-scaled GEMMs (docs/numerics.md 7.2)."""

import triton
import triton.language as tl


@triton.jit
def swizzle_scales(scale_ptr, out_ptr, R, C, stride_r, stride_c, WORDS: tl.constexpr, TILES: tl.constexpr):
    """Move byte (r, c) of each 128 x 4 tile to ``(r % 32) * 16 + (r // 32) * 4 + c``; bytes outside R x C are 0.

    One program for TILES tiles side by side. WORDS: rows are contiguous and their groups of four bytes aligned.
    """
    tiles = C // 4 if WORDS else (C + 3) // 4
    groups = (tiles + TILES - 1) // TILES
    row0 = (tl.program_id(0) // groups) * 128
    tile0 = (tl.program_id(0) % groups) * TILES
    tile = tile0 + tl.arange(0, TILES)[:, None]
    place = tl.arange(0, 128)[None, :]  # word of a tile: 4 * (r % 32) + r // 32
    out = out_ptr.to(tl.pointer_type(tl.int32)) + ((row0 // 128).to(tl.int64) * tiles + tile) * 128 + place
    if WORDS:
        r = row0 + tl.arange(0, 128)[:, None]
        t = tile0 + tl.arange(0, TILES)[None, :]
        at = scale_ptr.to(tl.pointer_type(tl.int32)) + r.to(tl.int64) * (stride_r // 4) + t
        words = tl.load(at, mask=(r < R) & (t < tiles), other=0)
        words = tl.permute(tl.reshape(words, [4, 32, TILES]), [2, 1, 0])
        tl.store(out, tl.reshape(words, [TILES, 128]), mask=tile < tiles)
    else:
        r = row0 + (place % 4) * 32 + place // 4
        word = tl.zeros([TILES, 128], tl.int32)
        for c in tl.static_range(4):
            column = tile * 4 + c
            at = scale_ptr + r.to(tl.int64) * stride_r + column * stride_c
            byte = tl.load(at, mask=(r < R) & (column < C), other=0).to(tl.int32)
            word = word | (byte << (8 * c))
        tl.store(out, word, mask=tile < tiles)
