"""microfloat.integrations.torchtitan in the real package, on a CPU: `make test-torchtitan` installs it beside torch."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

from torchtitan.components.quantization import QuantizationConverter  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.deepseek_v3 import model_registry as deepseek  # noqa: E402
from torchtitan.models.llama3 import model_registry as llama  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.integrations.torchtitan import MicrofloatConverter  # noqa: E402
from microfloat.recipes import Placement  # noqa: E402

T = torch.arange(64).expand(2, 64).contiguous()


def built(registry, **options):
    """The debug model as the trainer builds it; flex attention, which has no backward on a CPU, by torch's SDPA."""
    converters = [MicrofloatConverter.Config(**options)] if options else []
    config = registry("debugmodel", converters=converters).model
    for _, _, parent, name in list(config.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    model.verify_module_protocol()
    return model


def trained(model):
    """Losses of three steps on one batch."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 2000, T.shape)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(3):
        y = model(tokens, positions=T)
        loss = torch.nn.functional.cross_entropy(y.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("registry", [llama, deepseek], ids=["llama3", "deepseek_v3"])
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_models_train_as_without_a_recipe(registry, recipe):  # features B8
    plain, model = built(registry), built(registry, recipe=recipe)
    assert [*plain.state_dict()] == [*model.state_dict()]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    expected, losses = trained(plain), trained(model)
    assert losses != expected
    assert losses[0] == pytest.approx(expected[0], rel=0.01)  # of the same weights; later ones may drift apart
    assert losses[-1] < losses[0] - 0.8


def test_products_are_those_of_the_library_and_heads_stay():
    model = built(deepseek, recipe="mxfp8")
    block = model.layers["1"]
    x = torch.randn(8, block.attention.wq.in_features)
    assert torch.equal(block.attention.wq(x), mf.linear(x, block.attention.wq.weight, recipe="mxfp8"))
    assert type(model.lm_head).__name__ == type(block.moe.router.gate).__name__ == "Linear"
    experts = block.moe.routed_experts.inner_experts
    counts = torch.tensor([5, 0, 2, *[0] * (experts.num_experts - 3)])
    x = torch.randn(7, experts.w1_EFD.shape[-1]).bfloat16()
    gate, up = (mf.grouped_matmul(x, w.bfloat16(), counts, recipe="mxfp8") for w in (experts.w1_EFD, experts.w3_EFD))
    hidden = torch.nn.functional.silu(gate) * up
    expected = mf.grouped_matmul(hidden, experts.w2_EDF.bfloat16(), counts, recipe="mxfp8")
    assert torch.equal(experts(x, counts), expected)


def test_a_placement_decides_by_layer():
    model = built(llama, recipe=Placement([("layers.0.*", "nvfp4"), ("layers.*", "mxfp8")]))
    first, second = (model.layers[number].feed_forward.w1.effective_recipe() for number in ("0", "1"))
    assert (first, second) == (mf.recipes.from_name("nvfp4"), mf.recipes.from_name("mxfp8"))


def test_delayed_scaling_starts_from_one_and_moves():
    model = built(llama, recipe="delayed")
    w1 = model.layers["0"].feed_forward.w1
    assert float(w1.scaling_x_scale) == 1.0
    with mf.autocast(recipe="delayed"):
        model(T, positions=T)
    assert float(w1.scaling_x_scale) != 1.0


def test_what_does_not_fit_is_named():
    assert issubclass(MicrofloatConverter, QuantizationConverter)
    for options, error, words in (
        ({"recipe": "float9"}, InvalidValueError, "'float9'"),
        ({"recipe": "mxfp8", "exclude": "output"}, InvalidTypeError, "^exclude: .*list of name patterns"),
    ):
        with pytest.raises(error, match=words):
            MicrofloatConverter.Config(**options).build()
    with pytest.raises(NotSupportedError, match=r"^recipe: got delayed scaling for the experts 'layers"):
        built(deepseek, recipe="delayed")

    class Parallel:
        tp_enabled = True

    with pytest.raises(NotSupportedError, match=r"^parallelize: got tensor parallelism"):
        built(llama, recipe="mxfp8").layers["0"].feed_forward.w1.parallelize(Parallel())
