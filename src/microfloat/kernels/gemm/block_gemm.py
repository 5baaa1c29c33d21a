"""FP8 GEMM on Hopper, ``C = A @ B.T``, with 1x128 scales along K, or with scales of rows or matrices of groups.

    C[m, n] = sum over j of  a_scale[j, m] * b_scale[j, n] * (sum over k in block j of  A[m, k] * B[n, k])

Tensor cores compute the inner sum, from zero for every block of 128; scaling and the outer sum are in float32. Scales
of B are one factor per block of a column (LINES) or of 128 columns (TILES). Scales of ROWS of both operands, or of the
MATRIX of each group, do not depend on j and multiply the finished sum; with FAST, tensor cores carry that sum through
all blocks in their own, shorter accumulators.

One program per multiprocessor takes tiles of C (HEIGHT x 128) in turn. Its warpgroups multiply 64 rows x 128 columns
at a time; while one promotes its partial sums, the tensor cores work for the others. A last warp copies tiles of A, B
and their scales into a ring of shared-memory buffers. The kernel is written in Gluon, which spells out warp
specialization and asynchronous products. Gluon is part of Triton 3.6 and still changes, so its names stay here.

GROUPED launches compute many products. FPROP and DGRAD multiply consecutive groups of rows of A by a B of each group;
WGRAD has a C for every group of columns of A and B. A plan on the device locates the groups (`casts.groups`). No tile
of C holds rows of two groups, and a part of fewer than 64 rows is stored row by row. ADDED adds a product to C, once.

Legend: M, N, K as above; a step is 128 elements of K; HEIGHT = rows of a tile of C, 64 for each part of a warpgroup.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# The products of a launch: a single one, or one for each group.
ALONE = gl.constexpr(0)
FPROP = gl.constexpr(1)  # A [rows, K] by the rows of a group, B [G * N, K]
DGRAD = gl.constexpr(2)  # the same with B [N, G * K]
WGRAD = gl.constexpr(3)  # A [M, padded rows], B [N, padded rows], C [G * M, N]
ADDED = gl.constexpr(-1)  # a single one; memory adds it to C, float32, while programs go on
TURNED = gl.constexpr(-2)  # a single one, whose transpose is stored, bfloat16

# SCALES. The first two are per block of 128 along K: of a row of both operands; of a row of A and 128 rows of B.
LINES = gl.constexpr(0)
TILES = gl.constexpr(1)
ROWS = gl.constexpr(2)
MATRIX = gl.constexpr(3)

PART = 64  # rows that one asynchronous product of a warpgroup covers
COLUMNS = 128
STEP = gl.constexpr(128)
SCALE_BOX = 256  # scales of A copied at once: the rows of a tile, rounded up to a power of two

codes_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
scale_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def output_layout(bytes_per_element: int) -> gl.NVMMASharedLayout:
    """Shared-memory layout of a piece of C with 128 bytes per row."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * bytes_per_element, rank=2)


@gluon.jit
def _place(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """Row and column of a tile: numbers run down GROUP rows of tiles, then right, so that tiles share data in L2."""
    group = tile // (GROUP * column_tiles)
    rows = gl.minimum(row_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * column_tiles)
    return group * GROUP + within % rows, within // rows


@gluon.jit
def _row_tiles(M, plan_ptr, HEIGHT: gl.constexpr, GROUPED: gl.constexpr, GROUPS: gl.constexpr):
    """Number of rows of tiles; the plan of FPROP and DGRAD begins with it."""
    if GROUPED <= ALONE:
        return gl.cdiv(M, HEIGHT)
    elif GROUPED == WGRAD:
        return gl.cdiv(M, HEIGHT) * GROUPS
    else:
        return gl.load(plan_ptr)


@gluon.jit
def _extent(row, plan_ptr, M, N, K, HEIGHT: gl.constexpr, GROUPED: gl.constexpr):
    """For a row of tiles: first rows of A, B and C, number of rows, first steps of A and B, number of steps, group."""
    if GROUPED <= ALONE:
        return row * HEIGHT, 0, row * HEIGHT, gl.minimum(M - row * HEIGHT, HEIGHT), 0, 0, gl.cdiv(K, STEP), 0
    elif GROUPED == WGRAD:
        tiles = gl.cdiv(M, HEIGHT)
        group = row // tiles
        a_row = row % tiles * HEIGHT
        first = gl.load(plan_ptr + group) // STEP
        steps = gl.load(plan_ptr + group + 1) // STEP - first
        return a_row, 0, group * M + a_row, gl.minimum(M - a_row, HEIGHT), first, first, steps, group
    else:
        entry = plan_ptr + 4 * row + 1
        group = gl.load(entry + 3)
        steps = gl.cdiv(K, STEP)
        here = gl.maximum(group, 0)
        a_row, rows, c_row = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        if GROUPED == FPROP:
            return a_row, here * N, c_row, rows, 0, 0, gl.where(group < 0, 0, steps), group
        else:
            return a_row, 0, c_row, rows, 0, here * steps, gl.where(group < 0, 0, steps), group


@gluon.jit
def _copy_tiles(
    sources, rings, plan_ptr, sizes, HEIGHT: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SCALES: gl.constexpr, GROUPED: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    a_desc, b_desc, a_scale_desc, b_scale_desc = sources
    a_ring, b_ring, a_scale_ring, b_scale_ring, full, empty = rings
    M, N, K = sizes
    PARTS: gl.constexpr = HEIGHT // 64
    OF_LINES: gl.constexpr = a_scale_ring.shape[1] + (COLUMNS if SCALES == LINES else 0)
    COPIED: gl.constexpr = OF_LINES if SCALES < ROWS else 0
    B_MATRICES: gl.constexpr = GROUPS if GROUPED == FPROP else 1
    row_tiles, column_tiles = _row_tiles(M, plan_ptr, HEIGHT, GROUPED, GROUPS), gl.cdiv(N, COLUMNS)
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        a_row, b_row, _c_row, _rows, a_step, b_step, steps, _group = _extent(row, plan_ptr, M, N, K, HEIGHT, GROUPED)
        for step in range(steps):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, (HEIGHT + COLUMNS) * STEP + 4 * COPIED)
            for part in gl.static_range(PARTS):
                tma.async_copy_global_to_shared(
                    a_desc, [a_row + part * 64, (a_step + step) * STEP], arrived, a_ring.index(stage * PARTS + part)
                )
            tma.async_copy_global_to_shared(
                b_desc, [b_row + column * COLUMNS, (b_step + step) * STEP], arrived, b_ring.index(stage)
            )
            if COPIED > 0:
                tma.async_copy_global_to_shared(
                    a_scale_desc, [(a_step + step) * M + a_row], arrived, a_scale_ring.index(stage)
                )
            if SCALES == LINES:
                tma.async_copy_global_to_shared(
                    b_scale_desc,
                    [(b_step + step) * N * B_MATRICES + b_row + column * COLUMNS],
                    arrived,
                    b_scale_ring.index(stage),
                )
            turn += 1


@gluon.jit
def _add(p, factor, total):
    # Fused even where the total is 0: between a product and a sum of its own, ptxas lets no other warp in.
    return gl.fma(p, factor.broadcast_to(p.shape), total)


@gluon.jit
def _promote(total, p, row_factor, column_factor, SCALES: gl.constexpr):
    """total + p * factors, and p scaled by columns. Empty waits keep the compiler from moving the arithmetic behind the
    next product, where p would need registers of its own."""
    if SCALES == LINES:
        p = warpgroup_mma_wait(0, deps=[_add(p, column_factor[None, :], gl.zeros_like(p))])
    if SCALES < ROWS:
        total = warpgroup_mma_wait(0, deps=[_add(p, row_factor[:, None], total)])
    else:
        total = warpgroup_mma_wait(0, deps=[total + p])
    return total, p


@gluon.jit
def _scaled(x, a_scale_ptr, b_scale_ptr, a_row, rows, b_row, group, stride, SCALES: gl.constexpr):
    """Multiply sums of a part of C by scales of rows and columns, or of both matrices; group -1 makes them 0."""
    if SCALES == ROWS:
        r = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
        c = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        by_row = gl.load(a_scale_ptr + a_row + r, mask=r < rows, other=0.0)
        x = x * by_row[:, None] * gl.load(b_scale_ptr + b_row + c)[None, :]
    elif SCALES == MATRIX:
        at = gl.maximum(group, 0) * stride
        x = x * gl.load(a_scale_ptr + at) * gl.load(b_scale_ptr + at)
    return gl.where(group < 0, 0.0, x)


@builtin
def _add_to_global(c_desc, at, staging, _semantic=None):
    """Add a piece of shared memory to C, as `tma.async_copy_shared_to_global` copies one; Gluon has no name for it."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, c_desc.handle, at, staging.handle)


@gluon.jit
def _store(c_desc, staging, x, row, column, GROUPED: gl.constexpr):
    """Store, or add, a part of C in pieces as wide as `staging`; elements outside C are not written."""
    WIDTH: gl.constexpr = staging.shape[1]
    HALF: gl.constexpr = x.shape[1] // 2
    if x.shape[1] > WIDTH:
        left, right = x.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
        _store(c_desc, staging, left, row, column, GROUPED)
        _store(c_desc, staging, right, row, column + HALF, GROUPED)
    else:
        tma.store_wait(0)
        x = x.to(c_desc.dtype)
        staging.store(x.permute((1, 0)) if GROUPED == TURNED else x)
        fence_async_shared()
        if GROUPED == ADDED:
            _add_to_global(c_desc, [row, column], staging)
        elif GROUPED == TURNED:
            tma.async_copy_shared_to_global(c_desc, [column, row], staging)
        else:
            tma.async_copy_shared_to_global(c_desc, [row, column], staging)


@gluon.jit
def _store_part(c_desc, c_ptr, staging, x, row, column, rows, N, GROUPED: gl.constexpr):
    """Store the first `rows` rows of a part of C; further rows belong to another group."""
    if GROUPED <= ALONE:
        _store(c_desc, staging, x, row, column, GROUPED)
    else:
        if rows >= 64:
            _store(c_desc, staging, x, row, column, GROUPED)
        elif rows > 0:
            r = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))[:, None]
            c = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
            gl.store(c_ptr + (row + r).to(gl.int64) * N + c, x.to(c_desc.dtype), mask=(r < rows) & (c < N))


@gluon.jit
def _multiply(
    target, scales, rings, staging, plan_ptr, sizes, WARPGROUP: gl.constexpr, PARTS: gl.constexpr,
    HEIGHT: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr,
    FAST: gl.constexpr, GROUPED: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Multiply, in one warpgroup, PARTS x 64 rows of every tile; with one part `second` is unused."""
    c_desc, c_ptr = target
    a_scale_ptr, b_scale_ptr, scale_stride = scales
    a_ring, b_ring, a_scale_ring, b_scale_ring, full, empty = rings
    M, N, K = sizes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32]
    )
    FIRST: gl.constexpr = WARPGROUP * PARTS
    LAST: gl.constexpr = FIRST + PARTS - 1
    row_tiles, column_tiles = _row_tiles(M, plan_ptr, HEIGHT, GROUPED, GROUPS), gl.cdiv(N, COLUMNS)
    p = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    never = M < 0  # start every product from zero, and let it overwrite the registers of p
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        a_row, b_row, c_row, rows, _a_step, b_step, steps, group = _extent(row, plan_ptr, M, N, K, HEIGHT, GROUPED)
        first = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
        second = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
        tile_scale_ptr = b_scale_ptr + (b_row // COLUMNS + column) * scale_stride + b_step
        for step in range(steps):
            stage = turn % STAGES
            if SCALES == TILES:
                factor = gl.load(tile_scale_ptr + step)
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            b = b_ring.index(stage).permute((1, 0))
            if FAST:
                # The products of this step run while those of the one before are waited for.
                first = warpgroup_mma(a_ring.index(stage * (HEIGHT // 64) + FIRST), b, first, is_async=True)
                if PARTS == 2:
                    second = warpgroup_mma(a_ring.index(stage * (HEIGHT // 64) + LAST), b, second, is_async=True)
                first, second = warpgroup_mma_wait(PARTS, deps=[first, second])
                if step > 0:
                    mbarrier.arrive(empty.index((turn - 1) % STAGES))
            else:
                row_factor, last_row_factor, column_factor = 0.0, 0.0, 0.0
                if SCALES < ROWS:
                    a_scale = a_scale_ring.index(stage)
                    row_factor = a_scale.slice(FIRST * 64, 64).load(gl.SliceLayout(1, LAYOUT))
                    last_row_factor = a_scale.slice(LAST * 64, 64).load(gl.SliceLayout(1, LAYOUT))
                    column_factor = row_factor
                if SCALES == TILES:
                    row_factor *= factor
                    last_row_factor *= factor
                elif SCALES == LINES:
                    column_factor = b_scale_ring.index(stage).load(gl.SliceLayout(0, LAYOUT))
                p = warpgroup_mma(a_ring.index(stage * (HEIGHT // 64) + FIRST), b, p, use_acc=never, is_async=True)
                p = warpgroup_mma_wait(0, deps=[p])
                if PARTS == 2:
                    first, p = _promote(first, p, row_factor, column_factor, SCALES)
                    p = warpgroup_mma(a_ring.index(stage * (HEIGHT // 64) + LAST), b, p, use_acc=never, is_async=True)
                    p = warpgroup_mma_wait(0, deps=[p])
                mbarrier.arrive(empty.index(stage))
                if PARTS == 2:
                    second, p = _promote(second, p, last_row_factor, column_factor, SCALES)
                else:
                    first, p = _promote(first, p, row_factor, column_factor, SCALES)
            turn += 1
        if FAST:
            first, second = warpgroup_mma_wait(0, deps=[first, second])
            if steps > 0:
                mbarrier.arrive(empty.index((turn - 1) % STAGES))
        column = column * COLUMNS
        at = c_row if GROUPED == WGRAD else a_row
        b_at = gl.maximum(group, 0) * N + column
        group = gl.where(steps > 0, group, -1)  # nobody has written scales of a group without rows
        if SCALES >= ROWS:
            first = _scaled(
                first, a_scale_ptr, b_scale_ptr, at + FIRST * 64, rows - FIRST * 64, b_at, group, scale_stride, SCALES
            )
        _store_part(c_desc, c_ptr, staging, first, c_row + FIRST * 64, column, rows - FIRST * 64, N, GROUPED)
        if PARTS == 2:
            if SCALES >= ROWS:
                second = _scaled(
                    second, a_scale_ptr, b_scale_ptr, at + LAST * 64, rows - LAST * 64, b_at, group, scale_stride,
                    SCALES,
                )  # fmt: skip
            _store_part(c_desc, c_ptr, staging, second, c_row + LAST * 64, column, rows - LAST * 64, N, GROUPED)
    tma.store_wait(0)


# Not specialized: a size that is a multiple of 16 makes no better code here.
@gluon.jit(
    do_not_specialize=["scale_stride", "M", "N", "K"],
    do_not_specialize_on_alignment=["a_scale_ptr", "b_scale_ptr", "plan_ptr"],
)
def block_gemm(
    a_desc, b_desc, a_scale_desc, b_scale_desc, a_scale_ptr, b_scale_ptr, scale_stride, c_desc, c_ptr, plan_ptr, M, N,
    K, WARPGROUPS: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, FAST: gl.constexpr, REGISTERS: gl.constexpr, GROUPED: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """C [M, N] from A [M, K] and B [N, K], all contiguous along the last axis; one program per multiprocessor.

    Scales are float32. LINES and TILES: A's are [K / 128, M], contiguous; B's are [K / 128, N], or for TILES one per
    128 columns, at ``b_scale_ptr + (n / 128) * scale_stride + k / 128``. ROWS: one per row of A (for WGRAD per row of
    C), and [G, N] for B. MATRIX: one per group, or one for all groups where `scale_stride` is 0. Boxes of descriptors:
    A 64 x 128, B 128 x 128, scales `SCALE_BOX` and 128, C 64 x 128 bytes. GROUPED launches have GROUPS groups, the
    address of C in `c_ptr`, M rows of A in all, and N rows of B per group. `plan_ptr`: the number of row tiles and
    their table (FPROP, DGRAD), or the padded begins (WGRAD).
    """
    HEIGHT: gl.constexpr = 64 * WARPGROUPS * PARTS
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES * (HEIGHT // 64), 64, STEP], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, COLUMNS, STEP], b_desc.layout)
    a_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, a_scale_desc.block_shape[0]], a_scale_desc.layout)
    b_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], a_scale_desc.layout)
    staging = gl.allocate_shared_memory(c_desc.dtype, [WARPGROUPS, 64, c_desc.block_shape[1]], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    sources, target, sizes = (a_desc, b_desc, a_scale_desc, b_scale_desc), (c_desc, c_ptr), (M, N, K)
    scales, rings = (a_scale_ptr, b_scale_ptr, scale_stride), (a_ring, b_ring, a_scale_ring, b_scale_ring, full, empty)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    TWO: gl.constexpr = 2
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_multiply, (target, scales, rings, staging.index(0), plan_ptr, sizes, ZERO, PARTS, HEIGHT, COLUMNS,
                         STAGES, GROUP, SCALES, FAST, GROUPED, GROUPS)),
            (_multiply, (target, scales, rings, staging.index(1), plan_ptr, sizes, ONE, PARTS, HEIGHT, COLUMNS,
                         STAGES, GROUP, SCALES, FAST, GROUPED, GROUPS)),
            (_copy_tiles, (sources, rings, plan_ptr, sizes, HEIGHT, COLUMNS, STAGES, GROUP, SCALES, GROUPED, GROUPS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (target, scales, rings, staging.index(0), plan_ptr, sizes, ZERO, PARTS, HEIGHT, COLUMNS,
                         STAGES, GROUP, SCALES, FAST, GROUPED, GROUPS)),
            (_multiply, (target, scales, rings, staging.index(1), plan_ptr, sizes, ONE, PARTS, HEIGHT, COLUMNS,
                         STAGES, GROUP, SCALES, FAST, GROUPED, GROUPS)),
            (_multiply, (target, scales, rings, staging.index(2), plan_ptr, sizes, TWO, PARTS, HEIGHT, COLUMNS,
                         STAGES, GROUP, SCALES, FAST, GROUPED, GROUPS)),
            (_copy_tiles, (sources, rings, plan_ptr, sizes, HEIGHT, COLUMNS, STAGES, GROUP, SCALES, GROUPED, GROUPS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


@gluon.jit(do_not_specialize=["scale_stride", "M", "N", "K"])
def block_gemm_of_pointers(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, scratch_ptr, scale_stride, M, N, K, A_TYPE: gl.constexpr,
    B_TYPE: gl.constexpr, WARPGROUPS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, FAST: gl.constexpr, REGISTERS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """`block_gemm` of a single product, ALONE or TURNED, for launchers that pass no descriptors: each program makes its
    own.

    Codes come as bytes, of the element types A_TYPE and B_TYPE. `scratch_ptr` is not read: it holds the place of the
    parameter by which the compiler takes memory for descriptors.
    """
    codes: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    c_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a_codes, b_codes = a_ptr.to(gl.pointer_type(A_TYPE), bitcast=True), b_ptr.to(gl.pointer_type(B_TYPE), bitcast=True)
    blocks = gl.cdiv(K, STEP)
    a_desc = tma.make_tensor_descriptor(a_codes, [M, K], [K, 1], [64, 128], codes)
    b_desc = tma.make_tensor_descriptor(b_codes, [N, K], [K, 1], [128, 128], codes)
    if KIND == TURNED:
        c_desc = tma.make_tensor_descriptor(c_ptr, [N, M], [M, 1], [64, 64], c_layout)
    else:
        c_desc = tma.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [64, 64], c_layout)
    a_scale_desc = tma.make_tensor_descriptor(a_scale_ptr, [M * blocks], [1], [256], flat)
    b_scale_desc = a_scale_desc
    if SCALES == LINES:
        b_scale_desc = tma.make_tensor_descriptor(b_scale_ptr, [N * blocks], [1], [128], flat)
    block_gemm(
        a_desc, b_desc, a_scale_desc, b_scale_desc, a_scale_ptr, b_scale_ptr, scale_stride, c_desc, c_ptr, c_ptr, M, N,
        K, WARPGROUPS, PARTS, 128, STAGES, GROUP, SCALES, FAST, REGISTERS, KIND, 0,
    )  # fmt: skip
