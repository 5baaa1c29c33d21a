"""FP4 and FP6 bytes and the tiles of scales on tensors: the oracle's bytes. features Q7 and Q8."""

import numpy as np
import pytest
import torch

import microfloat.torch as mf
from microfloat import reference
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.recipes import Cast, Hadamard
from microfloat.torch import QuantizedTensor

GENERATOR = torch.Generator().manual_seed(5)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PACKING = [(mf.pack_fp4, mf.unpack_fp4, 4), (mf.pack_fp6, mf.unpack_fp6, 6)]


def randint(high, *shape):
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=GENERATOR)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pack", "unpack", "bits"), PACKING)
@pytest.mark.parametrize("shape", [(7,), (5, 32), (2, 3, 33), (0, 4), (3, 0), (1, 2)], ids=str)
def test_packing_is_the_oracles(pack, unpack, bits, shape, device):
    codes = randint(2**bits, *shape)
    packed = pack(codes.to(device))
    oracle = getattr(reference, pack.__name__)(codes.numpy())
    assert packed.dtype == torch.uint8
    assert np.array_equal(packed.cpu().numpy(), oracle)
    assert torch.equal(unpack(packed, shape[-1]).cpu(), codes)
    assert torch.equal(pack(codes.long().to(device)), packed)


@pytest.mark.parametrize(("pack", "unpack", "bits"), PACKING)
def test_compiled_and_batched(pack, unpack, bits):
    codes = randint(2**bits, 4, 6, 40)
    torch._dynamo.reset()
    both = torch.compile(lambda codes: unpack(pack(codes), 40), fullgraph=True, backend="aot_eager")
    assert torch.equal(both(codes), codes)
    assert torch.equal(torch.vmap(pack)(codes), pack(codes))


@pytest.mark.parametrize(("pack", "unpack", "bits"), PACKING)
def test_what_cannot_be_packed(pack, unpack, bits):
    with pytest.raises(InvalidValueError, match=f"codes: got values from 0 to {2**bits}, needed {bits}-bit codes"):
        pack(torch.tensor([0, 2**bits], dtype=torch.uint8))
    with pytest.raises(InvalidTypeError, match=r"codes: got torch\.float32"):
        pack(torch.ones(3))
    with pytest.raises(InvalidTypeError, match="codes: got list"):
        pack([1, 2])
    with pytest.raises(InvalidValueError, match="codes: got a 0-d tensor"):
        pack(torch.tensor(1))
    with pytest.raises(InvalidTypeError, match=r"data: got torch\.int16"):
        unpack(torch.zeros(3, dtype=torch.int16), 4)
    with pytest.raises(InvalidTypeError, match="length: got float"):
        unpack(torch.zeros(3, dtype=torch.uint8), 4.0)
    with pytest.raises(InvalidValueError, match=r"length: got 99 for data of shape \(2, 3\)"):
        unpack(torch.zeros(2, 3, dtype=torch.uint8), 99)


GROUPS = [(None, 0), ([130, 0, 70], 0), ([1] * 200, 0), ([200], 0), ([3, 2, 6], 1), ([], 0)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("sizes", "dim"), GROUPS, ids=str)
def test_tiles_are_the_oracles(sizes, dim, device):
    scale = randint(256, 0 if sizes == [] else 200, 11)
    flat = mf.to_blocked(scale.to(device), sizes, dim=dim)
    assert np.array_equal(flat.cpu().numpy(), reference.to_blocked(scale.numpy(), sizes, dim=dim))
    assert torch.equal(mf.from_blocked(flat, *scale.shape, sizes, dim=dim).cpu(), scale)
    if sizes:
        assert torch.equal(mf.to_blocked(scale.to(device), torch.tensor(sizes), dim=dim), flat)
    for dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        named = mf.to_blocked(scale.to(device).view(dtype), sizes, dim=dim)
        assert named.dtype == dtype
        assert torch.equal(named.view(torch.uint8), flat)
        assert mf.from_blocked(named, *scale.shape, sizes, dim=dim).dtype == dtype


def test_tiles_of_any_memory_and_compiled():
    scale = randint(256, 40, 300)
    turned = scale.t()  # as a pass that casts both usages stores the scales of MX
    expected = mf.to_blocked(turned.contiguous())
    assert torch.equal(mf.to_blocked(turned), expected)
    torch._dynamo.reset()
    there = torch.compile(lambda s: mf.to_blocked(s, [100, 200]), fullgraph=True, backend="aot_eager")
    assert torch.equal(there(turned), mf.to_blocked(turned, [100, 200]))
    back = torch.compile(lambda f: mf.from_blocked(f, 300, 40), fullgraph=True, backend="aot_eager")
    assert torch.equal(back(expected), turned)


def test_scales_of_slices_and_of_three_axes():
    """Stored scales are never in tiles, so a slice needs no steps of 128 rows, and any M is right in 3-D."""
    q = mf.quantize(torch.randn(3, 100, 96, generator=GENERATOR), "mxfp8")
    experts = mf.to_blocked(q.scale.flatten(0, 1), [100] * 3)
    assert torch.equal(experts, torch.cat([mf.to_blocked(one.scale) for one in q]))
    cut = q[1, 30:70]
    assert torch.equal(mf.from_blocked(mf.to_blocked(cut.scale), 40, 3), q.scale[1, 30:70])


def test_what_has_no_tiles():
    with pytest.raises(InvalidTypeError, match=r"scale: got torch\.float32.*FP32 scales have no swizzled layout"):
        mf.to_blocked(mf.quantize(torch.ones(4, 128), "fp8_1x128").scale)
    with pytest.raises(InvalidTypeError, match=r"scale: got QuantizedTensor.*Give q\.scale"):
        mf.to_blocked(mf.quantize(torch.ones(4, 128), "mxfp8"))
    with pytest.raises(InvalidValueError, match=r"scale: got shape \(2,\), needed \[R, C\]"):
        mf.to_blocked(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(InvalidValueError, match=r"group_sizes: got .* add up to 4, the rows"):
        mf.to_blocked(torch.zeros(4, 2, dtype=torch.uint8), [1, 2])
    with pytest.raises(InvalidValueError, match=r"flat: got shape \(512,\), needed \(1024,\) bytes"):
        mf.from_blocked(torch.zeros(512, dtype=torch.uint8), 129, 4)


# features Q7
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "cast",
    [
        "mxfp6_e2m3",
        "mxfp6_e3m2",
        Cast("mxfp6_e2m3", hadamard=Hadamard()),
        Cast("mxfp6_e3m2", hadamard=Hadamard(64, 1 << 63)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("shape", "axis"), [((5, 70), -1), ((70, 5), -2), ((2, 3, 32), -1), ((33,), -1)], ids=str)
def test_packed_fp6_is_a_form_of_the_tensor(cast, shape, axis, device):
    q = mf.quantize(torch.randn(shape, generator=GENERATOR).to(device), cast, axis=axis)
    data = q.packed_codes()
    assert np.array_equal(data.cpu().numpy(), reference.pack_fp6(q.codes.cpu().numpy()))
    options = {"axis": axis, "hadamard": q.hadamard, "packed": True}
    again = QuantizedTensor.from_parts(data, q.scale, None, q.format, shape=shape, **options)
    assert torch.equal(again, q)
    if len(shape) == 2 and q.shape[q.axis] % 4 == 0 and q.hadamard is None:
        assert torch.equal(QuantizedTensor.from_parts(data, q.scale, None, q.format, **options), q)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "fp8_tensor_e5m2"])
def test_packed_codes_of_other_formats_are_the_stored_bytes(name):
    q = mf.quantize(torch.randn(4, 64, generator=GENERATOR), name)
    data = q.packed_codes()
    assert data.dtype == torch.uint8
    assert data.data_ptr() == q.codes.data_ptr()
    again = QuantizedTensor.from_parts(data, q.scale, q.tensor_scale, name, shape=(4, 64), packed=True)
    assert torch.equal(again, q)


def test_packed_bytes_that_do_not_fit():
    q = mf.quantize(torch.randn(4, 64, generator=GENERATOR), "mxfp6_e2m3")
    with pytest.raises(InvalidValueError, match="length: got 64 for data of shape"):
        QuantizedTensor.from_parts(q.codes, q.scale, None, q.format, shape=(4, 64), packed=True)
    with pytest.raises(InvalidValueError, match=r"packed=True, or microfloat\.torch\.unpack_fp6"):
        QuantizedTensor.from_parts(torch.full((4, 64), 255, dtype=torch.uint8), q.scale, None, q.format)
    with pytest.raises(InvalidTypeError, match=r"codes: got torch\.float32"):
        QuantizedTensor.from_parts(q.codes.float(), q.scale, None, q.format, shape=(4, 64), packed=True)
