"""The self-check digests of docs/numerics.md: input sets, the digest, and every pinned case, for any implementation.

A case names its Cast; `quantize` is given by the test, so the same pins serve every front end and backend.
"""

import functools
import hashlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from microfloat.formats import (
    FORMATS,
    FP8_ROW,
    FP8_ROW_E5M2,
    FP8_TENSOR,
    FP8_TENSOR_E5M2,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    NVFP4_2D,
    NVFP4_ROW,
    FP8_1x128,
    FP8_1x128_E5M2,
    FP8_128x128,
    FP8_128x128_E5M2,
)
from microfloat.recipes import Cast, Current, Hadamard

SEED = 0x89ABCDEF01234567
SETS = {"A": (107, 147), "B": (0, 254), "C": (0, 12)}
SET_DIGESTS = {"A": "71160c66205a", "B": "e7d677e4f009", "C": "71f050c46327"}
SHAPE = (64, 256)


@functools.cache
def input_set(name: str) -> np.ndarray:
    """float32 [64, 256] of set A, B or C; bfloat16 of set "Abf16"; set "N" (docs/numerics.md, appendices A and C)."""
    if name == "Abf16":
        array = input_set("A").astype(ml_dtypes.bfloat16)
    elif name == "N":
        array = input_set("A").copy()
        array[0, 0], array[20, 40], array[40] = np.nan, np.inf, -0.0
    else:
        low, high = SETS[name]
        index = np.arange(16384, dtype=np.uint64)
        u = ((index * 2654435761 + 12345) & 0xFFFFFFFF).astype(np.uint32)
        exponent = low + ((u >> 23) & 255) % (high - low + 1)
        array = ((u & 0x807FFFFF) | exponent.astype(np.uint32) << 23).view(np.float32).reshape(SHAPE)
    array.setflags(write=False)
    return array


def digest(*parts) -> str:
    """First 12 hex digits of sha256 over the bytes of the arrays, in order."""
    state = hashlib.sha256()
    for part in parts:
        array = np.ascontiguousarray(part)
        state.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return state.hexdigest()[:12]


@dataclass(frozen=True)
class Pin:
    """One pinned digest: quantize the input set, seen through `view`, under the Cast, then `digest(scale, codes)`."""

    id: str
    set: str
    cast: Cast
    expected: str
    stream: int | None = None
    axis: int = -1
    amax: float | None = None
    view: str = ""
    replicate_tiles: bool = False

    @property
    def x(self) -> np.ndarray:
        """The input: the whole set, or the part or shape of it that `view` names."""
        array = input_set(self.set)
        return _VIEWS[self.view](array) if self.view else array

    @property
    def arguments(self) -> dict:
        """Keyword arguments of quantize besides x and cast."""
        given = {"axis": self.axis}
        if self.stream is not None:
            given |= {"seed": SEED, "stream": self.stream}
        if self.amax is not None:
            given["amax"] = np.float32(self.amax)
        return given

    def digest(self, scale: np.ndarray, codes: np.ndarray) -> str:
        """Digest of what a quantizer returned: scale (uint8 or float32) and codes (uint8, FP4 packed)."""
        if self.replicate_tiles:
            scale = np.repeat(scale, self.cast.format.block[0], axis=0)[: SHAPE[0]]
        return digest(scale, codes)


_VIEWS = {
    "[:50, :250]": lambda array: array[:50, :250],
    "[:, :33]": lambda array: array[:, :33],
    "(4, 8, 512)": lambda array: array.reshape(4, 8, 512),
}
_MX = {"e4m3": MXFP8, "e5m2": MXFP8_E5M2, "e2m3": MXFP6_E2M3, "e3m2": MXFP6_E3M2, "e2m1": MXFP4}
_FP8 = {
    ("e4m3", "tensor"): FP8_TENSOR, ("e4m3", "row"): FP8_ROW, ("e4m3", "1x128"): FP8_1x128,
    ("e4m3", "128x128"): FP8_128x128, ("e5m2", "tensor"): FP8_TENSOR_E5M2, ("e5m2", "row"): FP8_ROW_E5M2,
    ("e5m2", "1x128"): FP8_1x128_E5M2, ("e5m2", "128x128"): FP8_128x128_E5M2,
}  # fmt: skip
_COLUMNS = ("A", "B", "C", "Abf16")

# Appendix A. Columns: sets A, B, C, A rounded to bf16.
_TABLE_A = """
e4m3 floor | f5ae75d4add6 | 2c2301e10835 | 77fb53471941 | fa60d4662616
e4m3 ceil | dcb3700953f9 | 7db43dbc89ad | e59cf1be7daa | e99a42f550b7
e4m3 even | 1fcc77a94a6f | d7e44d166ef9 | ceb02a7e1b25 | 98a24589f667
e4m3 rceil | 28fe253f24bf | 941517b4cb6a | 8b1561718c00 | 792a9b56c8ed
e4m3 oas | b65150457be4 | ff73691427c9 | c176cae42929 | 7ef2c445a05d
e5m2 floor | a97844bcab38 | 92bd942db8a8 | 0fe437bed9d4 | 801548c8676d
e5m2 ceil | af1b095cc871 | eb916b9a20f9 | 0fe437bed9d4 | 17107dd905f5
e5m2 even | 057b27b449d4 | cd1afa679157 | 0fe437bed9d4 | 266120e459e5
e5m2 rceil | 947587cea194 | 3a6cc7183b50 | 0fe437bed9d4 | 9340f134de82
e2m3 floor | f1650df6aa49 | 5589ca64b856 | 96a3d371f0b4 | 5008cd93103c
e2m3 ceil | bba922a3f49b | 1bcad5fd053b | 4f15bf6f71c7 | 1aefa02f7861
e2m3 even | dce762b1af64 | 0cb3b614c9e1 | 52f05f24d32b | e12c8a893fc8
e2m3 rceil | aeb458bb519c | 6d9047938d93 | dc65fdfd9d60 | 0ac54c0a86f7
e3m2 floor | 1192e49a1b7f | a85ff35b72f4 | 22f5f8cdbe73 | 668b0f8f174a
e3m2 ceil | 25028a9720bc | 6c9e836a7cb2 | 5ddf006e860c | 5633a2d36bc9
e3m2 even | dce336b0776d | 77586b940360 | 69db0ea8ca15 | e28d2c83ecd6
e3m2 rceil | 5f9d2af41e90 | 3df09c07a445 | a2700f1fa397 | 5bd49a02379f
e2m1 floor | bffa37610af4 | dee9b9aeb203 | f0384738497d | 057f9492235b
e2m1 ceil | 54b3811fa4b5 | c9f032092d1c | 3068892a3be8 | a0a8dc18ba5b
e2m1 even | a440031fa092 | e354106243e5 | d2234aa59dec | e96302552074
e2m1 rceil | 7a2fb90789dd | 4cc06ee51761 | 3a9387c09b7c | 4dc3589a78bc
e2m1 oas | 274d54795608 | 210ea72c3d4e | 5348af65355e | e96302552074
one_level_e4m3 | dabfb0e0843a | cc0556aef7db | b103f8964bb8 | 1935c4cc56ac
two_level_torchao | cd03e55a29ae | ec00c75485fe | d91c1e38a86a | df853bf51883
two_level | cd03e55a29ae | b3d48e8ebab6 | d91c1e38a86a | df853bf51883
two_level 16x16 | 75c0ec16cc89 | 26b492c3786a | 7780b4f314a4 | 0c5a03f41203
two_level RHT | 9aa7789863a4 | - | - | 9aa7789863a4
two_level SR | 0a51c470b0a8 | 909b3188ce45 | c75c4d9d8366 | b4346e39c5fb
two_level RHT+SR | c9e50dae4001 | - | - | c9e50dae4001
two_level_17_16 SR | abc06e51b3cd | bf729734ab67 | e713bfc8138e | dd86bd9c739d
four_over_six_mae_448 | 12a28d356832 | 21de488a764d | 3928ba6d263a | c8ea82e865c5
four_over_six_mae_256 | 9620922ca0e2 | 0777e9a95c97 | 3928ba6d263a | 83c170d74bd3
four_over_six_mse_448 | 63a9b4054662 | b3d48e8ebab6 | d91c1e38a86a | 2f5ab5b02a78
four_over_six_mse_256 | beeb2e6b38e3 | 68d7de295ce0 | d91c1e38a86a | 46179b354c2a
four_over_six_mae_448 16x16 | 2b13c2f4d905 | 26b492c3786a | 7780b4f314a4 | 39d36820f6bc
four_over_six_mae_256 16x16 | 071a970b84e9 | 80a49514da8e | 7780b4f314a4 | 762d4945f678
four_over_six_mse_448 16x16 | 8312c435c329 | 26b492c3786a | 7780b4f314a4 | 583969291760
four_over_six_mse_256 16x16 | 6c37305f821e | 80a49514da8e | 7780b4f314a4 | a5fbb8d4b082
e4m3 tensor amax | edf23ead3fce | 4d92f8cd9466 | fe6dc12a8ea0 | bdfc3845c179
e4m3 tensor amax_pow2 | 0b98328f2f54 | ea35d035d523 | f5be87e2a5f9 | f90661aed83f
e4m3 row amax | 4ae4702a72ca | f8b236558372 | ad7b270c3808 | c3eb4dda21bb
e4m3 row amax_pow2 | 630b47370fc3 | deb19c5b69f7 | ed12c57bb0ef | 6ef951937dd6
e4m3 1x128 amax | e089ebfb0d54 | 1182a5bb61c3 | e124961f5bc3 | 69d3a5279d6b
e4m3 1x128 amax_pow2 | 7da69e7173e8 | 50ec82b804d9 | cc2c3d52fa4a | 95db5eff7e2d
e4m3 128x128 amax | 998ee3a059d2 | d9523982d58f | 9675a6c9da57 | 6c38af1752b7
e4m3 128x128 amax_pow2 | bb6028129c21 | c3ceaa7c938a | 3cad2ec21296 | 4152f7ba26f1
e5m2 tensor amax | 608874269f13 | b40aed5ed400 | f777e7edb689 | 299db4b45907
e5m2 tensor amax_pow2 | 06f47d6453fa | 027f974384e0 | f777e7edb689 | 1935c713ea76
e5m2 row amax | aa7930efc07b | 53ff25edc058 | c9a3a882b1b9 | e8ba03143b1f
e5m2 row amax_pow2 | db9c8d2dd78a | 552ff3c4bf33 | c9a3a882b1b9 | adc641d576ea
e5m2 1x128 amax | 27f19f5a5f90 | 3bb05aacc703 | 410ca8ae7094 | a85fd83e3b23
e5m2 1x128 amax_pow2 | 7dbfdbf67c9c | 4a433e1a9b3f | 410ca8ae7094 | 98b5c1b76ef8
e5m2 128x128 amax | 2d6cfd4c249b | cbc28f6c03aa | 8a86e742c06a | 2618779c9b67
e5m2 128x128 amax_pow2 | 2151ecbd0c77 | 1f66468d12ef | 8a86e742c06a | d28865109eb4
"""

# Appendix C.6: stochastic rounding, stream 0; the same columns.
_TABLE_C6 = """
mxfp8 rceil | 2618f73d649d | 59e5a1917c5a | 1b7b4175b157 | 1a659a86ef7e
mxfp8_e5m2 rceil | 409a33905406 | f3518cf36768 | 874d00044be0 | 496144e4b2a3
mxfp6_e2m3 rceil | d0b7702497d5 | 5ff6215a1047 | 5321a24ade26 | 0b0381643626
mxfp6_e3m2 rceil | e50c63b9a7e7 | c907b1fcdb3d | 2fb630cb501d | ae353a4bfbf6
mxfp4 even | 9dcba01cbee9 | a6bbb275b831 | 48e6740ef0fe | 007c7e628dfc
fp8_tensor amax | 91e4eb202878 | 130bb33442f5 | 6bee9dbb7bfc | 8fffb8caff17
fp8_1x128_e5m2 amax | 9ec7a9addb29 | d7dfc8e9eb91 | d244c4da4b81 | 60018b89c1f7
"""


def _rows(table: str) -> list[tuple[str, str, str]]:
    """(name, set, expected) of every filled cell."""
    cells = []
    for line in table.strip().splitlines():
        name, *values = (cell.strip() for cell in line.split("|"))
        cells += [(name, column, value) for column, value in zip(_COLUMNS, values, strict=True) if value != "-"]
    return cells


def _pin_a(name: str, column: str, expected: str) -> Pin:
    first, *rest = name.split()
    if (first, rest[0] if rest else "") in _FP8:
        cast = Cast(_FP8[first, rest[0]], rest[1])
    elif first in _MX:
        cast = Cast(_MX[first], rest[0])
    else:
        stochastic = rest in (["SR"], ["RHT+SR"])
        hadamard = Hadamard() if rest in (["RHT"], ["RHT+SR"]) else None
        fmt = NVFP4_2D if rest == ["16x16"] else NVFP4
        cast = Cast(fmt, first, "stochastic" if stochastic else "nearest", hadamard)
        return Pin(
            f"{name} {column}", column, cast, expected, 4 if stochastic else None, replicate_tiles=fmt is NVFP4_2D
        )
    return Pin(f"{name} {column}", column, cast, expected)


def _pin_c6(name: str, column: str, expected: str) -> Pin:
    fmt, rule = name.split()
    return Pin(f"C.6 {name} stochastic {column}", column, Cast(FORMATS[fmt], rule, "stochastic"), expected, stream=0)


APPENDIX_A = [_pin_a(*row) for row in _rows(_TABLE_A)]
_SR = "stochastic"
APPENDIX_C = [
    # C.2: NaN, Inf, -0
    Pin("C.2 nvfp4 two_level", "N", Cast(NVFP4), "1c3f15b0f2fc"),
    Pin("C.2 nvfp4 four_over_six", "N", Cast(NVFP4, "four_over_six"), "1c3f15b0f2fc"),
    Pin("C.2 nvfp4_2d two_level", "N", Cast(NVFP4_2D), "86f776f4f03e"),
    Pin("C.2 nvfp4_2d four_over_six", "N", Cast(NVFP4_2D, "four_over_six"), "86f776f4f03e"),
    Pin("C.2 nvfp4 two_level_torchao", "N", Cast(NVFP4, "two_level_torchao"), "e5981fb790aa"),
    Pin("C.2 nvfp4_row two_level", "N", Cast(NVFP4_ROW), "b51326863793"),
    Pin("C.2 mxfp8 rceil", "N", Cast(MXFP8), "2152788b19d6"),
    Pin("C.2 mxfp8 rceil stochastic", "N", Cast(MXFP8, rounding=_SR), "73106fbfbe21", stream=0),
    Pin("C.2 mxfp4 even", "N", Cast(MXFP4), "32386622527b"),
    Pin("C.2 fp8_tensor amax", "N", Cast(FP8_TENSOR), "ea3c270b9271"),
    Pin("C.2 fp8_row amax", "N", Cast(FP8_ROW, "amax"), "3c4cd5743668"),
    Pin("C.2 fp8_1x128 amax_pow2", "N", Cast(FP8_1x128), "c5b5f1cdb4c1"),
    Pin("C.2 fp8_128x128 amax_pow2", "N", Cast(FP8_128x128), "b2997ff07fc8"),
    # C.3: amax given, per row, epsilon
    Pin("C.3 nvfp4 amax=2^21", "A", Cast(NVFP4), "b54181f540b4", amax=2.0**21),
    Pin("C.3 nvfp4 amax=2^18", "A", Cast(NVFP4), "ada42eb56770", amax=2.0**18),
    Pin("C.3 fp8_tensor amax=2^21", "A", Cast(FP8_TENSOR), "e481ed9017ea", amax=2.0**21),
    Pin("C.3 nvfp4_row", "A", Cast(NVFP4_ROW), "161aca8904f7"),
    Pin("C.3 nvfp4_row four_over_six", "A", Cast(NVFP4_ROW, "four_over_six"), "842191d7d771"),
    Pin("C.3 fp8_1x128 epsilon", "A", Cast(FP8_1x128, "amax", scaling=Current(1.9e6)), "685ba36cfd95"),
    *(_pin_c6(*row) for row in _rows(_TABLE_C6)),
    # C.7: Hadamard with padding, either axis
    Pin("C.7 nvfp4 axis -1", "A", Cast(NVFP4, None, _SR, Hadamard()), "7f4544b63b70", 5, -1, view="[:50, :250]"),
    Pin("C.7 nvfp4 axis -2", "A", Cast(NVFP4, None, _SR, Hadamard()), "49ba0150226a", 5, -2, view="[:50, :250]"),
    Pin("C.7 mxfp8", "A", Cast(MXFP8, hadamard=Hadamard()), "a7665fa4c244", view="[:50, :250]"),
    # C.8: odd length, more than two axes
    Pin("C.8 mxfp4 odd", "A", Cast(MXFP4), "009694460cbe", view="[:, :33]"),
    Pin("C.8 nvfp4_2d 3-D", "A", Cast(NVFP4_2D), "3f90e598f4da", view="(4, 8, 512)"),
    Pin("C.8 nvfp4 stochastic 3-D", "A", Cast(NVFP4, rounding=_SR), "409962c49b91", stream=0, view="(4, 8, 512)"),
    Pin("C.8 fp8_128x128 3-D", "A", Cast(FP8_128x128), "7d525f3393f6", view="(4, 8, 512)"),
]

# tensor_scale: (id of a pin, its bits, or the digest of a vector)
TENSOR_SCALES = [
    ("two_level A", 0x4442F4F4),
    ("C.2 nvfp4_row two_level", "94224952ec4a"),
    ("C.3 nvfp4 amax=2^21", 0x44430C31),
    ("C.3 nvfp4 amax=2^18", 0x42C30C31),
    ("C.3 nvfp4_row", "282b9f20c600"),
    ("C.7 nvfp4 axis -1", 0x43C30C31),
    ("C.7 nvfp4 axis -2", 0x43AE79E8),
]

# C.9: digest of the float32 result of dequantize, set A.
DEQUANTIZED = [
    (Cast(NVFP4), "803d2a8abe3a"),
    (Cast(NVFP4_2D), "344ee7521ad9"),
    (Cast(NVFP4, "four_over_six"), "62b192e2d2bb"),
    (Cast(MXFP8), "5256a9ef4433"),
    (Cast(FP8_TENSOR), "1a606665e329"),
    (Cast(FP8_1x128, "amax"), "5bbc87a23cf0"),
]


@dataclass(frozen=True)
class FoldPin:
    """One pinned folding: bytes Eg (255 = NaN group) || codes, and the number of lossy elements."""

    set: str
    cast: Cast
    block: tuple[int, int]
    expected: str

    @property
    def id(self) -> str:
        """For pytest."""
        return f"{self.block[0]}x{self.block[1]} of {self.cast.format.name} {self.cast.scale_rule} {self.set}"

    @staticmethod
    def digest(scale: np.ndarray, codes: np.ndarray, lossy: int) -> str:
        """`scale` is the float32 scale of the folded tensor."""
        exponents = (np.ascontiguousarray(scale).view(np.uint32) >> 23).astype(np.uint8)
        return f"{digest(exponents, codes)}/{lossy}"


# Appendix A (last rows) and C.10.
_TABLE_FOLD = """
mxfp8 rceil | 95b2431c5dc4/827 | a10e57d445c0/607 | a7a24998fcac/113 | ea13f08b5853/819
mxfp8 floor | 48da241a319a/489 | 5b84f14fb2d4/598 | fd1937a76275/6 | fc8785782c99/487
mxfp4 even | 42c431e288c9/0 | fcf387d436a0/0 | 5d5115d5fc11/0 | cd04ef230de7/0
mxfp6_e2m3 rceil | 404e26ad926a/0 | b6c755315c74/4 | 0a0b8ff422c3/0 | cc1f0a298471/0
mxfp6_e3m2 rceil | 082d4f7d628e/0 | 2ce65572adfe/5 | d6fc6c6d296b/0 | 4f2bf8700bcf/0
mxfp8_e5m2 rceil | 6b1e034f704a/824 | 209ef4f76b1f/510 | 34b6d4b023f2/0 | ec517e7b701c/812
"""
FOLDS = [
    *(FoldPin(column, Cast(*name.split()), (1, 128), expected) for name, column, expected in _rows(_TABLE_FOLD)),
    FoldPin("Abf16", Cast(MXFP8), (128, 128), "b76906af7fe1/1090"),
    FoldPin("A", Cast(MXFP4), (128, 128), "2cb30c4ad8f4/0"),
    FoldPin("N", Cast(MXFP8), (1, 128), "0028389adbdb/796"),
    FoldPin("N", Cast(MXFP8), (128, 128), "256d9abe17fd/529"),
    FoldPin("N", Cast(MXFP4), (1, 128), "252bafa01cb4/0"),
    FoldPin("N", Cast(MXFP4), (128, 128), "51b02c48d70f/0"),
]
# The float32 scales alone of the folded set N, the same for both formats.
FOLDED_SCALES_N = {(1, 128): "308c41be116f", (128, 128): "30f4663542e9"}
