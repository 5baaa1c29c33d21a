"""Programs that run at once on neighbouring multiprocessors and add up what they found: clusters (Hopper).

The programs of a cluster write into each other's shared memory and wait for each other there, which takes a tenth of
the time that words in global memory take. Triton 3.6 compiles such a kernel like any other; what makes it one is how
it is started (`torch.backends.triton._direct`). A cluster of one program needs none of that; it is what the
interpreter runs.

An *area* of shared memory begins with what every program of the cluster has sent and what all threads of the program
shall read, in each of one or two rounds; the rest is the caller's, who may have memory copied there and take words from
it (PTX ISA: mapa, st.shared::cluster, barrier.cluster, cp.async).
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _area_text(size, ctas):
    arrive = "barrier.cluster.arrive.relaxed.aligned; " if ctas > 1 else ""
    return f"{{ .shared .align 16 .b8 area[{size}]; {arrive}mov.u32 $0, area; }}"


@triton.constexpr_function
def exchange_bytes(rounds, ctas, rows):
    """What the sums of so many rows take of an area."""
    return rounds * (ctas + 1) * rows * 4


@triton.jit
def area_of(pid, SIZE: tl.constexpr, CTAS: tl.constexpr, HW: tl.constexpr):
    """The address of SIZE bytes, `exchange_bytes` and what else is wanted; once in a program, first of all."""
    if HW:
        TEXT: tl.constexpr = _area_text(SIZE, CTAS)
        return tl.inline_asm_elementwise(TEXT, "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return 0


@triton.jit
def others_have_started(pid, CTAS: tl.constexpr):
    """Wait for the other programs of the cluster: before anything is sent to them."""
    if CTAS > 1:
        tl.inline_asm_elementwise(
            "barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;", "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def cluster_sum(sums, area, rank, ROUND: tl.constexpr, CTAS: tl.constexpr):
    """[BM] sums of this program -> those of the cluster, added up in the order of its programs."""
    if CTAS == 1:
        return sums
    else:
        BM: tl.constexpr = sums.shape[0]
        row = tl.arange(0, BM)
        area = area + ROUND * (CTAS + 1) * BM * 4
        tl.inline_asm_elementwise(
            "{ .reg .b32 there; mapa.shared::cluster.u32 there, $2, $1; st.shared::cluster.f32 [there], $3; "
            "mov.b32 $0, 0; }",
            "=r,r,r,r", [tl.arange(0, CTAS)[:, None], area + (rank * BM + row[None, :]) * 4, sums[None, :]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        area += tl.inline_asm_elementwise(
            "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;",
            "=r,r", [area], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        total = tl.zeros([BM], tl.float32)
        for cta in tl.static_range(CTAS):
            total += tl.inline_asm_elementwise(
                "ld.shared.f32 $0, [$1];", "=r,r", [area + (cta * BM + row) * 4], dtype=tl.float32, is_pure=False,
                pack=1,
            )  # fmt: skip
        return total


@triton.jit
def for_all_threads(
    values, memory, area, r, COUNT: tl.constexpr, ROUND: tl.constexpr, CTAS: tl.constexpr, HW: tl.constexpr
):
    """[BM] values of rows -> a tuple of those of rows r, r + 1, ..., COUNT of them, a multiple of 4, as is r.

    `memory`: where they lie in global memory too, for the interpreter.
    """
    BM: tl.constexpr = values.shape[0]
    row = tl.arange(0, BM)
    spread = ()
    if HW:
        area = area + (ROUND * (CTAS + 1) + CTAS) * BM * 4
        tl.inline_asm_elementwise(
            "st.shared.f32 [$1], $2; mov.b32 $0, 0;", "=r,r,r", [area + row * 4, values], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        area += tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, 0;", "=r,r", [area], dtype=tl.int32, is_pure=False, pack=1
        )
        for p in tl.static_range(0, COUNT, 4):  # pure: computed in the layout that it is wanted in
            a, b, c, d = tl.inline_asm_elementwise(
                "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [area + (r + p) * 4],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
            spread = spread + (a, b, c, d)
    else:
        tl.debug_barrier()
        for p in tl.static_range(COUNT):
            spread = spread + (tl.load(memory + r + p),)
    return spread


# ----------------------------------------------------------------------------------------------- the rest of an area


@triton.jit
def copy_units(at, source, there, MAY_MISS: tl.constexpr):
    """Units of 16 bytes on their way to shared memory; zeros where they are not `there`."""
    size = tl.where(there, 16, 0) if MAY_MISS else 16
    tl.inline_asm_elementwise(
        "cp.async.cg.shared.global [$1], [$2], 16, $3; mov.b32 $0, 0;", "=r,r,l,r", [at, source.to(tl.int64), size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_copies(pid):
    """Wait for the copies of all threads of the program."""
    tl.inline_asm_elementwise(
        "cp.async.wait_all; bar.sync 0; mov.b32 $0, 0;", "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def take_words(at):
    """The four words of a unit. `at` [..., 4]: its address, four times, in a layout that gives all four to one thread.

    Nothing but `at` decides that layout: it must come from a load of words (`zeros_like`).
    """
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,r,r,r", [at], dtype=tl.int32, is_pure=False, pack=4
    )


@triton.jit
def zeros_like(words, HW: tl.constexpr):
    """Zeros in the layout of loaded words, which the compiler takes for any number."""
    if HW:
        return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return words & 0
