"""Reductions over all programs of a launch: maxima and sums, in which no program waits for another.

Scratch memory holds the merged results and a counter of arrivals; all words are zero before and after a launch. Each
program offers its result, increments the counter, and continues with its stores. The last program to arrive publishes
the merged result and clears the words for the next launch on the stream.

With `HW` one thread of a program does all of this, so the others do not wait. It skips an offer that is no larger than
the maximum in scratch memory, and the fence with it; after the first few programs hardly any offers are left. No
program waits for its own stores or for the result of its increment, which would delay the start of the next program.
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import bits_of, float_of
from microfloat.kernels.device.scales import unless_infinite

# The last program stores a maximum as float32, or merges it into a history if it is finite.
STORE = tl.constexpr(0)
RECORD = tl.constexpr(1)


@triton.jit
def peek(scratch_ptr, HW: tl.constexpr):
    """The maximum offered so far, in thread 0; called before the tile is loaded, to hide the latency."""
    if HW:
        PTX: tl.constexpr = (
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; mov.b32 $0, 0; "
            "@p ld.relaxed.gpu.global.b32 $0, [$1]; }"
        )
        return tl.inline_asm_elementwise(PTX, "=r,l", [scratch_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return 0


@triton.jit
def offer_maximum(bits, known, scratch_ptr, HW: tl.constexpr):
    """Merge the bits of a magnitude into the first word, unless `known` is as large."""
    if HW:
        PTX: tl.constexpr = (
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.gt.and.s32 p, $1, $2, p; "
            "@p red.relaxed.gpu.global.max.s32 [$3], $1; @p fence.acq_rel.gpu; mov.b32 $0, 0; }"
        )
        tl.inline_asm_elementwise(
            PTX, "=r,r,r,l", [bits, known, scratch_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.atomic_max(scratch_ptr, bits.to(tl.int64), sem="relaxed")


@triton.jit
def offer_count(count, scratch_ptr, HW: tl.constexpr):
    """Add a count to an int64 word."""
    if HW:
        PTX: tl.constexpr = (
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.gt.and.s64 p, $1, 0, p; "
            "@p red.relaxed.gpu.global.add.u64 [$2], $1; @p fence.acq_rel.gpu; mov.b32 $0, 0; }"
        )
        tl.inline_asm_elementwise(
            PTX, "=r,l,l", [count.to(tl.int64), scratch_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    elif count > 0:
        tl.atomic_add(scratch_ptr, count.to(tl.int64), sem="relaxed")


@triton.jit
def arrive(count_ptr, HW: tl.constexpr):
    """Number of programs that arrived before this one, in thread 0; called after all offers and before the stores."""
    if HW:
        PTX: tl.constexpr = (
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; mov.b32 $0, -1; "
            "@p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }"
        )
        return tl.inline_asm_elementwise(PTX, "=r,l", [count_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return tl.atomic_add(count_ptr, 1, sem="acq_rel").to(tl.int32)


@triton.constexpr_function
def in_last(text, bits=32):
    """PTX that runs `text`, with a register v, in the last program only: if the arrivals $1 equal $2."""
    begin = f"{{ .reg .pred p; .reg .b{bits} v; setp.eq.s32 p, $1, $2; @!p bra DONE; fence.acq_rel.gpu; "
    return begin + text + "DONE: mov.b32 $0, 0; }"


# TAKE moves the maximum from scratch memory at $4 to v and clears both words; MERGE records it at $3 if it is finite.
TAKE = "atom.relaxed.gpu.global.exch.b32 v, [$4], 0; st.relaxed.gpu.global.b32 [$4 + 8], 0; "
MERGE = "setp.lt.s32 p, v, 0x7F800000; @p red.relaxed.gpu.global.max.s32 [$3], v; "
STORE_TEXT = tl.constexpr(TAKE + "st.global.b32 [$3], v; ")
RECORD_TEXT = tl.constexpr(TAKE + MERGE)
SCALED_TEXT = tl.constexpr(
    TAKE + MERGE + "mov.b32 v, 0x7FC00000; @p mov.b32 v, $5; st.global.b32 [$6], v; st.global.b32 [$7], v; "
)
COUNTS_TEXT = tl.constexpr(
    "atom.relaxed.gpu.global.exch.b64 v, [$4], 0; st.global.b64 [$3], v; "
    "atom.relaxed.gpu.global.exch.b64 v, [$4 + 16], 0; st.global.b64 [$3 + 8], v; "
    "st.relaxed.gpu.global.b32 [$4 + 8], 0; "
)
MAXIMA_TEXT = tl.constexpr(
    "atom.relaxed.gpu.global.exch.b32 v, [$4], 0; st.global.b32 [$3], v; "
    "atom.relaxed.gpu.global.exch.b32 v, [$4 + 16], 0; st.global.b32 [$3 + 4], v; "
    "st.relaxed.gpu.global.b32 [$4 + 8], 0; "
)


@triton.jit
def publish_maximum(arrived, programs, out_ptr, scratch_ptr, WHAT: tl.constexpr, HW: tl.constexpr):
    """Let the last of `programs` programs store the maximum A; RECORD: ``out = max(out, A)`` unless A is infinite."""
    if HW:
        out, words = out_ptr.to(tl.int64), scratch_ptr.to(tl.int64)
        PTX: tl.constexpr = in_last(RECORD_TEXT if WHAT == RECORD else STORE_TEXT)
        tl.inline_asm_elementwise(
            PTX, "=r,r,r,l,l", [arrived, programs - 1, out, words], dtype=tl.int32, is_pure=False, pack=1
        )
    elif arrived == programs - 1:
        total = tl.atomic_xchg(scratch_ptr, 0).to(tl.int32)
        tl.atomic_xchg(scratch_ptr + 1, 0)
        if WHAT == RECORD:
            finite = tl.where(total < 0x7F800000, total, 0)
            tl.atomic_max(out_ptr.to(tl.pointer_type(tl.int32)), finite)
        else:
            tl.store(out_ptr, float_of(total))


@triton.jit
def publish_scaled_maximum(arrived, programs, out_ptr, scratch_ptr, scale, scale_ptr, scale2_ptr, HW: tl.constexpr):
    """`publish_maximum` with RECORD; also stores a gradient's scale at two addresses, NaN for an infinite A."""
    if HW:
        out, words, at, also = (
            out_ptr.to(tl.int64), scratch_ptr.to(tl.int64), scale_ptr.to(tl.int64), scale2_ptr.to(tl.int64)
        )  # fmt: skip
        PTX: tl.constexpr = in_last(SCALED_TEXT)
        tl.inline_asm_elementwise(
            PTX, "=r,r,r,l,l,r,l,l", [arrived, programs - 1, out, words, bits_of(scale), at, also], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    elif arrived == programs - 1:
        total = tl.atomic_xchg(scratch_ptr, 0).to(tl.int32)
        tl.atomic_xchg(scratch_ptr + 1, 0)
        tl.atomic_max(out_ptr.to(tl.pointer_type(tl.int32)), tl.where(total < 0x7F800000, total, 0))
        scale = unless_infinite(scale, float_of(total), True)
        tl.store(scale_ptr, scale)
        tl.store(scale2_ptr, scale)


@triton.jit
def publish_two(arrived, programs, out_ptr, scratch_ptr, HW: tl.constexpr):
    """Let the last of `programs` programs store words 0 and 2: two float32 maxima, or two int64 counts."""
    COUNTS: tl.constexpr = out_ptr.dtype.element_ty == tl.int64
    if HW:
        out, words = out_ptr.to(tl.int64), scratch_ptr.to(tl.int64)
        PTX: tl.constexpr = in_last(COUNTS_TEXT, 64) if COUNTS else in_last(MAXIMA_TEXT)
        tl.inline_asm_elementwise(
            PTX, "=r,r,r,l,l", [arrived, programs - 1, out, words], dtype=tl.int32, is_pure=False, pack=1
        )
    elif arrived == programs - 1:
        first, second = tl.atomic_xchg(scratch_ptr, 0), tl.atomic_xchg(scratch_ptr + 2, 0)
        if COUNTS:
            tl.store(out_ptr, first)
            tl.store(out_ptr + 1, second)
        else:
            tl.store(out_ptr, float_of(first.to(tl.int32)))
            tl.store(out_ptr + 1, float_of(second.to(tl.int32)))
        tl.atomic_xchg(scratch_ptr + 1, 0)
