"""Grouped layout: a plan, made on the device, of groups of rows whose operands begin at multiples of 128 rows.

x holds the rows of all groups one after the other. In its operands each group is padded with zeros to a multiple of
128 rows, so no tile of 128 rows, and no block along the rows, mixes two groups. Cast kernels read full tiles from x
itself. The last rows of a group that fill no tile are copied, with their zeros, to a buffer of tails: one tile for each
group, and one of zeros for padded rows behind the last group.

The plan is an int32 vector:
* for every padded tile: its first row in x, or ~(number of its tile in the buffer of tails);
* for every padded tile: its group, or G behind the last group;
* begins [G + 1] of the groups in x, then padded begins [G + 1];
* the number of row tiles of a product, each of at most ROWS rows of one group;
* for each row tile: first row of A, number of rows, first row of C, group (-1 behind the last group).

`plan_groups` runs one program for BLOCK entries, `copy_tails` one for each BM x BN tile of the buffer of tails.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(128)


@triton.jit
def _at(values, groups, group):
    """The elements of `values` at the indices `group`."""
    return tl.sum(tl.where(groups[None, :] == group[:, None], values[None, :], 0), 1)


@triton.jit
def plan_groups(ends_ptr, plan_ptr, T, G, TILES, PARTS, ROWS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the plan of G groups that end at `ends` in T rows. GROUPS: G + 1 rounded up to a power of two."""
    groups = tl.arange(0, GROUPS)
    end = tl.minimum(tl.load(ends_ptr + groups, mask=groups < G, other=0), T)
    begin = tl.minimum(tl.load(ends_ptr + groups - 1, mask=(groups > 0) & (groups < G), other=0), T)
    size = tl.where(groups < G, tl.maximum(end - begin, 0), 0)
    padded = (size + TILE - 1) // TILE * TILE
    parts = (size + ROWS - 1) // ROWS
    padded_end, part_end = tl.cumsum(padded, 0), tl.cumsum(parts, 0)
    padded_begin, part_begin = padded_end - padded, part_end - parts
    total = tl.sum(size, 0)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.sum((padded_end[None, :] <= entry[:, None] * TILE).to(tl.int32), 1)  # the group of a padded tile
    first = tl.minimum(first, G)
    within = entry * TILE - _at(padded_begin, groups, first)
    full = (first < G) & (within + TILE <= _at(size, groups, first))
    tl.store(plan_ptr + entry, tl.where(full, _at(begin, groups, first) + within, ~first), mask=entry < TILES)
    tl.store(plan_ptr + TILES + entry, first, mask=entry < TILES)
    if tl.program_id(0) == 0:
        begin = tl.where(groups < G, begin, total)
        tl.store(plan_ptr + 2 * TILES + groups, begin, mask=groups <= G)
        tl.store(plan_ptr + 2 * TILES + G + 1 + groups, padded_begin, mask=groups <= G)
        tl.store(plan_ptr + 2 * TILES + 2 * (G + 1), tl.sum(parts, 0) + (T - total + ROWS - 1) // ROWS)
    group = tl.minimum(tl.sum((part_end[None, :] <= entry[:, None]).to(tl.int32), 1), G)
    within = (entry - _at(part_begin, groups, group)) * ROWS
    inside = group < G
    # Behind the last group, where `part_begin` of G counts the parts of all.
    at = tl.where(inside, _at(begin, groups, group), total) + within
    rows = tl.where(inside, _at(size, groups, group), T - total) - within
    table = plan_ptr + 2 * (TILES + G + 1) + 1 + 4 * entry
    tl.store(table, tl.where(inside, _at(padded_begin, groups, group) + within, 0), mask=entry < PARTS)
    tl.store(table + 1, tl.minimum(tl.maximum(rows, 0), ROWS), mask=entry < PARTS)
    tl.store(table + 2, at, mask=entry < PARTS)
    tl.store(table + 3, tl.where(inside, group, -1), mask=entry < PARTS)


@triton.jit
def copy_tails(x_ptr, plan_ptr, tails_ptr, TILES, G, C, stride_r, BM: tl.constexpr, BN: tl.constexpr):
    """Copy the last rows of each group that fill no tile, padded with zeros: [G + 1, 128, C], strides as in x."""
    across = (C + BN - 1) // BN
    pid = tl.program_id(0)
    group, band = pid // across // (TILE // BM), pid // across % (TILE // BM)
    begin = tl.load(plan_ptr + 2 * TILES + group)
    size = tl.load(plan_ptr + 2 * TILES + tl.minimum(group + 1, G)) - begin
    row = band * BM + tl.arange(0, BM)[:, None]
    column = pid % across * BN + tl.arange(0, BN)[None, :]
    at = (begin + size // TILE * TILE + row).to(tl.int64) * stride_r + column
    x = tl.load(x_ptr + at, mask=(row < size % TILE) & (column < C), other=0.0)
    tl.store(tails_ptr + (group * TILE + row).to(tl.int64) * stride_r + column, x, mask=column < C)
