"""Any file is read, or refused with findings; any names and arrays are read as they were saved (features K7)."""

import json
import warnings

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from microfloat.checkpoint import Record, load, save
from microfloat.checkpoint.container import DTYPES
from microfloat.errors import CheckpointError
from tests.checkpoint.files import container

# Not those of a codec, which Hypothesis looks for in all of Unicode: 3 s.
CHARACTERS = st.characters(exclude_categories=("Cs",))
NAMES = st.text(CHARACTERS, max_size=12)
# Names that stand for something in a family, so that tensors meet as parts of one parameter.
PARTS = st.sampled_from(
    [f"{module}.{last}" for module in ("a", "model.b.q_proj") for last in (
        "weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_scale_inv",
        "input_scale", "pre_quant_scale", "gate_up_proj_blocks", "gate_up_proj_scales", "weight.blocks", "_extra_state",
    )]
)  # fmt: skip
SHAPES = st.lists(st.sampled_from([0, 1, 2, 4, 16, 32]), max_size=4)


@st.composite
def files(draw):
    """Bytes of a file whose tensors fit together, or nearly do: shapes, dtypes and offsets of some are others."""
    header, data = {}, b""
    for name in draw(st.lists(PARTS | NAMES, max_size=5, unique=True)):
        dtype, shape = draw(st.sampled_from(list(DTYPES))), draw(SHAPES)
        count = int(np.prod(shape, dtype=object)) * DTYPES[dtype][0] // 8
        if count > 1 << 12:
            continue
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + count]}
        data += draw(st.binary(min_size=1, max_size=4)) * count
        data = data[: header[name]["data_offsets"][1]]
    for entry in header.values():
        if draw(st.integers(0, 4)) == 0:
            key = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            numbers = (
                st.integers(-3, 1 << 70) | st.none() | st.floats(allow_nan=False) | st.text(CHARACTERS, max_size=3)
            )
            entry[key] = draw(numbers | st.lists(numbers, max_size=3))
    text = json.dumps(header).encode()
    whole = container(text, data)
    if draw(st.booleans()):
        return whole
    start, count = draw(st.integers(0, len(whole))), draw(st.integers(0, 9))
    return whole[:start] + draw(st.binary(max_size=9)) + whole[start + count :]


@given(files())
def test_a_file_is_read_or_refused_with_findings(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    path.write_bytes(data)
    for options in ({}, {"strict": False, "nan": "zero"}):
        refused = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checkpoint = load(path, **options)
            assert all(finding.message for finding in checkpoint.findings)
            for record in checkpoint.values():
                dtype = np.complex64 if record.codes.dtype.kind == "c" else np.float32
                assert record.dequantize(dtype).shape == record.logical_shape
        except CheckpointError as error:
            refused = error
        assert refused is None or refused.findings


@given(
    st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), st.tuples(st.sampled_from(list(DTYPES)), SHAPES))
)
def test_names_and_arrays_are_read_as_they_were_saved(tmp_path_factory, about):
    arrays = {}
    for index, (name, (dtype, shape)) in enumerate(about.items()):
        shape = shape[:2]
        count = int(np.prod(shape)) * DTYPES[dtype][1].itemsize
        raw = np.random.default_rng(index).integers(0, 2 if dtype == "BOOL" else 256, count, np.uint8)
        arrays[name] = raw.view(DTYPES[dtype][1]).reshape(shape)
    folder = tmp_path_factory.mktemp("folder") / "out"
    save([Record(name, array, logical_shape=array.shape) for name, array in arrays.items()], folder, format="plain",
         max_shard_size=4000)  # fmt: skip
    with warnings.catch_warnings():  # of TransformerEngine's states
        warnings.simplefilter("ignore")
        again = load(folder, strict=False).tensors
    assert set(again) == set(arrays)
    for name, array in arrays.items():
        assert (again[name].dtype, again[name].shape, again[name].tobytes()) == (
            array.dtype, array.shape, array.tobytes(),
        )  # fmt: skip
