"""features M4: `fuse_wgrad_accumulation`, by which wgrad adds to `weight.main_grad` in float32."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.recipes import RECIPES, from_name  # noqa: E402
from microfloat.torch.nn import functional as fused  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402

K, N = 48, 40


def make(recipe, dtype=torch.float32, **options):
    """A layer in bfloat16 with a main_grad, and the gradient of a batch in float32, before it is rounded."""
    torch.manual_seed(0)
    layer = mf.Linear(K, N, dtype=torch.bfloat16, recipe=recipe, fuse_wgrad_accumulation=True, **options)
    layer.weight.main_grad = torch.randn(N, K).to(dtype)
    return layer


def batch(rows=9, seed=1):
    torch.manual_seed(seed)
    return torch.randn(rows, K, dtype=torch.bfloat16), torch.randn(rows, N, dtype=torch.bfloat16)


def unrounded(layer, x, dy):
    """dw in float32: that of a float32 copy of the weight, whose values are the same."""
    wide = mf.Linear(K, N, dtype=torch.float32, recipe=layer.pinned)
    wide.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        wide(x).backward(dy)
    return wide.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_main_grad_takes_the_unrounded_sum(name, dtype):
    """``main_grad = round(f32(main_grad) + dw)`` in float32 and in the weight's dtype; autograd gets nothing."""
    layer, (x, dy) = make(from_name(name), dtype), batch()
    dw, before = unrounded(layer, x, dy), layer.weight.main_grad.clone()
    torch.manual_seed(5)
    layer(x).backward(dy)
    assert layer.weight.grad is None
    assert torch.equal(layer.weight.main_grad, (before.float() + dw).to(dtype))
    assert layer.bias.grad is not None


@pytest.mark.parametrize("recipe", [None, "mxfp8", "delayed"])
def test_the_first_microbatch_overwrites(recipe):
    """is_first_microbatch=True overwrites, False and None add: also in high precision, with frozen inputs, ragged."""
    layer, total = make(None), torch.zeros(N, K)
    with mf.autocast(recipe=recipe, enabled=recipe is not None):
        for index, rows in enumerate((9, 17, 1)):  # sizes that change between microbatches
            x, dy = batch(rows, index)
            plain = mf.Linear(K, N, dtype=torch.float32)
            with mf.autocast(enabled=False):
                plain(x.float()).backward(dy.float())
            total += plain.weight.grad
            layer(x, is_first_microbatch=index == 0).backward(dy)
    torch.testing.assert_close(layer.weight.main_grad, total, rtol=0.1, atol=2.5 if recipe else 1e-3)
    assert layer.weight.grad is None


def test_attributes_of_megatron():
    """`grad_added_to_main_grad` is set and hooks run; `overwrite_main_grad` overwrites."""
    layer, (x, dy) = make("fp8_current"), batch()
    seen, weight = [], layer.weight
    weight.grad_added_to_main_grad = False
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad_added_to_main_grad))
    layer(x).backward(dy)
    assert seen == [True]
    assert not weight.grad.any()
    weight.overwrite_main_grad, dw = True, unrounded(layer, x, dy)
    layer(x).backward(dy)
    assert torch.equal(weight.main_grad, dw)


def test_fused_layers_accumulate_too():
    layer, (x, dy) = make("fp8_current"), batch()
    norm = torch.nn.RMSNorm(K, dtype=torch.bfloat16)
    before, dw = layer.weight.main_grad.clone(), unrounded(layer, norm(x).detach(), dy)
    fused.norm_linear(x, norm, layer).backward(dy)
    assert torch.equal(layer.weight.main_grad, before + dw)


def test_stored_weights_accumulate_too():
    with mf.quantized_model_init(recipe="mxfp8"):
        layer = mf.Linear(K, N, dtype=torch.bfloat16, recipe="mxfp8", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(N, K)
    x, dy = batch()
    layer(x).backward(dy)
    assert layer.weight.main_grad.any()
    assert layer.weight.grad is None


@pytest.mark.parametrize("recipe", ["mxfp8", None])
def test_a_call_without_rows_adds_zeros(recipe):
    """And overwrites with them: an expert without tokens in the first microbatch keeps nothing of the step before."""
    layer = make(recipe)
    layer.weight.grad_added_to_main_grad, before = False, layer.weight.main_grad.clone()
    layer(torch.ones(0, K, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(layer.weight.main_grad, before)
    assert layer.weight.grad_added_to_main_grad
    del layer.weight.grad_added_to_main_grad
    layer.weight.grad = None
    layer(torch.ones(0, K, dtype=torch.bfloat16), is_first_microbatch=True).sum().backward()
    assert not layer.weight.main_grad.any()
    assert layer.weight.grad is None


def test_a_frozen_weight_needs_none():
    layer, (x, dy) = make("mxfp8"), batch()
    layer.weight.requires_grad_(False)
    del layer.weight.main_grad
    layer(x.requires_grad_()).backward(dy)
    assert x.grad is not None


def test_what_does_not_fit_is_named_with_its_layer():
    model = torch.nn.Sequential(torch.nn.Linear(K, N, dtype=torch.bfloat16))
    mf.convert(model, "mxfp8")
    layer, (x, dy) = model[0], batch()
    layer.fuse_wgrad_accumulation = True
    assert "fuse_wgrad_accumulation=True" in repr(layer)
    for wrong, message in (
        (None, r"weight.main_grad: got none, needed a tensor of shape \(40, 48\), float32 or torch.bfloat16, on cpu"),
        (torch.zeros(N, K, dtype=torch.float16), r"got torch.float16 \(40, 48\) on cpu"),
        (torch.zeros(K, N), r"got torch.float32 \(48, 40\) on cpu"),
    ):
        layer.weight.main_grad = wrong
        with pytest.raises(InvalidValueError, match=rf"{message}.*\(In the layer '0'.\)"):
            model(x).backward(dy)
    with pytest.raises(InvalidTypeError, match="fuse_wgrad_accumulation"):
        mf.Linear(K, N, fuse_wgrad_accumulation=1)
    mf.revert(model)
    assert "fuse_wgrad_accumulation" not in vars(layer)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_code_leaves_it_to_eager_mode():
    layer, (x, dy) = make("mxfp8"), batch()
    before, dw = layer.weight.main_grad.clone(), unrounded(layer, x, dy)
    torch._dynamo.reset()
    torch.compile(layer, backend="aot_eager")(x).backward(dy)
    assert torch.equal(layer.weight.main_grad, before + dw)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a compiled backward cannot see"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # read by Dynamo
def test_joint_layers_keep_to_it_in_compiled_code():
    module = mf.LayerNormLinear(
        K, N, split={"q": 32, "k": 8}, recipe="mxfp8", options=mf.LayerOptions(fuse_wgrad_accumulation=True)
    )
    for layer in module.layers:
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    torch._dynamo.reset()
    torch.compile(module, backend="aot_eager")(torch.randn(9, K)).sum().backward()
    for layer in module.layers:
        assert layer.weight.main_grad.any()
        assert layer.weight.grad is None


@pytest.mark.slow_cases(
    "further recipes and modules of a checked kind",
    all_but=("False-*-nvfp4", "True-*-fp8_current"),
)
@pytest.mark.parametrize("name", ["mxfp8", "fp8_current", "nvfp4"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "attention", "layer"])
@pytest.mark.parametrize("flagged", [False, True])
def test_every_module_accumulates(name, kind, flagged):
    """LayerNormLinear with joint weights, LayerNormMLP, attention and the layer of them: every weight, its own part."""
    options = {"recipe": name, "dtype": torch.float32}
    make_one = {
        "linear": lambda **o: mf.LayerNormLinear(32, 48, split={"q": 32, "k": 16}, **options, **o),
        "mlp": lambda **o: mf.LayerNormMLP(32, 48, activation="swiglu", **options, **o),
        "attention": lambda **o: mf.MultiheadAttention(32, 4, 2, **options, **o),
        "layer": lambda **o: mf.TransformerLayer(32, 48, 4, 2, **options, **o),
    }[kind]
    torch.manual_seed(0)
    plain = make_one()
    module = make_one(options=mf.LayerOptions(fuse_wgrad_accumulation=True))
    module.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 32)
    for one in (plain, module):
        layers = [layer for layer in one.modules() if isinstance(layer, mf.Linear)]
        for layer in layers if one is module else ():
            layer.weight.main_grad = torch.ones_like(layer.weight)
            if flagged:
                layer.weight.grad_added_to_main_grad = False
        for first in (True, False):
            torch.manual_seed(5)
            one(x, is_first_microbatch=first).square().sum().backward()
    wanted = dict(plain.named_parameters())
    for key, layer in module.named_modules():
        if isinstance(layer, mf.Linear):
            weight, want = layer.weight, wanted[f"{key}.weight"].grad
            if flagged:
                assert weight.grad_added_to_main_grad
                assert not weight.grad.any()
            else:
                assert weight.grad is None
            torch.testing.assert_close(weight.main_grad, want, rtol=1e-5, atol=1e-6)
    assert (
        any(
            parameter.grad is not None for key, parameter in module.named_parameters() if "norm" in key or "bias" in key
        )
        or kind == "attention"
    )


@pytest.mark.parametrize("syncs", [True, False])
def test_under_fsdp2_the_remedy_that_is_named_helps(syncs):
    """FSDP2 adds up what float32 holds and bfloat16 does not; of a weight that it gathers the option is refused."""
    fsdp = pytest.importorskip("torch.distributed.fsdp", reason="torch has no distributed package")
    with world_of_one():
        layer = mf.Linear(16, 16, bias=False, recipe="mxfp8", fuse_wgrad_accumulation=True)
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fsdp.fully_shard(layer, mp_policy=policy)
        x, rows = torch.eye(16, dtype=torch.bfloat16), torch.zeros(0, 16, dtype=torch.bfloat16)
        for given in (x, rows):
            with pytest.raises(NotSupportedError, match=r"FSDP shards.*Leave it out.*reduce_dtype=torch.float32"):
                layer(given)
        layer.fuse_wgrad_accumulation = False
        for last, scale in ((False, 1.0), (False, 2.0**-12), (True, 2.0**-12)):
            layer.set_requires_gradient_sync(syncs or last)
            layer(x).backward(torch.full((16, 16), scale, dtype=torch.bfloat16))
        assert (layer.weight.grad.to_local() == 1 + 2.0**-11).all()
        layer.fuse_wgrad_accumulation = True
        layer.unshard()
        layer.weight.main_grad = torch.zeros(16, 16)  # of a user who reduces it
        layer(x).sum().backward()
        layer.unshard()
        assert (layer.weight.main_grad == 1).all()
