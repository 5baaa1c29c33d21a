"""Casts and producers as tests call them: two casts and the names of what they are given.

Nothing of Triton is imported before the first call, so that `compiling` may put its own driver in place first.
"""


def specs(row, column, *, form="codes", row_stream=0, column_stream=0):
    """The operands that two casts make, each None where there is no cast."""
    from microfloat.passes import OperandSpec

    pair = (row, row_stream), (column, column_stream)
    return tuple(None if cast is None else OperandSpec(cast, form, stream=stream) for cast, stream in pair)


def cast_to(form, x, row, column, *, seed=None, row_stream=0, column_stream=0):
    """Codes or values, scale and tensor scale of both operands in a form, and the counts of folding, int64 [2]."""
    import torch

    from microfloat.passes import CastInputs
    from microfloat.torch.launch import triton

    lossy = torch.empty(2, dtype=torch.int64, device=x.device)
    both = specs(row, column, form=form, row_stream=row_stream, column_stream=column_stream)
    made = triton.cast_parts(x, *both, CastInputs(seed=seed, folded=lossy, tiles=lossy))
    return made.row, made.column, lossy


def folded(x, row, column, *, tile=False, **options):
    """Both operands folded to 1x128 or 128x128 blocks as `Operand`s, and the counts of what that changed."""
    from microfloat.layout import folded_format
    from microfloat.torch.backends.base import Operand

    form, (rows, columns) = "tiles" if tile else "folded", x.shape
    *made, lossy = cast_to(form, x, row, column, **options)

    def operand(cast, parts, rows, length):
        codes, scale, _ = parts
        return Operand(codes, scale[:, : -(-length // 128)], None, folded_format(cast.format, form), rows, length)

    casts = (row, rows, columns), (column, columns, rows)
    pairs = zip(made, casts, strict=True)
    return *(None if cast is None else operand(cast, parts, *sizes) for parts, (cast, *sizes) in pairs), lossy


def codes(producer, row, column, *, row_stream=0, column_stream=0, second=None, **given):
    """Both operands of each value of a producer, and the statistics of a norm; `second`: inputs of the second."""
    from microfloat.passes import CastInputs
    from microfloat.torch.launch import triton

    both = specs(row, column, row_stream=row_stream, column_stream=column_stream)
    inputs = [CastInputs(**one) for one in (given, second) if one is not None]
    return triton.codes(producer, *both, *inputs)


def folded_codes(operand, cast, *, tile):
    """An MX operand of codes, folded from these to 1x128 or 128x128 blocks, with what fills up its scales."""
    from microfloat.layout import layout_of
    from microfloat.torch.launch import triton

    form = "tiles" if tile else "folded"
    return triton.fold_codes(operand, form, layout_of(cast, operand.rows, operand.length, form).scale)
