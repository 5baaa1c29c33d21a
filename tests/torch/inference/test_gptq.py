"""features I1: GPTQ, `method="gptq"` of `quantize_`, against a plain implementation in float64, and on whole models."""

import copy
import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import formats, reference  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError  # noqa: E402
from microfloat.recipes import WeightActivation, WeightOnly  # noqa: E402
from tests.torch.nn.test_experts import PATH, Model, Routed, inputs  # noqa: E402

BLOCKS = ("nvfp4", "nvfp4_row", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "fp8_1x128")
TILES = ("nvfp4_2d", "fp8_128x128")
WHOLE = ("fp8_tensor", "fp8_row", "fp8_row_e5m2")
CONFIGS = [
    *(WeightOnly(name) for name in (*BLOCKS, *TILES, *WHOLE)), WeightOnly("nvfp4", "four_over_six"),
    WeightOnly("nvfp4_row", "four_over_six"), WeightOnly("nvfp4_2d", "four_over_six"), WeightOnly("mxfp4", "mse"),
    WeightOnly("fp8_tensor", "mse"), WeightActivation("nvfp4", activation="fp8_row"), WeightActivation("mxfp8"),
]  # fmt: skip
N, K = 24, 152
# One of each kind of scales: blocks with and without a tensor scale, tiles, rows, a whole tensor, and a search.
KINDS = [f"WeightOnly({name})" for name in ("nvfp4", "mxfp6_e2m3", "fp8_128x128", "fp8_row")]
KINDS += ["WeightOnly(nvfp4_2d, scale_search=four_over_six)"]
further = pytest.mark.slow_cases("further formats of a checked kind", all_but=tuple(KINDS))


def weight(rows: int = N, length: int = K) -> torch.Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(3))


def tokens(number: int = 400, length: int = K) -> torch.Tensor:
    """Inputs whose features depend on each other."""
    generator = torch.Generator().manual_seed(4)
    few, mix = torch.randn(number, 30, generator=generator), torch.randn(30, length, generator=generator)
    return few @ mix + torch.randn(number, length, generator=generator)


def layer(values: torch.Tensor) -> nn.Module:
    made = nn.Sequential(nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=values.dtype))
    with torch.no_grad():
        made[0].weight.copy_(values)
    return made


def same_bytes(q: mf.QuantizedTensor, other: mf.QuantizedTensor) -> bool:
    pairs = zip(q.detach().part_list(), other.detach().part_list(), strict=True)
    return all(torch.equal(*(part.reshape(-1).view(torch.uint8) for part in pair)) for pair in pairs)


@torch.no_grad()
def gptq(model: nn.Module, config, *arguments, **options) -> mf.recipes.placement.ConversionReport:
    with mf.calibrate(model):
        model(*arguments)
    return mf.quantize_(model, config, method="gptq", **options)


def plainly(w: np.ndarray, x: np.ndarray, cast) -> np.ndarray:
    """The values of GPTQ's codes column by column in float64, without blocks of columns and without Cholesky."""
    hessian = 2 * x.T @ x
    inverse = np.linalg.inv(hessian + 0.01 * np.diag(hessian).mean() * np.eye(len(hessian)))
    fmt, w, out = cast.format, w.astype(np.float64), np.zeros(w.shape)
    amax = None
    if cast.takes_amax:
        amax = np.abs(w).max(1, keepdims=True) if fmt.tensor_scale == "row" else np.abs(w).max()
        amax = amax.astype(np.float32)
    numbers = formats.decode(np.arange(1 << fmt.element.bits, dtype=np.uint8), fmt.element)
    numbers = np.unique(numbers[np.isfinite(numbers)].astype(np.float64))
    width = fmt.block[1] or w.shape[1]
    for k in range(w.shape[1]):
        if k % width == 0:
            q = reference.quantize(w[:, k : k + width].astype(np.float32), cast, amax=amax)
            ones = np.full_like(q.codes, 0x22 if fmt.element.codes_per_byte == 2 else formats.encode(
                np.ones(1, np.float32), fmt.element)[0])  # fmt: skip
            scale = reference.dequantize(dataclasses.replace(q, codes=ones))[:, 0].astype(np.float64)
        found = np.abs(w[:, k, None] - numbers * scale[:, None]).argmin(1)
        out[:, k] = numbers[found] * scale
        error = (w[:, k] - out[:, k]) / inverse[k, k]
        w[:, k + 1 :] -= np.outer(error, inverse[k, k + 1 :])
        inverse -= np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return out


@further
@pytest.mark.parametrize("config", [one for one in CONFIGS if one.scale_search != "mse"], ids=lambda one: one.label)
def test_codes_are_those_of_a_plain_implementation(config) -> None:
    model, x = layer(weight()), tokens()
    gptq(model, config, x)
    expected = plainly(weight().numpy(), x.numpy().astype(np.float64), config.fprop.rhs)
    assert np.allclose(model[0].weight.detach().dequantize().numpy(), expected, rtol=1e-6, atol=0)


@further
@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: one.label)
def test_outputs_err_less_than_with_the_nearest_codes(config, tmp_path) -> None:
    x, w = tokens(), weight()
    nearest, model = layer(w), layer(w)
    mf.quantize_(nearest, config)
    report = gptq(model, config, x)
    assert report.rows[0].reason == "gptq"
    q, other = (one[0].weight.detach() for one in (model, nearest))
    assert q.cast == other.cast
    assert q.tensor_scale is None or torch.equal(q.tensor_scale, other.tensor_scale)
    errors = [((one.dequantize() - w) @ x.t()).norm() for one in (q, other)]
    assert errors[0] < 0.8 * errors[1]
    mf.save_quantized(model, tmp_path / "saved")
    loaded = layer(w)
    mf.load_quantized(tmp_path / "saved", loaded)
    assert same_bytes(loaded[0].weight, q)


INDEPENDENT = [*(one for one in CONFIGS if one.format != "fp8_tensor"), WeightOnly("nvfp4", "mse")]


@further
@pytest.mark.parametrize("config", INDEPENDENT, ids=lambda one: one.label)
def test_inputs_that_are_independent_give_the_nearest_codes(config) -> None:
    nearest, model = layer(weight()), layer(weight())
    mf.quantize_(nearest, config)
    gptq(model, config, torch.eye(K))
    assert same_bytes(model[0].weight, nearest[0].weight)


def test_few_tokens_and_inputs_that_are_always_zero() -> None:
    x, w = tokens(3), weight()
    x[:, 7] = x[:, 40:60] = 0
    nearest, model = layer(w), layer(w)
    mf.quantize_(nearest, WeightOnly("mxfp8"))
    gptq(model, WeightOnly("mxfp8"), x)
    q, other = model[0].weight.detach().dequantize(), nearest[0].weight.detach().dequantize()
    assert ((q - w) @ x.t()).norm() < ((other - w) @ x.t()).norm() / 2
    assert torch.equal(q[:, 41:60], other[:, 41:60]) or (q[:, 41:60] - w[:, 41:60]).abs().max() < 0.15
    huge = tokens(500) * torch.where(torch.arange(K) == 5, 1e6, 1.0)  # one feature that outweighs all the others
    model = layer(w)
    gptq(model, WeightOnly("nvfp4"), huge)
    assert model[0].weight.dequantize().isfinite().all()


def test_layers_that_read_one_input_share_its_hessian() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(self, name, nn.Linear(K, 32))

        def forward(self, x: torch.Tensor, spoils: bool = False) -> torch.Tensor:
            first = self.q_proj(x) + self.k_proj(x)
            if spoils:
                x.mul_(2)
            return first + self.v_proj(x) + self.o_proj(x.clone())

    torch.manual_seed(0)
    model, x = Attention(), tokens()
    plain = copy.deepcopy(model)
    with mf.calibrate(model), torch.no_grad():
        model(x[:100])
        model(x[100:])
    q, k, v, o = (vars(one)["_hessians"]["weight"] for one in model.children())
    assert q is k is v
    assert o is not q
    assert torch.equal(o, q)
    with mf.calibrate(plain), torch.no_grad():
        plain(x[:100], spoils=True)
        plain(x[100:])
    x[:100] /= 2
    assert vars(plain.v_proj)["_hessians"]["weight"] is not vars(plain.q_proj)["_hessians"]["weight"]
    torch.testing.assert_close(vars(plain.q_proj)["_hessians"]["weight"], x.t() @ x, rtol=1e-4, atol=1e-2)
    x[:100] *= 2
    torch.testing.assert_close(vars(plain.v_proj)["_hessians"]["weight"], x.t() @ x, rtol=1e-4, atol=1e-2)
    with mf.calibrate(plain), torch.inference_mode():
        plain(x[:100])
        plain(x[100:])
    torch.testing.assert_close(vars(plain.v_proj)["_hessians"]["weight"], x.t() @ x, rtol=1e-4, atol=1e-2)
    assert not any("hessian" in name for name in plain.state_dict())
    report = mf.quantize_(model, WeightOnly("nvfp4"), method="gptq")
    assert {row.reason for row in report} == {"gptq"}
    assert len({float(one.weight.tensor_scale) for one in list(model.children())[:3]}) == 1
    assert not any(vars(one).get("_hessians") for one in model.modules())


def test_tied_weights_stay_tied_and_take_the_inputs_of_both() -> None:
    model = nn.ModuleList([nn.Linear(K, K, bias=False), nn.Linear(K, K, bias=False), nn.Linear(K, K)])
    model[1].weight = model[0].weight
    w, x = model[0].weight.detach().clone(), tokens()
    with mf.calibrate(model), torch.no_grad():
        model[0](x[:200])
        model[1](x[200:])
    report = mf.quantize_(model, WeightOnly("mxfp4"), method="gptq")
    assert model[0].weight is model[1].weight
    assert [row.reason for row in report] == ["gptq", "gptq", "nearest: calibrate has seen no input of it"]
    together = layer(w)
    gptq(together, WeightOnly("mxfp4"), x)
    assert (model[0].weight.codes == together[0].weight.codes).float().mean() > 0.98


@pytest.mark.slow_cases("further layouts of a checked kind", all_but=("ENK",))
@pytest.mark.parametrize("fields", [{}, {"turned": True, "has_bias": True}], ids=["ENK", "EKN"])
def test_experts_have_a_hessian_each(fields) -> None:
    torch.manual_seed(0)
    model = Model(**fields).requires_grad_(False)
    x, index, weights = (one.detach() for one in inputs())
    index = torch.where(index == 2, 1, index)  # expert 2 gets no token
    y = model(x, index, weights)
    nearest = copy.deepcopy(model)
    mf.quantize_(nearest, WeightOnly("nvfp4"))
    report = gptq(model, WeightOnly("nvfp4"), x, index, weights)
    rows = {row.name: row.reason for row in report}
    assert rows[PATH].endswith("gptq; nearest for experts without tokens: 2")
    assert isinstance(model.layers[0]["experts"], Routed)
    ours, theirs = (one.layers[1]["experts"].down_proj for one in (model, nearest))
    assert torch.equal(ours[2].detach(), theirs[2].detach())
    assert not torch.equal(ours[1].detach(), theirs[1].detach())
    errors = [(one(x, index, weights) - y).float().norm() for one in (model, nearest)]
    assert errors[0] < errors[1]


def test_layers_that_run_a_recipe_already_and_static_scales() -> None:
    config, x = WeightActivation("fp8_tensor", scales="static"), tokens().bfloat16()
    plain, model = layer(weight().bfloat16()), layer(weight().bfloat16())
    mf.convert(model, config)
    assert isinstance(model[0], mf.Linear)
    for one in (plain, model):
        gptq(one, config, x)
    assert torch.equal(model[0].weight.codes.view(torch.uint8), plain[0].weight.codes.view(torch.uint8))
    assert model[0].input_amax == plain[0].input_amax == x.abs().max()
    again = layer(weight().bfloat16())
    gptq(again, config, x)
    assert torch.equal(model[0].weight.codes.view(torch.uint8), again[0].weight.codes.view(torch.uint8))


def test_without_inputs_it_is_an_error() -> None:
    model = layer(weight())
    words = r"method: got 'gptq' for layers whose inputs were not measured.*with microfloat.torch.calibrate\(model\)"
    with mf.calibrate(model, hessians=False):
        model(tokens())
    with pytest.raises(InvalidValueError, match=words):
        mf.quantize_(model, WeightOnly("nvfp4"), method="gptq")
    with pytest.raises(InvalidValueError, match=r"method: got 'awq'.*'nearest', 'gptq'"):
        mf.quantize_(model, WeightOnly("nvfp4"), method="awq")
    with pytest.raises(InvalidTypeError, match="hessians"), mf.calibrate(model, hessians="yes"):
        pass
    x = tokens()
    x[3, 5] = float("nan")
    with pytest.raises(InvalidValueError, match=r"inputs of 0 or sums of .* were not finite, needed batches"):
        gptq(model, WeightOnly("nvfp4"), x)
    assert not isinstance(model[0].weight, mf.QuantizedTensor)


@pytest.mark.parametrize("length", [64, 1, 2 * K])
def test_a_weight_of_another_size_than_in_calibrate_is_named(length) -> None:
    model = layer(weight())
    with mf.calibrate(model):
        model(tokens())
    model[0].weight = nn.Parameter(weight(length=length))
    with pytest.raises(InvalidValueError, match=f"for 0, whose weight has {length} inputs and had {K} .* again"):
        mf.quantize_(model, WeightOnly("nvfp4"), method="gptq")
    model[0].weight = nn.Parameter(weight(rows=5))
    mf.quantize_(model, WeightOnly("nvfp4"), method="gptq")
    assert model[0].weight.shape == (5, K)


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_of_another_size_than_in_calibrate_are_named(is_turned) -> None:
    model = Model(turned=is_turned).requires_grad_(False)
    with mf.calibrate(model):
        model(*(one.detach() for one in inputs()))
    experts = model.layers[0]["experts"]
    shape = list(experts.down_proj.shape)
    length = shape[1 if is_turned else 2]
    shape[1 if is_turned else 2] += 32
    experts.down_proj = nn.Parameter(torch.ones(shape), requires_grad=False)
    with pytest.raises(InvalidValueError, match=f"down_proj has {length + 32} inputs and had {length} in calibrate"):
        mf.quantize_(model, WeightOnly("nvfp4"), method="gptq")


def test_a_device_without_memory_for_a_hessian_says_how_to_do_without(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("microfloat.torch.inference.gptq.Hessians.see", full)
    model = layer(weight())
    with pytest.raises(torch.OutOfMemoryError) as error, mf.calibrate(model):
        model(tokens())
    assert "hessians=False" in error.value.__notes__[0]
    with mf.calibrate(model, hessians=False):
        model(tokens())


@pytest.mark.parametrize("layers", [2, 3])
def test_a_sum_over_tied_weights_that_leaves_float32_is_an_error(layers: int) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers)))
    for one in model:
        one.weight = model[0].weight
    nn.init.eye_(model[0].weight)
    x = torch.full((1, 8), 1.4e19)
    assert (x * x).isfinite().all()
    with pytest.raises(InvalidValueError, match=r"inputs of .* or sums of their squares were not finite"):
        gptq(model, WeightOnly("nvfp4"), x)


@pytest.mark.parametrize("is_called_before", [False, True])
def test_a_compiled_model_is_measured_as_in_eager_mode(is_called_before: bool) -> None:
    torch._dynamo.reset()
    model, x = layer(weight(8, 32)), tokens(20, 32)
    compiled = torch.compile(model, backend="eager")
    eager = copy.deepcopy(model)
    with torch.no_grad():
        if is_called_before:
            compiled(x)
        gptq(compiled, WeightActivation("fp8_tensor", scales="static"), x)
        gptq(eager, WeightActivation("fp8_tensor", scales="static"), x)
        assert torch.equal(model[0].input_amax, x.abs().amax())
        assert same_bytes(model[0].weight, eager[0].weight)


@pytest.mark.filterwarnings("ignore:.*(NaN|finite):UserWarning")
def test_a_weight_that_is_not_finite_gets_the_nearest_codes_and_says_so() -> None:
    values = weight()
    values[2, 7] = float("nan")
    spoiled, nearest = layer(values), layer(values.clone())
    with mf.calibrate(spoiled):
        spoiled(tokens())
    report = mf.quantize_(spoiled, WeightOnly("mxfp8"), method="gptq")
    mf.quantize_(nearest, WeightOnly("mxfp8"))
    (row,) = report.rows
    assert row.reason.endswith("nearest for matrices that are not finite")
    assert torch.equal(spoiled[0].weight.codes.view(torch.uint8), nearest[0].weight.codes.view(torch.uint8))
