"""Compile what the launchers would launch, for a GPU that is not there; count instructions in the result.

Run in a process of its own: Triton's driver is replaced by one that only names the target.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

from tests.kernels.launchers import answer

HOPPER, AMPERE, TURING = 90, 80, 75
UNREADABLE = (103, 121)  # chips that the disassembler of Triton 3.6 does not know, though its assembler does


class NamedTarget:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):
        return self.capability  # a device of its own, since compiled kernels are kept by device

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def instructions_of(cubin):
    """The machine instructions of one thread's program, as text, without padding."""
    from triton.backends import nvidia

    disassembler = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)
    return [line for line in lines if not line.lstrip("@!UPT0123456789 ").startswith("NOP")]


def unwritten_reads(instructions):
    """Instructions that take the stack pointer (R1) as data.

    The assembler of Triton 3.6 (CUDA 12.8) does that where one FP8 conversion should have served two uses: a wrong
    result without a message. Memory operands ([R1+...]), its loading and its adjusting are what R1 is for.
    """
    wrong = []
    for line in instructions:
        operation = line.split(";")[0]
        if re.search(r"\bR1\b(?!\d)", re.sub(r"\[[^\]]*\]", "", operation)) and not re.match(
            r"^(@!?U?P\d+ )?(LDC|MOV|IMAD\.MOV|S2R|IADD3|UIADD3|VIADD)\S* R1\b", operation.strip()
        ):
            wrong.append(operation.strip())
    return wrong


def _launchers(capability):
    """`torch.launch.program`, all launchers made to believe in a GPU of that capability."""
    import torch
    from triton.runtime import driver

    driver.set_active(NamedTarget(capability))
    program = answer(scratch=lambda device: torch.zeros(8, dtype=torch.int64))
    program.DEVICES[-1] = program.device_of(-1)._replace(conversions=capability >= 89)
    return program


def compile_all(workloads, capability=HOPPER):
    """``{name: (instructions per element, misread registers, shared memory, conversions)}`` of what workloads launch.

    On whole bfloat16 tiles. The first is that of the last kernel of a workload; the second is `unwritten_reads` over
    all of them, the third the most bytes that one of them shares, the fourth all conversions to or from FP8 and FP4
    that their PTX asks the hardware for. Machine code of `UNREADABLE` chips is made, and not read.
    """
    import torch

    from microfloat.kernels.constants import How

    program = _launchers(capability)
    launched = []

    def compile_only(self, key, programs, tensors, scalars, constants, warps):
        arguments = [program.as_bytes(tensor) for tensor in tensors]
        options = {"num_warps": warps.number, "maxnreg": warps.registers, "enable_fp_fusion": False}
        compiled = self.function.run(*arguments, *scalars, *constants, **options, grid=(programs,), warmup=True)
        instructions = [] if capability in UNREADABLE else instructions_of(compiled.asm["cubin"])
        # Other kernels (of amaxes, swizzles) are not the last of a workload.
        hows = [getattr(constant, "HOW", constant) for constant in constants]
        how = next((how for how in hows if isinstance(how, How)), How(0, 0, False, False, False, 128, 128))
        elements = how.BM * how.BN / (32 * warps.number)
        conversions = re.findall(r"cvt\.\S*(?:e4m3|e5m2|e2m1)\S*", compiled.asm["ptx"])
        shared = compiled.metadata.shared
        launched.append((len(instructions), elements, unwritten_reads(instructions), shared, conversions))

    program.Kernel.compile = compile_only
    counts = {}
    for name in workloads:
        launched.clear()
        WORKLOADS[name](torch.zeros(256, 1024, dtype=torch.bfloat16))
        instructions, elements, *_ = launched[-1]
        wrong = [line for _, _, wrong, *_ in launched for line in wrong]
        shared = max(shared for *_, shared, _ in launched)
        conversions = sorted({line for *_, lines in launched for line in lines})
        counts[name] = instructions / elements, wrong, shared, conversions
    return counts


def read_all(shape, stream):
    """``(kernels, complaints)``: Triton's reading of every kind of launch for a matrix of that shape, nothing compiled.

    A size of 1 is a constant to Triton, and a number of 2^31 and more is wider than others: what is right for a tensor
    or for a word need not be for these. The interpreter knows no such differences.
    """
    import torch
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction

    program = _launchers(HOPPER)
    seen, complaints = set(), []

    def read(self, key, signature, device, constexprs, options, attrs, warmup):
        from triton._C.libtriton import ir

        target = self.device_caches[device][2]
        backend, context = make_backend(target), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source, functions = ASTSource(self, signature, constexprs, attrs), backend.get_codegen_implementation(options)
        source.make_ir(target, options, functions, backend.get_module_map(), context)

    def read_only(self, key, programs, tensors, scalars, constants, warps):
        arguments = [program.as_bytes(tensor) for tensor in tensors]
        kinds = tuple(None if tensor is None else tensor.dtype for tensor in arguments)
        if (self.function.fn.__name__, kinds, constants) not in seen:
            seen.add((self.function.fn.__name__, kinds, constants))
            self.function.run(*arguments, *scalars, *constants, grid=(programs,), warmup=True)

    program.Kernel.compile = read_only
    x = torch.zeros(shape, dtype=torch.bfloat16)
    with mock.patch.object(JITFunction, "_do_compile", read):  # later tests of this process compile
        for name, launch in _every_launch(x, stream):
            try:
                launch()
            except Exception as error:
                while error.__cause__ is not None:
                    error = error.__cause__
                complaints.append(f"{name}: {error}")
    return len(seen), complaints


def compile_norms_of_one_column():
    """Number of kernels of norms of one column that compile: Triton 3.6 fails where it takes the 1 for a constant."""
    import torch

    program = _launchers(HOPPER)
    compiled = []

    def compile_only(self, key, programs, tensors, scalars, constants, warps):
        arguments = [program.as_bytes(tensor) for tensor in tensors]
        options = {"num_warps": warps.number, "maxnreg": warps.registers, "enable_fp_fusion": False}
        compiled.append(self.function.run(*arguments, *scalars, *constants, **options, grid=(programs,), warmup=True))

    program.Kernel.compile = compile_only
    from microfloat.torch.launch import triton
    from microfloat.torch.launch.prologues import Norm
    from tests.kernels import calls

    x, weight, casts = torch.zeros(5, 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16), _casts()
    known = {"scale_enc": torch.ones(()), "record": torch.zeros(4)}
    calls.codes(Norm(x, weight, weight, 1e-5, "layer"), casts["delayed"], casts["delayed"], **known)
    calls.codes(Norm(x, weight, None, 1e-5, "rms"), casts["mxfp8"], casts["mxfp8"])
    triton.values(Norm(x, weight, None, 1e-5, "rms"))
    return len(compiled)


def _every_launch(x, stream):
    """Named launches: a Cast of every format, rounding and transform, and every producer, decoder and folded form."""
    import functools

    import torch

    from microfloat.recipes import Cast
    from microfloat.routes import family_of
    from microfloat.torch.launch import triton
    from microfloat.torch.launch.prologues import Activation, ActivationGradient, Norm
    from tests.contract.cases import EVERY_CAST, cast_id
    from tests.kernels import calls

    usual = [cast for cast in EVERY_CAST if cast == Cast(cast.format, None, cast.rounding, cast.hadamard)]
    weight, one, record = torch.zeros(x.shape[1], dtype=x.dtype), torch.ones(()), torch.zeros(4)
    random = {"seed": torch.zeros(2, dtype=torch.int64), "row_stream": stream, "column_stream": stream}
    for cast in usual:
        if not family_of(cast)[1]:
            options = random if cast.is_stochastic else {}
            yield cast_id(cast), functools.partial(triton.quantize_both, x, cast, cast, **options)
    casts = _casts()
    for name, known in (("delayed", {"scale_enc": one, "record": record}), ("mxfp8", {}), ("mxfp4", {})):
        both = casts[name], casts[name]
        for kind in ("rms", "layer"):
            norm = Norm(x, weight, weight if kind == "layer" else None, 1e-5, kind)
            yield f"{kind} norm, {name}", functools.partial(calls.codes, norm, *both, **known)
        yield f"swiglu, {name}", functools.partial(calls.codes, Activation(x, x, "silu"), *both, **known)
        gradients = ActivationGradient(x, x, x, "silu")
        yield f"its gradients, {name}", functools.partial(calls.codes, gradients, *both, **known, second=known)
        if name != "delayed":
            yield f"{name} folded", functools.partial(calls.folded, x, *both)
            operand = triton.quantize(x, both[0])
            for tile in (False, True):
                yield f"{name} folded codes, {tile}", functools.partial(calls.folded_codes, operand, both[0], tile=tile)
            yield f"{name} to bfloat16", functools.partial(calls.cast_to, "values", x, *both)
    for tile, name in ((False, "nvfp4 rht sr"), (True, "nvfp4 2d")):
        yield f"{name} folded", functools.partial(calls.folded, x, casts[name], casts[name], tile=tile, **random)
    for name in ("nvfp4 sr", "nvfp4 rht sr"):
        both = casts[name], casts[name]
        yield f"{name} to bfloat16", functools.partial(calls.cast_to, "values", x, *both, **random)


def _casts():
    from microfloat.recipes import Cast, Delayed, Hadamard

    return {
        "delayed": Cast("fp8_tensor", scaling=Delayed()), "tiles": Cast("fp8_128x128"), "blocks": Cast("fp8_1x128"),
        "mxfp8": Cast("mxfp8"), "mxfp4": Cast("mxfp4"), "nvfp4 sr": Cast("nvfp4", rounding="stochastic"),
        "nvfp4 2d": Cast("nvfp4_2d"), "nvfp4 rht sr": Cast("nvfp4", rounding="stochastic", hadamard=Hadamard()),
    }  # fmt: skip


def _quantize(row, column):
    def workload(x):
        import torch

        from microfloat.torch.launch import triton

        casts = _casts()
        options = {"seed": torch.zeros(2, dtype=torch.int64)}
        if row == "delayed":
            options |= {"scale_enc": torch.ones(()), "record": torch.zeros(4)}
        if (row or column).startswith("nvfp4"):
            options["amax"] = torch.ones(())
        triton.quantize_both(x, casts.get(row), casts.get(column), **options)

    return workload


def _fused(name):
    def workload(x):
        import torch

        from microfloat.torch.launch.prologues import Activation, ActivationGradient, Norm
        from tests.kernels import calls

        cast, delayed = _casts()["mxfp8"], _casts()["delayed"]
        known = {"scale_enc": torch.ones(()), "record": torch.zeros(4)}
        if name.startswith("swiglu"):
            calls.codes(Activation(x, x, "silu"), cast, None if name == "swiglu rows" else cast)
        elif name == "gradients":
            calls.codes(ActivationGradient(x, x, x, "silu"), delayed, delayed, **known, second=known)
        elif name.startswith("norm"):
            norm, is_delayed = (
                Norm(x, torch.zeros(1024, dtype=torch.bfloat16), None, 1e-5, "rms"),
                name[5:] == "delayed",
            )
            calls.codes(norm, *((delayed, delayed) if is_delayed else (cast, cast)), **(known if is_delayed else {}))
        elif name == "nvfp4 folded":
            cast, column = _casts()["nvfp4 sr"], _casts()["nvfp4 rht sr"]
            calls.folded(x, cast, column, seed=torch.zeros(2, dtype=torch.int64))
        elif name == "nvfp4 tiles folded":
            calls.folded(x, _casts()["nvfp4 2d"], _casts()["nvfp4 2d"], tile=True)
        elif name.startswith("fold"):
            calls.folded(x, cast if name != "fold columns" else None, cast if name != "fold rows" else None)
        else:
            calls.cast_to("values", x, cast, cast)

    return workload


def _together(delayed):
    """Two matrices in one launch, measured on the way or not."""

    def workload(x):
        import torch

        from microfloat.passes import OperandSpec
        from microfloat.recipes import Cast
        from microfloat.torch.launch.program import pair_program, scratch

        specs = (OperandSpec(_casts()["delayed"] if delayed else Cast("fp8_tensor")),) * 2
        program = pair_program(x, specs, x, specs, records=delayed)
        one = torch.ones(16)
        inputs = (one, None, one, None, None, None, None) if delayed else (None,) * 7
        program.run(0, (None, x, scratch(-1), *inputs, x, inputs[0], None, inputs[2]))

    return workload


def _values_together(transposed):
    """Two matrices measured and cast to NVFP4 values in one launch, which makes a call seed as well."""

    def workload(x):
        import torch

        from microfloat.passes import OperandSpec
        from microfloat.recipes import Cast, Hadamard
        from microfloat.torch.launch.program import pair_program, scratch

        rows, tiles = OperandSpec(Cast("nvfp4"), "values"), OperandSpec(Cast("nvfp4_2d"), "values")
        columns = OperandSpec(Cast("nvfp4", hadamard=Hadamard()), "values", False, 5)
        first, second = ((rows, columns), (tiles, tiles)) if transposed else ((rows, None), (rows, None))
        program = pair_program(x, first, x, second, draws_seed=True)
        words = torch.zeros(8, dtype=torch.int64)
        program.run(0, (None, x, scratch(-1), None, words, *(None,) * 5, x, None, words, None))

    return workload


WORKLOADS = {
    "fp8 delayed, both": _quantize("delayed", "delayed"), "fp8 128x128, both": _quantize("tiles", "tiles"),
    "fp8 1x128, both": _quantize("blocks", "blocks"), "mxfp8, both": _quantize("mxfp8", "mxfp8"),
    "mxfp8, rows": _quantize("mxfp8", None), "mxfp4, rows": _quantize("mxfp4", None),
    "nvfp4 tiles, both": _quantize("nvfp4 2d", "nvfp4 2d"), "nvfp4 tiles, rows": _quantize("nvfp4 2d", None),
    "nvfp4 stochastic, rows": _quantize("nvfp4 sr", None), "nvfp4 transformed stochastic, columns": _quantize(None,
    "nvfp4 rht sr"),
    "mxfp8 to bfloat16, both": _fused("values"), "swiglu to mxfp8, both": _fused("swiglu"),
    "swiglu to mxfp8, rows": _fused("swiglu rows"), "gradients of swiglu to fp8, both": _fused("gradients"),
    "norm to fp8, both": _fused("norm delayed"), "norm to mxfp8, both": _fused("norm mxfp8"),
    "mxfp8 folded, both": _fused("fold"), "mxfp8 folded, rows": _fused("fold rows"),
    "mxfp8 folded, columns": _fused("fold columns"), "nvfp4 folded, both": _fused("nvfp4 folded"),
    "nvfp4 tiles folded, both": _fused("nvfp4 tiles folded"),
    "fp8 current, two matrices": _together(False), "fp8 delayed, two matrices": _together(True),
    "nvfp4 to bfloat16, two matrices": _values_together(True),
    "nvfp4 to bfloat16, rows of two matrices": _values_together(False),
}  # fmt: skip
