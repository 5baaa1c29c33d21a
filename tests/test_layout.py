"""`layout_of` against what the oracle makes, for every format; and how layouts turn."""

import numpy as np
import pytest

from microfloat import reference
from microfloat.formats import FORMATS, NVFP4, FP8_1x128
from microfloat.layout import layout_of
from microfloat.operands import OPERANDS, OPERANDS_OF, TENSORS
from microfloat.recipes import Cast, Hadamard

_SIZES = ((1, 1), (3, 17), (16, 32), (33, 130), (128, 256))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_codes_and_scales_are_as_the_oracle_makes_them(fmt):
    casts = [Cast(fmt)]
    if fmt.name.startswith("NVFP4") and not fmt.is_tile:
        casts.append(Cast(fmt, hadamard=Hadamard()))
    for cast in casts:
        for rows, length in _SIZES:
            made, layout = reference.quantize(np.ones((rows, length), np.float32), cast), layout_of(cast, rows, length)
            assert layout.codes.shape == made.codes.shape
            for part, array in ((layout.scale, made.scale), (layout.tensor_scale, made.tensor_scale)):
                got = None if array is None else (array.shape, str(array.dtype))
                assert (None if part is None else (part.shape, part.dtype)) == got


def test_a_turned_operand_is_the_same_memory_but_for_block_scales_of_fp8():
    plain, turned = (layout_of(Cast(NVFP4), 48, 32, turned=turned) for turned in (False, True))
    assert plain.codes.shape == turned.codes.shape[::-1]
    assert plain.codes.strides == turned.codes.strides[::-1] == (16, 1)
    block = layout_of(Cast(FP8_1x128), 48, 256, turned=True)
    assert block.scale is not None
    assert (block.scale.shape, block.scale.strides) == ((48, 2), (1, 48))


def test_every_tensor_is_read_once_as_it_lies_and_once_transposed():
    for tensor in TENSORS:
        row, column = OPERANDS_OF[tensor]
        assert (row.tensor, column.tensor, row.transposed, column.transposed) == (tensor, tensor, False, True)
    assert [operand.stream for operand in OPERANDS] == list(range(6))
