"""Kernels compiled for Hopper without a GPU, and the number of instructions that an element costs there.

A Hopper multiprocessor issues 4 warp instructions per clock; at full memory speed that is about 28 instructions per
element for a cast that reads two bytes and writes two. The budgets are what was counted with the tiles in use, plus a
tenth: small tiles repeat more addresses, which is worth it where memory is waited for. Stochastic NVFP4 casts count
twice: a program holds a form for tensors of any size beside the one that runs.
"""

import functools
import importlib.metadata

import pytest

from tests.processes import other_process

COUNTED_WITH = "3.6."
BUDGETS = {
    "fp8 delayed, both": 12.3, "fp8 128x128, both": 10.5, "fp8 1x128, both": 18.8, "mxfp8, both": 12.4,
    "mxfp8, rows": 9.6, "mxfp4, rows": 13.9, "nvfp4 tiles, both": 15.9, "nvfp4 stochastic, rows": 27.9,
    "nvfp4 transformed stochastic, columns": 53.6, "mxfp8 to bfloat16, both": 30.6, "mxfp8 folded, both": 26.8,
    "nvfp4 folded, both": 97.9, "nvfp4 tiles folded, both": 18.4,
    "swiglu to mxfp8, both": 23.0, "swiglu to mxfp8, rows": 19.6, "gradients of swiglu to fp8, both": 47.1,
    "norm to fp8, both": 19.5, "norm to mxfp8, both": 17.4,
    "fp8 current, two matrices": 32.4, "fp8 delayed, two matrices": 25.3, "nvfp4 to bfloat16, two matrices": 124.0,
}  # fmt: skip

# Without FP8 instructions the compiler takes ten times as long for kernels that do rows and columns at once, and half a
# minute for NVFP4 in pairs, which call what single casts call: rows alone show that such a kernel compiles.
ONE_OF_A_KIND = (
    "fp8 delayed, both", "mxfp8, rows", "mxfp4, rows", "nvfp4 stochastic, rows", "mxfp8 to bfloat16, both",
    "mxfp8 folded, rows", "swiglu to mxfp8, rows", "norm to fp8, both", "fp8 current, two matrices",
    "nvfp4 to bfloat16, rows of two matrices",
)  # fmt: skip
ALL_KINDS_OF_CASTS = (
    *ONE_OF_A_KIND, "fp8 1x128, both", "mxfp8, both", "nvfp4 tiles, both", "nvfp4 tiles, rows",
    "nvfp4 transformed stochastic, columns", "mxfp8 folded, both", "mxfp8 folded, columns", "nvfp4 folded, both",
    "nvfp4 tiles folded, both", "gradients of swiglu to fp8, both", "norm to mxfp8, both",
)  # fmt: skip


def _compile(names, capability):
    from tests.kernels.compiling import compile_all

    return compile_all(names, capability)


def _read(shape, stream):
    from tests.kernels.compiling import read_all

    return read_all(shape, stream)


def _norms_of_one_column():
    from tests.kernels.compiling import compile_norms_of_one_column

    return compile_norms_of_one_column()


def compiled(capability, workloads=tuple(BUDGETS)):
    """`compile_all` of workloads, in a process whose Triton has a target but no device."""
    pytest.importorskip("triton", reason="triton is not installed")
    return other_process()(_compile, list(workloads), capability)


# Casts by blocks and by two levels: compiled in every run.
QUICK = ("mxfp8, rows", "nvfp4 stochastic, rows")
WORKLOADS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow("machine code of further kernels for Hopper"))
    for name in BUDGETS
]


@pytest.fixture(scope="module")
def instructions():
    """``instructions(workload)`` of Hopper; the quick ones are compiled together, and so are the others."""
    groups = [QUICK, tuple(name for name in BUDGETS if name not in QUICK)]
    compile_group = functools.cache(functools.partial(compiled, 90))
    return lambda workload: compile_group(groups[workload not in QUICK])[workload]


@pytest.mark.slow("machine code of casts")
@pytest.mark.xdist_group("triton-interpreter")
@pytest.mark.parametrize("workload", WORKLOADS)
def test_instructions_per_element(instructions, workload, record_property):
    version = importlib.metadata.version("triton")
    if not version.startswith(COUNTED_WITH):
        pytest.skip(f"instructions were counted with Triton {COUNTED_WITH}, this is {version}")
    per_element, *_ = instructions(workload)
    record_property("instructions per element", round(per_element, 1))
    assert 1.0 < per_element <= BUDGETS[workload]


@pytest.mark.xdist_group("triton-interpreter")
@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_register_is_read_that_was_never_written(instructions, workload):
    assert instructions(workload)[1] == []


@pytest.mark.slow("machine code for GPUs before Hopper")
@pytest.mark.xdist_group("triton-interpreter")
@pytest.mark.parametrize("capability", [80, 75])
def test_gpus_without_fp8_get_kernels_without_its_instructions(instructions, capability):
    # What the two are given differs in its target alone, so one kernel of each kind will do for the older.
    workloads = ALL_KINDS_OF_CASTS if capability == 80 else ONE_OF_A_KIND
    assert {line.split(".")[0] for workload in BUDGETS for line in instructions(workload)[-1]} == {
        "cvt"
    }  # Hopper has them
    for workload, (_, wrong, _, conversions) in compiled(capability, workloads).items():
        assert (wrong, conversions) == ([], []), workload


# Bytes of shared memory that one block of threads may have, by compute capability.
SHARED_MEMORY = {89: 99 << 10, 100: 227 << 10, 103: 227 << 10, 120: 99 << 10, 121: 99 << 10}


@pytest.mark.slow("machine code for chips that nobody here has")
@pytest.mark.xdist_group("triton-interpreter")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_for_ada_and_blackwell(capability):
    """Casts and producers: no misread register, FP8 conversions by the hardware, shared memory within the chip's."""
    for workload, (_, wrong, shared, conversions) in compiled(capability, ONE_OF_A_KIND[:-2]).items():
        assert wrong == [], workload
        assert shared <= SHARED_MEMORY[capability], workload
        codes_are_fp4 = workload.startswith("mxfp4") or "to bfloat16" in workload
        assert codes_are_fp4 or "cvt.rn.satfinite.e4m3x2.f32" in conversions, workload


@pytest.mark.slow("what Triton reads of every launch of one element")
@pytest.mark.xdist_group("triton-interpreter")
def test_kernels_read_sizes_of_one_and_wide_streams():
    pytest.importorskip("triton", reason="triton is not installed")
    kernels, complaints = other_process()(_read, (1, 1), 2**32 - 1)
    assert complaints == []
    assert kernels > 80


@pytest.mark.slow("machine code of norms")
@pytest.mark.xdist_group("triton-interpreter")
def test_norms_of_one_column_compile():
    pytest.importorskip("triton", reason="triton is not installed")
    assert other_process()(_norms_of_one_column) == 6


def test_misread_registers_are_seen():
    from tests.kernels.compiling import unwritten_reads

    fine = [
        "LDC R1, c[0x0][0x28]",
        "IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28]",
        "IADD3 R1, R1, -0x8, RZ",
        "STL [R1+0x4], R10",
        "LDL R2, [R1]",
        "MOV R11, R10",
    ]
    assert unwritten_reads(fine) == []
    wrong = ["F2FP.F16.E4M3.UNPACK_B R22, R1", "@P0 LOP3.LUT R26, R1, 0xffff, RZ, 0xc0, !PT"]
    assert unwritten_reads(fine + wrong) == wrong
