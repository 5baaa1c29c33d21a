"""QuantizedTensor: what it presents, which operations it knows, and how it refuses the rest."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import microfloat.torch as mf
from microfloat.errors import InvalidTypeError, InvalidValueError, MicrofloatError
from microfloat.formats import E2M1, SCALE_E8M0, ElementFormat, ScaledFormat
from microfloat.recipes import Cast, Current, Delayed, Hadamard
from microfloat.torch import QuantizedTensor
from tests.torch.tensor.format_cases import every_format, formats, one_row_formats

ELEMENT = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def agrees(q, values):
    """True if `q` is quantized and stands for exactly `values`."""
    assert isinstance(q, QuantizedTensor)
    assert (q.shape, q.dtype) == (values.shape, values.dtype)
    assert q.codes.shape[:-1] == ((*q.shape[: q.axis], *q.shape[q.axis + 1 :]) if q.dim() > 1 else (1,))
    for part in q.parts().values():
        assert not isinstance(part, QuantizedTensor)
    return torch.equal(q.dequantize(), values)


# ---- what it presents


@every_format
def test_attributes(fmt):
    x = randn(3, 40, 70).bfloat16()
    q = mf.quantize(x, fmt)
    assert (q.shape, q.dtype, q.device, q.ndim, q.numel()) == (x.shape, x.dtype, x.device, 3, x.numel())
    assert (q.axis, q.hadamard, q.format, q.requires_grad) == (2, None, fmt, False)
    packed = fmt.element.codes_per_byte == 2
    assert q.codes.shape == (3, 40, 35 if packed else 70)
    assert q.codes.dtype == ELEMENT.get(fmt.element.name, torch.uint8)
    assert q.scale.dtype == (torch.float32 if fmt.scale.name == "FP32" else torch.uint8)
    assert isinstance(q, torch.Tensor)
    assert torch.is_tensor(q)


def test_repr_names_formats_and_shapes_only():
    q = mf.quantize(torch.ones(300, 300), Cast("nvfp4", hadamard=Hadamard()))
    assert repr(q) == (
        "QuantizedTensor(nvfp4, shape=(300, 300), dtype=torch.float32, axis=1, codes=uint8[300, 152], "
        "scale=uint8[300, 19], tensor_scale=float32[], Hadamard(16, 0xd7e8))"
    )
    assert str(q) == repr(q) == f"{q}"
    assert "fp8_row" in str([mf.quantize(torch.ones(2, 2), "fp8_row")])


# ---- copies


@every_format
def test_copies(fmt):
    q = mf.quantize(randn(5, 32, 40), fmt)
    values = q.dequantize()
    clone = q.clone()
    assert agrees(clone, values)
    assert clone.codes.data_ptr() != q.codes.data_ptr()
    assert agrees(q.detach(), values)
    assert q.detach().codes.data_ptr() == q.codes.data_ptr()
    assert agrees(copy.copy(q), values)
    deep = copy.deepcopy(q)
    assert agrees(deep, values)
    assert deep.codes.data_ptr() != q.codes.data_ptr()
    assert q.contiguous() is q
    assert q.cpu() is q
    assert q.to("cpu") is q
    assert torch.equal(q, clone)
    if q.numel():
        clone.codes.view(torch.uint8)[0, 0, 0] ^= 1
        assert not torch.equal(q, clone)


def test_equality_is_of_bytes_format_and_axis():
    x = randn(32, 32)
    assert torch.equal(mf.quantize(x, "mxfp8"), mf.quantize(x, "mxfp8"))
    assert not torch.equal(mf.quantize(x, "mxfp8"), mf.quantize(x, "mxfp8", axis=-2))
    assert not torch.equal(mf.quantize(x, "mxfp6_e2m3"), mf.quantize(x, "mxfp6_e3m2"))
    nan = mf.quantize(torch.full((2, 32), float("nan")), "mxfp8")
    assert torch.equal(nan, nan.clone())


@every_format
def test_to_changes_the_presented_dtype_only(fmt):
    q = mf.quantize(randn(32, 48), fmt)
    for dtype, half in (
        (torch.bfloat16, q.bfloat16()),
        (torch.float16, q.half()),
        (torch.float16, q.to(torch.float16)),
    ):
        assert half.dtype == dtype
        assert torch.equal(half.codes.view(torch.uint8), q.codes.view(torch.uint8))
        assert torch.equal(half.dequantize(), q.dequantize(dtype))
    assert torch.equal(half.float(), q)
    assert q.type_as(torch.zeros(1).half()).dtype == torch.float16
    for refused in (lambda: q.double(), lambda: q.int(), lambda: q.to(torch.float8_e4m3fn)):
        with pytest.raises(InvalidTypeError, match=r"dtype: got torch\.\w+, .*dequantize"):
            refused()


def test_meta_device_keeps_shapes():
    moved = mf.quantize(randn(32, 48), "nvfp4").to("meta")
    assert (moved.device.type, moved.codes.device.type, moved.shape) == ("meta", "meta", (32, 48))


@pytest.mark.gpu
@every_format
def test_moving_to_a_gpu_and_back(fmt):
    q = mf.quantize(randn(32, 48), fmt)
    moved = q.cuda()
    assert moved.is_cuda
    assert all(part.is_cuda for part in moved.parts().values())
    assert torch.equal(moved.dequantize().cpu(), q.dequantize())
    assert torch.equal(moved.cpu(), q)
    pinned = q.pin_memory()
    assert pinned.is_pinned()
    assert not q.is_pinned()
    assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), q)


@every_format
def test_copy_from_the_same_kind_and_from_a_plain_tensor(fmt):
    q, other = mf.quantize(randn(32, 48), fmt), mf.quantize(randn(33, 48)[1:], fmt)
    version = q._version
    assert q.copy_(other) is q
    assert torch.equal(q, other)
    assert q._version > version
    plain = randn(34, 48)[2:]
    assert torch.equal(q.copy_(plain), mf.quantize(plain, fmt))


def test_copies_between_kinds_are_refused():
    q = mf.quantize(randn(32, 64), "mxfp8")
    for other in (mf.quantize(randn(32, 64), "nvfp4"), mf.quantize(randn(32, 64), "mxfp8", axis=-2)):
        with pytest.raises(InvalidValueError, match=r"copy_: got .* needed mxfp8 of shape \(32, 64\), axis 1"):
            q.copy_(other)
    with pytest.raises(InvalidTypeError, match=r"copy_.*dequantize"):
        torch.zeros(32, 64).copy_(q)


# ---- files


@every_format
@pytest.mark.parametrize("axis", [-1, -2])
def test_saving_with_weights_only(fmt, axis):
    """Features Q17."""
    q = mf.quantize(randn(32, 48).bfloat16(), fmt, axis=axis)
    buffer = io.BytesIO()
    torch.save({"q": q, "parameter": nn.Parameter(q, requires_grad=True)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded["q"], q)
    assert (loaded["q"].dtype, loaded["q"].axis, loaded["q"].cast) == (q.dtype, q.axis, q.cast)
    assert not isinstance(loaded["q"], nn.Parameter)
    assert isinstance(loaded["parameter"], nn.Parameter)
    assert loaded["parameter"].requires_grad
    assert torch.equal(pickle.loads(pickle.dumps(q)), q)


def test_casts_survive_a_file():
    own = ScaledFormat(
        "mine", ElementFormat("E2M2", 2, 2, bias=1, max=7.0, has_inf=False, has_nan=False), SCALE_E8M0, (1, 8)
    )
    casts = [
        Cast("nvfp4", "four_over_six_mse_448"), Cast("nvfp4", rounding="stochastic", hadamard=Hadamard(16, 3)),
        Cast("fp8_row", scaling=Current(0.5)), Cast(own),
    ]  # fmt: skip
    for cast in casts:
        q = mf.quantize(randn(4, 40), cast, seed=1)
        loaded = pickle.loads(pickle.dumps(q))
        assert loaded.cast == cast
        assert torch.equal(loaded.dequantize(), q.dequantize())


def test_a_delayed_tensor_keeps_its_scale_and_forgets_the_history():
    q = mf.quantize(randn(4, 40), Cast("fp8_tensor", scaling=Delayed()), scale_enc=3.0)
    assert q.cast.scaling == Current()
    assert torch.equal(pickle.loads(pickle.dumps(q)), q)


def test_a_damaged_file_is_refused():
    q = mf.quantize(randn(4, 40), "mxfp8")
    rebuild, (codes, scale, tensor_scale, description) = q.__reduce_ex__(4)
    with pytest.raises(InvalidValueError, match=r"scale: got shape \(3, 2\), needed shape \(4, 2\)"):
        rebuild(codes, scale[:3], tensor_scale, description)


def test_modules_with_quantized_parameters():
    layer = nn.Linear(48, 32)
    layer.weight = nn.Parameter(mf.quantize(randn(32, 48), "mxfp8"), requires_grad=False)
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, nn.Parameter)
    assert torch.equal(twin.weight, layer.weight)
    twin.weight.data.zero_()
    assert not torch.equal(twin.weight, layer.weight)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.weight, layer.weight)
    assert layer.bfloat16().weight.dtype == torch.bfloat16


# ---- shapes


@every_format
def test_regrouping_leading_axes(fmt):
    q = mf.quantize(randn(4, 32, 70), fmt)
    values = q.dequantize()
    assert agrees(q.view(128, 70), values.view(128, 70))
    assert agrees(q.view(-1, 70), values.view(-1, 70))
    assert agrees(q.reshape(2, 2, 32, 70), values.reshape(2, 2, 32, 70))
    assert agrees(q.flatten(0, 1), values.flatten(0, 1))
    assert agrees(q.unflatten(0, (2, 2)), values.unflatten(0, (2, 2)))
    assert agrees(q.unsqueeze(0), values.unsqueeze(0))
    assert agrees(q.unsqueeze(-2), values.unsqueeze(-2))
    assert agrees(q.unsqueeze(1).squeeze(1), values)
    assert agrees(q.unsqueeze(1).squeeze(), values)
    assert agrees(q[None], values[None])
    assert q.view(128, 70).codes.data_ptr() == q.codes.data_ptr()
    flat = mf.quantize(randn(70), fmt)
    assert agrees(flat.view(1, 70), flat.dequantize().view(1, 70))
    assert agrees(flat.view(1, 70).view(70), flat.dequantize())
    assert agrees(mf.quantize(torch.tensor(2.0), fmt).view(1), torch.tensor([2.0]))


@formats(lambda fmt: not fmt.is_per_tensor)
@pytest.mark.parametrize("shape", [(2240, 4), (8960,), (4, 70, 32), (4, 32, 70, 1), (4, 32, 7, 10)], ids=str)
def test_regrouping_the_contraction_axis_is_refused(fmt, shape):
    with pytest.raises(
        InvalidValueError, match=r"shape: got .* needed a shape whose last axis is the contraction axis, 70"
    ):
        mf.quantize(randn(4, 32, 70), fmt).view(shape)


@pytest.mark.parametrize("shape", [(2240, 4), (8960,), (4, 70, 32), (4, 32, 70, 1), (4, 32, 7, 10)], ids=str)
def test_a_tensor_of_one_scale_takes_any_shape(shape):
    q = mf.quantize(randn(4, 32, 70), "fp8_tensor")
    viewed = q.view(shape)
    assert agrees(viewed, q.dequantize().view(shape))
    assert viewed.codes.data_ptr() == q.codes.data_ptr()
    assert agrees(viewed.reshape(4, 32, 70), q.dequantize())
    rows = q[:, :, 2:66].reshape(-1)  # copied, since the memory has gaps
    assert agrees(rows, q.dequantize()[:, :, 2:66].reshape(-1))
    viewed.copy_(torch.ones(shape))
    assert agrees(q, torch.ones(4, 32, 70))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        q.view(-1, 71)
    column = mf.quantize(randn(32, 70), "fp8_tensor", axis=-2)
    with pytest.raises(InvalidValueError, match="the contraction axis, 32 long"):
        column.view(-1)


def test_regrouping_to_another_size_is_refused():
    with pytest.raises((InvalidValueError, RuntimeError), match="shape"):
        mf.quantize(randn(4, 70), "mxfp8").view(5, 70)
    with pytest.raises(InvalidValueError, match="blocks along axis 0"):
        mf.quantize(randn(4, 70), "mxfp8", axis=-2).view(2, 2, 70)


@every_format
@pytest.mark.parametrize("axis", [-1, -2])
def test_transposing_a_matrix_moves_no_byte(fmt, axis):
    q = mf.quantize(randn(33, 70), fmt, axis=axis)
    values = q.dequantize()
    for transposed in (q.t(), q.T, q.mT, q.transpose(0, 1), q.permute(1, 0), q.swapaxes(0, 1)):
        assert agrees(transposed, values.t())
        assert transposed.axis == 1 - q.axis
        assert transposed.codes.data_ptr() == q.codes.data_ptr()
    assert torch.equal(q.t().t(), q)
    assert agrees(q.permute(0, 1), values)


@one_row_formats
def test_permuting_leading_axes(fmt):
    q = mf.quantize(randn(3, 5, 2, 70), fmt)
    values = q.dequantize()
    assert agrees(q.transpose(0, 1), values.transpose(0, 1))
    permuted = q.permute(2, 0, 1, 3)
    assert agrees(permuted, values.permute(2, 0, 1, 3))
    assert agrees(permuted.contiguous(), values.permute(2, 0, 1, 3))
    assert permuted.contiguous().codes.is_contiguous()
    assert agrees(permuted.reshape(30, 70), values.permute(2, 0, 1, 3).reshape(30, 70))
    assert agrees(q.transpose(0, 3), values.transpose(0, 3))
    assert agrees(q.permute(1, 3, 2, 0)[:, :, 1], values.permute(1, 3, 2, 0)[:, :, 1])


# features Q4
@every_format
def test_transposing_the_last_two_axes_moves_no_byte(fmt):
    """Weights of experts [E, N, K] as [E, K, N]; each operation on them is that on the values."""
    q = mf.quantize(randn(3, 256, 264), fmt)
    turned, values = q.transpose(-2, -1), q.dequantize().transpose(-2, -1)
    assert (turned.axis, turned.codes.data_ptr(), turned.scale.data_ptr()) == (
        1, q.codes.data_ptr(), q.scale.data_ptr(),
    )  # fmt: skip
    assert agrees(turned, values)
    assert agrees(turned.mT, values.mT)
    for function in (
        lambda t: t.clone(), lambda t: t.contiguous(), lambda t: t.detach(), lambda t: t.unsqueeze(0), lambda t: t[1:],
        lambda t: t.unsqueeze(0).squeeze(0), lambda t: t.split(2)[1],
        lambda t: t[:, :128], lambda t: t[:, 128:], lambda t: t.narrow(1, 128, 128), lambda t: t.chunk(3)[2],
        lambda t: t.unflatten(0, (3, 1)), lambda t: t.expand(2, -1, -1, -1),
        lambda t: torch.cat([t[:, :128], t[:, 128:]], 1) if fmt.block[1] else t,
    ):  # fmt: skip
        assert agrees(function(turned), function(values))
    assert agrees(turned[1], values[1])
    assert agrees(torch.stack(list(turned.unbind()))[2], values[2]) or fmt.is_per_tensor or fmt.tensor_scale
    assert torch.equal(mf.scaled_matmul(turned[1], turned[2]), mf.scaled_matmul(q[1], q[2]))
    if fmt.block[0] in (None, 1):
        assert agrees(turned[..., 5:9], values[..., 5:9])
        assert agrees(turned[..., 5], values[..., 5])
        assert agrees(turned.flatten(0, 0), values)
    for cut in (lambda: turned.select(1, 0), lambda: turned.flatten(1), lambda: turned.reshape(3, -1)):
        with pytest.raises(InvalidValueError, match="contraction axis"):
            cut()
    copy = mf.quantize(torch.zeros(3, 256, 264), fmt).transpose(-2, -1)
    assert agrees(copy.copy_(q.dequantize().transpose(-2, -1)), mf.quantize(q.dequantize(), fmt).dequantize().mT)
    assert agrees(pickle.loads(pickle.dumps(turned)), values)
    assert agrees(turned.fill_(2.0), torch.full((3, 264, 256), 2.0))


# features Q4
@every_format
def test_expanding_leading_axes(fmt):
    q = mf.quantize(randn(1, 128, 70), fmt)
    values = q.dequantize()
    for sizes in ((4, -1, -1), (2, 3, -1, -1), (1, -1, -1), (2, 1, 128, 70)):
        expanded = q.expand(*sizes)
        assert agrees(expanded, values.expand(*sizes))
        assert expanded.codes.data_ptr() == q.codes.data_ptr()
        assert agrees(expanded.contiguous(), values.expand(*sizes))
        assert agrees(expanded[0], values.expand(*sizes)[0])
    assert agrees(q.expand_as(torch.empty(5, 128, 70)), values.expand(5, -1, -1))
    assert agrees(q.mT.expand(3, -1, -1), values.mT.expand(3, -1, -1))
    with pytest.raises(RuntimeError, match=r"single memory location|write into a slice"):
        q.expand(4, -1, -1).copy_(torch.zeros(4, 128, 70))
    row = mf.quantize(randn(70), fmt)
    if fmt.is_tile:
        with pytest.raises(InvalidValueError, match=r"size: got .* in front of whole tiles"):
            row.expand(8, 70)
    else:
        assert agrees(row.expand(8, 70), row.dequantize().expand(8, 70))
        middle = mf.quantize(randn(3, 1, 70), fmt)
        assert agrees(middle.expand(3, 4, 70), middle.dequantize().expand(3, 4, 70))
    with pytest.raises(InvalidValueError, match=r"size: got .* the contraction axis as it is"):
        mf.quantize(randn(4, 1), fmt).expand(4, 8)


def test_permuting_the_rows_of_tiles_is_refused():
    q = mf.quantize(randn(4, 32, 64), "nvfp4_2d")
    with pytest.raises(InvalidValueError, match=r"dims: got .*nvfp4_2d.* needed blocks of one row"):
        q.transpose(0, 1)


@one_row_formats
def test_cutting_leading_axes(fmt):
    q = mf.quantize(randn(4, 33, 70), fmt)
    values = q.dequantize()
    for cut in (
        lambda t: t[1:3], lambda t: t[2], lambda t: t[-1], lambda t: t[:, 3:17:2], lambda t: t[:, 5], lambda t: t[1, 2],
        lambda t: t[1:1], lambda t: t[..., :], lambda t: t.narrow(1, 4, 9), lambda t: t.select(0, 1),
        lambda t: t[1][2:4], lambda t: t[:, -3:],
    ):  # fmt: skip
        assert agrees(cut(q), cut(values))
    for parts in (
        lambda t: t.split(3), lambda t: t.split([1, 3]), lambda t: t.chunk(4, dim=1), lambda t: t.unbind(0),
        lambda t: t.tensor_split(3, dim=1), lambda t: list(t),
    ):  # fmt: skip
        assert all(agrees(part, wanted) for part, wanted in zip(parts(q), parts(values), strict=True))
    matrix = mf.quantize(randn(70, 9), fmt, axis=-2)
    assert agrees(matrix[:, 2:5], matrix.dequantize()[:, 2:5])
    assert agrees(matrix[:, 4], matrix.dequantize()[:, 4])


@pytest.mark.parametrize("name", ["nvfp4_2d", "fp8_128x128"])
def test_cutting_tiles(name):
    q = mf.quantize(randn(300, 270), name)
    values, tile = q.dequantize(), q.format.block[0]
    for cut in (
        lambda t: t[tile:],
        lambda t: t[: 2 * tile],
        lambda t: t[:, tile : 2 * tile],
        lambda t: t[2 * tile :, :tile],
    ):
        assert agrees(cut(q), cut(values))
    assert agrees(q.t()[tile:], values.t()[tile:])
    for cut, axis in ((lambda t: t[1:], 0), (lambda t: t[: tile + 1], 0), (lambda t: t[3], 0), (lambda t: t[:, 1:], 1)):
        with pytest.raises(
            InvalidValueError, match=rf"slice of axis {axis}: got .* bounds that are multiples of {tile} "
        ):
            cut(q)
    deep = mf.quantize(randn(4, tile // 2, 64), name)
    assert agrees(deep[2:], deep.dequantize()[2:])
    with pytest.raises(InvalidValueError, match="multiples of 2 "):
        deep[1:]
    with pytest.raises(InvalidValueError, match="a cut along the first axis only"):
        deep[:, 1:]


@pytest.mark.parametrize(
    ("cast", "unit"),
    [("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16), ("nvfp4_row", 16), ("fp8_1x128", 128), ("fp8_row", 1),
     ("fp8_tensor", 1), (Cast("mxfp8", hadamard=Hadamard()), 32), (Cast("fp8_row", hadamard=Hadamard()), 16),
     (ScaledFormat("mine", E2M1, SCALE_E8M0, (1, 3)), 6)], ids=str,
)  # fmt: skip
def test_cutting_the_contraction_axis_at_blocks(cast, unit):
    for axis in (-1, -2):
        q = mf.quantize(randn(5, 3 * unit + 7) if axis == -1 else randn(3 * unit + 7, 5), cast, axis=axis)
        values = q.dequantize()
        for bounds in ((unit, 2 * unit), (0, unit), (2 * unit, None)):
            window = (..., slice(*bounds)) if axis == -1 else (slice(*bounds),)
            assert agrees(q[window], values[window])
        if unit > 1:
            for bounds in ((1, None), (0, unit + 1), (0, 2 * unit, 2)):
                window = (..., slice(*bounds)) if axis == -1 else (slice(*bounds),)
                with pytest.raises(InvalidValueError, match=rf"step 1 and bounds that are multiples of {unit} "):
                    q[window]
        with pytest.raises(InvalidValueError, match=r"dim: got .*, the contraction axis of a QuantizedTensor"):
            q.select(q.axis, 0)


# ---- products


@every_format
def test_products_as_torch_writes_them(fmt):
    q, w, bias = mf.quantize(randn(40, 96), fmt), mf.quantize(randn(24, 96), fmt), randn(24)
    expected = mf.scaled_matmul(q, w)
    for product in (q @ w.t(), torch.mm(q, w.t()), torch.matmul(q, w.T), F.linear(q, w), q.mm(w.t()), q.matmul(w.mT)):
        assert type(product) is torch.Tensor
        assert torch.equal(product, expected)
    assert torch.equal(F.linear(q, w, bias), mf.scaled_matmul(q, w, bias=bias))
    assert torch.equal(torch.addmm(bias, q, w.t()), mf.scaled_matmul(q, w, bias=bias))
    columns = mf.quantize(w.dequantize().t().contiguous(), fmt, axis=-2)
    assert torch.equal(q @ columns, mf.scaled_matmul(q, columns.t()))
    deep = q.view(2, 20, 96)
    assert torch.equal(F.linear(deep, w), expected.view(2, 20, 24))
    assert torch.equal(F.linear(deep, w, bias), mf.scaled_matmul(q, w, bias=bias).view(2, 20, 24))
    assert torch.equal(deep @ w.t(), expected.view(2, 20, 24))


def test_products_that_torch_writes_wrongly():
    q, w = mf.quantize(randn(40, 96), "mxfp8"), mf.quantize(randn(96, 24), "mxfp8")
    with pytest.raises(
        InvalidValueError, match=r"b: got blocks along axis 1 of shape \(96, 24\), needed blocks along axis 0"
    ):
        q @ w
    with pytest.raises(InvalidValueError, match=r"a: got blocks along axis 0 of shape \(40, 96\)"):
        mf.quantize(randn(40, 96), "mxfp8", axis=-2) @ w.t().t()
    for mixed in (lambda: randn(24, 40) @ q, lambda: F.linear(q, randn(24, 96))):
        with pytest.raises(InvalidTypeError, match=r"got a QuantizedTensor \(mxfp8\).*dequantize.*torch\.linear\("):
            mixed()


# ---- gradients


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("eager",))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_loss_of_the_values_reaches_the_parameter(compiled):
    """A weight decay in the loss, for instance; without the gradient it would do nothing, in silence."""
    parameter = nn.Parameter(mf.quantize(randn(4, 40), "mxfp4"))

    def loss(weight):
        return weight.dequantize(torch.float64).square().sum() + mf.dequantize(weight.clone()).sum()

    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    run(parameter).backward()
    assert type(parameter.grad) is torch.Tensor
    assert torch.equal(parameter.grad, 2 * parameter.detach().dequantize() + 1)
    with torch.no_grad():
        assert not parameter.dequantize().requires_grad
    assert not mf.quantize(randn(4, 40), "mxfp4").dequantize().requires_grad


# ---- everything else


REFUSED = {
    "add": lambda q, x: q + 1, "add tensor": lambda q, x: q + x, "radd": lambda q, x: x + q, "sub": lambda q, x: 1 - q,
    "mul": lambda q, x: q * x, "div": lambda q, x: q / 2, "pow": lambda q, x: q**2, "eq": lambda q, x: q == x,
    "lt": lambda q, x: q < x, "neg": lambda q, x: -q, "abs": lambda q, x: q.abs(), "sum": lambda q, x: q.sum(),
    "relu": lambda q, x: torch.relu(q), "cat": lambda q, x: torch.cat([q, x]),
    "isclose": lambda q, x: torch.isclose(q, x),
    "where": lambda q, x: torch.where(x > 0, q, x), "stack": lambda q, x: torch.stack([q, x]),
    "numpy": lambda q, x: q.numpy(), "tolist": lambda q, x: q.tolist(), "item": lambda q, x: q.item(),
    "softmax": lambda q, x: q.softmax(-1), "amax": lambda q, x: q.amax(), "isnan": lambda q, x: torch.isnan(q),
    "allclose": lambda q, x: torch.allclose(q, x), "einsum": lambda q, x: torch.einsum("ij->ji", q) + 0,
    "layer_norm": lambda q, x: F.layer_norm(q, (64,)), "out": lambda q, x: torch.add(x, q, out=x),
    "in place argument": lambda q, x: x.add_(q), "set item": lambda q, x: x.__setitem__(0, q[0]),
    "bmm": lambda q, x: torch.bmm(q[None], q[None]), "repeat": lambda q, x: q.repeat(3, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_every_other_operation_names_dequantize(name):
    """Features Q2."""
    q, x = mf.quantize(randn(32, 64), "mxfp8"), randn(32, 64)
    with pytest.raises(
        InvalidTypeError, match=r"got a QuantizedTensor \(mxfp8\), needed a plain tensor. Call .dequantize"
    ):
        REFUSED[name](q, x)


def test_refusals_say_what_does_the_same():
    weight, rows = mf.quantize(randn(64, 64).bfloat16(), "mxfp8"), torch.tensor([3, 1])
    with pytest.raises(InvalidTypeError, match=r"weight\[indices\].dequantize\(\) reads the rows"):
        F.embedding(rows, weight, max_norm=1.0)
    assert torch.equal(weight[rows].dequantize(), F.embedding(rows, weight.dequantize()))
    experts, offsets = torch.stack([weight, weight]), torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(InvalidTypeError, match=r"grouped_matmul\(x, weight, group_sizes\).*offs.diff"):
        torch._grouped_mm(randn(4, 64).bfloat16(), experts.mT, offs=offsets)
    parameter = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(InvalidValueError, match=r"To cut it by hand: weight.detach\(\)"):
        parameter.chunk(2, 1)
    assert torch.equal(torch.cat(parameter.detach().chunk(2, 1), 1), weight)


def test_a_view_that_compiled_code_returns_is_named():
    weight = mf.quantize(randn(64, 64), "mxfp8")
    with pytest.raises(InvalidTypeError, match=r"Where torch.compile asked.*return view.clone\(\)"):
        torch.compile(lambda q: q.t(), backend="aot_eager", fullgraph=True)(weight)
    assert torch.equal(torch.compile(lambda q: q.t().clone(), backend="aot_eager", fullgraph=True)(weight), weight.t())


def test_factories_give_plain_tensors():
    q = mf.quantize(randn(32, 64).bfloat16(), "mxfp8")
    for made in (
        torch.zeros_like(q),
        torch.empty_like(q),
        torch.randn_like(q),
        q.new_zeros(32, 64),
        torch.full_like(q, 3),
    ):
        assert type(made) is torch.Tensor
        assert (made.shape, made.dtype) == (q.shape, q.dtype)
    assert torch.zeros_like(q, dtype=torch.float32).dtype == torch.float32
    assert q.new_empty(3).shape == (3,)


@every_format
def test_an_optimizer_steps_on_codes(fmt):
    """Dequantize, apply, requantize with the same Cast."""
    x = randn(32, 64)
    for make in (lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
        parameter, plain = nn.Parameter(mf.quantize(x, fmt)), nn.Parameter(mf.quantize(x, fmt).dequantize())
        gradient = randn(32, 65)[:, :64].contiguous()
        parameter.grad, plain.grad = gradient.clone(), gradient.clone()
        before = parameter._version
        make([parameter]).step()
        make([plain]).step()
        assert isinstance(parameter.data, QuantizedTensor)
        assert parameter._version > before
        cast = Cast(fmt)
        if make([plain]).defaults.get("weight_decay", 0) == 0 and cast.takes_amax:  # of scales that may be kept
            amax = parameter.upper * (2688 if cast.tensor_scale else fmt.element.max)
            expected = mf.quantize(plain.detach(), fmt, amax=amax)
            torch.testing.assert_close(parameter.detach().dequantize(), expected.dequantize())
        elif make([plain]).defaults.get("weight_decay", 0) == 0:
            assert torch.equal(parameter, mf.quantize(plain.detach(), fmt))
        else:  # decay is a step of its own, and each step rounds
            assert (parameter.dequantize() - plain).abs().max() < 0.5


# ---- from_parts


@every_format
def test_from_parts_wraps_without_copying(fmt):
    q = mf.quantize(randn(3, 33, 48), fmt)
    made = QuantizedTensor.from_parts(q.codes, q.scale, q.tensor_scale, fmt, shape=q.shape)
    assert torch.equal(made, q)
    assert made.codes is q.codes
    assert torch.equal(QuantizedTensor.from_parts(q.codes, q.scale, q.tensor_scale, fmt.name), q)
    columns = mf.quantize(randn(48, 33), fmt, axis=-2)
    made = QuantizedTensor.from_parts(*columns.parts().values(), *([None] * (3 - len(columns.parts()))), fmt, axis=-2)
    assert torch.equal(made, columns)


def test_from_parts_with_a_transform_and_without_a_tensor_scale():
    cast = Cast("nvfp4", hadamard=Hadamard())
    q = mf.quantize(randn(5, 50).bfloat16(), cast)
    made = QuantizedTensor.from_parts(
        q.codes, q.scale, q.tensor_scale, "nvfp4", shape=(5, 50), dtype=torch.bfloat16, hadamard=Hadamard()
    )
    assert torch.equal(made.dequantize(), q.dequantize())
    one_level = mf.quantize(randn(5, 48), Cast("nvfp4", "one_level_e4m3"))
    made = QuantizedTensor.from_parts(one_level.codes, one_level.scale, None, "nvfp4")
    assert torch.equal(made.dequantize(), one_level.dequantize())


@every_format
def test_a_plain_tensor_takes_no_quantized_data(fmt):
    """The next use of the plain tensor was a segmentation fault."""
    q = mf.quantize(randn(32, 64), fmt)
    for plain_one in (torch.zeros(32, 64), nn.Parameter(randn(32, 64)), nn.Linear(64, 32).weight, randn(64, 32).t()):
        kept = plain_one.detach().clone()
        with pytest.raises(InvalidTypeError, match=rf"data: got a QuantizedTensor \({q.format}.*copy_\(q.dequantize"):
            plain_one.data = q
        for other in (nn.Parameter(q), q.t(), mf.quantize(randn(4, 4), "mxfp4")):
            with pytest.raises(RuntimeError, match="incompatible tensor type"):
                setattr(plain_one, "data", other)  # noqa: B010  # no statement that assigns
        assert torch.equal(plain_one, kept)
        with pytest.raises(InvalidTypeError, match=r"data: got a tensor of torch.float32, needed a QuantizedTensor"):
            q.data = plain_one
    compatible = torch._has_compatible_shallow_copy_type
    assert [compatible(kept, q), compatible(q, kept), compatible(q, q.clone()), compatible(kept, randn(2))] == [
        False, False, True, True
    ]  # fmt: skip


def test_loaders_put_quantized_parameters_in_the_place_of_plain_ones_and_back():
    def swapped(layer, value):
        torch.utils.swap_tensors(layer.weight, nn.Parameter(value, requires_grad=False))

    q, values = mf.quantize(randn(4, 32), "mxfp8"), randn(4, 32)
    for put in (
        swapped, lambda layer, value: layer.load_state_dict({"weight": value}, assign=True),
        lambda layer, value: layer._apply(lambda _: value),
        lambda layer, value: setattr(layer, "weight", nn.Parameter(value, requires_grad=False)),
    ):  # fmt: skip
        layer = nn.Linear(32, 4, bias=False).requires_grad_(False)
        put(layer, q)
        assert torch.equal(layer.weight.dequantize(), q.dequantize())
        put(layer, values)
        assert not isinstance(layer.weight.data, QuantizedTensor)
        assert torch.equal(layer.weight, values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": torch.zeros(6, 40, dtype=torch.uint8)}, r"codes: got shape \(6, 40\), needed shape \(6, 20\)"),
        ({"codes": torch.zeros(6, 20)}, r"codes: got torch.float32, needed a tensor of torch.uint8"),
        ({"codes": [[0]]}, r"codes: got list"),
        ({"scale": torch.zeros(6, 2, dtype=torch.uint8)}, r"scale: got shape \(6, 2\), needed shape \(6, 3\)"),
        ({"scale": torch.zeros(6, 3)}, r"scale: got torch.float32"),
        ({"scale": None}, r"scale: got NoneType"),
        ({"tensor_scale": torch.ones(1)}, r"tensor_scale: got shape \(1,\), needed shape \(\)"),
        ({"format": "mxfp4"}, r"scale: got shape \(6, 3\), needed shape \(6, 2\)"),
        ({"format": 4}, r"format: got int, needed a ScaledFormat"),
        ({"format": "nvfp5"}, r"Did you mean"),
        ({"shape": (6, 41)}, r"codes: got shape"),
        ({"axis": -2}, r"codes: got shape"),
        ({"dtype": torch.float64}, r"dtype: got torch.float64"),
        ({"hadamard": Hadamard()}, r"codes: got shape \(6, 20\), needed shape \(6, 24\)"),
    ],
    ids=str,
)
def test_from_parts_that_do_not_fit(changes, message):
    q = mf.quantize(randn(6, 40), "nvfp4")
    arguments = {
        "codes": q.codes,
        "scale": q.scale,
        "tensor_scale": q.tensor_scale,
        "format": "nvfp4",
        "shape": (6, 40),
    }
    with pytest.raises(MicrofloatError, match=message):
        QuantizedTensor.from_parts(**(arguments | changes))


def test_a_constructor_call_without_a_cast_names_from_parts():
    q = mf.quantize(randn(4, 32), "mxfp8")
    for arguments in ((q.codes, q.scale), (q.codes, q.scale, None, "mxfp8"), ("codes", "scale", None, q.cast)):
        with pytest.raises(InvalidTypeError, match=r"needed a tensor and a Cast\. QuantizedTensor\.from_parts\("):
            QuantizedTensor(*arguments, axis=1, shape=(4, 32), dtype=torch.float32)


def test_from_parts_with_a_scale_too_many():
    q = mf.quantize(randn(6, 40), "mxfp8")
    with pytest.raises(InvalidValueError, match=r"tensor_scale: got a tensor, needed None for mxfp8"):
        QuantizedTensor.from_parts(q.codes, q.scale, torch.ones(()), "mxfp8")


@every_format
def test_derived_classes_stay_what_they_are(fmt):
    class Derived(QuantizedTensor):
        pass

    q = mf.quantize(randn(256, 64), fmt)
    q.__class__ = Derived
    detached = q.detach()
    assert type(detached) is Derived
    assert detached.codes.data_ptr() == q.codes.data_ptr()
    assert type(torch.nn.Parameter(q)) is Derived
    assert {type(made) for made in (q.clone(), q.t(), q[:128], q.bfloat16(), q.view(1, 256, 64))} == {Derived}


@every_format
def test_flattening_for_compilers(fmt):
    q = mf.quantize(randn(6, 40), fmt, axis=-2)
    names, context = q.__tensor_flatten__()
    hash(context)
    parts = {name: getattr(q, name) for name in names}
    again = QuantizedTensor.__tensor_unflatten__(parts, context, q.shape, q.stride())
    assert torch.equal(again, q)
    assert (again.dtype, again.axis, again.cast) == (q.dtype, q.axis, q.cast)


@every_format
def test_flattening_for_callers_that_keep_no_size(fmt):
    """torch and others pass None for size and strides, which then follow from the parts."""
    cast = Cast(fmt, hadamard=Hadamard()) if fmt.name == "nvfp4" else fmt
    tensors = [
        mf.quantize(randn(6, 40), fmt, axis=-2),
        mf.quantize(randn(5, 21), cast),
        mf.quantize(randn(256, 32), fmt)[:128],
        mf.quantize(randn(33, 1), fmt, axis=0),
    ]
    if not fmt.is_tile:
        tensors += [mf.quantize(randn(2, 3, 35), fmt), mf.quantize(randn(33), fmt)]
    for q in tensors:
        names, context = q.__tensor_flatten__()
        again = QuantizedTensor.__tensor_unflatten__({name: getattr(q, name) for name in names}, context, None, None)
        assert torch.equal(again, q)
        assert (again.shape, again.stride()) == (q.shape, q.stride())


# ---- what torch refuses


@every_format
@pytest.mark.parametrize("axis", [-1, -2])
def test_axes_indices_and_sizes_raise_what_torch_raises(fmt, axis):
    shape = (256, 384)
    q, plain = mf.quantize(randn(*shape), fmt, axis=axis), torch.zeros(shape)
    for wrong in (
        lambda t: t.select(0, 999), lambda t: t.select(0, -257), lambda t: t.select(7, 0), lambda t: t[256],
        lambda t: t.split([128, 64]), lambda t: t.split([256, 256]), lambda t: t.split(-1), lambda t: t.split(0),
        lambda t: t.split(128, 7), lambda t: t.permute(0, 0), lambda t: t.permute(1), lambda t: t.permute(2, 3),
        lambda t: t.unsqueeze(9), lambda t: t.squeeze(9), lambda t: t.transpose(0, 5), lambda t: t.unbind(7),
        lambda t: t.chunk(0), lambda t: t.narrow(0, 200, 100), lambda t: t.narrow(0, 0, -1), lambda t: t.view(-1, -1),
        lambda t: t.view(7, -1), lambda t: t.movedim(0, 4), lambda t: t.unsqueeze(0).t(), lambda t: t[:, :, 0],
        lambda t: t.tensor_split(0), lambda t: t.unflatten(0, (3, 100)), lambda t: t.flatten(1, 0),
    ):  # fmt: skip
        with pytest.raises((IndexError, RuntimeError, ValueError)) as torchs:
            wrong(plain)
        with pytest.raises((type(torchs.value), InvalidValueError)):
            wrong(q)


@every_format
def test_strides_are_those_of_the_codes(fmt):
    for shape, axis in (((256, 384), -1), ((2, 128, 384), -1), ((7,), -1), ((), -1), ((1, 32), -1)):
        q = mf.quantize(randn(*shape), fmt, axis=axis)
        assert (q.stride(), q.is_contiguous()) == (torch.zeros(shape).stride(), True)
    q = mf.quantize(randn(256, 384), fmt)
    columns = mf.quantize(randn(384, 256), fmt, axis=-2)
    for view in (lambda t: t.t(), lambda t: t[128:], lambda t: t[:, 128:256], lambda t: t.view(2, 128, 384)):
        assert view(q).stride() == view(torch.zeros(256, 384)).stride()
        assert view(q).is_contiguous() == view(torch.zeros(256, 384)).is_contiguous()
    assert (columns.stride(), columns.is_contiguous(), columns.t().is_contiguous()) == ((1, 384), False, True)


@one_row_formats
def test_views_that_memory_does_not_allow_are_refused_and_reshape_copies(fmt):
    q = mf.quantize(randn(4, 6, 64), fmt).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        q.view(24, 64)
    assert agrees(q.reshape(24, 64), q.dequantize().reshape(24, 64))


# ---- memory


def test_what_asks_for_memory_is_refused_or_gets_the_parts():
    q = mf.quantize(randn(32, 64), "nvfp4")
    for asks in (
        lambda: torch.from_dlpack(q), lambda: q.__dlpack__(), lambda: q.__dlpack_device__(), lambda: q.data_ptr(),
        lambda: q.storage(), lambda: q.apply_(abs), lambda: q.map_(q, max),
        lambda: __import__("numpy").from_dlpack(q), lambda: __import__("numpy").asarray(q),
    ):  # fmt: skip
        with pytest.raises(InvalidTypeError, match=r"got a QuantizedTensor \(nvfp4\), needed a plain tensor"):
            asks()
    for past_our_methods in (lambda: torch.utils.dlpack.to_dlpack(q), lambda: torch.Tensor.data_ptr(q)):
        with pytest.raises(RuntimeError, match="data pointer"):
            past_our_methods()
    with pytest.raises(InvalidTypeError, match=r"safetensors take plain weights"):
        __import__("safetensors.torch").torch.save({"w": q, "other": q.clone()})


def test_its_bytes_are_those_of_codes_and_scales():
    q = mf.quantize(randn(32, 64), "nvfp4")
    size = 32 * 64 // 2 + 32 * 64 // 16 + 4
    assert (q.nbytes, nn.Parameter(q).nbytes, q[:16].nbytes) == (size, size, size // 2 + 2)
    assert q.numel() * q.element_size() == 32 * 64 * 4
    assert q.t().nbytes == q.bfloat16().nbytes == size
    assert torch.compile(lambda q: q.codes[:1] + q.nbytes, fullgraph=True, backend="eager")(q).shape == (1, 32)
    storage = q.untyped_storage()
    assert (storage.device.type, storage.nbytes(), storage.data_ptr()) == ("meta", size, 0)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_save_the_parts(tmp_path):
    import torch.distributed.checkpoint as dcp

    saved, loaded = ({"w": nn.Parameter(mf.quantize(randn(32, 64 + more)[:, more:], "nvfp4"))} for more in (0, 1))
    dcp.save(saved, checkpoint_id=tmp_path)
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["w"], saved["w"])


def test_shared_memory_is_that_of_the_parts():
    q = mf.quantize(randn(32, 64), "nvfp4")
    window, values = q[:16], q.dequantize()
    assert not q.is_shared()
    assert q.share_memory_() is q
    assert q.is_shared()
    assert torch.equal(q.dequantize(), values)
    window.zero_()
    assert torch.equal(q.dequantize(), torch.cat([torch.zeros(16, 64), values[16:]]))
    with mf.quantized_model_init(recipe="mxfp8"):
        layer = mf.Linear(64, 32)
    expected = layer(values)
    assert layer.share_memory().weight.is_shared()
    assert torch.equal(layer(values), expected)


# ---- attributes


def test_parts_are_replaced_by_parts_that_fit():
    q, other = mf.quantize(randn(32, 64), "nvfp4"), mf.quantize(randn(33, 64)[1:], "nvfp4")
    for name, wrong in (("scale", q.scale[:3]), ("codes", q.codes.int()), ("tensor_scale", None), ("scale", 3.0)):
        with pytest.raises(MicrofloatError, match=f"^{name}: got "):
            setattr(q, name, wrong)
    for name in ("axis", "cast"):
        with pytest.raises(MicrofloatError, match=f"^{name}: got an assignment.*from_parts"):
            setattr(q, name, getattr(q, name))
    q.codes, q.scale, q.tensor_scale = other.codes, other.scale, other.tensor_scale
    assert torch.equal(q, other)


def test_its_class_makes_a_parameter_of_another_one():
    """Packages take ``type(parameter)(values, requires_grad=...)`` for the constructor of any parameter."""
    layer = nn.Linear(64, 32)
    mf.quantize_(layer, mf.WeightOnly("nvfp4"))
    kind, q = type(layer.weight), mf.quantize(randn(64, 32), "mxfp8", axis=0)
    for value, requires_grad in ((q, False), (layer.weight, True), (layer.weight.detach().to("meta"), False)):
        made = kind(value, requires_grad=requires_grad)
        assert isinstance(made, nn.Parameter)
        assert (type(made), made.requires_grad, made.axis) == (QuantizedTensor, requires_grad, value.axis)
        pairs = zip(made.part_list(), value.part_list(), strict=True)
        assert all(part.data_ptr() == other.data_ptr() and part.shape == other.shape for part, other in pairs)
    assert not kind(q).requires_grad
    for value, text in ((torch.ones(2), "a tensor of torch.float32"), ([1.0], "list")):
        with pytest.raises(InvalidTypeError, match=f"data: got .*{text}.*, needed a QuantizedTensor.*from_parts"):
            kind(value, requires_grad=False)


def test_data_takes_over_the_parts_of_another():
    parameter = nn.Parameter(mf.quantize(randn(32, 64), "mxfp8"))
    other = mf.quantize(randn(16, 32), "nvfp4")
    parameter.data = other
    assert isinstance(parameter, nn.Parameter)
    assert parameter.shape == (16, 32)
    assert torch.equal(parameter, other)
    assert parameter.codes is other.codes
    with pytest.raises(InvalidTypeError, match=r"data: got a tensor of torch.float32.*copy_"):
        parameter.data = torch.zeros(16, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": 48}, r"shape: got 48, needed a tuple of sizes"),
        ({"shape": (4.7, 32)}, r"shape: got \(4.7, 32\)"),
        ({"shape": (-4, 32)}, r"shape: got \(-4, 32\)"),
        ({"scale": torch.ones(1, 1, dtype=torch.uint8).expand(4, 1)}, r"scale: got an expanded tensor.*contiguous"),
        ({"codes": torch.full((4, 32), 0x41, dtype=torch.uint8)}, r"codes: got a byte of 0x41, needed unpacked 6-bit"),
        ({"codes": mf.quantize(torch.ones(4, 32), "mxfp8")}, r"codes: got QuantizedTensor"),
        ({"hadamard": "H"}, r"hadamard: got str"),
    ],
    ids=str,
)  # fmt: skip
def test_from_parts_of_other_programs(changes, message):
    q = mf.quantize(randn(4, 32), "mxfp6_e3m2")
    arguments = {"codes": q.codes, "scale": q.scale, "tensor_scale": None, "format": "mxfp6_e3m2"}
    with pytest.raises(MicrofloatError, match=message):
        QuantizedTensor.from_parts(**(arguments | changes))


# ---- messages that say what to do


# features Q5
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "Adafactor", "NAdam"])
def test_optimizers_that_update_lists_say_what_does_the_same(name):
    """And change neither codes nor a plain tensor of the list."""
    for option in ("foreach", "fused"):
        parameters = [nn.Parameter(mf.quantize(randn(32, 64), "nvfp4")), nn.Parameter(randn(32, 64))]
        before = [one.detach().clone() for one in parameters]
        for parameter in parameters:
            parameter.grad = torch.randn(32, 64)
        make = getattr(torch.optim, name)
        if option not in inspect.signature(make).parameters:
            continue
        with pytest.raises(InvalidTypeError, match=r"nvfp4.*foreach=False, and no fused=True.*update_quantized"):
            make(parameters, lr=0.1, **{option: True}).step()
        assert all(torch.equal(one.detach(), old) for one, old in zip(parameters, before, strict=True))
        make(parameters, lr=0.1).step()  # torch takes lists of its own classes alone
        assert all(not torch.equal(one.detach(), old) for one, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize("update", [
    lambda q, x: torch._foreach_add_([q], [x]), lambda q, x: torch._foreach_add_([x], [q]),
    lambda q, x: torch._foreach_copy_([x, q], [x, x]), lambda q, x: torch._foreach_zero_([x, q]),
    lambda q, x: torch._foreach_lerp_([q], [x], 0.5), lambda q, x: torch._foreach_add([q], 1.0),
])  # fmt: skip
def test_lists_of_tensors_are_refused(update):
    with pytest.raises(InvalidTypeError, match=r"_foreach_.*updated one by one"):
        update(mf.quantize(randn(32, 64), "mxfp8"), randn(32, 64))


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"maximize": True}], ids=str)
def test_weight_decay_reads_quantized_weights(name, options):
    """The decay is a term of the gradient, which is plain."""
    q, gradient = mf.quantize(randn(32, 64), "mxfp8"), torch.randn(32, 64)
    parameters = [nn.Parameter(q.clone()), nn.Parameter(q.dequantize())]
    for parameter in parameters:
        parameter.grad = gradient.clone()
        getattr(torch.optim, name)([parameter], lr=0.1, weight_decay=0.5, **options).step()
    assert torch.equal(parameters[0], mf.quantize(parameters[1].detach(), "mxfp8"))


def test_weight_decay_in_place_and_no_other_sum():
    q, x = mf.quantize(randn(32, 64), "nvfp4"), torch.randn(32, 64)
    decayed = x + 0.1 * q.dequantize()
    torch.testing.assert_close(x.clone().add_(q, alpha=0.1), decayed)
    torch.testing.assert_close(
        torch.add(x.bfloat16(), q.to(torch.bfloat16), alpha=0.1), decayed.bfloat16(), atol=0.1, rtol=0
    )
    for refused in (lambda: x + q, lambda: q + x, lambda: x.clone().add_(q), lambda: torch.add(q, q, alpha=2)):
        with pytest.raises(InvalidTypeError, match=r"add.*dequantize"):
            refused()


def test_initializers_write_values():
    q = mf.quantize(torch.zeros(64, 64), "mxfp8")
    for fill, deviation in (
        (lambda: nn.init.normal_(q), 1.0), (lambda: nn.init.uniform_(q, -1, 1), 0.577),
        (lambda: nn.init.ones_(q), 0.0), (lambda: nn.init.kaiming_uniform_(q), 0.177),
    ):  # fmt: skip
        fill()
        assert abs(q.dequantize().std().item() - deviation) < 0.1 * deviation + 1e-6
    with pytest.raises(InvalidTypeError, match=r"clamp_.*q\.copy_\(values\)"):
        q.clamp_(0, 1)
    with pytest.raises(InvalidTypeError, match=r"__lt__.*q\.copy_\(torch\.nn\.init\.trunc_normal_"):
        nn.init.trunc_normal_(q)
    q.copy_(nn.init.trunc_normal_(torch.empty_like(q)))
    assert 0.7 < q.dequantize().std() < 1.1


def test_quantized_sources_of_plain_tensors_name_the_wrappers_that_copy_so():
    words = r"copy_.*dequantize.*use fully_shard, or build .* without quantized_model_init"
    with pytest.raises(InvalidTypeError, match=words):
        torch.zeros(32, 64).copy_(mf.quantize(randn(32, 64), "mxfp8"))


TRANSFORMED = {
    "grad": lambda x, q: torch.func.grad(lambda x: mf.quantize(x, "mxfp8").dequantize().sum())(x),
    "jvp": lambda x, q: torch.func.jvp(lambda x: mf.quantize(x, "mxfp8").dequantize(), (x,), (x,)),
    "jit": lambda x, q: torch.jit.trace(lambda x: mf.quantize(x, "mxfp8").dequantize(), x),
}


# features G7
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_are_refused_by_name(name):
    x = randn(32, 64)
    with pytest.raises(MicrofloatError, match=r"got a transform of torch\.func"):
        TRANSFORMED[name](x, mf.quantize(x, "mxfp8"))


def test_a_transform_over_a_quantized_argument_is_refused():
    q = mf.quantize(randn(32, 64), "mxfp8")
    for transformed in (torch.vmap(lambda q: q.dequantize()), torch.func.grad(lambda q: q.dequantize().sum())):
        with pytest.raises(InvalidTypeError, match="outside of the transform"):
            transformed(q)


def test_bytes_in_the_dtypes_that_torch_has_for_them():
    """As torchao holds the parts of its tensors."""
    for name, of_scale in (
        ("mxfp8", torch.float8_e8m0fnu),
        ("mxfp4", torch.float8_e8m0fnu),
        ("nvfp4", torch.float8_e4m3fn),
    ):
        q = mf.quantize(randn(4, 64), name)
        codes = q.codes if name == "mxfp8" else q.codes.view(torch.float4_e2m1fn_x2)
        for packed in (False, True):
            bytes_of = codes.view(torch.uint8) if packed else codes
            made = QuantizedTensor.from_parts(bytes_of, q.scale.view(of_scale), q.tensor_scale, name, packed=packed)
            assert torch.equal(made, q)
            assert made.scale.data_ptr() == q.scale.data_ptr()
    q = mf.quantize(randn(4, 64), "mxfp8")
    with pytest.raises(InvalidTypeError, match=r"scale: got torch\.float8_e4m3fn, needed a tensor of torch\.uint8"):
        QuantizedTensor.from_parts(q.codes, q.scale.view(torch.float8_e4m3fn), None, "mxfp8")


def test_streams_are_told_of_every_part(monkeypatch):
    """`record_stream`, which code that offloads activations calls, exists for GPUs alone."""
    told = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda part, stream: told.append(part.data_ptr()))
    q = mf.quantize(randn(4, 64), "nvfp4")
    torch.ops.aten.record_stream.default(q, torch.Stream(device="cpu"))
    assert told == [part.data_ptr() for part in q.part_list()]
