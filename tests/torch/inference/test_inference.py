"""features I1, I2, I3, I4, I5, I6, K3, G5, Q6, Q13: models whose weights are stored quantized, through all that is done
with one.
"""

import copy
import dataclasses
import gc
import io
import json
import math
import types
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import formats, reference  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError, PlacementError  # noqa: E402
from microfloat.recipes import (  # noqa: E402
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Placement,
    Recipe,
    WeightActivation,
    WeightOnly,
    from_name,
)
from microfloat.torch.inference import quantize as inference  # noqa: E402
from microfloat.torch.linear import weight_cache  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]
QKV = ("q_proj", "k_proj", "v_proj")
FORMATS = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "fp8_tensor", "fp8_row", "fp8_128x128")
ACTIVATIONS = ("fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4")


class Block(nn.Module):
    """The Linears of a decoder layer, ragged on purpose: 72 is no multiple of 16 or 32."""

    def __init__(self, size: int = 72, hidden: int = 96) -> None:
        super().__init__()
        for name in QKV:
            setattr(self, name, nn.Linear(size, size))
        self.gate_proj, self.up_proj = nn.Linear(size, hidden, bias=False), nn.Linear(size, hidden, bias=False)
        self.down_proj, self.lm_head = nn.Linear(hidden, size), nn.Linear(size, 10)

        with torch.no_grad():
            self.k_proj.weight.mul_(2)
            self.v_proj.weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.q_proj(x) + self.k_proj(x) + self.v_proj(x)
        return self.lm_head(x + self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x)))


def made(config=None, dtype=torch.bfloat16, **options) -> Block:
    torch.manual_seed(0)
    model = Block().to(dtype)
    if config is not None:
        mf.quantize_(model, config, **options)
    return model


def inputs(dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(3, 5, 72, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_weight_only_multiplies_by_the_values_of_the_codes(fmt, dtype) -> None:
    layer = made(WeightOnly(fmt), dtype).q_proj
    assert isinstance(layer, mf.Linear)
    assert isinstance(layer, nn.Linear)
    x, weight = inputs(dtype), layer.weight
    assert isinstance(weight, mf.QuantizedTensor)
    assert weight.dtype == dtype
    own = reference.quantize(made(dtype=dtype).k_proj.weight.detach().float().numpy(), fmt)
    if weight.cast.tensor_scale is None and fmt != "fp8_tensor":
        assert (made(WeightOnly(fmt), dtype).k_proj.weight.codes.view(torch.uint8).numpy() == own.codes).all()
    expected = x.float() @ weight.dequantize(dtype).float().T + layer.bias.float()
    assert torch.equal(layer(x), expected.to(dtype))


@pytest.mark.parametrize("fmt", ACTIVATIONS)
def test_weight_activation_multiplies_quantized_activations(fmt) -> None:
    layer = made(WeightActivation(fmt)).up_proj
    x = inputs().reshape(-1, 72)
    assert torch.equal(layer(x), mf.scaled_matmul(mf.quantize(x, fmt), layer.weight, accumulate="fast"))


def test_activations_and_weights_of_two_formats() -> None:
    layer = made(WeightActivation("mxfp8", weight="mxfp4")).up_proj
    assert layer.weight.format.name == "mxfp4"
    x = inputs().reshape(-1, 72)
    assert torch.equal(layer(x), mf.scaled_matmul(mf.quantize(x, "mxfp8"), layer.weight, accumulate="fast"))


def test_fused_groups_share_one_tensor_scale() -> None:
    model = made(WeightOnly("nvfp4"))
    q, k, v = (getattr(model, name).weight for name in QKV)
    plain = made()
    amax = max(float(getattr(plain, name).weight.detach().abs().max()) for name in QKV)
    for one, name in ((q, "q_proj"), (k, "k_proj"), (v, "v_proj")):
        assert torch.equal(one.detach(), mf.quantize(getattr(plain, name).weight, "nvfp4", amax=amax))
    assert torch.equal(model.gate_proj.weight.tensor_scale, model.up_proj.weight.tensor_scale)
    assert torch.equal(torch.cat([q, k, v])[72:144], k)  # what a serving engine makes of them
    alone = made(WeightOnly("nvfp4"), fuse=())
    assert len({float(getattr(alone, name).weight.tensor_scale) for name in QKV}) == 3


@pytest.mark.parametrize("names", [("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_b", "in_proj_a"), ("query", "value")])
def test_other_layers_that_engines_join_share_one_too(names) -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 16 * (i + 1)) for i, name in enumerate((*names, "o_proj"))})
    mf.quantize_(model, WeightOnly("nvfp4"))
    scales = [float(layer.weight.tensor_scale) for layer in model.values()]
    assert scales[0] == scales[1] != scales[2]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "fp8_tensor", "fp8_row", "fp8_128x128"])
def test_searched_scales_err_no_more_in_any_block(fmt) -> None:
    torch.manual_seed(2)
    layer = nn.Linear(256, 128, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(128, 256) ** 3)
    plain, found = copy.deepcopy(layer), copy.deepcopy(layer)
    mf.quantize_(plain, WeightOnly(fmt))
    mf.quantize_(found, WeightOnly(fmt, scale_search="mse"))
    assert found.weight.cast == plain.weight.cast
    errors = [(one.weight.dequantize() - layer.weight).detach().square() for one in (plain, found)]
    block = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}.get(fmt, 256)
    if fmt not in ("fp8_tensor", "fp8_128x128"):
        before, after = (error.view(128, -1, block).sum(2) for error in errors)
        assert (after <= before * 1.00001).all()
    assert errors[1].sum() <= errors[0].sum()
    if fmt in ("nvfp4", "mxfp4"):
        assert errors[1].sum() < 0.99 * errors[0].sum()


def test_a_searched_scale_of_a_fused_group_is_one() -> None:
    torch.manual_seed(3)
    model = made()
    with torch.no_grad():
        model.k_proj.weight[0, 0] = 4 * model.q_proj.weight.abs().max()  # worth clipping, for the group
    alone, plain = copy.deepcopy(model), copy.deepcopy(model)
    mf.quantize_(model, WeightOnly("fp8_tensor", scale_search="mse"))
    mf.quantize_(alone, WeightOnly("fp8_tensor", scale_search="mse"), fuse=())
    assert len({float(getattr(alone, name).weight.scale) for name in QKV}) == 3
    assert len({float(getattr(model, name).weight.scale) for name in QKV}) == 1
    weights = [getattr(plain, name).weight.detach().float() for name in QKV]
    largest = torch.cat(weights).abs().max()

    def error(ratio):
        amax = largest * ratio
        return sum((mf.quantize(w, "fp8_tensor", amax=amax).dequantize() - w).square().sum() for w in weights)

    best = min((1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7), key=error)
    assert best < 1
    assert float(model.q_proj.weight.scale) == float(
        mf.quantize(torch.ones(1), "fp8_tensor", amax=largest * best).scale
    )


def test_nvfp4_folded_to_fp8_blocks_errs_as_stated() -> None:
    exponents = torch.randint(-20, 1, (16, 256)).repeat_interleave(16, 1)[:, :256].repeat_interleave(8, 0)
    values = mf.quantize(torch.randn(128, 256) * torch.exp2(exponents.float()), "nvfp4").dequantize()
    error = (mf.quantize(values, "fp8_128x128").dequantize() - values).abs()
    largest = values.abs().view(128, 2, 128).amax((0, 2)).repeat_interleave(128)
    assert (error <= torch.maximum(values.abs() * 2.0**-4, largest * 2.0**-17.8)).all()
    assert (error > values.abs() * 2.0**-4).any()


def test_four_over_six_is_a_rule_of_the_oracle() -> None:
    layer = made(WeightOnly("nvfp4", scale_search="four_over_six")).down_proj
    expected = reference.quantize(made().down_proj.weight.detach().float().numpy(), layer.weight.cast)
    assert layer.weight.cast.scale_rule == "four_over_six_mae_256"
    assert (layer.weight.codes.numpy() == expected.codes).all()


def test_layers_follow_a_placement() -> None:
    rules = {"*_proj": WeightOnly("nvfp4"), "lm_head": None}
    model = made()
    report = mf.quantize_(model, {"down_proj": WeightActivation("mxfp8"), **rules}, exclude=())
    assert model.down_proj.weight.format.name == "mxfp8"
    assert model.q_proj.weight.format.name == "nvfp4"
    assert not isinstance(model.lm_head.weight, mf.QuantizedTensor)
    assert {row.name: row.action for row in report}["lm_head"] == "high precision"
    assert "quantized" in str(report)
    down, q = (next(line for line in str(report).splitlines() if name in line) for name in ("down_proj", "q_proj"))
    assert "WeightActivation(mxfp8)" in down
    assert "WeightOnly(nvfp4)" in q
    assert WeightOnly("mxfp4", scale_search="mse").label == "WeightOnly(mxfp4, scale_search=mse)"
    assert len(report.converted) == 6


def test_configs_are_values() -> None:
    for config in (
        WeightOnly("mxfp4", prefill="folded"), WeightOnly("mxfp4", prefill="dequantized"),
        WeightOnly("fp8_row", prefill="dequantized", prefill_rows=100), WeightActivation("fp8_tensor", scales="static"),
    ):  # fmt: skip
        assert Recipe.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert hash(config) == hash(copy.deepcopy(config))
        assert "refused" in str(config)
        assert mf.explain(config, device="h200").rows
    assert [WeightOnly(prefill=how).prefill_rows for how in (None, "folded", "dequantized")] == [128, 128, 65]
    assert [WeightOnly(fmt).prefill_rows for fmt in FORMATS] == [65, 65, 33, 33, 33, 33, 33, 33]
    assert WeightOnly(prefill="dequantized").label == "WeightOnly(nvfp4, prefill=dequantized)"
    assert WeightOnly(prefill="folded", prefill_rows=65).label == "WeightOnly(nvfp4, prefill=folded, prefill_rows=65)"


def test_tied_weights_stay_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    mf.quantize_(model, WeightOnly("mxfp8"))
    assert model["a"].weight is model["b"].weight


class Tied(nn.Module):
    """An embedding and a head of one weight, as many models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.config = types.SimpleNamespace(tie_word_embeddings=True)


def test_a_head_that_an_embedding_is_tied_to_is_untied_with_a_warning(tmp_path) -> None:
    model = Tied()
    values = model.embed_tokens.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"lm_head \(that of embed_tokens.weight\).*tied no longer") as caught:
        mf.quantize_(model, WeightOnly("mxfp8"), exclude=())
    assert caught[0].filename == __file__
    assert torch.equal(model.embed_tokens.weight, values)
    assert isinstance(model.lm_head.weight, mf.QuantizedTensor)
    with pytest.warns(UserWarning, match="has tie_word_embeddings, while quantize_ gave lm_head codes of its own"):
        mf.save_quantized(model, tmp_path / "tied")
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        mf.save_quantized(model, tmp_path / "told", config={"tie_word_embeddings": True})
    loaded = Tied()
    loaded.lm_head.weight = nn.Parameter(torch.zeros(64, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mf.save_quantized(model, tmp_path / "untied", config={"tie_word_embeddings": False})
        mf.load_quantized(tmp_path / "untied", loaded)
        mf.quantize_(nn.ModuleList([Tied(), nn.Linear(32, 32)]), WeightOnly("mxfp8"))  # heads are left out by default
    assert torch.equal(loaded.embed_tokens.weight, values)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_layer_that_another_one_of_its_weight_is_left_out_beside() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    with pytest.warns(UserWarning, match=r"b \(that of a.weight\)"):
        mf.quantize_(model, WeightOnly("mxfp8"), filter=lambda name, layer: name == "b")
    assert type(model["a"].weight) is nn.Parameter


# ---------------------------------------------------------------------------------------------------- static scales


@pytest.mark.slow_cases("further recipes and modules of a checked kind", all_but=("before-fp8_tensor", "after-nvfp4"))
@pytest.mark.parametrize("fmt", ["fp8_tensor", "nvfp4"])
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_static_scales_are_those_of_the_largest_amax(fmt, before) -> None:
    config = WeightActivation(fmt, scales="static")
    model = made() if before else made(config)
    x = inputs()
    with mf.calibrate(model) as same:
        assert same is model
        model(x)
        model(x * 2)
    if before:
        mf.quantize_(model, config)
    layer = model.q_proj
    assert float(layer.input_amax) == float((x * 2).abs().max())
    rows = x.reshape(-1, 72)
    expected = mf.quantize(rows, fmt, amax=layer.input_amax)
    y = mf.scaled_matmul(expected, layer.weight, bias=layer.bias, accumulate="fast")
    assert torch.equal(layer(rows), y)
    outliers = rows * 100
    assert torch.equal(
        layer(outliers),
        mf.scaled_matmul(mf.quantize(outliers, fmt, amax=layer.input_amax), layer.weight, bias=layer.bias,
                         accumulate="fast"),
    )  # fmt: skip
    if not before:  # a model in which both have ended is the same
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(rows), layer(rows))
    again = made(config)
    again.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(again(x), model(x))
    assert again.half().q_proj.input_amax.dtype == torch.float32


def test_calibration_that_never_ran_is_an_error() -> None:
    model = made(WeightActivation("fp8_tensor", scales="static"))
    with pytest.raises(InvalidValueError, match=r"never calibrated.*calibrate\(model\).*'q_proj'"):
        model(inputs())
    with pytest.raises(Exception, match="never calibrated"):  # Dynamo's, with the text of ours
        torch.compile(model, fullgraph=True, backend="aot_eager")(inputs())
    with pytest.warns(UserWarning, match="not called.*down_proj"), mf.calibrate(model):
        model.q_proj(inputs())
    with pytest.raises(InvalidTypeError), mf.calibrate(model):
        model.up_proj(inputs().int())
    assert model.up_proj.input_amax is None
    assert model.up_proj.pinned == WeightActivation("fp8_tensor", scales="static")
    with pytest.raises(InvalidValueError, match="linear layers"), mf.calibrate(nn.ReLU()):
        pass


def test_an_autocast_that_calibrates_measures_static_scales() -> None:
    layer, x = made(WeightActivation("fp8_tensor", scales="static")).q_proj, inputs()
    for factor in (1, 3, 2, float("inf")):
        with mf.autocast(enabled=False, calibrating=True):
            y = layer(x * factor)
        expected = torch.nn.functional.linear(x * factor, layer.weight.dequantize(), layer.bias)
        assert torch.allclose(y, expected, rtol=0, atol=0, equal_nan=True)
    assert float(layer.input_amax) == float((x * 3).abs().max())
    layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with (
        mf.autocast(enabled=False, calibrating=True),
        pytest.raises(Exception, match="static scales in compiled code"),  # Dynamo's, with the text of ours
    ):
        compiled(x)
    experts = mf.GroupedLinear(2, 16, 8)
    mf.quantize_(experts, WeightActivation("fp8_tensor", scales="static"))
    with mf.autocast(enabled=False, calibrating=True):
        experts(x.reshape(-1, 72)[:5, :16], [2, 3])
    assert float(experts.input_amax) == float(x.reshape(-1, 72)[:5, :16].abs().max())


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_row", "fp8_1x128", "nvfp4_row"])
def test_formats_without_a_scale_of_the_whole_tensor_have_no_static_one(fmt) -> None:
    with pytest.raises(InvalidValueError, match="one scale for the whole tensor"):
        WeightActivation(fmt, scales="static")


# ------------------------------------------------------------------------------------------------- gradients, settings


def test_training_is_refused_and_adapters_train() -> None:
    model = made(WeightOnly("nvfp4"))
    with pytest.raises(NotSupportedError, match=r"requires_grad_\(False\).*'q_proj'|requires_grad_\(False\)"):
        model(inputs()).sum().backward()
    x = inputs().requires_grad_()
    model.requires_grad_(False)
    y = model.q_proj(x)
    y.backward(torch.ones_like(y))
    weight = model.q_proj.weight.dequantize(torch.bfloat16).float()
    assert torch.equal(x.grad, (torch.ones_like(y).float() @ weight).bfloat16())
    layer = model.up_proj
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradients = [torch.autograd.grad(call(x).float().square().sum(), [x])[0] for call in (layer, compiled)]
    assert torch.equal(*gradients)


def test_a_compiled_training_step_is_refused_too() -> None:
    model = made(WeightActivation("mxfp8"))
    with pytest.raises(NotSupportedError, match="quantized for inference"):
        torch.compile(model.q_proj, fullgraph=True, backend="aot_eager")(inputs()).sum().backward()


def test_settings_decide_as_for_any_layer() -> None:
    model, x = made(WeightActivation("nvfp4")), inputs()
    weight_only = made(WeightOnly("nvfp4"))
    with mf.autocast(enabled=False):
        assert torch.equal(model(x), weight_only(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x.float()).dtype == torch.bfloat16
    assert model.float()(x.float()).dtype == torch.float32
    assert model.q_proj.weight.dtype == torch.float32
    assert "nvfp4" in str(model.q_proj.schedule(x.float()))
    mf.revert(model)
    assert type(model.q_proj) is nn.Linear


@pytest.mark.slow_cases("further recipes and modules of a checked kind", all_but=("nvfp4",))
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8"])
def test_a_folded_weight_serves_many_rows(fmt) -> None:
    config = WeightOnly(fmt, prefill="folded", prefill_rows=8)
    model, x = made(config).requires_grad_(False), inputs().reshape(-1, 72)
    layer = model.up_proj
    assert torch.equal(layer(x[:7]), made(WeightOnly(fmt)).up_proj(x[:7]))
    folded = layer.weight.detach()
    activation = "mxfp8"
    if fmt == "nvfp4":
        folded, activation = mf.quantize(layer.weight.dequantize(), "fp8_128x128"), "fp8_1x128"
    y = layer(x)
    assert torch.equal(y, mf.scaled_matmul(mf.quantize(x, activation), folded, accumulate="fast"))
    kept = layer._weight_cache._entry if fmt == "nvfp4" else None
    assert torch.equal(layer(x), y)
    assert kept is None or layer._weight_cache._entry is kept  # made once
    layer.weight.copy_(torch.zeros(96, 72))
    assert not layer(x).any()
    if fmt != "mxfp4":  # which is folded as mxfp8 is
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


FOUR_BITS = {fmt: WeightActivation(fmt, activation="fp8_row") for fmt in ("nvfp4", "mxfp4", "nvfp4_row", "mxfp6_e2m3")}


@pytest.mark.parametrize(("fmt", "search"), [*((fmt, None) for fmt in FOUR_BITS), ("nvfp4", "mse")])
def test_fp8_rows_by_weights_of_four_bits(fmt, search) -> None:
    """37.4: few rows take the weight's own values, many its fold to rows, made once of the stored codes."""
    model = made(dataclasses.replace(FOUR_BITS[fmt], scale_search=search)).requires_grad_(False)
    layer, x = model.down_proj, torch.randn(40, 96).bfloat16()
    q = layer.weight
    parts = [
        None if part is None else part.detach().numpy() for part in (q.codes.view(torch.uint8), q.scale, q.tensor_scale)
    ]
    stored = reference.Quantized(*parts, q.format, 1, tuple(q.shape))
    folded, _ = reference.fold(stored, (1, None))
    for rows, weight in ((16, stored), (17, folded), (40, folded)):
        exact = reference.scaled_matmul(reference.quantize(x[:rows].float().numpy(), "fp8_row"), weight)
        exact += layer.bias.detach().double().numpy()
        assert abs(layer(x[:rows]).double().numpy() - exact).max() <= 2.0**-8 * abs(exact).max()
    made_once = layer._weight_cache._entry
    assert made_once[2].row.codes.view(torch.uint8).numpy().tobytes() == folded.codes.tobytes()
    assert made_once[2].row.scale.numpy().tobytes() == folded.scale.tobytes()
    layer(x)
    assert layer._weight_cache._entry is made_once
    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    expected = torch.ones(40, 72).double() @ torch.from_numpy(reference.dequantize(folded)).double()
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=2.0**-7, atol=2.0**-8)
    layer.weight.copy_(torch.zeros(72, 96))
    assert torch.equal(layer(x), layer.bias.expand(40, 72))


@pytest.mark.parametrize("rows", [9, 40])
def test_fp8_rows_by_weights_of_four_bits_train_to_what_they_serve(rows) -> None:
    model, x = made().requires_grad_(True), torch.randn(rows, 72).bfloat16()
    mf.convert(model, FOUR_BITS["nvfp4"])
    trained = model.up_proj(x)
    trained.float().square().sum().backward()
    assert model.up_proj.weight.grad.any()
    mf.quantize_(model, FOUR_BITS["nvfp4"], fuse=())
    assert torch.equal(model.up_proj(x), trained)


def test_fp8_rows_by_weights_of_four_bits_are_told_and_saved(tmp_path) -> None:
    config = FOUR_BITS["nvfp4"]
    assert (
        config == WeightActivation("fp8_row", weight="nvfp4") == WeightActivation(weight="nvfp4", activation="fp8_row")
    )
    assert config.label == "WeightActivation(fp8_row, weight=nvfp4)"
    model, x = made(config), torch.randn(20, 72).bfloat16()
    for told in (mf.explain(model), mf.explain(config, "h200")):
        assert "up to 16 rows of x: by the weight's own values; more: by its fold to FP8" in " ".join(str(told).split())
    assert "takes 6912 bytes, and is kept" not in str(model.down_proj.schedule(torch.randn(3, 96).bfloat16()))
    assert "takes 7200 bytes, and is kept" in str(model.down_proj.schedule(torch.randn(20, 96).bfloat16()))
    for fmt, given, loaded in (
        ("microfloat:native", None, config), ("ct:nvfp4", None, WeightOnly("nvfp4")), ("ct:nvfp4", config, config),
        ("modelopt:nvfp4", config, config),
    ):  # fmt: skip
        path, copied = tmp_path / f"{fmt.replace(':', '_')}{given is None}", made()
        mf.save_quantized(model, path, format=fmt)
        mf.load_quantized(path, copied, config=given)
        assert copied.up_proj.pinned == loaded
        assert torch.equal(copied.up_proj.weight, model.up_proj.weight)
        if loaded == config:
            assert torch.equal(copied(x), model(x))
    assert mf.quantize_(made(), {"*_proj": FOUR_BITS["mxfp4"], "lm_head": None}).converted
    torch.testing.assert_close(
        torch.compile(model.up_proj, fullgraph=True, backend="aot_eager")(x), model.up_proj(x), rtol=0, atol=0
    )


@pytest.fixture
def dequantized(monkeypatch) -> list:
    """What every dequantization of a weight from here on has made."""
    made, decoded = [], mf.QuantizedTensor.decoded
    monkeypatch.setattr(mf.QuantizedTensor, "decoded", lambda q, dtype: made.append(decoded(q, dtype)) or made[-1])
    return made


DEQUANTIZED = {fmt: WeightOnly(fmt, prefill="dequantized", prefill_rows=8) for fmt in FORMATS}


@pytest.mark.slow_cases("further dtypes of a checked format", all_but=("*bfloat16", "nvfp4-*"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_dequantized_weight_changes_no_bits(fmt, dtype) -> None:
    usual, kept = (made(config, dtype).requires_grad_(False) for config in (WeightOnly(fmt), DEQUANTIZED[fmt]))
    x, dy = inputs(dtype).reshape(-1, 72), torch.ones(15, 72, dtype=dtype)
    for rows in (7, 8, 15):
        assert torch.equal(kept(x[:rows]), usual(x[:rows]))
    assert torch.equal(kept(inputs(dtype)), usual(inputs(dtype)))
    gradients = []
    for model in (usual, kept):
        leaf = x.clone().requires_grad_()
        model.q_proj(leaf).backward(dy)
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kept(x), usual(x))


def test_a_weight_is_dequantized_once(dequantized) -> None:
    model, x = made(DEQUANTIZED["nvfp4"]), inputs().reshape(-1, 72)
    layer = model.up_proj
    layer.requires_grad_(False)
    layer(x[:7])
    assert not layer.__dict__.get("_weight_cache")
    dequantized.clear()
    for rows in (8, 15, 9):
        layer(x[:rows])
        assert len(dequantized) == 1
    assert dequantized[0].nbytes == 2 * 96 * 72  # beside the codes
    assert "takes 13824 bytes, and is kept" in str(layer.schedule(x))
    with torch.autocast("cpu", dtype=torch.float16):
        layer(x)
    assert dequantized[1].dtype == torch.float16
    words = "8 rows of x or more: by the weight dequantized to the dtype of the call, made once (prefill='dequantized')"
    for told in (mf.explain(model), mf.explain(DEQUANTIZED["nvfp4"], "h200")):
        assert words in " ".join(str(told).split())


def test_a_dequantized_weight_follows_writes_and_is_never_saved(dequantized) -> None:
    model, usual, x = made(DEQUANTIZED["nvfp4"]), made(WeightOnly("nvfp4")), inputs()
    size = len(saved(model))
    model(x)
    assert len(saved(model)) == size
    assert set(model.state_dict()) == set(usual.state_dict())
    half = mf.quantize(torch.ones(48, 72), "nvfp4")
    for one in (model, usual):
        one.up_proj.weight.detach().narrow(0, 48, 48).copy_(half)
    assert torch.equal(model(x), usual(x))
    for one in (model, usual):
        one.load_state_dict(made(WeightOnly("nvfp4")).state_dict())
        one.half()
    assert torch.equal(model(x.half()), usual(x.half()))
    dequantized.clear()
    model(x.half())
    assert not dequantized
    plain = copy.deepcopy(model)
    plain(x.half())
    parameter = plain.up_proj.weight
    assert mf.revert(plain).up_proj.weight is parameter  # nothing kept refers to it
    twin = copy.deepcopy(model)
    twin.up_proj.weight.detach().copy_(torch.zeros(96, 72))
    assert torch.equal(model(x.half()), usual(x.half()))
    assert not twin.up_proj(x.half()).any()


@pytest.mark.parametrize("write", ["copy_", "slices", "load_plain"])
@pytest.mark.parametrize("prefill", ["dequantized", "folded"])
def test_what_is_kept_follows_writes_through_data(prefill, write) -> None:
    """Weight loaders write ``weight.data``, whose version is not that of the weight."""
    model = made(WeightOnly("nvfp4", prefill=prefill, prefill_rows=8))
    layer, x = model.up_proj.requires_grad_(False), inputs().reshape(-1, 72)
    new = mf.quantize(torch.randn(96, 72, generator=torch.Generator().manual_seed(5)).bfloat16(), "nvfp4")
    before, data = layer(x), layer.weight.data
    if write == "copy_":
        data.copy_(new)
    elif write == "slices":
        data.copy_(torch.zeros(96, 72))
        assert not layer(x).any()
        data.narrow(0, 0, 48).copy_(new[:48])
        data[48:].copy_(new[48:])
    else:
        data.copy_(new.dequantize())
    fresh = copy.deepcopy(layer)
    assert torch.equal(layer(x), fresh(x))
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("prefill", ["dequantized", "folded"])
def test_what_is_kept_follows_a_weight_that_is_swapped(prefill, monkeypatch) -> None:
    """`torch.utils.swap_tensors`, by itself and where torch loads a state dict by it."""
    first, second = (made(WeightOnly("nvfp4", prefill=prefill, prefill_rows=8)).up_proj for _ in range(2))
    second.weight.detach().copy_(torch.randn(96, 72, generator=torch.Generator().manual_seed(5)))
    x = inputs().reshape(-1, 72)
    with torch.no_grad():
        before = [first(x), second(x)]
        torch.utils.swap_tensors(first.weight, second.weight)
        assert torch.equal(first(x), before[1])
        assert torch.equal(second(x), before[0])
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        first.load_state_dict(second.state_dict())
        assert torch.equal(first(x), before[0])


def test_a_backward_refuses_codes_that_were_written_after_its_forward() -> None:
    layer = made(WeightOnly("mxfp8")).up_proj.requires_grad_(False)
    y = layer(inputs().requires_grad_())
    layer.weight.data.copy_(torch.zeros(96, 72))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def saved(model) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8_tensor"])
def test_a_layer_asks_once_for_memory_and_keeps_a_copy(fmt, monkeypatch, dequantized) -> None:
    """37.4: from the crossover on, the dequantized weight is taken without being asked if memory allows."""
    asked, free = [], {}
    monkeypatch.setattr(weight_cache, "has_memory", lambda device, size: asked.append(size) or free.get("answer"))
    rows, usual = WeightOnly(fmt).prefill_rows, made(WeightOnly(fmt, prefill=None)).up_proj.requires_grad_(False)
    x = torch.randn(rows, 72).bfloat16()
    layer = made(WeightOnly(fmt)).up_proj.requires_grad_(False)
    layer(x[1:])
    assert not asked  # below the crossover
    assert torch.equal(layer(x), usual(x))
    assert asked == [2 * 96 * 72]
    assert layer._weight_cache._entry is None  # a device without an answer, such as a CPU
    free["answer"] = False
    layer(x)
    layer(x)
    assert len(asked) == 2
    assert layer._weight_cache._entry is None
    assert "no copy: too little free memory" in repr(layer)
    free["answer"] = True
    layer.to("cpu")  # a move asks again
    leaf = x.clone().requires_grad_()
    layer(leaf)
    assert len(asked) == 2  # of calls without gradients alone
    dequantized.clear()
    for _ in range(3):
        assert torch.equal(layer(x), usual(x))
    assert len(asked) == 3
    assert layer._weight_cache._entry is not None
    assert "a dequantized copy serves calls of many rows" in repr(layer)
    assert "a dequantized copy serves calls of many rows" in " ".join(str(mf.explain(nn.Sequential(layer))).split())
    mf.linear(x, layer.weight, recipe=WeightOnly(fmt))
    usual(x)
    assert len(asked) == 3
    layer.weight.copy_(torch.zeros(96, 72))
    assert not layer(x).any()


def test_memory_for_copies_leaves_an_eighth_free(monkeypatch) -> None:
    for name, value in (("mem_get_info", (30, 80)), ("memory_reserved", 50), ("memory_allocated", 40)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert [weight_cache.has_memory(torch.device("cuda", 0), size) for size in (30, 31)] == [True, False]
    assert weight_cache.has_memory(torch.device("cpu"), 1) is None


@pytest.mark.slow("further programs of a checked kind")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_programs_dequantize_at_every_call() -> None:
    layer, usual = (
        made(config).up_proj.requires_grad_(False) for config in (DEQUANTIZED["nvfp4"], WeightOnly("nvfp4"))
    )
    compiled, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), inputs().reshape(-1, 72)
    for rows in (15, 7):
        assert torch.equal(compiled(x[:rows]), usual(x[:rows]))
    leaf = x.clone().requires_grad_()
    gradients = [torch.autograd.grad(call(leaf).float().square().sum(), [leaf])[0] for call in (usual, compiled)]
    assert torch.equal(*gradients)
    program = mf.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},)).module()
    for rows in (15, 7):
        assert torch.equal(program(x[:rows]), usual(x[:rows]))


@pytest.mark.parametrize("prefill", ["dequantized", "folded"])
def test_a_function_keeps_nothing(prefill) -> None:
    weight, x = made(WeightOnly("nvfp4")).up_proj.weight, inputs().reshape(-1, 72)
    config = WeightOnly("nvfp4", prefill=prefill, prefill_rows=8)
    assert torch.equal(mf.linear(x, weight, recipe=config), made(config).up_proj(x))


def test_a_weight_of_another_format_is_quantized_to_that_of_the_recipe_first() -> None:
    x, weight = inputs().reshape(-1, 72), mf.quantize(torch.randn(40, 72).bfloat16(), "mxfp8")
    usual = mf.linear(x, weight, recipe=WeightOnly("nvfp4"))
    assert torch.equal(mf.linear(x, weight, recipe=DEQUANTIZED["nvfp4"]), usual)
    assert not torch.equal(usual, mf.linear(x, weight, recipe=WeightOnly("mxfp8")))


def test_experts_run_as_without_a_dequantized_weight(dequantized) -> None:
    layers = []
    for config in (WeightOnly("nvfp4"), DEQUANTIZED["nvfp4"]):
        torch.manual_seed(3)
        layers.append(mf.GroupedLinear(2, 64, 48, dtype=torch.bfloat16).requires_grad_(False))
        mf.quantize_(layers[-1], config)
    usual, kept = layers
    x = torch.randn(40, 64).bfloat16()
    assert torch.equal(kept(x, [30, 10]), usual(x, [30, 10]))
    assert str(kept.schedule(x)) == str(usual.schedule(x))


# ----------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_tensor", "mxfp4", "mxfp8", "fp8_row", "fp8_128x128"])
def test_every_expert_has_a_scale_of_its_own(fmt) -> None:
    torch.manual_seed(3)
    experts = mf.GroupedLinear(3, 64, 128, bias=True, dtype=torch.bfloat16)
    with torch.no_grad():
        experts.weight.mul_(torch.tensor([1.0, 5.0, 0.2])[:, None, None])
    plain = [one.detach().clone() for one in experts.weight]
    mf.quantize_(experts, WeightOnly(fmt))
    weight, x = experts.weight, torch.randn(9, 64).bfloat16()
    assert weight.shape == (3, 128, 64)
    for one, own in zip(plain, weight, strict=True):
        assert torch.equal(own, mf.quantize(one, fmt))
    assert torch.equal(weight.dequantize(), torch.stack([mf.quantize(one, fmt).dequantize() for one in plain]))
    y = experts(x, [4, 0, 5])
    expected = [x[:4] @ weight[0].dequantize().T, x[4:] @ weight[2].dequantize().T]
    assert torch.allclose(y.float(), torch.cat([expected[0] + experts.bias[0], expected[1] + experts.bias[2]]).float(),
                          atol=0.02, rtol=0.02)  # fmt: skip
    file = io.BytesIO()
    torch.save(experts.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], weight)
    assert torch.equal(copy.deepcopy(experts)(x, [4, 0, 5]), y)
    weight.detach()[1].copy_(plain[0])  # as a serving engine loads one expert
    assert torch.equal(weight[1], weight[0])


def test_tiles_that_two_experts_would_share_are_refused_in_words() -> None:
    """Rows of a group are free; those of an expert's weight are not, where tiles cover several."""
    model = nn.ModuleList([nn.Linear(64, 64), mf.GroupedLinear(3, 256, 192, dtype=torch.bfloat16)])
    needed = "multiples of 128 rows, so that no tile holds rows of two experts. Take a format without tiles"
    with pytest.raises(InvalidValueError, match=f"got experts of 192 rows under fp8_128x128, needed {needed}"):
        mf.quantize_(model, WeightOnly("fp8_128x128"))
    assert type(model[0]) is nn.Linear, "nothing changes"
    mf.quantize_(model, WeightOnly("fp8_128x128"), filter=lambda name, layer: name != "1")
    alone = nn.ModuleList([mf.GroupedLinear(1, 256, 192)])
    mf.quantize_(alone, WeightOnly("fp8_128x128"))  # whose tiles are its own
    assert alone[0].weight.dequantize().shape == (1, 192, 256)


def test_gates_of_experts_share_scales_with_their_ups() -> None:
    torch.manual_seed(3)
    model = nn.ModuleDict({name: mf.GroupedLinear(2, 32, 48) for name in ("gate_proj", "up_proj")})
    mf.quantize_(model, WeightOnly("nvfp4"))
    gate, up = (layer.weight.tensor_scale for layer in model.values())
    assert gate.shape == (2,)
    assert torch.equal(gate, up)
    with pytest.raises(InvalidValueError, match="experts"):
        model["up_proj"].weight.permute(1, 0, 2)


def test_a_plan_of_a_training_is_served(tmp_path) -> None:
    """issue 39: one file trains and serves; each layer multiplies as fprop of its recipe does."""
    report = mf.quantize_(made(), WeightOnly("mxfp8"))
    first, second, *_, last = report.converted
    plan = mf.Placement([(first, None), (f"{second}:wgrad", None), (second, "mxfp8"), ("*", "nvfp4")])
    plan.to_json(tmp_path / "plan.json")
    expected = {first: None, second: WeightActivation("mxfp8"), "*": WeightActivation("nvfp4")}
    served = [made(config) for config in (tmp_path / "plan.json", str(tmp_path / "plan.json"), plan, expected)]
    outputs = [model(inputs()) for model in served]
    assert all(torch.equal(one, outputs[-1]) for one in outputs)
    assert type(served[0].get_submodule(first)) is nn.Linear
    model = made()
    trained = {row.name: row.recipe for row in mf.convert(model, str(tmp_path / "plan.json"))}
    assert trained[first] is None
    assert trained[second] == plan.resolve([row.name for row in report])[second]
    assert trained[last] == from_name("nvfp4")
    mf.Placement([("nothing", "mxfp8"), ("*", "nvfp4")]).to_json(tmp_path / "wrong.json")
    named = r"wrong\.json: got patterns that match no layer: 'nothing' \(rules\[0\]\)"
    for call in (mf.quantize_, mf.convert):
        with pytest.raises(PlacementError, match=named):
            call(made(), tmp_path / "wrong.json")


# --------------------------------------------------------------------------------------------------------- bad input


def test_bad_configs_are_named() -> None:
    for config, error, text in (
        ("nvfp4", InvalidTypeError, r"WeightOnly\('nvfp4'\)"),
        (NVFP4BlockScaling(), InvalidTypeError, "convert"),
        ({"*": NVFP4BlockScaling()}, InvalidTypeError, "convert"),
        (None, InvalidTypeError, "config"),
        (WeightOnly, InvalidTypeError, r"got the class WeightOnly, .*Call the class: WeightOnly\('nvfp4'\)"),
        ({"q_proj": "nvfp4"}, InvalidTypeError, r"got 'nvfp4', .*Write WeightOnly\('nvfp4'\)"),
        ({"nothing.*": WeightOnly("nvfp4")}, PlacementError, "match no layer"),
        (Placement([("*:wgrad", WeightOnly("nvfp4"))]), InvalidValueError, "whole layers"),
    ):
        with pytest.raises(error, match=text):
            mf.quantize_(made(), config)
    with pytest.raises(InvalidValueError, match="Did you mean 'nvfp4'"):
        WeightOnly("nvfp")
    for fmt in ("fp8_128x128", "nvfp5"):
        with pytest.raises(InvalidValueError, match=r"one of 'fp8_tensor', 'fp8_row', 'fp8_1x128', 'mxfp8'"):
            WeightActivation(fmt)
    for fmt, weight, needed in (
        ("mxfp8", "fp8_row", "None or one of 'mxfp8', 'mxfp8_e5m2', 'mxfp6_e2m3', 'mxfp6_e3m2', 'mxfp4'. .* E8M0 too"),
        ("nvfp4", "mxfp4", "None or one of 'nvfp4', 'nvfp4_row', 'nvfp4_2d'. A GEMM multiplies nvfp4 by .* E4M3 too"),
        ("fp8_tensor", "mxfp8", "None or one of 'fp8_tensor', .*, 'fp8_128x128_e5m2'. A GEMM .* FP32 too. .*: fp8_row"),
        (
            "fp8_1x128",
            "nvfp4",
            "None or one of 'fp8_tensor', .* FP8 activations beside .* a scale for each row: fp8_row",
        ),
    ):
        for options in ({"format": fmt, "weight": weight}, {"format": weight, "activation": fmt}):
            with pytest.raises(InvalidValueError, match=f"^weight: got '{weight}', needed {needed}"):
                WeightActivation(**options)
    with pytest.raises(InvalidValueError, match=r"^weight: got 'nvfp4' beside 'mxfp4' and an activation"):
        WeightActivation("mxfp4", "fp8_row", "nvfp4")
    with pytest.raises(InvalidValueError, match=r"^format: got 'fp9', needed one of"):
        WeightActivation("nvfp4", activation="fp9")
    with pytest.raises(InvalidValueError, match=r"^scales: got 'static' with mxfp8, .*fp8_tensor or nvfp4"):
        WeightActivation("mxfp8", scales="static")
    with pytest.raises(
        InvalidTypeError, match=r"prefill: got bool, needed None or one of 'auto', 'dequantized', 'folded'"
    ):
        WeightOnly("nvfp4", prefill=False)
    with pytest.raises(InvalidValueError, match=r"prefill: got 'none', needed None or one of"):
        WeightOnly("nvfp4", prefill="none")
    with pytest.raises(InvalidTypeError, match=r"got the class MXFP8BlockScaling, .*recipe.fprop.rhs.format"):
        WeightOnly(MXFP8BlockScaling)
    with pytest.raises(InvalidTypeError, match=r"cast: got the class MXFP8BlockScaling, .*six Casts"):
        mf.quantize(inputs(), MXFP8BlockScaling)
    for options in ({"scale_search": "best"}, {"prefill": "yes"}, {"prefill_rows": 0}):
        with pytest.raises(InvalidValueError):
            WeightOnly("nvfp4", **options)
    with pytest.raises(InvalidValueError, match="four_over_six"):
        WeightOnly("mxfp4", scale_search="four_over_six")


@pytest.mark.parametrize("config", [WeightOnly, WeightActivation])
@pytest.mark.parametrize("name", ["mxfp8", "mine"])
def test_a_format_of_ones_own_is_not_taken_for_the_stock_one_of_its_name(config, name) -> None:
    own = dataclasses.replace(formats.MXFP8, name=name, block=(1, 16))
    with pytest.raises(InvalidValueError, match=f"^format: got a ScaledFormat of your own, '{name}', .*torch.linear"):
        config(own)
    x, weight = inputs().float(), torch.randn(8, 72)
    q = mf.quantize(weight, own)
    assert torch.allclose(mf.linear(x, q), x @ q.dequantize().T, rtol=1e-4, atol=1e-4)


def layers_of(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]


@pytest.mark.slow_cases("further configs of a checked kind", all_but=("config0",))
@pytest.mark.parametrize("config", [WeightOnly("nvfp4"), {"q_proj": WeightOnly("nvfp4"), "*": WeightOnly("mxfp8")}])
def test_after_an_error_a_layer_is_quantized_or_as_it_was_and_a_second_call_goes_on(config, monkeypatch) -> None:
    """The plain weight of a layer that is done is let go: a model that just fits is quantized where it is."""
    model, search, calls = Block(), inference.searched, []
    whole = copy.deepcopy(model)
    mf.quantize_(whole, config, exclude=())
    wanted = {name: q.dequantize() for name, q in whole.named_parameters() if isinstance(q, mf.QuantizedTensor)}
    before = {name: (type(one), vars(one).keys(), weakref.ref(one.weight)) for name, one in layers_of(model)}
    number = len(before) - 1

    def failing(*arguments):
        calls.append(sum(weight() is not None for _, _, weight in before.values()))
        if len(calls) == number:
            raise RuntimeError("out of memory")
        return search(*arguments)

    monkeypatch.setattr(inference, "searched", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        mf.quantize_(model, config, exclude=())
    done = [name for name, one in layers_of(model) if isinstance(one.weight, mf.QuantizedTensor)]
    assert len(done) == number - 1
    assert calls[-1] == 2  # the plain weight of this layer, and of the one after it
    gc.collect()
    for name, one in layers_of(model):
        kind, attributes, weight = before[name]
        if name in done:
            assert weight() is None
        else:
            assert (type(one), vars(one).keys(), one.weight) == (kind, attributes, weight())
    mf.quantize_(model, config, exclude=())
    for name, values in wanted.items():
        assert torch.equal(model.get_parameter(name).dequantize(), values), name


def test_weights_that_are_not_finite_are_named() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64), mf.GroupedLinear(2, 64, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[0].weight[3, 1] = math.nan
        model[2].weight[1, 0, 5] = -math.inf
        model[3].bias[0] = math.nan  # stays as it is
    with pytest.warns(UserWarning, match=r"weights hold a NaN or an infinity: 0, 2\. .*filter=.*\['0', '2'\]"):
        mf.quantize_(model, mf.WeightOnly("nvfp4"))
    assert model[0].weight.dequantize().isnan().any()


def test_a_model_without_a_layer_that_matches_is_an_error() -> None:
    for model, options in ((nn.ReLU(), {}), (Block(), {"filter": lambda name, module: False}), (nn.Linear(4, 4), {
        "exclude": ("*",)
    })):  # fmt: skip
        with pytest.raises(InvalidValueError, match="without a layer to quantize"):
            mf.quantize_(model, WeightOnly("nvfp4"), **options)
    model = made(WeightOnly("nvfp4"))
    with pytest.raises(InvalidValueError, match=r"quantized already.*revert\(model\).*convert\(model, config\)"):
        mf.quantize_(model, WeightOnly("mxfp8"))
    double = Block().double()
    with pytest.raises(InvalidValueError, match="float64"):
        mf.quantize_(double, WeightOnly("mxfp8"), exclude=())
    assert type(double.q_proj) is nn.Linear


def test_codes_that_a_model_has_loaded_stay_as_they_are() -> None:
    """A state dict that was assigned to a plain model, or the weights of quantized_model_init."""
    served, loaded = made(WeightOnly("nvfp4")), Block().bfloat16()
    loaded.load_state_dict(served.state_dict(), assign=True)
    with pytest.raises(InvalidValueError, match=r"quantized already \(nvfp4\)"):
        mf.quantize_(loaded, WeightOnly("mxfp8"))
    with pytest.raises(InvalidValueError, match=r"quantized already \(nvfp4\)"):
        mf.quantize_(loaded, {"*": None})
    codes = loaded.q_proj.weight
    mf.quantize_(loaded, WeightOnly("nvfp4"))
    assert loaded.q_proj.weight is codes
    assert torch.equal(loaded(inputs()), served(inputs()))
    with mf.quantized_model_init(recipe="mxfp8"):
        trained = mf.Linear(64, 32)
    mf.quantize_(trained, WeightActivation("mxfp8"))
    with pytest.raises(InvalidValueError, match="quantized already"):
        mf.quantize_(trained, WeightActivation("mxfp8"))


def test_convert_runs_stored_codes_under_another_config() -> None:
    model, kept, x = made(WeightOnly("nvfp4")), made(DEQUANTIZED["nvfp4"]), inputs()
    codes = model.q_proj.weight
    mf.convert(model, DEQUANTIZED["nvfp4"])
    assert model.q_proj.weight is codes
    assert model.q_proj.pinned == kept.q_proj.pinned
    assert torch.equal(model(x), kept(x))


def test_activations_of_another_dtype() -> None:
    model = made(WeightOnly("nvfp4"))
    assert model.q_proj(inputs().float()).dtype == torch.float32  # the compute dtype is x's
    with pytest.raises(InvalidTypeError, match=r"torch.int64.*'q_proj'"):
        model.q_proj(torch.ones(2, 72, dtype=torch.int64))
    with pytest.raises(InvalidTypeError, match="float64"):
        model.q_proj(torch.ones(2, 72, dtype=torch.float64))


# ------------------------------------------------------------------------------------------ features I8: the KV cache


@pytest.mark.parametrize(("fmt", "cast"), [("fp8", "fp8_row"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4")])
def test_a_cache_holds_keys_and_values_quantized(fmt, cast) -> None:
    torch.manual_seed(4)
    k, v = torch.randn(2, 5, 2, 32).bfloat16(), torch.randn(2, 5, 2, 32).bfloat16()
    cache = mf.KVCache(2, 8, 2, 32, dtype=torch.bfloat16, format=fmt)
    for start in range(5):  # token by token: earlier ones keep their values
        keys, values = cache.update(k[:, start : start + 1], v[:, start : start + 1])
    assert torch.equal(keys, mf.quantize(k, cast).dequantize())
    assert torch.equal(values, mf.quantize(v, cast).dequantize())
    assert cache.nbytes < 0.6 * mf.KVCache(2, 8, 2, 32, dtype=torch.bfloat16).nbytes
    cache.reset()
    assert cache.update(k, v)[0].shape == k.shape


def test_a_cache_takes_the_scales_of_a_checkpoint() -> None:
    k = torch.tensor([1.0, -3.0, 100.0, 0.5]).view(1, 1, 1, 4)
    cache = mf.KVCache(1, 4, 1, 4, format="fp8", k_scale=0.125, v_scale=torch.tensor(0.125))
    keys, _ = cache.update(k, k)
    assert keys.flatten().tolist() == [1.0, -3.0, 56.0, 0.5]  # 448 / 8: larger ones saturate
    for options in ({"format": "fp9"}, {"format": "fp8", "k_scale": 1.0}, {"k_scale": 1.0, "v_scale": 1.0}):
        with pytest.raises(InvalidValueError):
            mf.KVCache(1, 4, 1, 4, **options)


def test_the_scale_of_a_checkpoint_is_kept_as_it_is() -> None:
    """Where a scale is not the reciprocal of a float32 number, values are multiples of the scale all the same."""
    codes = torch.tensor([1.0, -3.0, 448.0, 0.5]).view(1, 1, 1, 4)
    for numerator in range(1, 60):
        scale = torch.tensor(numerator / 61)
        cache = mf.KVCache(1, 4, 1, 4, dtype=torch.float32, format="fp8", k_scale=scale.item(), v_scale=scale)
        keys, values = cache.update(codes * scale, codes * scale)
        assert torch.equal(keys, codes * scale)
        assert torch.equal(values, codes * scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_scale": 0.0}, "k_scale: got 0.0, needed one number in"),
        ({"v_scale": float("inf")}, "v_scale: got inf"),
        ({"k_scale": torch.ones(3)}, r"k_scale: got shape \(3,\)"),
        ({"k_scale": "1"}, "k_scale: got str"),
        ({"length": -4}, "length: got -4"),
        ({"dtype": torch.int8}, "dtype: got torch.int8"),
    ],
)
def test_wrong_arguments_of_a_cache_are_named(change, message) -> None:
    arguments = {
        "batch": 1,
        "length": 4,
        "num_kv_heads": 1,
        "head_dim": 4,
        "format": "fp8",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        mf.KVCache(**{**arguments, **change})
    with pytest.raises(InvalidTypeError, match="k: got NoneType"):
        mf.KVCache(**arguments).update(None, None)  # type: ignore[arg-type]


def test_attention_generates_from_a_quantized_cache() -> None:
    torch.manual_seed(5)
    layer = mf.MultiheadAttention(64, 4, 2, dtype=torch.bfloat16)
    mf.quantize_(layer, WeightOnly("nvfp4"), exclude=())
    x = torch.randn(1, 6, 64).bfloat16()
    with torch.no_grad():
        whole = layer(x)
        cache = mf.KVCache(1, 6, 2, 16, dtype=torch.bfloat16, format="fp8")
        steps = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(6)], 1)
    assert (steps - whole).float().norm() < 0.05 * whole.float().norm()


@pytest.mark.slow("further programs of a checked kind")
@pytest.mark.parametrize("config", [WeightOnly("nvfp4"), WeightActivation("fp8_tensor", scales="static")],
                         ids=lambda one: one.format)  # fmt: skip
def test_compiled_experts_give_the_bits_of_eager(config) -> None:
    torch.manual_seed(6)
    experts = mf.GroupedLinear(2, 32, 48, dtype=torch.bfloat16)
    mf.quantize_(experts, config)
    x, sizes = torch.randn(7, 32).bfloat16().requires_grad_(), torch.tensor([3, 4])
    if config.is_static:
        with mf.calibrate(experts):
            experts(x, sizes)
    experts.requires_grad_(False)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    (y, dx), (again, dx_again) = (
        (one := call(x, sizes), torch.autograd.grad(one.float().square().sum(), [x])[0]) for call in (experts, compiled)
    )
    assert torch.equal(y, again)
    assert torch.equal(dx, dx_again)


# ---- embeddings


class _Speaker(nn.Module):
    """An embedding, a layer and a head that may share the embedding's weight."""

    def __init__(self, tied=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.up, self.lm_head = nn.Embedding(40, 64, **options), nn.Linear(64, 64), nn.Linear(64, 40)
        if tied:
            self.lm_head.weight = self.words.weight

    def forward(self, ids):
        return self.lm_head(self.up(self.words(ids)))


IDS = torch.tensor([[1, 39, 7], [0, 3, 3]])


def test_embeddings_are_quantized_where_asked_for():
    left, model = _Speaker(), _Speaker()
    values = mf.quantize(model.words.weight.detach(), "nvfp4").dequantize()
    report = mf.quantize_(left, mf.WeightOnly("nvfp4"))
    assert [(row.name, row.shape, row.action) for row in report.unseen] == [("words", (64, 40), "not seen")]
    assert "embeddings=True" in str(report)
    report = mf.quantize_(model, mf.WeightActivation("nvfp4", scales="static"), embeddings=True)
    assert [(row.name, row.action) for row in report] == [
        ("words", "quantized"), ("up", "quantized"), ("lm_head", "skipped"),
    ]  # fmt: skip
    assert report.unseen == ()
    assert "input_amax" not in model.words._buffers
    assert torch.equal(model.words(IDS), values[IDS])
    assert torch.equal(mf.plain_state_dict(model)["words.weight"], values)
    loaded = _Speaker()
    loaded.load_state_dict(mf.plain_state_dict(model), strict=False)
    assert torch.equal(loaded.words(IDS), model.words(IDS))
    parameter = mf.revert(model).words.weight
    assert type(parameter) is nn.Parameter
    assert torch.equal(parameter, values)
    with pytest.raises(InvalidTypeError, match="embeddings"):
        mf.quantize_(_Speaker(), mf.WeightOnly("nvfp4"), embeddings="words")


def test_a_tied_head_stays_tied_to_a_quantized_embedding():
    model = _Speaker(tied=True)
    mf.quantize_(model, mf.WeightOnly("mxfp8"), exclude=(), embeddings=True)
    assert model.lm_head.weight is model.words.weight
    assert model(IDS).shape == (2, 3, 40)


def test_an_embedding_stays_tied_to_a_head_that_is_left_out():
    for tied, options in (
        (_Speaker(tied=True), {}),  # the head is left out by default
        (_Speaker(tied=True), {"exclude": (), "filter": lambda name, layer: name != "lm_head"}),
    ):
        held, values = tied.words.weight, tied.words.weight.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = mf.quantize_(tied, mf.WeightOnly("mxfp8"), embeddings=True, **options)
        assert report.converted == ["up"]
        assert "its weight is lm_head.weight too" in report.skipped["words"]
        assert tied.lm_head.weight is tied.words.weight is held
        assert torch.equal(held, values)
    with pytest.raises(InvalidValueError, match=r"lm_head.weight too"):
        mf.quantize_(
            nn.ModuleDict({"words": tied.words, "lm_head": tied.lm_head}), mf.WeightOnly("mxfp8"), embeddings=True
        )


def test_embeddings_that_cannot_be_looked_up_in_codes_are_left():
    for model, config, reason in (
        (_Speaker(), mf.WeightOnly("fp8_128x128"), "a tile of fp8_128x128 has several"),
        (_Speaker(max_norm=1.0), mf.WeightOnly("mxfp8"), "max_norm"),
        (_Speaker(sparse=True), mf.WeightOnly("mxfp8"), "sparse"),
    ):
        report = mf.quantize_(model, config, embeddings=True)
        assert report.converted == ["up"]
        assert reason in report.skipped["words"]
    both = {"words": mf.WeightOnly("mxfp8"), "up": mf.WeightOnly("nvfp4"), "lm_head": None}
    report = mf.quantize_(_Speaker(), both, exclude=(), embeddings=True)
    assert [row.recipe and row.recipe.label for row in report] == ["WeightOnly(mxfp8)", "WeightOnly(nvfp4)", None]
