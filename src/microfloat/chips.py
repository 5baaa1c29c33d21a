"""NVIDIA GPUs by compute capability: what they multiply on tensor cores, and the names that people call them by."""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chip:
    """Products that a CUDA device has tensor cores for, by compute capability.

    `is_known`: NVIDIA's chips from Volta to Blackwell; others, such as AMD's 9.4, get no tensor cores of ours.
    `has_fp8`: FP8 GEMM (Ada, Hopper and newer). `has_fp8_blocks`: the same with 1x128 and 128x128 scales (Hopper only;
    newer chips take them as MX), which torch refuses of E5M2; `own_gemm`: microfloat's, which takes it, can be built.
    `has_block_scales`: MX and NVFP4 GEMM (Blackwell). `has_mxfp4`: torch has a GEMM of MXFP4 for it (Blackwell of data
    centers). `multiplies_stored_codes`: bfloat16 products of a few rows with a weight decoded in registers,
    `kernels.gemm.decode` (Ampere and newer). `is_tried`: the paths for it have run on such a chip, with the bytes and
    within the tolerances of the tests. `name`: its generation, for people; `architecture`: as compilers call it.
    """

    capability: tuple[int, int]
    own_gemm: bool = True
    is_known: bool = field(init=False, repr=False, compare=False)
    has_fp8: bool = field(init=False, repr=False, compare=False)
    has_fp8_blocks: bool = field(init=False, repr=False, compare=False)
    has_block_scales: bool = field(init=False, repr=False, compare=False)
    has_mxfp4: bool = field(init=False, repr=False, compare=False)
    multiplies_stored_codes: bool = field(init=False, repr=False, compare=False)
    is_tried: bool = field(init=False, repr=False, compare=False)
    name: str = field(init=False, repr=False, compare=False)
    architecture: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        here, (major, minor) = self.capability, self.capability
        known = here in ((8, 9), (9, 0)) or major in (10, 11, 12) or here < (8, 9)
        name = _GENERATIONS.get(major if known else 0, f"compute capability {major}.{minor}")
        vars(self).update(
            is_known=known, has_fp8=known and here >= (8, 9), has_fp8_blocks=here == (9, 0), has_mxfp4=major == 10,
            has_block_scales=known and major >= 10, multiplies_stored_codes=known and here >= (8, 0),
            is_tried=here == (9, 0), name="Ada" if here == (8, 9) else name, architecture=f"sm_{major}{minor}",
        )  # fmt: skip


_GENERATIONS = {7: "Volta / Turing", 8: "Ampere", 9: "Hopper", 10: "Blackwell", 11: "Blackwell", 12: "Blackwell"}
# Name of a chip or of its generation -> compute capability.
CHIPS = {
    "volta": (7, 0), "v100": (7, 0), "turing": (7, 5), "t4": (7, 5), "ampere": (8, 0), "a100": (8, 0), "a30": (8, 0),
    "a10": (8, 6), "a40": (8, 6), "rtx3090": (8, 6), "ada": (8, 9), "l4": (8, 9), "l40": (8, 9), "l40s": (8, 9),
    "rtx4090": (8, 9), "hopper": (9, 0), "h100": (9, 0), "h200": (9, 0), "h20": (9, 0), "gh200": (9, 0),
    "blackwell": (10, 0), "b100": (10, 0), "b200": (10, 0), "gb200": (10, 0), "b300": (10, 3), "gb300": (10, 3),
    "rtx5090": (12, 0), "rtxpro6000": (12, 0), "gb10": (12, 1),
}  # fmt: skip


def chip_named(name: str) -> Chip | None:
    """The chip behind "h200", "RTX 5090", "Hopper", "sm_90" or "sm_90a"; None for any other word."""
    word = re.sub(r"[\s_-]", "", name.lower())
    if word in CHIPS:
        return Chip(CHIPS[word])
    match = re.fullmatch(r"sm(\d{1,2})(\d)[af]?", word)
    return Chip((int(match[1]), int(match[2]))) if match and int(match[1]) >= 7 else None
