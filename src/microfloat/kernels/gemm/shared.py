"""Pipeline of codes and scales through shared memory, half a chunk at a time, for four-bit codes of `gemm.decode`.

Loads into registers need a register for every word under way, so a lane can have only few, and the assembler delays
loads until registers are free. Here each lane copies its codes to its own slot of shared memory and reads them back, so
only the warp itself waits (`cp.async` groups, sm_80 and newer). The copy of the next chunk's half starts as soon as the
half has been read, before it is multiplied: a warp waits for copies that it requested half a chunk of work earlier.
The four lanes of a row share its scales, which are copied in words of four bytes with the first half and read with it.

On an H200 a product of one row with 8192x8192 NVFP4 codes takes 13.1 us instead of 14.6
(benchmarks/results/decode_shared_cuts.json).
"""

import triton
import triton.language as tl

from microfloat.kernels.constants import DecodeCodes, DecodeCut


@triton.constexpr_function
def _bytes_of_scales(codes):
    """Bytes of the scales of a chunk of a row."""
    codes = DecodeCodes(*codes)
    return 1024 // codes.BITS // codes.WIDTH


@triton.constexpr_function
def _lanes(cut):
    cut = DecodeCut(*cut)
    return 32 * cut.ROW_WARPS * cut.LENGTH_WARPS


@triton.constexpr_function
def _bytes_of_codes(cut):
    """Bytes of the codes of a chunk for all lanes of a program: two rows of each tile, two halves, 16 bytes."""
    return 64 * DecodeCut(*cut).TILES * _lanes(cut)


@triton.constexpr_function
def _text_of_memory(codes, cut):
    """PTX for the address in $0 of the codes and scales of a chunk, for all rows of a program."""
    rows = DecodeCut(*cut).TILES * _lanes(cut) // 2  # 16 of each tile and warp
    size = _bytes_of_codes(cut) + rows * _bytes_of_scales(codes)
    return f"{{ .shared .align 16 .b8 microfloat_chunk[{size}]; mov.u32 $0, microfloat_chunk; }}"


@triton.constexpr_function
def _text_of_copy(size, to, source):
    """PTX that copies `size` bytes, 4 or 16, from $2 + source to shared memory at $1 + to where $3 is not 0."""
    cached = "cg" if size == 16 else "ca"  # 16 bytes pass the L1 cache by
    copy = f"cp.async.{cached}.shared.global [$1+{to}], [$2+{source}], {size};"
    return f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; @p {copy} mov.b32 $0, 0; }}"


@triton.jit
def _copy(at, place, here, SIZE: tl.constexpr, TO: tl.constexpr, SOURCE: tl.constexpr):
    PTX: tl.constexpr = _text_of_copy(SIZE, TO, SOURCE)
    tl.inline_asm_elementwise(PTX, "=r,r,l,r", [place, at.to(tl.int64), here], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def places(thread, lane, codes_of_rows, scales_of_rows, CODES: tl.constexpr, CUT: tl.constexpr):
    """A lane's addresses: codes in global and in shared memory; scales to copy, target and source; scales to read."""
    BYTES: tl.constexpr = _bytes_of_scales(CODES)
    WORDS: tl.constexpr = BYTES // 4
    PTX: tl.constexpr = _text_of_memory(CODES, CUT)
    memory = tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    of_warp = memory + _bytes_of_codes(CUT) + (thread >> 5) * (16 * CUT.TILES * BYTES)
    g, t = lane >> 2, lane & 3
    COPIES: tl.constexpr = (2 * CUT.TILES * BYTES + 15) // 16
    to, source = (), ()
    for i in tl.static_range(COPIES):  # lane t copies word 4 i + t of all rows of its g, modulo the number of words
        one = (4 * i + t) % (2 * CUT.TILES * WORDS)
        row = one // WORDS
        mine = scales_of_rows[0]
        for other in tl.static_range(2 * CUT.TILES - 1):
            mine = tl.where(row == other + 1, scales_of_rows[other + 1], mine)
        word = one % WORDS
        to = to + (of_warp + (row * 8 + g) * BYTES + word * 4,)
        source = source + (mine + word * 4,)
    OF_SCALE: tl.constexpr = 128 // CODES.BITS  # elements of a lane: one scale or two, or half of one
    mine = t * OF_SCALE // CODES.WIDTH
    return codes_of_rows, memory + thread * 16, to, source, of_warp + g * BYTES + mine


@triton.jit
def copy_half(at, chunk, here, HALF: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr):
    """Copy half a chunk of codes for both rows of every tile, and with the first half all scales, where `here`."""
    code_at, place, to, source, _ = at
    BYTES: tl.constexpr = _bytes_of_scales(CODES)
    here = here.to(tl.int32) + place * 0
    for i in tl.static_range(2 * CUT.TILES):
        _copy(code_at[i] + chunk * 32, place, here, 16, (2 * i + HALF) * 16 * _lanes(CUT), 64 * HALF)
    if HALF == 0:
        for i in tl.static_range(len(to)):
            _copy(source[i] + chunk * BYTES, to[i], here, 4, 0, 0)
    PTX: tl.constexpr = "cp.async.commit_group; mov.b32 $0, $1;"
    tl.inline_asm_elementwise(PTX, "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait_for_half(place):
    """Wait until all lanes of the warp have copied the older of two halves under way."""
    PTX: tl.constexpr = "cp.async.wait_group 1; bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
    return tl.inline_asm_elementwise(PTX, "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _all_have_read(place):
    """Wait until all lanes of the warp have read, so that any of them may overwrite."""
    PTX: tl.constexpr = "bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
    tl.inline_asm_elementwise(PTX, "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _text_of_read(bits, at):
    if bits == 128:
        return f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{at}];"
    return f"{{ .reg .b16 v; ld.shared.u{bits} v, [$1+{at}]; cvt.u32.u16 $0, v; }}"


@triton.jit
def _read_codes(place, HALF: tl.constexpr, CUT: tl.constexpr):
    """Four words of codes of half a chunk for both rows of every tile."""
    words = ()
    for i in tl.static_range(2 * CUT.TILES):
        words = words + tl.inline_asm_elementwise(
            _text_of_read(128, (2 * i + HALF) * 16 * _lanes(CUT)), "=r,=r,=r,=r,r", [place],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def _read_scales(place, HALF: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr):
    """Scale of a lane's elements of half a chunk, or two scales in one word, for both rows of every tile."""
    BYTES: tl.constexpr = _bytes_of_scales(CODES)
    BITS: tl.constexpr = max(BYTES, 8)  # 16 of NVFP4, where a lane has two scales
    stored = ()
    for i in tl.static_range(2 * CUT.TILES):
        one = tl.inline_asm_elementwise(
            _text_of_read(BITS, i * 8 * BYTES + HALF * (BYTES // 2)), "=r,r", [place], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
        stored = stored + (one,)
    return stored


@triton.jit
def take_half(shared, scales, chunk, has, HALF: tl.constexpr, CODES: tl.constexpr, CUT: tl.constexpr):
    """Codes of half a chunk for both rows of every tile, and the scales of both halves, which come with the first half.

    The same half of `chunk` is then copied to the same slot, if it exists (`has`).
    """
    _, place, _, _, place_of_scales = shared
    place = _wait_for_half(place)
    words = _read_codes(place, HALF, CUT)
    if HALF == 0:
        scales = (_read_scales(place_of_scales, 0, CODES, CUT), _read_scales(place_of_scales, 1, CODES, CUT))
        _all_have_read(place)
    copy_half(shared, chunk, has, HALF, CODES, CUT)
    return words, scales
