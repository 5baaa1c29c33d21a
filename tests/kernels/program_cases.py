"""Programs for every cast, form, stride and alignment: the bytes of the reference, in the layout that is stated."""

from dataclasses import replace

import torch

from microfloat.passes import CastInputs, OperandSpec
from microfloat.recipes import Cast, Delayed, Hadamard
from microfloat.torch import reference
from microfloat.torch.launch.program import cast_program, scratch
from tests.kernels.cases import bytes_of, check_values, matrix, seed_words

ROTATED = {"hadamard": Hadamard(), "rounding": "stochastic"}
CASTS = [
    Cast("fp8_tensor"), Cast("fp8_tensor_e5m2", scaling=Delayed()), Cast("fp8_row"), Cast("fp8_1x128"),
    Cast("fp8_128x128"), Cast("mxfp8"), Cast("mxfp6_e2m3"), Cast("mxfp4"), Cast("mxfp4", **ROTATED), Cast("nvfp4"),
    Cast("nvfp4", **ROTATED), Cast("nvfp4_row"), Cast("nvfp4_2d"),
]  # fmt: skip


def _shifted(x):
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    return memory.view(x.shape).copy_(x)


MEMORY = {
    "rows": lambda x: x, "columns": lambda x: x.t().contiguous().t(),
    "both strides": lambda x: x.repeat_interleave(2, 1)[:, ::2], "no alignment": _shifted,
    "three axes": lambda x: x.view(2, -1, x.shape[1]),
}  # fmt: skip


def made(x, row, column, **options):
    """(program, its results) on a seed and an encode scale of 3."""
    specs = [spec for spec in (row, column) if spec is not None]
    scale_enc = torch.tensor(3.0, device=x.device) if any(spec.cast.is_delayed for spec in specs) else None
    inputs = CastInputs(scale_enc, seed_words(x.device))
    program = cast_program(x, row, column, **options)
    stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
    table = (None, x, scratch(x.get_device()), *inputs, None, None, None, None)
    first = program.run(stream, table)
    for a, b in zip(first, program.run(stream, table), strict=True):  # by addresses alone, on a GPU
        assert (a is None) == (b is None)
        assert a is None or torch.equal(bytes_tensor(a), bytes_tensor(b))
    return program, first


def bytes_tensor(x):
    return torch.from_numpy(bytes_of(x))


def check_layouts(program, results):
    """Results lie as the program says."""
    assert len(results) == len(program.layouts)
    for part, tensor in zip(program.layouts, results, strict=True):
        assert (part is None) == (tensor is None)
        if part is not None:
            assert (tensor.shape, tensor.stride()) == (part.shape, part.strides)
            assert str(tensor.dtype) == f"torch.{part.dtype}"


def wanted_of(x, cast, transposed, stream):
    options = {"scale_enc": torch.tensor(3.0)} if cast.is_delayed else {}
    return reference.quantize(x, cast, transposed=transposed, seed=seed_words("cpu"), stream=stream, **options)


def check_operand(spec, parts, x, transposed, what):
    """Three results against the reference."""
    codes, scale, tensor_scale = parts
    want = wanted_of(x, spec.cast, transposed, spec.stream)
    if spec.form == "values":
        if spec.cast.hadamard is None:
            bare = replace(want, tensor_scale=None)
            check_values(codes.t() if spec.turned else codes, reference.dequantize(bare, torch.bfloat16), what)
            assert (tensor_scale is None) == (want.tensor_scale is None)
            assert tensor_scale is None or float(tensor_scale) == float(want.tensor_scale)
        return
    if spec.turned:
        codes = codes.t()
        if scale.dim() == 2 and spec.cast.format.block != (1, 128):
            scale = scale.t()
    for got, other in ((codes, want.codes), (scale, want.scale), (tensor_scale, want.tensor_scale)):
        assert (got is None) == (other is None), what
        if got is not None:
            assert got.shape == other.shape, f"{what}: {got.shape}, {other.shape}"
            assert (bytes_of(got) == bytes_of(other)).all(), what


def check(device):
    """Both operands of matrices that lie in memory in every way."""
    plain = matrix((40, 72), "bfloat16")
    for number, cast in enumerate(CASTS):
        forms = ["codes"]
        if cast.format.scale.name != "FP32" and cast.format.tensor_scale != "row":
            forms.append("values")
        for form in forms:
            for at, (name, lay) in enumerate(MEMORY.items()):
                if device == "cpu" and at != (2 * number + len(form)) % len(MEMORY):  # in the interpreter in turns
                    continue
                turned = (number // len(MEMORY) + at) % 2 == 1
                x = lay(plain.to(device))
                row, column = OperandSpec(cast, form, turned, 2), OperandSpec(cast, form, not turned, 4)
                if name == "three axes":
                    column = None
                program, results = made(x, row, column)
                what = f"{cast.format.name} {form} {name} turned {turned}"
                check_layouts(program, results)
                check_operand(row, results[:3], plain, False, what)
                if column is not None:
                    check_operand(column, results[3:], plain, True, what)
    mixed = OperandSpec(Cast("fp8_tensor"), "codes", False, 0), OperandSpec(Cast("mxfp8"), "values", True, 5)
    program, results = made(plain.to(device), *mixed)
    check_layouts(program, results)
    check_operand(mixed[0], results[:3], plain, False, "mixed")
    check_operand(mixed[1], results[3:], plain, True, "mixed")
