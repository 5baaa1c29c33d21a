"""The delayed-scaling update of many slots in one launch (docs/numerics.md 3.3).

One program rolls one slot: ``history[0] = live``, the amax over the history gives the new encode scale, and the history
moves on by one place. Slots are given by the addresses of their buffers, so that layers keep their own tensors.
"""

import triton
import triton.language as tl


@triton.jit
def update_delayed(
    addresses_ptr, live_ptr, previous_ptr, element_max_ptr, margin_factor, L, GIVEN: tl.constexpr,
    MOST_RECENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`addresses_ptr`: int64 [slots, 2], history and scale; `live_ptr`: float32 [slots], the reduced live amaxes if
    `GIVEN`, else unused; `previous_ptr`: float32 [slots], receives the scales from before; `margin_factor` = 2^-margin;
    L = history length <= BLOCK."""
    slot = tl.program_id(0)
    history_ptr = tl.load(addresses_ptr + 2 * slot).to(tl.pointer_type(tl.float32))
    scale_ptr = tl.load(addresses_ptr + 2 * slot + 1).to(tl.pointer_type(tl.float32))
    live = tl.load(live_ptr + slot) if GIVEN else tl.load(history_ptr)
    element_max = tl.load(element_max_ptr + slot)
    i = tl.arange(0, BLOCK)
    following = tl.load(history_ptr + i + 1, mask=i + 1 < L, other=0.0)
    amax = live if MOST_RECENT else tl.maximum(live, tl.max(following, 0))
    old = tl.load(scale_ptr)
    tl.store(previous_ptr + slot, old)
    # No subnormal quotients: the amax is kept at or above element_max * 2^-126.
    smallest = element_max * 1.1754943508222875e-38
    fresh = tl.div_rn(element_max, tl.maximum(amax, smallest)) * margin_factor
    usable = (amax > 0.0) & (amax < float("inf"))
    tl.store(scale_ptr, tl.where(usable, tl.minimum(fresh, 8.507059173023462e37), old))
    # Every load of the history above must be done before the first store below.
    tl.debug_barrier()
    rolled = tl.where(i == L - 1, live, following)
    tl.store(history_ptr + i, tl.where(i == 0, 0.0, rolled), mask=i < L)


@triton.jit
def gather_live(addresses_ptr, live_ptr, SLOTS, BLOCK: tl.constexpr):
    """``live[slot] = history[slot][0]``, so that one all-reduce serves all slots."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < SLOTS
    history = tl.load(addresses_ptr + 2 * slot, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    tl.store(live_ptr + slot, tl.load(history, mask=inside, other=0.0), mask=inside)
