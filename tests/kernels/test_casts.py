"""Numbers that stand for a cast in the kernels, without a kernel."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from microfloat.passes.matrix import kernel_cast
from microfloat.recipes import Cast, Hadamard


def test_both_operands_of_tiles_have_the_same_values_unless_something_depends_on_the_axis() -> None:
    from microfloat.passes import OperandSpec
    from microfloat.passes.casts import cast_passes
    from microfloat.passes.matrix import Device, Matrix

    def is_one(row: Cast, column: Cast) -> bool:
        """Decoded operands of a matrix are one buffer, seen twice."""
        matrix = Matrix(64, 64, 64, 1, "bfloat16", 16, Device(0, 132, conversions=True))
        return bool(cast_passes(matrix, OperandSpec(row, "values"), OperandSpec(column, "values")).shared)

    tiles = Cast("nvfp4_2d")
    assert is_one(tiles, Cast("nvfp4_2d"))
    for other in (
        Cast("nvfp4"), Cast("nvfp4_2d", rounding="stochastic"), Cast("nvfp4_2d", scale_rule="four_over_six_mse_256"),
        Cast("nvfp4", hadamard=Hadamard()), Cast("mxfp8"),
    ):  # fmt: skip
        assert not is_one(other, other), other
    assert not is_one(tiles, Cast("nvfp4_2d", scale_rule="two_level_torchao"))


def test_only_equal_casts_of_large_whole_tiles_are_converted_once() -> None:
    from microfloat.kernels.casts.scaled import AMAX, AXES, GIVEN, TILE, converts_once
    from microfloat.kernels.constants import ScaledCast

    cast, stochastic = ScaledCast(3, 7, 0, False, False), ScaledCast(3, 7, 0, True, False)
    for source in (GIVEN, AMAX):
        assert converts_once(cast, cast, source, True, 256)
    for row, column, source, even, rows in (
        (cast, stochastic, GIVEN, True, 256), (stochastic, stochastic, GIVEN, True, 256),
        (cast, None, GIVEN, True, 256), (None, cast, GIVEN, True, 256),
        (cast, cast, GIVEN, False, 256), (cast, cast, GIVEN, True, 128),
        (cast, cast, AXES, True, 256), (cast, cast, TILE, True, 256),
    ):  # fmt: skip
        assert not converts_once(row, column, source, even, rows)


def test_a_shared_operand_has_a_layout_of_its_own() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from microfloat.passes import OperandSpec
    from microfloat.torch.launch.program import cast_program

    specs = [OperandSpec(Cast("nvfp4_2d"), "values", True, stream) for stream in (1, 3)]
    program = cast_program(torch.zeros(48, 32, dtype=torch.bfloat16), *specs)
    row, row_scale, row_level, column, column_scale, column_level = program.layouts
    assert row == ((32, 48), (1, 32), "bfloat16")
    assert column == ((48, 32), (32, 1), "bfloat16")
    assert row_scale is column_scale is None
    assert row_level == column_level == ((), (), "float32")


@pytest.mark.parametrize("form", ["codes", "values"])
def test_a_launch_of_one_operand_writes_every_buffer_that_it_is_given(form: str) -> None:
    """XLA makes an array of each position of a launch: one that is given twice, and written once, would be read."""
    from microfloat.passes import OperandSpec
    from microfloat.passes.casts import cast_passes
    from microfloat.passes.matrix import At, Device, Matrix
    from microfloat.routes import WRITES_VALUES

    device = Device(0, 132, True, measures=False, orders_scales=False)
    matrix = Matrix(256, 384, 384, 1, "bfloat16", 16, device)
    for name in (
        "fp8_tensor",
        "fp8_row",
        "fp8_1x128",
        "fp8_128x128",
        "mxfp8",
        "mxfp4",
        "nvfp4",
        "nvfp4_row",
        "nvfp4_2d",
    ):
        spec = OperandSpec(Cast(name), form)
        if form == "values" and kernel_cast(spec.cast).family not in WRITES_VALUES:
            continue
        for row, column in ((spec, None), (None, spec)):
            for launch in cast_passes(matrix, row, column).launches:
                buffers = [at for at in launch.tensors if at >= At.MADE]
                assert len(buffers) == len(set(buffers)), f"{name} {form}: {launch.tensors}"
