"""Writes through slices of QuantizedTensors change nothing else; rows are replaced, tensors joined at whole blocks."""

import copy
import io

import pytest
import torch
from torch import nn

import microfloat.torch as mf
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.recipes import Cast, Hadamard
from microfloat.torch import QuantizedTensor
from tests.torch.tensor.format_cases import every_format, one_row_formats

shared = pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tensor_e5m2", "nvfp4", "nvfp4_2d"])


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(values, wanted):
    return ((values - wanted).norm() / wanted.norm()).item()


@every_format
@pytest.mark.parametrize("base", ["zeros", "noise"])
@pytest.mark.parametrize("source", ["plain", "quantized"])
def test_shards_of_very_different_size_are_loaded_one_by_one(fmt, base, source):
    """As serving engines load q, k and v into one weight: each as precise as in the cast of all three together."""
    shards = [randn(128, 80) * size for size in (1, 10, 100)]
    weight = nn.Parameter(mf.quantize(torch.zeros(384, 80) if base == "zeros" else randn(384, 80), fmt), False)
    for position, shard in enumerate(shards):
        weight.data.narrow(0, 128 * position, 128).copy_(shard if source == "plain" else mf.quantize(shard, fmt))
    together = mf.quantize(torch.cat(shards), fmt).dequantize()
    rounds = 1.05 if source == "plain" else 1.7  # codes of another scale are rounded once more
    for loaded, expected, shard in zip(weight.data.dequantize().split(128), together.split(128), shards, strict=True):
        assert error(loaded, shard) < rounds * error(expected, shard)


VIEWS = {
    "slice": lambda t: t[16:32], "narrow": lambda t: t.narrow(0, 16, 16), "split": lambda t: t.split(16)[1],
    "columns": lambda t: t[:, 128:], "transposed": lambda t: t.t()[128:], "slice of a slice": lambda t: t[16:][:16],
    "detached": lambda t: t[16:32].detach(), "regrouped": lambda t: t.view(2, 32, 144)[1],
    "through an axis": lambda t: t.unsqueeze(0)[0][32:],
}  # fmt: skip
WRITES = {
    "zeros": lambda t: t.zero_(), "ones": lambda t: t.fill_(1.0), "larger": lambda t: t.copy_(torch.full(t.shape, 3e4)),
    "grown": lambda t: t.mul_(1000), "stepped": lambda t: t.add_(torch.full(t.shape, 50.0), alpha=-1),
    "infinite": lambda t: t.copy_(torch.full(t.shape, float("inf"))),
}  # fmt: skip


@pytest.mark.slow_cases(
    "further formats of a checked operation",
    all_but=("*-nvfp4", "slice-*", "columns-*", "through an axis-*"),
)
@shared
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_through_a_slice_changes_nothing_else(name, view, write):
    q = mf.quantize(randn(64, 144).clamp(min=0.3), name)
    window = VIEWS[view](q)
    other, before = VIEWS["slice"](q) if view != "slice" else q[32:48], q.dequantize()
    outside = torch.ones(64, 144, dtype=torch.bool)
    VIEWS[view](outside).zero_()
    expected = before.clone()
    WRITES[write](VIEWS[view](expected))
    WRITES[write](window)
    values = q.dequantize()
    # A scale that grew by a power of two keeps what is no subnormal under it, but for the scale's own rounding.
    coarse = 3e4 / 448 * 2**-9 if write == "larger" else 0.0
    torch.testing.assert_close(values[outside], before[outside], rtol=1e-6, atol=coarse)
    largest = values.abs().max() if write == "infinite" else None
    if largest is not None:
        assert torch.equal(values[~outside], largest.expand_as(values[~outside]))
    else:
        torch.testing.assert_close(values[~outside], expected[~outside], rtol=0.3, atol=0.02)
    assert torch.equal(VIEWS["slice"](q).dequantize() if view != "slice" else q[32:48].dequantize(), other.dequantize())


@shared
def test_what_fits_leaves_every_other_byte(name):
    q = mf.quantize(randn(64, 48), name)
    untouched = q[32:].clone()
    for factor in (1.0, 0.5, 1.0):
        q[:32].copy_(q[:32].dequantize() * factor)
        assert torch.equal(q[32:], untouched)


@shared
def test_the_last_rows_with_values_choose_the_scale(name):
    """A weight that is zeros but for the slice, as before loading, gets the scale of the slice."""
    q, values = mf.quantize(torch.zeros(64, 48), name), randn(32, 48) * 1e-4
    q[32:].copy_(values)
    assert torch.equal(q[32:].dequantize(), mf.quantize(values, name).dequantize())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("fmt", ["fp8_tensor", "fp8_row", "mxfp8", "nvfp4", "nvfp4_row", "nvfp4_2d"])
def test_a_tensor_of_zeros_takes_the_bytes_of_shards(fmt, dim):
    """Shards of one stored weight, whose largest value is in none of them, fill memory as a serving engine does."""
    values = torch.cat([randn(64, 128), 9 * randn(64, 128)], dim)
    stored = mf.quantize(values, fmt).narrow(dim, 0, values.shape[dim] // 2)
    weight = mf.quantize(torch.zeros(64, 128), fmt)
    for loaded, shard in zip(weight.chunk(2, dim), stored.chunk(2, dim), strict=True):
        loaded.copy_(shard)
    assert torch.equal(weight, stored)


@pytest.mark.parametrize("fmt", ["fp8_row", "nvfp4_row"])
def test_columns_take_row_scales_where_no_other_value_is_under_them(fmt):
    weight, values = mf.quantize(torch.zeros(64, 128), fmt), randn(64, 64)
    weight[:, :64].copy_(values)
    assert torch.equal(weight[:, :64], mf.quantize(values, fmt))
    before = copy.deepcopy(weight)
    with pytest.raises(NotSupportedError, match="write into a slice"):
        weight[:, 64:].copy_(9 * values)
    assert torch.equal(weight, before)


def test_slices_that_share_row_scales_are_not_written_to():
    for q in (mf.quantize(randn(32, 64), "fp8_row"), mf.quantize(randn(32, 64), "nvfp4_row")):
        before = q.clone()
        with pytest.raises(NotSupportedError, match=r"write into a slice: got \(32, 16\) of .* q.copy_\(values\)"):
            q[:, :16].zero_()
        assert torch.equal(q, before)
    deep = mf.quantize(randn(4, 6, 32), "nvfp4_row")
    for window in (deep[:, 2:4], deep.permute(1, 0, 2)):
        with pytest.raises(NotSupportedError, match="write into a slice"):
            window.zero_()
    before = deep.dequantize()
    deep[2:].zero_()
    assert torch.equal(deep.dequantize(), torch.cat([before[:2], torch.zeros(2, 6, 32)]))
    transformed = mf.quantize(randn(32, 64), Cast("nvfp4", hadamard=Hadamard()))
    with pytest.raises(NotSupportedError, match="no Hadamard transform"):
        transformed[:16].zero_()


@shared
def test_copies_of_a_slice_are_tensors_of_their_own(name):
    q = mf.quantize(randn(64, 48), name)
    buffer = io.BytesIO()
    torch.save((q, q[16:32]), buffer)
    buffer.seek(0)
    base, loaded = torch.load(buffer, weights_only=True)
    for whole, part in (
        (q, q[16:32].clone()), (q, copy.deepcopy(q[16:32])), (base, loaded), (q, q[16:32].to(torch.float16)),
        (q, q[::2].contiguous() if name != "nvfp4_2d" else q[16:32].clone()),
    ):  # fmt: skip
        before = whole.clone()
        part.fill_(500.0)
        assert torch.equal(whole, before)
        torch.testing.assert_close(part.dequantize(), torch.full_like(part, 500.0), rtol=0.01, atol=0)


def test_a_slice_that_came_through_a_compiler_is_not_written_to():
    q = mf.quantize(randn(64, 48), "fp8_tensor")
    names, context = q[:16].__tensor_flatten__()
    again = QuantizedTensor.__tensor_unflatten__({n: getattr(q[:16], n) for n in names}, context, (16, 48), (48, 1))
    with pytest.raises(NotSupportedError, match="eager mode"):
        again.zero_()
    before = q.clone()
    with pytest.raises(Exception, match="write into a slice"):
        torch.compile(lambda q: q[:16].zero_(), fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(q, before)


# ---- rows by index


ROWS = {
    "indices": lambda t, i: t[i], "list": lambda t, i: t[[3, 0]], "second axis": lambda t, i: t[:, i],
    "both axes": lambda t, i: t[i, i + 1], "mask": lambda t, i: t[torch.arange(12).view(4, 3) % 2 == 0],
    "mask of one axis": lambda t, i: t[torch.arange(4) > 1], "grid": lambda t, i: t[i[:, None], i],
    "none": lambda t, i: t[i[:0]], "index_select": lambda t, i: t.index_select(-2, i),
    "permutation": lambda t, i: t.flatten(0, 1)[torch.arange(12).flip(0)],
}  # fmt: skip


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tensor_e5m2", "nvfp4"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_row_of_every_expert_is_refused(name, axis):
    """It would be a matrix whose rows have a scale each; FP8 gave rows of the wrong scale, NVFP4 ended inside torch."""
    matrices = [mf.quantize(randn(32, 64), name, axis=axis), mf.quantize(1000 * randn(32, 64), name, axis=axis)]
    experts, across = torch.stack(matrices), 1 if axis == -1 else 2
    for take in (lambda: experts.select(across, 3), lambda: experts.unbind(across)):
        with pytest.raises(InvalidValueError, match=r"select: got .* of 2 experts"):
            take()
    assert torch.equal(experts[1].dequantize(), matrices[1].dequantize())
    window = experts.narrow(across, 3, 1)
    assert torch.equal(window.dequantize(), experts.dequantize().narrow(across, 3, 1))


@every_format
@pytest.mark.parametrize("shape", [(128, 0), (128, 32)])
def test_expanded_tensors_are_saved(fmt, shape):
    """torch keeps strides of 0 where there are no elements, which is no memory that several entries share."""
    expanded, buffer = mf.quantize(randn(*shape), fmt).unsqueeze(0).expand(3, *shape), io.BytesIO()
    torch.save(expanded, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer).dequantize(), expanded.dequantize())


@one_row_formats
@pytest.mark.parametrize("how", ROWS)
def test_rows_taken_by_index(fmt, how):
    """Tokens in the order of their experts, for instance."""
    q, index = mf.quantize(randn(4, 3, 70), fmt), torch.tensor([1, 0])
    values = q.dequantize()
    taken = ROWS[how](q, index)
    assert torch.equal(taken.dequantize(), ROWS[how](values, index))
    assert (taken.shape, taken.axis, taken.dtype) == (ROWS[how](values, index).shape, taken.dim() - 1, q.dtype)
    taken.zero_()
    assert torch.equal(q.dequantize(), values)


@one_row_formats
def test_rows_without_elements(fmt):
    """A contraction axis of length 0: rows are taken and counted as ever."""
    q, index = mf.quantize(torch.empty(4, 3, 0), fmt), torch.tensor([1, 0])
    assert q[index].shape == (2, 3, 0)
    assert q[torch.ones(4, dtype=torch.bool)].shape == (4, 3, 0)
    assert q.flatten(0, 1).dequantize().shape == (12, 0)
    columns = mf.quantize(torch.empty(0, 32), fmt, axis=-2).expand(2, 0, 32)
    with pytest.raises(InvalidValueError, match="contraction axis"):
        columns.flatten(0, 1)


def test_rows_that_cannot_be_taken():
    q, tiled, row = mf.quantize(randn(8, 64), "mxfp8"), mf.quantize(randn(32, 64), "nvfp4_2d"), torch.tensor([1])
    for refused in (
        lambda: q[row, row], lambda: q[q.dequantize() > 0], lambda: tiled[row], lambda: q.t()[:, row],
        lambda: q.index_select(1, row), lambda: q[0][row],
    ):  # fmt: skip
        with pytest.raises(InvalidValueError, match=r"indices: got those of . axes.*dequantize"):
            refused()
    with pytest.raises(IndexError):
        q[torch.tensor([8])]
    with pytest.raises(InvalidValueError, match=r"index: got .* of 2 experts"):
        torch.stack([tiled, tiled])[row]
    graph = torch.compile(lambda q, row: q[row], backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(q, row), q[row])


@every_format
def test_rows_replaced_by_slice(fmt):
    q, other = mf.quantize(randn(256, 64), fmt), mf.quantize(randn(128, 64) * 3, fmt)
    kept = q[:128].dequantize()
    q[128:] = other
    assert error(q[128:].dequantize(), other.dequantize()) < 0.16
    torch.testing.assert_close(q[:128].dequantize(), kept, rtol=1e-6, atol=0.02 if fmt.is_per_tensor else 0)


def test_rows_are_not_replaced_by_index():
    """Nor by masks; slices take copies."""
    q, before = mf.quantize(randn(8, 64), "nvfp4"), mf.quantize(randn(1, 64), "nvfp4")
    for where in (torch.tensor([1]), [3, 5], torch.arange(8) > 5, q.dequantize() > 0):
        with pytest.raises(InvalidTypeError, match=r"index_put_.*q\.copy_\(values\)"):
            q[where] = before
    q[1] = before[0]
    q[2:3] = before
    assert error(q[1:3].dequantize(), before.dequantize().expand(2, -1)) < 0.16


# ---- joining


@every_format
@pytest.mark.parametrize("axis", [-1, -2])
def test_joined_tensors(fmt, axis):
    whole = mf.quantize(randn(300, 272), fmt, axis=axis)
    values, cut = whole.dequantize(), 256
    assert torch.equal(torch.cat([whole[:cut], whole[cut:]]), whole)
    assert torch.equal(torch.cat([whole[:, :cut], whole[:, cut:]], dim=1), whole)
    assert torch.equal(torch.cat([whole[:cut], whole[cut:]]).dequantize(), values)
    joined = torch.cat([whole[:cut], whole[cut:]])
    joined.zero_()
    assert torch.equal(whole.dequantize(), values)
    if axis == -1:
        stacked = torch.stack([whole[:128], whole[128:256]])
        assert torch.equal(stacked.dequantize(), torch.stack([values[:128], values[128:256]]))
        deep = whole[:256].view(2, 128, 272)
        if not fmt.is_tile:
            joined = torch.cat([deep[:, :50], deep[:, 50:]], dim=1)
            assert torch.equal(joined.dequantize(), values[:256].view(2, 128, 272))


def test_tensors_that_cannot_be_joined():
    a, b = mf.quantize(randn(40, 40), "mxfp8"), mf.quantize(randn(40, 40), "nvfp4")
    tiles = mf.quantize(randn(40, 40), "nvfp4_2d")
    for refused, message in (
        (lambda: torch.cat([a, b]), "cat: got nvfp4"),
        (lambda: torch.cat([a, a], 1), r"tensors: got lengths \[40, 40\] along axis 1"),
        (lambda: torch.cat([tiles, tiles]), "multiples of 16"),
        (lambda: torch.cat([b, mf.quantize(9 * randn(40, 40), "nvfp4")]), "tensor_scale is one for all .* quantize"),
        (lambda: torch.cat([a, mf.quantize(randn(40, 40), "mxfp8", axis=-2)]), "axis 0"),
    ):  # fmt: skip
        with pytest.raises(InvalidValueError, match=message):
            refused()
    with pytest.raises(IndexError):
        torch.cat([a, a], 2)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([a, a[:, :32]], 0)
