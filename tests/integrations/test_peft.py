"""LoRA of PEFT on converted models: adapters in high precision, frozen base weights, merging, both orders."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError  # noqa: E402

pytestmark = [
    pytest.mark.slow("needs a training package that make test does not install"),
    # transformers asks its models by a name that it deprecates itself.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
TARGETS = ["q_proj", "v_proj", "down_proj"]


def _inject(peft, model):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))


def _step(model):
    ids = torch.arange(32).reshape(2, 16)
    torch.manual_seed(2)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("fuse", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "delayed"])
def test_both_orders_are_one(peft, llama, recipe, fuse):  # features M17
    first, second = llama().bfloat16(), _inject(peft, llama().bfloat16())
    mf.convert(first, recipe, fuse=fuse)
    first = _inject(peft, first)
    report = mf.convert(second, recipe, fuse=fuse)
    assert {name.split(".")[-2] for name in report.skipped} == {"lora_A", "lora_B", "model"}  # the head
    for model in (first, second):
        for name, module in model.named_modules():
            if "lora_" in name:
                assert not isinstance(module, mf.Linear), name
        assert isinstance(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer, mf.Linear)
    loss, gradients = _step(first)
    other, others = _step(second)
    assert loss == other
    assert gradients.keys() == others.keys()
    assert all("lora_" in name for name in gradients)
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_a_frozen_weight_costs_no_wgrad(peft, llama):  # features M3
    model = llama().bfloat16()
    mf.convert(model, "mxfp8")
    model = _inject(peft, model)
    base = model.base_model.model.model.layers[1].mlp.down_proj.base_layer
    x = torch.randn(4, 48, dtype=torch.bfloat16, requires_grad=True)
    shown = str(base.schedule(x))
    assert "dgrad" in shown
    assert "wgrad" not in shown
    assert "x.T" not in shown
    assert "dgrad" not in str(base.schedule(x.detach()))  # the first layer: its input needs no gradient


@pytest.mark.parametrize("recipe", ["fp8_row", "delayed"])
def test_adapters_train_and_merge(peft, llama, recipe, tmp_path):
    model = _inject(peft, llama())
    mf.convert(model, recipe)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(6):
        losses.append(_step(model)[0])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    # What the adapters save is what a plain model's adapters read.
    model.save_pretrained(tmp_path)
    saved = peft.PeftModel.from_pretrained(llama(), tmp_path)
    for name, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(peft.get_peft_model_state_dict(saved)[name], value)
    with torch.no_grad():
        want = model(torch.arange(8)[None]).logits
        merged, reference = model.merge_and_unload(), saved.merge_and_unload()
        got = merged(torch.arange(8)[None]).logits
    assert isinstance(merged.model.layers[0].self_attn.q_proj, mf.Linear)
    assert all(torch.equal(mf.plain_state_dict(merged)[name], value) for name, value in reference.state_dict().items())
    if recipe == "delayed":  # its scales are those of the weights before they were merged
        mf.convert(merged, "fp8_current")
        with torch.no_grad():
            got = merged(torch.arange(8)[None]).logits
    # One product of the sum instead of a product and an adapter in high precision: E4M3 is off by 2^-4 at most.
    assert float((got - want).norm() / want.norm()) < 0.1


@pytest.mark.parametrize("make", ["layer", "mlp", "linear"])
def test_adapters_inside_our_modules(peft, make):
    """A module of ours whose Linears were replaced or hooked calls them one by one."""
    torch.manual_seed(0)
    module, targets = {
        "layer": (lambda: mf.TransformerLayer(32, 48, 4, 2, recipe="mxfp8"), ["q_proj", "up_proj"]),
        "mlp": (lambda: mf.LayerNormMLP(32, 48, activation="swiglu", recipe="mxfp8"), ["down_proj"]),
        "linear": (lambda: mf.LayerNormLinear(32, 48, recipe="mxfp8"), ["linear"]),
    }[make]  # fmt: skip
    module = module()
    x = torch.randn(2, 5, 32)
    want = module(x)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=targets), module)
    y = module(x)
    assert torch.allclose(y, want, atol=0.02)  # the adapters begin at zero; scales of joint products may differ
    y.square().sum().backward()
    assert {name.split(".")[-2] for name, p in module.named_parameters() if p.grad is not None and p.grad.any()} >= {
        "default"
    }


def test_adapters_around_weights_that_are_stored_quantized(peft):
    """Base weights exist as codes alone; merging quantizes the sum."""
    torch.manual_seed(0)
    with mf.quantized_model_init(recipe="nvfp4"):
        model = torch.nn.Sequential()
        model.add_module("proj", mf.Linear(64, 64))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["proj"]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(8, 64)
    with mf.autocast(recipe="nvfp4"):
        y = model(x)
        y.sum().backward()
        base = model.base_model.model.proj.base_layer
        assert isinstance(base.weight.data, mf.QuantizedTensor)
        assert base.weight.grad is None
        merged = model.merge_and_unload()
        assert isinstance(merged.proj.weight.data, mf.QuantizedTensor)
        z = merged(x)
    assert float(((z - y).norm() / y.norm()).detach()) < 0.25  # E2M1


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_adapters_that_compute_with_the_base_weight(peft, llama, options):
    """They train on a converted model, whose weights are plain; codes are refused, and PiSSA may begin before them."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, **options)
    converted, stored = llama(), llama()
    mf.convert(converted, "mxfp8")
    loss, gradients = _step(peft.get_peft_model(converted, config))
    plain, others = _step(peft.get_peft_model(llama(), config))
    assert loss == pytest.approx(plain, rel=1e-2)
    assert gradients.keys() == others.keys()
    mf.quantize_(stored, mf.WeightOnly("mxfp8"))
    with pytest.raises(InvalidTypeError, match="got a QuantizedTensor"):
        peft.get_peft_model(stored, config)
    if "use_dora" not in options:
        first = peft.get_peft_model(llama(), config)
        mf.quantize_(first, mf.WeightOnly("mxfp8"))
        assert _step(first)[0] == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("order", ["convert first", "adapters first", "reverted"])
def test_adapters_of_a_conv1d_merge(peft, order):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=16)).eval()
    of_conv1d = order == "adapters first"
    config = peft.LoraConfig(r=2, target_modules=["c_proj", "c_fc"], fan_in_fan_out=of_conv1d, init_lora_weights=False)
    if not of_conv1d:
        mf.convert(model, "mxfp8")
    model = peft.get_peft_model(model, config).eval()
    if of_conv1d:
        mf.convert(model, "mxfp8")
    if order == "reverted":
        mf.revert(model)
    with torch.no_grad(), mf.autocast(enabled=False):
        want = model(torch.arange(8)[None]).logits
        torch.testing.assert_close(model.merge_and_unload()(torch.arange(8)[None]).logits, want)
