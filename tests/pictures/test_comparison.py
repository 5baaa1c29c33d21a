"""`compare`: one array under formats of any kind, as a table and as a picture."""

import math

import numpy as np
import pytest

from microfloat import metrics, reference
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.pictures.comparison import compare
from microfloat.recipes import Cast, Hadamard
from tests.formats.elements import own_casts

X = np.random.default_rng(0).standard_t(4, (32, 64)).astype(np.float32)


def test_the_figures_are_those_of_the_metrics():
    casts = [Cast("nvfp4"), Cast("mxfp4", rounding="stochastic"), *own_casts().values()]
    made = compare(X, casts, seed=5)
    assert len(made.fits) == len(casts)
    for one, cast in zip(made.fits, casts, strict=True):
        values = reference.dequantize(reference.quantize(X, cast, seed=5))
        np.testing.assert_array_equal(one.values, values)
        assert (one.sqnr_db, one.underflow) == (metrics.sqnr_db(X, values), metrics.underflow(X, values))
        assert (one.format, one.scale_rule) == (cast.format.name, str(cast.scale_rule))
    assert compare(X, "e3m0:e8m0:1x16").fits[0].clip > compare(X, "int8:e8m0:1x16").fits[0].clip == 0.0


def test_odd_arrays_and_odd_formats():
    wild = X.copy()
    wild[0, 0], wild[1, 1], wild[2] = np.nan, np.inf, 0
    table = repr(compare(wild, ["mxfp4", Cast("nvfp4", hadamard=Hadamard())])).splitlines()
    assert [line.split()[0] for line in table] == ["format", "mxfp4", "nvfp4"]
    assert len({len(line) for line in table}) == 1
    assert math.isnan(compare(X, Cast("nvfp4", hadamard=Hadamard())).fits[0].clip)
    assert compare(X.astype(np.float64).tolist()[0], "mxfp8").x.shape == (64,)
    np.testing.assert_array_equal(compare(X, "mxfp4", axis=0).fits[0].values, compare(X.T, "mxfp4").fits[0].values.T)
    with pytest.raises(InvalidValueError, match="Did you mean 'mxfp4'"):
        compare(X, ["mxpf4"])
    with pytest.raises(InvalidValueError, match="formats: got no format"):
        compare(X, [])
    with pytest.raises(InvalidTypeError, match="x: got"):
        compare(["a"], "mxfp4")


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    wild = X.copy()
    wild[0, 0], wild[2] = np.nan, 0
    for x in (wild, np.zeros((2, 16), np.float32)):
        figure = compare(x, ["mxfp4", Cast("mxfp4", "floor"), "int4:e5m0:1x16"]).draw(tmp_path / "errors.png")
        assert (tmp_path / "errors.png").read_bytes()[:4] == b"\x89PNG"
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert labels == ["mxfp4 even", "mxfp4 floor", "int4:e5m0:1x16"]


def test_front_ends_have_the_same_function():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import microfloat.torch as mf

    assert mf.compare is compare
    tensor = torch.from_numpy(X).to(torch.bfloat16).requires_grad_()
    assert mf.compare(tensor, "nvfp4").fits[0].sqnr_db > 15
