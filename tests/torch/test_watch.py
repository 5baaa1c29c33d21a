"""`mf.watch`: the numbers of the NumPy metrics, the bits of unwatched steps (features O1, O2, U9)."""

import copy
import csv
import math

import pytest
import torch
from torch import nn

import microfloat.torch as mf
from microfloat import metrics, reference
from microfloat.errors import InvalidValueError
from microfloat.recipes import from_name

BF16 = torch.bfloat16
MODULES = {
    "linear": (lambda: nn.Sequential(mf.Linear(64, 96, dtype=BF16), nn.ReLU(), mf.Linear(96, 32, dtype=BF16)), ()),
    "fused": (lambda: mf.LayerNormMLP(64, 96, activation="swiglu", normalization="RMSNorm", dtype=BF16), ()),
    "joined": (lambda: mf.LayerNormLinear(64, 96, split={"a": 32, "b": 64}, dtype=BF16), ()),
    "transformer": (lambda: mf.TransformerLayer(64, 96, 4, 2, dtype=BF16), ()),
    "grouped": (lambda: mf.GroupedLinear(3, 64, 96, bias=True, dtype=BF16), (torch.tensor([30, 0, 50]),)),
}


def trained(model, more, recipe, w):
    """Everything that three steps leave behind."""
    torch.manual_seed(5)
    made = []
    with w(model) as watched:
        for _ in range(3):
            x = torch.randn((80, 64) if more else (2, 40, 64), dtype=BF16, requires_grad=True)
            with mf.autocast(recipe=recipe):
                y = model(x, *more)
            y.float().square().sum().backward()
            made += [y.detach(), x.grad]
    made += [parameter.grad for parameter in model.parameters()] + [torch.get_rng_state()]
    # state_dict rolls what the last backward has recorded. The buffers as they lie would be rolled by whichever
    # autocast is opened next in this thread, if their model is still alive: that of the run this one is compared with.
    return made + [value.clone() for value in model.state_dict().values()], watched


class Unwatched:
    def __init__(self, model):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.slow_cases(
    "further modules and recipes, watched",
    all_but=("linear-*", "fused-mxfp8", "joined-delayed", "transformer-nvfp4", "grouped-fp8_block"),
)
@pytest.mark.parametrize("name", ["delayed", "fp8_block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", MODULES)
def test_watched_steps_have_the_bits_of_unwatched_ones(kind, name):
    make, more = MODULES[kind]
    torch.manual_seed(1)
    model = make()
    plain, _ = trained(copy.deepcopy(model), more, from_name(name), Unwatched)
    seen, w = trained(model, more, from_name(name), lambda model: mf.watch(model, every=2))
    assert len(plain) == len(seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert {one.step for one in w.records} == {0, 2}
    results = {(one.gemm, one.operand) for one in w.records if one.metric == "relative_error"}
    assert results == {("fprop", "y"), ("dgrad", "dx"), ("wgrad", "dw")}
    assert w.first_non_finite is None


@pytest.mark.parametrize("name", ["fp8_current", "fp8_row", "mxfp8", "mxfp4", "nvfp4"])
def test_numbers_are_those_of_the_numpy_metrics(name):
    torch.manual_seed(0)
    recipe = from_name(name)
    layer = mf.Linear(96, 64, bias=False, recipe=recipe)
    x = torch.randn(80, 96)
    x[3] = 0
    with mf.watch(
        layer,
        what_if=("mxfp6_e2m3",),
        metrics=(
            "sqnr_db",
            "rel_mse",
            "bias",
            "underflow",
            "zeros",
            "clip",
            "crest",
            "amax",
            "relative_error",
            "cosine",
            "block_dynamic_range",
            "scale_histogram",
        ),
    ) as w:
        y = layer(x)
    for cast, fmt in ((recipe.fprop.lhs, recipe.fprop.lhs.format), ("mxfp6_e2m3", None)):
        q = reference.quantize(x.numpy(), cast)
        values = reference.dequantize(q)
        fmt = fmt or q.format
        found = {
            one.metric: one.value for one in w.records if one[2:5] == ("fprop", "x", fmt.name)
        }  # fmt: skip
        for metric in ("sqnr_db", "rel_mse", "bias", "underflow", "zeros"):
            assert found[metric] == pytest.approx(getattr(metrics, metric)(x.numpy(), values), rel=1e-9), metric
        assert found["crest"] == pytest.approx(metrics.crest(x.numpy()), rel=1e-9)
        spans = [found["block_dynamic_range"], found["block_dynamic_range_p99"], found["block_dynamic_range_max"]]
        assert spans == pytest.approx(metrics.block_dynamic_range(x.numpy(), fmt.block[1] or 96), rel=1e-9)
        if q.scale.dtype == "uint8":
            assert found["scale_histogram"] == metrics.scale_histogram(q.scale, fmt.scale)
    found = {one.metric: one.value for one in w.records if one.operand == "y"}
    exact = x.double() @ layer.weight.detach().double().T
    error = metrics.gemm_error(exact.numpy(), y.detach().numpy())
    assert (found["relative_error"], found["cosine"]) == pytest.approx(error, rel=1e-9)


def test_the_first_nan_is_located():
    model = nn.Sequential(mf.Linear(32, 32), mf.Linear(32, 32))
    mf.convert(model, "mxfp8")
    with mf.watch(model, every=1, what_if=()) as w:
        model(torch.randn(8, 32))
        with torch.no_grad():
            model[1].weight[3, 4] = math.inf
        model(torch.randn(8, 32))
    found = w.first_non_finite
    assert (found.step, found.module, found.gemm, found.operand, found.metric) == (1, "1", "fprop", "w", "inf")
    assert "First inf: step 1, 1, w of fprop" in w.table()


def test_steps_are_counted_and_nothing_listens_between_them():
    from microfloat.torch.observing import OBSERVERS

    model = mf.Linear(32, 32, recipe="mxfp8")
    with mf.watch(model, every=3) as w:
        for step in range(5):
            model(torch.randn(4, 32)).sum().backward()
            assert bool(OBSERVERS) == (step % 3 == 0)
            with torch.no_grad():  # validation is no step
                model(torch.randn(4, 32))
    assert not OBSERVERS
    assert "_compiled_call_impl" not in model.__dict__
    assert {one.step for one in w.records} == {0, 3}
    with mf.watch(model, every=2) as w:
        for _ in range(4):
            w.step()
            for _ in range(2):
                model(torch.randn(4, 32)).sum().backward()
    assert {one.step for one in w.records} == {0, 2}
    with pytest.warns(UserWarning, match="was never called"), mf.watch(model):
        pass


def test_plain_layers_are_watched_for_other_formats():
    model = nn.Linear(64, 32)
    with mf.watch(model, what_if=("nvfp4", "mxfp8")) as w:
        model(torch.randn(16, 64, requires_grad=True)).sum().backward()
    formats = {(one.operand, one.format) for one in w.records if one.metric == "sqnr_db"}
    assert formats == {(operand, name) for operand in ("x", "w", "dy") for name in ("nvfp4", "mxfp8")}


def test_sinks_and_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    model = mf.Linear(64, 32, recipe="nvfp4")
    with mf.watch(model, every=1, metrics=(*mf.watch(model).metrics, "sr_noise")) as w:
        for _ in range(2):
            model(torch.randn(64, 64, requires_grad=True)).sum().backward()
    w.to_csv(tmp_path / "records.csv")
    with open(tmp_path / "records.csv", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "module", "gemm", "operand", "format", "metric", "value"]
    assert len(rows) == len(w.records) + 1
    assert {row[5] for row in rows[1:]} >= {"sr_noise_mean", "sr_noise_z", "scale_histogram"}

    class Writer(list):
        def add_scalar(self, tag, value, step):
            self.append((tag, value, step))

        def add_histogram(self, tag, values, step):
            assert len(values)

        def log(self, values, step):
            self.append((step, values))

    w.to_tensorboard(writer := Writer())
    assert any(tag.endswith("/sqnr_db/nvfp4") for tag, *_ in writer)
    w.to_wandb(run := Writer())
    assert [step for step, _ in run] == [0, 1]
    assert (path := w.plot(tmp_path / "sheet.png")) == [tmp_path / "sheet.png"]
    assert path[0].stat().st_size > 10_000
    assert len(w.plot(tmp_path / "all")) == 6


def test_arguments_that_are_refused():
    model = nn.Linear(8, 8)
    with pytest.raises(InvalidValueError, match="metrics: got 'sqnr', needed one of"):
        mf.watch(model, metrics=("sqnr",))
    with pytest.raises(InvalidValueError, match="rows: got 192, needed a multiple of 128"):
        mf.watch(model, rows=192)
    with pytest.raises(InvalidValueError, match="every: got 0"):
        mf.watch(model, every=0)


@pytest.mark.slow("a transformer layer is compiled twice")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["nvfp4", "delayed"])
def test_compiled_models_are_watched_as_they_run(name):
    torch.manual_seed(1)
    model = MODULES["transformer"][0]()
    mf.convert(model, name)
    for _ in range(2):
        torch._dynamo.reset()
        seen, w = trained(
            torch.compile(copy.deepcopy(model), backend="aot_eager"), (), from_name(name),
            lambda model: mf.watch(model, every=2),
        )  # fmt: skip
    torch._dynamo.reset()
    plain, _ = trained(torch.compile(copy.deepcopy(model), backend="aot_eager"), (), from_name(name), Unwatched)
    assert len(plain) == len(seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert {one.step for one in w.records} == {0, 2}
    if name == "nvfp4":
        assert "self_attn.q_proj+k_proj+v_proj" in {one.module for one in w.records}


@pytest.mark.slow("a layer is compiled twice")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_delayed_scaling_of_a_compiled_model_is_that_of_the_unwatched_one():
    model = mf.Linear(32, 32, dtype=BF16, recipe="delayed")
    runs = []
    for session in (lambda model: mf.watch(model, every=1, what_if=()), Unwatched):
        torch._dynamo.reset()
        made = torch.compile(copy.deepcopy(model), backend="aot_eager")
        with session(made) as w:
            for step in range(3):
                with mf.autocast(recipe="delayed"):
                    y = made(torch.full((16, 32), step + 1.0, dtype=BF16))
                (y * (step + 1)).float().sum().backward()
        runs.append((made, w))  # alive: its dy is pending while the other run opens its autocasts
    seen, plain = (made._orig_mod.state_dict() for made, _ in runs)
    assert all(torch.equal(value, plain[name]) for name, value in seen.items())
    assert seen["scaling_dy_amax_history"].any()
