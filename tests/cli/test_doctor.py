"""`microfloat doctor`: features O3."""

import pytest

from microfloat import recipes
from microfloat.cli import doctor, machine

pytest.importorskip("torch", reason="torch is not installed")
RECIPES = set(recipes.RECIPES)


def test_every_backend_answers_for_every_recipe_with_a_reason(microfloat):
    document = microfloat("doctor", "--device", "cpu", "--json").json
    rows = document["support"]
    assert {(row["front_end"], row["backend"]) for row in rows} == set(doctor.PLACES)
    assert {row["recipe"] for row in rows} == RECIPES
    assert all(row["reason"] for row in rows)
    native = next(row for row in rows if row["backend"] == "native" and row["front_end"] == "torch")
    assert not native["available"]
    assert "NVIDIA GPU" in native["reason"]
    assert "float32" in native["instead"]
    packages = {row["package"]: row["version"] for row in document["packages"]}
    assert {"python", "numpy", "ml_dtypes", "torch", "jax", "flax", "triton"} <= set(packages)


def test_the_answers_are_those_of_explain(microfloat):
    import microfloat.torch as mf

    rows = microfloat("doctor", "--device", "h200", "--json").json["support"]
    for row in rows:
        if row["front_end"] == "torch":
            found = mf.explain(row["recipe"], "h200", backend=row["backend"])
            assert (row["available"], row["accelerated"]) == (found.available, found.accelerated)
            assert row["reason"] == found.rows[0].support.reason


def test_the_table_fits_80_columns_and_numbers_its_reasons(microfloat):
    text = microfloat("doctor", "--device", "b200", columns=80).out
    assert max(map(len, text.splitlines())) <= 80
    assert "fast" in text
    assert "1. " in text
    assert "not yet run on the hardware" in " ".join(text.split())


def test_the_first_line_says_by_which_backend_every_recipe_trains_on_a_cpu(microfloat, monkeypatch):
    first = microfloat("doctor", "--device", "cpu", columns=120).out.splitlines()[0]
    assert first.startswith("Every recipe trains here, by torch reference")
    assert first.endswith("not accelerated.")
    assert "trains here" not in microfloat("doctor", "--device", "b200").out  # which is not here
    monkeypatch.setattr(doctor, "import_front_end", lambda name: f"{name} is broken")
    assert "trains here" not in microfloat("doctor", "--device", "cpu").out


@pytest.mark.parametrize("words", [["--device", "h2000"], ["--device", "h200", "--check"]])
def test_a_device_that_does_not_fit_is_wrong_usage(microfloat, words):
    done = microfloat("doctor", *words)
    assert done.code == 2
    assert "--device" in done.err


def test_a_front_end_that_cannot_be_imported_is_an_answer(microfloat, monkeypatch):
    monkeypatch.setattr(doctor, "import_front_end", lambda name: f'{name} is broken: pip install ".[{name}]"')
    document = microfloat("doctor", "--json").json
    rows = {row["front_end"]: row for row in document["support"]}
    assert not rows["torch"]["available"]
    assert "torch is broken" in rows["torch"]["reason"]
    assert rows["numpy"]["available"]


def test_check_finds_a_backend_that_computes_something_else(microfloat, monkeypatch):
    monkeypatch.setattr(doctor, "RECIPES", ("mxfp8",))
    monkeypatch.setattr(doctor, "PLACES", tuple(place for place in doctor.PLACES if place.front_end == "torch"))
    done = microfloat("doctor", "--check", "--device", "cpu", "--json")
    assert done.code == 0
    (row,) = done.json["check"]
    assert row["passed"]
    assert row["bytes_equal"]
    assert row["difference"] < 1e-6
    for wrong in (lambda *_: (False, 0.0), lambda *_: (True, 0.1)):
        monkeypatch.setattr(doctor, "against_oracle", wrong)
        assert microfloat("doctor", "--check", "--device", "cpu").code == 1
    monkeypatch.setattr(doctor, "against_oracle", lambda *_: 1 / 0)
    done = microfloat("doctor", "--check", "--device", "cpu", "--json")
    assert done.code == 1
    assert "ZeroDivisionError" in done.json["check"][0]["problem"]


def test_gpus_are_read_from_the_driver(microfloat, monkeypatch):
    line = "NVIDIA H200, 9.0, 143771 MiB, 560.35.03"
    monkeypatch.setattr(machine, "smi", lambda query, every=False: [line])
    monkeypatch.setattr(doctor, "RECIPES", ())
    (row,) = microfloat("doctor", "--json").json["gpus"]
    assert row["name"] == "NVIDIA H200"
    assert (row["architecture"], row["generation"], row["driver"]) == ("sm_90", "Hopper", "560.35.03")


def test_jax_is_checked_too(microfloat, monkeypatch):
    pytest.importorskip("jax", reason="jax is not installed")
    monkeypatch.setattr(doctor, "RECIPES", ("nvfp4", "delayed"))
    monkeypatch.setattr(doctor, "PLACES", tuple(place for place in doctor.PLACES if place.front_end == "jax"))
    rows = microfloat("doctor", "--check", "--device", "cpu", "--json").json["check"]
    assert [(row["backend"], row["passed"]) for row in rows] == [("reference", True)] * 2


@pytest.mark.parametrize("front_end", ["torch", "jax"])
def test_delayed_scaling_is_checked_with_a_scale_of_its_own(front_end, monkeypatch):
    pytest.importorskip(front_end, reason=f"{front_end} is not installed")
    found, cast = [], doctor.reference.quantize
    monkeypatch.setattr(
        doctor.reference, "quantize", lambda *args, **named: found.append(cast(*args, **named)) or found[-1]
    )
    equal, difference = doctor.against_oracle(front_end, recipes.from_name("delayed").fprop, "reference", "cpu")
    assert equal
    assert difference < 1e-6
    assert {float(one.tensor_scale if one.scale is None else one.scale) for one in found} == {1 / 64}
