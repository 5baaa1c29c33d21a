"""`mf.watch`: the numbers of the NumPy metrics, the bits of unwatched steps (features O1, O2, U9)."""

import copy
import csv
import math
import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import microfloat.torch as mf
from microfloat import metrics, recipes, reference, watching
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.formats import get_format
from microfloat.passes import CastInputs
from microfloat.recipes import from_name
from microfloat.torch.linear.observer import OBSERVERS
from microfloat.torch.watch import readings as measuring

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


@pytest.mark.slow_cases("further modules and recipes, watched", all_but=("linear-nvfp4", "joined-delayed"))
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


def test_elements_at_the_edge_of_a_binade_count_below_it():
    layer = mf.Linear(32, 32, bias=False, recipe="mxfp8")
    peak = 1.7
    x = torch.full((1, 32), peak) * torch.exp2(-torch.arange(32.0) % 8)
    with mf.watch(layer, what_if=()) as w:
        layer(x)
    found = next(one.value for one in w.records if one[2:4] == ("fprop", "x") and one.metric == "error_by_magnitude")
    # All have the mantissa of the peak, so that all are rounded alike.
    assert found[:8] == pytest.approx([found[0]] * 8, rel=1e-6)
    assert all(math.isnan(one) for one in found[8:])


def test_a_block_without_a_scale_hides_no_other_binade():
    layer = mf.Linear(64, 32, bias=False, recipe="mxfp8")
    x = torch.full((2, 64), 1.3)
    x[0, :32] *= 2.0**-8
    x[0, 5] = math.inf
    with mf.watch(layer, what_if=()) as w:
        layer(x)
    found = next(one.value for one in w.records if one[2:4] == ("fprop", "x") and one.metric == "error_by_magnitude")
    assert found[0] == pytest.approx(metrics.relative_error(x[1].numpy(), reference.dequantize(
        reference.quantize(x[1:].numpy(), "mxfp8"))[0]), rel=1e-6)  # fmt: skip


def test_binades_of_many_blocks_and_of_blocks_without_numbers():
    """Zeros fill half of the blocks, whose median is that of the others."""
    layer = mf.Linear(16 * 256, 16, bias=False, recipe="nvfp4")
    x = torch.exp2(torch.randint(0, 20, (128, 256, 16), generator=torch.Generator("cpu").manual_seed(3)).float())
    x[:, ::2] = 0
    x[5, 1, 3], x[6, 3, 4] = math.nan, math.inf
    with mf.watch(layer, what_if=(), metrics=("block_dynamic_range",)) as w:
        layer(x.reshape(128, -1))
    found = [one.value for one in w.records if one[2:4] == ("fprop", "x")]
    assert found == pytest.approx(list(metrics.block_dynamic_range(x.reshape(128, -1).numpy(), 16)), rel=1e-12)


def test_layers_are_measured_in_turn():
    """Two of five layers in each sample, each in its next rows when its turn comes again; all of them in a snapshot."""
    layers = [mf.Linear(32, 160, bias=False, recipe="mxfp8") for _ in range(4)]
    model, x = nn.ModuleList([*layers, nn.Linear(32, 160)]), torch.zeros(160, 32)
    x[128:] = 1
    with mf.watch(model, every=1, layers=2, what_if=(), metrics=("amax", "zeros")) as w:
        for step in range(7):
            if step == 5:
                w.snapshot()
            w.step()
            for layer in model:
                layer(x).sum().backward()
    of_x = [[one for one in w.records if one.step == step and one.operand == "x"] for step in range(7)]
    seen = [sorted(one.module for one in found if one.metric == "amax") for found in of_x]
    assert seen == [["0", "1"], ["2", "3"], ["0", "4"], ["1", "2"], ["3", "4"], ["0", "1", "2", "3", "4"], ["0", "1"]]
    zeros = [{one.module: one.value for one in found if one[2::3] == ("fprop", "zeros")} for found in of_x]
    assert zeros[:2] == [{"0": 1.0, "1": 1.0}, {"2": 1.0, "3": 1.0}]
    assert zeros[3] == {"1": 0.0, "2": 0.0}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_a_watched_step_waits_for_no_gpu():
    model = nn.Sequential(*(mf.Linear(256, 256, dtype=BF16, device="cuda", recipe="mxfp8") for _ in range(2)))
    x = torch.randn(256, 256, dtype=BF16, device="cuda", requires_grad=True)
    with mf.watch(model, every=1) as w:
        for step in range(4):
            if step == 3:
                torch.cuda.set_sync_debug_mode("error")
            try:
                model(x).float().square().sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert {one.step for one in w.records} == {0, 1, 2, 3}


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
    from microfloat.torch.linear.observer import OBSERVERS

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
    with pytest.warns(UserWarning, match="no call of the Linear was seen"), mf.watch(model):
        pass


def test_plain_layers_are_watched_for_other_formats():
    model = nn.Linear(64, 32)
    with mf.watch(model, what_if=("nvfp4", "mxfp8")) as w:
        model(torch.randn(16, 64, requires_grad=True)).sum().backward()
    formats = {(one.operand, one.format) for one in w.records if one.metric == "sqnr_db"}
    assert formats == {(operand, name) for operand in ("x", "w", "dy") for name in ("nvfp4", "mxfp8")}


# ----------------------------------------------------------------------------------------------------- the worst layers


class Apart(nn.Module):
    """Three layers, each of an input of its own, so that a fault of one is none of the others."""

    def __init__(self, recipe):
        super().__init__()
        self.layers = nn.ModuleDict({name: mf.Linear(64, 64, bias=False, recipe=recipe) for name in "abc"})

    def forward(self, inputs):
        outputs = [layer(x) for layer, x in zip(self.layers.values(), inputs, strict=True)]
        return sum(y.nan_to_num().square().sum() for y in outputs)


def spoil_weight(model, x, number):
    model.layers["b"].weight.data[0, :3] = 50.0


def repeat(value, peak=None):
    """x and the weight hold one magnitude, and one element of them a peak."""

    def spoil(model, x, number):
        for tensor in (x, model.layers["b"].weight.data):
            tensor.copy_(torch.where(tensor < 0, -value, value))
            tensor[0, 0] = peak or value

    return spoil


def put_nan(model, x, number):
    x[3, 5] = math.nan


def grow(model, x, number):
    x *= 100.0**number


def shrink(model, x, number):
    x *= 1e4 * 1e-4**number


@pytest.mark.parametrize(
    ("recipe", "fault", "gemm", "reason"),
    [
        ("mxfp8", put_nan, "fprop", "1 NaN in x, 64 NaN in y"), ("nvfp4", put_nan, "fprop", "1 NaN in x"),
        ("delayed", grow, "fprop", "clipping: .*% of x are beyond"),
        ("delayed", shrink, "fprop", "underflow: .*% of x become zero"),
        ("mxfp4", repeat(1.25), "fprop", r"few distinct values: rounding moves those of x one way, by -20\.0%"),
        ("fp8_current", repeat(17.0, 448.0), "fprop", r"few distinct values: rounding moves those of x one way, by -5"),
        ("nvfp4", spoil_weight, "fprop", "outliers: the largest element of w is 37 times its root mean square"),
        ("mxfp4", spoil_weight, "fprop", "outliers: the largest element of w"),
    ],
)  # fmt: skip
@pytest.mark.slow_cases("further faults of a checked kind", cases=("nvfp4-put_nan*", "mxfp4-spoil_weight*"))
def test_a_sick_layer_is_named_first_with_the_likely_reason(recipe, fault, gemm, reason):
    """issue 39: the two others raise no alarm."""
    torch.manual_seed(0)
    model = Apart(recipe)
    with mf.watch(model, every=1, what_if=("mxfp6_e2m3",)) as w:
        for number in range(2):
            inputs = [torch.randn(256, 64) for _ in range(3)]
            with torch.no_grad():
                fault(model, inputs[1], number)
            model(inputs).backward()
    first, *others = w.worst()
    assert (first.module, first.step, first.gemm) == ("layers.b", 1, gemm)
    assert re.match(reason, first.reason), first
    assert [(one.module, one.reason) for one in sorted(others, key=lambda one: one.module)] == [
        ("layers.a", ""), ("layers.c", ""),
    ]  # fmt: skip
    assert [one.module for one in w.worst(1)] == ["layers.b"]
    lines = w.table(layers=1).splitlines()
    assert {line.split()[0] for line in lines[3:] if line.startswith("layers.")} == {"layers.b"}
    assert str(first) in lines
    assert w.table().splitlines()[3].startswith("layers.b")
    assert str(w) == w.table()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.slow("trains a model of a report")
def test_two_sick_layers_of_sixteen_are_named_first():
    """issue 39: a norm with one large gain, and a few outliers of a weight, were rows 53 and beyond of 192."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(8)))
    model[5].down.weight.data[3, :7] *= 400
    model[2].norm.weight.data[5] = 3000.0
    mf.convert(model, "nvfp4")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    with mf.watch(model, every=5) as w:
        for _ in range(16):
            x = torch.randn(64, 128)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {one.module for one in w.worst(20) if one.reason} == {"2.down", "2.up", "5.down"}
    assert w.worst(1)[0].module == "2.down"


def test_outliers_that_a_format_holds_are_none():
    torch.manual_seed(0)
    model = Apart("mxfp8")
    with mf.watch(model) as w:
        spoil_weight(model, None, 0)
        model([torch.randn(256, 64) for _ in range(3)])
    assert [one.reason for one in w.worst()] == ["", "", ""]


@pytest.mark.slow_cases("a further training of each recipe", all_but=("nvfp4",))
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_healthy_training_raises_no_alarm(name):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64))
    mf.convert(model, name)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with mf.watch(model, every=8, what_if=()) as w:
        for _ in range(17):
            tokens = torch.randint(64, (128,))
            nn.functional.cross_entropy(model(tokens), (7 * tokens + 3) % 64).backward()
            optimizer.step()
            optimizer.zero_grad()
    suspects = [one for step in (0, 8, 16) for one in w.worst(step=step)]
    assert len(suspects) == 15
    assert [str(one) for one in suspects if one.reason] == []
    assert all(one.gemm == "wgrad" or 0.3 < one.error / one.expected < 2**0.5 for one in suspects)


def test_the_expected_error_is_that_of_normal_data():
    torch.manual_seed(0)
    for name in ("nvfp4", "mxfp4", "fp8_row"):
        layer = mf.Linear(512, 256, bias=False, recipe=name)
        nn.init.normal_(layer.weight)
        with mf.watch(layer, what_if=()) as w:
            layer(torch.randn(128, 512))
        (found,) = w.worst()
        assert found.error == pytest.approx(found.expected, rel=0.03), name
    with pytest.raises(InvalidValueError, match="count"):
        w.worst(0)


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


@pytest.mark.slow("draws every picture of a watch")
def test_a_picture_of_each_kind(tmp_path):
    pytest.importorskip("matplotlib")
    model = mf.Linear(64, 32, recipe="nvfp4")
    with mf.watch(model, every=1) as w:
        model(torch.randn(64, 64, requires_grad=True)).sum().backward()
    assert len(w.plot(tmp_path / "all")) == 6


def test_arguments_that_are_refused():
    model = nn.Linear(8, 8)
    with pytest.raises(InvalidValueError, match="metrics: got 'sqnr', needed one of"):
        mf.watch(model, metrics=("sqnr",))
    with pytest.raises(InvalidValueError, match="rows: got 192, needed a multiple of 128"):
        mf.watch(model, rows=192)
    with pytest.raises(InvalidValueError, match="every: got 0"):
        mf.watch(model, every=0)
    for argument in ("tensors", "metrics", "what_if"):
        with pytest.raises(InvalidTypeError, match=rf"{argument}: got NoneType, .* Write {argument}=\(\) for none"):
            mf.watch(model, **{argument: None})
    with pytest.raises(InvalidValueError, match="what_if: got 'fp8_current', needed one of 'fp8_tensor'"):
        mf.watch(model, what_if="fp8_current")
    assert [one.format.name for one in mf.watch(model, what_if=get_format("mxfp4")).measured.what_if] == ["mxfp4"]


def test_sinks_that_are_refused(tmp_path):
    w = mf.watch(nn.Linear(8, 8))
    with pytest.raises(InvalidTypeError, match=r"writer: got object, needed .* add_scalar and add_histogram"):
        w.to_tensorboard(object())
    with pytest.raises(InvalidTypeError, match="run: got object, needed an object with the methods log"):
        w.to_wandb(object())
    for write in (w.to_csv, w.plot):
        with pytest.raises(InvalidTypeError, match="path: got NoneType"):
            write(None)
    with pytest.raises(
        InvalidValueError, match=r"path: got .*x.csv, needed a file in a folder .* Create .*there first"
    ):
        w.to_csv(tmp_path / "there" / "x.csv")
    with pytest.raises(InvalidValueError, match=r"path: got .*, needed the name of a file. This is a folder"):
        w.to_csv(tmp_path)


def the_first_of_two_watches_closed():
    """A layer and two watches of it, which have both seen a call before the first one was closed."""
    model = mf.Linear(32, 16, recipe="mxfp8")
    first, second = (mf.watch(model, every=1, what_if=()) for _ in range(2))
    first.__enter__()
    second.__enter__()
    model(torch.ones(4, 32))
    first.__exit__(None, None, None)
    return model, first, second


def test_watches_of_one_model_close_in_any_order():
    """The first one to be opened took the other one away, and came back for good when that was closed."""
    model, first, second = the_first_of_two_watches_closed()
    model(torch.ones(4, 32))
    second.__exit__(None, None, None)
    model(torch.ones(4, 32))
    assert [{one.step for one in w.records} for w in (first, second)] == [{0}, {0, 1}]
    assert not OBSERVERS
    assert "_compiled_call_impl" not in vars(model)  # a watch of a model around it would take it for compiled


def test_a_watch_is_opened_again_while_a_later_one_is_open():
    model, first, second = the_first_of_two_watches_closed()
    first.__enter__()
    model(torch.ones(4, 32))
    second.__exit__(None, None, None)
    model(torch.ones(4, 32))
    first.__exit__(None, None, None)
    assert [{one.step for one in w.records} for w in (first, second)] == [{0, 1, 2}, {0, 1}]
    assert "_compiled_call_impl" not in vars(model)


def test_a_watch_that_is_closed_twice():
    """As a cell of a notebook does that is run again."""
    w = mf.watch(model := mf.Linear(32, 16, recipe="mxfp8"), what_if=())
    w.__enter__()
    model(torch.ones(4, 32))
    for _ in range(2):
        w.__exit__(None, None, None)
    assert {one.step for one in w.records} == {0}


def test_a_watch_that_is_open_already_or_not_is_refused():
    with mf.watch(nn.Linear(8, 8)) as w:
        with pytest.raises(InvalidValueError, match="watch: got one that is open already"):
            w.__enter__()
        w.step()
    with pytest.raises(InvalidValueError, match=r"w.step: got a call of a watch that is not open, .* with mf.watch"):
        w.step()


def test_an_interrupted_reading_loses_no_sample(monkeypatch):
    with mf.watch(layer := mf.Linear(32, 16, recipe="mxfp8"), every=1, what_if=()) as w:
        for _ in range(3):
            layer(torch.ones(4, 32))
    read, calls = measuring.Sample.read, iter(range(9))

    def interrupted(sample):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return read(sample)

    monkeypatch.setattr(measuring.Sample, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        w.records  # noqa: B018
    steps = [one.step for one in w.records if one.metric == "amax" and one.operand == "x"]
    assert steps == [0, 1, 2]


def test_an_interrupted_file_leaves_the_earlier_one(tmp_path):
    """What is written later holds all that was there before; half of it would have less."""

    class Interrupting:
        def __repr__(self):
            raise KeyboardInterrupt

    with mf.watch(layer := mf.Linear(32, 16, recipe="mxfp8"), what_if=()) as w:
        layer(torch.ones(4, 32))
    w.to_csv(path := tmp_path / "records.csv")
    (link := tmp_path / "latest.csv").symlink_to(path.name)
    whole = path.read_bytes()
    w.take(watching.Entry(1, "", "fprop", "x", "mxfp8"), {"crest": Interrupting()})
    for one in (path, link):
        with pytest.raises(KeyboardInterrupt):
            w.to_csv(one)
        assert path.read_bytes() == whole
        assert sorted(tmp_path.iterdir()) == [link, path]
    w.records.pop()
    path.chmod(0o640)
    w.to_csv(link)
    assert link.is_symlink()
    assert path.read_bytes() == whole
    assert path.stat().st_mode & 0o777 == 0o640


def test_two_processes_write_one_file(tmp_path, monkeypatch):
    """As ranks of one program do: the second one is whole before the first one gets its name."""
    w, path = mf.watch(nn.Linear(8, 8)), tmp_path / "records.csv"
    write = w._write_csv

    def both(to):
        write(to)
        monkeypatch.setattr(w, "_write_csv", write)
        w.to_csv(path)

    monkeypatch.setattr(w, "_write_csv", both)
    w.to_csv(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_written_where_no_other_can_be_made(tmp_path, monkeypatch):
    w, path = mf.watch(nn.Linear(8, 8)), tmp_path / "records.csv"
    path.touch()
    inode = path.stat().st_ino
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever runs the tests may be root
    w.to_csv(path)
    assert path.stat().st_ino == inode
    assert path.read_text().startswith("step,")


def test_layers_of_a_joined_weight_are_found_by_values():
    """A compiler joins weights in new memory."""
    model = nn.ModuleDict({name: mf.Linear(32, 16) for name in "abc"})

    def name_of(w, weight):
        """The name under which a call with this weight is measured."""
        w.step()
        call = w.listener(SimpleNamespace(device=-1), (), weight, False)
        if call is None:
            return None
        x = torch.randn(8, 32)
        call.schedule = None  # of a call in high precision
        call.see_x(x, CastInputs())
        call.see_w(weight, CastInputs())
        call.see_y(x @ weight.T, None)
        return call.name

    def joined(names):
        return torch.cat([model[name].weight for name in names]).detach()

    with mf.watch(model, every=1) as w:
        assert [name_of(w, joined(names)) for names in ("bc", "ab", "cab")] == ["b+c", "a+b", "c+a+b"]
        assert name_of(w, torch.cat([joined("a"), torch.randn(16, 32)])) is None
    assert {(one.step, one.module) for one in w.records} == {(0, "b+c"), (1, "a+b"), (2, "c+a+b")}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("calls", ["a wrapper", "a function"])
def test_compiled_code_is_watched_whose_caller_is_not_the_model(calls):
    """The last of four steps was lost where w.step() ends a step, and all of them where nobody calls it."""
    from microfloat.torch.linear.observer import OBSERVERS

    model = nn.Sequential(mf.Linear(32, 64), mf.Linear(64, 32))
    mf.convert(model, "mxfp8")
    torch._dynamo.reset()
    # Without a wrapper's own call, in which a watch of the model would have a place.
    call = torch.compile(model if calls == "a wrapper" else lambda x: model(x) * 2, backend="aot_eager")

    def steps(ends, every=1, trains=True, count=4):
        with mf.watch(model, every=every, what_if=()) as w:
            for _ in range(count):
                y = call(torch.randn(8, 32))
                if trains:
                    y.square().sum().backward()
                if ends:
                    w.step()
        assert not OBSERVERS
        return sorted({(one.step, one.module) for one in w.records if one.gemm == ("wgrad" if trains else "fprop")})

    def both(*numbers):
        return [(number, name) for number in numbers for name in ("0", "1")]

    for ends in (False, True):
        assert steps(ends) == both(0, 1, 2, 3)
        assert steps(ends, every=3) == both(0, 3)
    with torch.no_grad():
        assert steps(False, trains=False, every=2, count=5) == both(0, 2, 4)
    with mf.watch(model, every=1, what_if=()) as w:  # from the first call of the model on, that counts
        for step in range(3):
            (model if step else call)(torch.randn(8, 32)).sum().backward()
    assert {one.step for one in w.records} == {0, 1, 2}
    with pytest.warns(UserWarning, match="no call of the Sequential was seen"), mf.watch(model):
        torch.compile(mf.Linear(32, 32, recipe="mxfp8"), backend="aot_eager")(torch.randn(8, 32)).sum().backward()


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
