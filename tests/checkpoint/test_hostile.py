"""Damaged and hostile files are a CheckpointError that lists all findings (features K7)."""

import json
import os
import struct

import numpy as np
import pytest

from microfloat import reference
from microfloat.checkpoint import Record, load, save
from microfloat.errors import CheckpointError
from tests.checkpoint.files import container, header_of, nvfp4, write


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def text(**tensors):
    return json.dumps(tensors).encode()


HUGE = 10 * 2**40
FILES = {
    "empty": (b"", "header"),
    "longer header": (struct.pack("<Q", 1 << 60) + b"{}", "header"),
    "no json": (container(b"{[", b""), "json"),
    "not utf-8": (container(b'{"\xff": 1}', b""), "json"),
    "deep": (container(b"[" * 100_000, b""), "json"),
    "no object": (container(b"[1]", b""), "header"),
    "twice": (container(b'{"a":1,"a":2}', b""), "duplicate-name"),
    "overlap": (container(text(a=entry(), b=entry(offsets=(2, 6))), b"......"), "offsets"),
    "negative": (container(text(a=entry(offsets=(-4, 0))), b"...."), "offsets"),
    "backwards": (container(text(a=entry(offsets=(4, 0))), b"...."), "offsets"),
    "beyond": (container(text(a=entry(offsets=(0, 400))), b"...."), "offsets"),
    "gap": (container(text(a=entry(offsets=(1, 5))), b"....."), "offsets"),
    "bytes left": (container(text(a=entry()), b"......"), "offsets"),
    "ten terabytes": (container(text(a=entry(shape=(HUGE,))), b"...."), "shape"),
    "overflowing": (container(text(a=entry(shape=(0, 1 << 200))), b""), "shape"),
    "size": (container(text(a=entry("F32", (2,), (0, 4))), b"...."), "shape"),
    "dtype": (container(text(a=entry("Q4")), b"...."), "dtype"),
    "many digits": (container(b'{"a":{"shape":[' + b"9" * 5000 + b"]}}", b""), "json"),
    "metadata": (container(b'{"__metadata__":{"a":1}}', b""), "header"),
    "pickle": (b"PK\x03\x04" + bytes(60), "header"),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_headers(name, tmp_path):
    data, id = FILES[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load(path, strict=False)
    assert id in {finding.id for finding in caught.value.findings}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12", "git lfs pull"),
        (b"PK\x03\x04" + bytes(60), "torch.save"),
        (b"GGUF\3\0\0\0" + bytes(60), "GGUF"),
        (b'{"model_type": "llama"}', "name the folder"),
        (b"import torch\n" + bytes(60), "not a safetensors file, or it is damaged"),
    ],
)
def test_files_of_other_kinds_are_named(data, named, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "shape", "bits"), [("F4", (2, 3), 12), ("F4", (), 4), ("F6_E2M3", (4, 2), 12), ("F6_E3M2", (1,), 6)]
)
def test_rows_that_end_inside_a_byte_are_named_and_not_called_damaged(dtype, shape, bits, tmp_path):
    nbytes = -(-int(np.prod(shape)) * bits // max(shape[-1:] or (1,)) // 8)
    (tmp_path / "model.safetensors").write_bytes(container(text(a=entry(dtype, shape, (0, nbytes))), bytes(nbytes)))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert f"a row of {dtype}{list(shape)} has {bits} bits, which are no whole bytes" in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_all_findings_are_listed(tmp_path):
    header = text(a=entry("Q4"), b=entry(shape=(9,)), c=entry(offsets=(0, 999)))
    (tmp_path / "model.safetensors").write_bytes(container(header, b"...."))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert [finding.tensor for finding in caught.value.findings] == ["a", "b", "c"]


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "a/../../b", "", "absent.safetensors"])
def test_an_index_names_files_inside(file, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_a_link_out_of_the_directory(tmp_path):
    outside = write(tmp_path / "other.safetensors", {"a": np.zeros(4, np.float32)})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match="link"):
        load(tmp_path / "model")


def _modelopt(parts):
    names = {"codes": "x.weight", "scale": "x.weight_scale", "global": "x.weight_scale_2"}
    return {names[role]: array for role, array in parts.items() if array is not None}


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({"scale": None}, "missing-scale"),
        ({"global": None}, "missing-scale"),
        ({"global": np.float32("nan")}, "nan-scale"),
        ({"global": np.float32("inf")}, "inf-scale"),
        ({"global": np.float32(0)}, "zero-global"),
        ({"scale": ("F8_E4M3", np.full((4, 2), 0x7F, np.uint8))}, "nan-scale"),
        ({"scale": ("F8_E4M3", np.full((4, 3), 0x38, np.uint8))}, "shape"),
    ],
)
def test_scales_are_checked(changes, id, tmp_path):
    path = write(tmp_path / "model.safetensors", _modelopt({**nvfp4(), **changes}))
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert {finding.id for finding in caught.value.findings} == {id}
    record = load(path, strict=False)["x.weight"]
    if id in ("missing-scale", "shape"):
        with pytest.raises(CheckpointError):
            record.dequantize()


@pytest.mark.parametrize(("divisor", "id"), [(0, "zero-global"), (-0.0, "zero-global"), ("inf", "inf-scale")])
@pytest.mark.parametrize("nan", ["keep", "zero"])
def test_a_divisor_is_named_as_it_is_stored(divisor, id, nan, tmp_path):
    parts = nvfp4()
    names = {"codes": "x.weight_packed", "scale": "x.weight_scale", "global": "x.weight_global_scale"}
    tensors = {names[role]: array for role, array in parts.items()}
    tensors["x.weight_global_scale"] = np.float32([divisor])
    path = write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        load(path, nan=nan)
    assert [finding.id for finding in caught.value.findings] == [id]
    assert "x.weight_global_scale is" in str(caught.value)


def test_any_truncation_is_refused(tmp_path):
    header, data = header_of(_modelopt(nvfp4()))
    whole = container(json.dumps(header).encode(), data)
    for size in range(0, len(whole), 7):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            load(tmp_path)


def test_a_file_that_is_cut_after_it_was_opened(tmp_path):
    path = write(tmp_path / "model.safetensors", _modelopt(nvfp4()))
    checkpoint = load(path)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="shorter since it was opened"):
        list(checkpoint.values())


@pytest.mark.parametrize("place", ["out", "out.safetensors"])
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["b", "a.weight"], "Two tensors have the name 'a.weight'"),
        (["a.weight_scale"], "Two tensors have the name 'a.weight_scale'"),
        (["__metadata__"], "'__metadata__', which safetensors keeps for itself"),
    ],
)
def test_names_that_a_file_cannot_hold_are_named_before_it_is_written(names, words, place, tmp_path):
    q = reference.quantize(np.ones((4, 32), np.float32), "mxfp8")
    records = [Record("a.weight", q.codes, q.scale, None, q.format, q.shape)]
    records += [Record(name, np.full(4, 2, np.float32), logical_shape=(4,)) for name in names]
    with pytest.raises(CheckpointError, match=words):
        save(records, tmp_path / place, format="modelopt:mxfp8")
    assert not list(tmp_path.iterdir())


def test_a_name_in_two_shards(tmp_path):
    for file in ("a", "b"):
        write(tmp_path / f"{file}.safetensors", {"x": np.zeros(4, np.float32), file: np.zeros(2, np.float32)})
    index = {"weight_map": {"x": "a.safetensors", "a": "a.safetensors", "b": "b.safetensors"}}
    for with_index in (False, True):
        if with_index:
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path)
        assert ("duplicate-name", "x") in {(finding.id, finding.tensor) for finding in caught.value.findings}
