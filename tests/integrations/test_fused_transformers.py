"""`convert(fuse=True)` on the models of the real transformers package: values, keys, generation, copies, fallbacks."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.torch.convert.fuse import Fused  # noqa: E402

pytestmark = [
    pytest.mark.slow("needs a training package that make test does not install"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]
# Relative difference of logits from those of the unfused conversion: norms are rounded once instead of twice, q, k and
# v share scales under scaling per tensor, and a code that differs carries on. E4M3 is off by 2^-4, E2M1 by 2^-2.
BOUNDS = {"mxfp8": 0.06, "fp8_current": 0.06, "delayed": 0.06, "fp8_block": 0.06, "nvfp4": 0.25}


def _model(family):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    if family == "Qwen3":
        sizes["head_dim"] = 16
    if family == "Mistral":
        sizes["sliding_window"] = 8
    # Imported here, since collecting the tests must not.
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()


def _relative(got, want):
    return float(((got - want).float().norm() / want.float().norm()).detach())


IDS = torch.arange(24).reshape(2, 12) * 7 % 64


def _step(model, recipe):
    with mf.autocast(recipe=recipe):
        out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return out, gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", list(BOUNDS))
def test_values_are_those_of_the_unfused_conversion(family, recipe):
    plain = _model(family)
    apart, fused = copy.deepcopy(plain), copy.deepcopy(plain)
    mf.convert(apart, recipe)
    report = mf.convert(fused, recipe, fuse=True)
    assert [row.action for row in report.blocks] == ["fused", "fused"]
    assert "rotary embedding" in str(report)
    assert list(fused.state_dict()) == list(apart.state_dict())
    for _ in range(2):  # delayed scaling knows its scales from the second step on
        torch.manual_seed(1)
        want, wanted = _step(apart, recipe)
        torch.manual_seed(1)
        got, gradients = _step(fused, recipe)
    assert _relative(got.logits, want.logits) < BOUNDS[recipe]
    high, exact = _step(plain, recipe)
    key = "model.layers.0.self_attn.k_proj.weight"
    assert set(gradients) == set(wanted)
    assert _relative(gradients[key], exact[key]) < 2 * _relative(wanted[key], exact[key])
    assert abs(float((got.loss - high.loss).detach())) < 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_recipe_it_is_the_original(family):
    plain = _model(family)
    fused = copy.deepcopy(plain)
    mf.convert(fused, "mxfp8", fuse=True)
    with mf.autocast(enabled=False), torch.no_grad():
        assert _relative(fused(IDS).logits, plain(IDS).logits) < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_saving_copies_and_revert(family, tmp_path):
    plain = _model(family)
    model = copy.deepcopy(plain).eval()
    mf.convert(model, "fp8_row", fuse=True)
    prompt = IDS[:, :5] + 1
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    kept, again = model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options)
    assert torch.equal(kept, again)
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    want = model(IDS).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.model.layers[0], Fused)
        assert type(other.model.layers[0]).__name__ == f"{family}DecoderLayer"
        assert torch.equal(other(IDS).logits, want)
    mf.revert(model)
    assert type(model.model.layers[0]) is type(plain.model.layers[0])
    assert torch.equal(model(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["dynamic", "static", "by a recipe"])
def test_steps_through_a_cache_are_the_whole_sequence(family, kind):
    from transformers import DynamicCache, StaticCache

    model = _model(family).float().eval()
    mf.convert(model, "fp8_row", fuse=True)
    ids = IDS[:, :11]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padding on the left, of which logits say nothing
    caches = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=16),
        "by a recipe": lambda: None,
    }
    cache = caches[kind]()
    with torch.no_grad(), mf.autocast(enabled=kind == "by a recipe"):
        want = model(ids, attention_mask=mask, use_cache=False).logits
        steps = []
        for first, last in ((0, 6), (6, 7), (7, 10), (10, 11)):
            out = model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    assert cache.get_seq_length() == 11
    got = torch.cat(steps, 1)
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)


def test_a_call_with_an_argument_that_nobody_knows_runs_the_own_forward():
    plain, model = _model("Qwen2"), _model("Qwen2")
    mf.convert(model, "mxfp8", fuse=True)
    heard = []
    original = type(plain.model.layers[0]).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(plain.model.layers[0]), "forward", lambda *a, **k: heard.append(k) or original(*a, **k))
        model(IDS, some_new_argument=3)
        assert [one["some_new_argument"] for one in heard] == [3, 3]
        model(IDS, num_items_in_batch=3)
        assert len(heard) == 2


def test_under_autocast_the_norms_of_heads_take_their_own_dtype(recwarn):
    model = _model("Qwen3").float()
    mf.convert(model, "mxfp8", fuse=True)
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS, labels=IDS).loss.backward()
    assert not [one for one in recwarn if "dtype" in str(one.message)]


def test_who_listens_to_the_parts_hears_them():
    model = _model("Llama")
    mf.convert(model, "mxfp8", fuse=True)
    assert len(model(IDS, output_hidden_states=True).hidden_states) == 3
    model.set_attn_implementation("eager")
    attentions = model(IDS, output_attentions=True).attentions
    assert [tuple(one.shape) for one in attentions] == [(2, 4, 12, 12)] * 2
    heard = []
    model.model.layers[1].mlp.register_forward_hook(lambda *arguments: heard.append(1))
    model(IDS)
    assert heard == [1]


def test_gradient_checkpointing_has_the_same_bits():
    model = _model("Qwen3")
    mf.convert(model, "nvfp4", fuse=True)
    torch.manual_seed(3)
    want = _step(model, "nvfp4")[1]
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(3)
    got = _step(model, "nvfp4")[1]
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_padding_masks_and_unconverted_layers():
    model, plain = _model("Llama"), _model("Llama")
    report = mf.convert(model, mf.Placement([("*.layers.0.mlp.*", None), ("*", "mxfp8")]), fuse=True)
    # A layer of which one part stays a plain nn.Linear is left alone.
    assert [row.action for row in report.blocks][:1] == ["not fused"]
    assert "not all of its Linears" in report.blocks[0].reason
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    with torch.no_grad():
        got, want = model(IDS, attention_mask=mask).logits, plain(IDS, attention_mask=mask).logits
    assert _relative(got[mask.bool()], want[mask.bool()]) < 0.1


def test_other_gated_mlps_are_fused(transformers):
    config = transformers.GemmaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = transformers.GemmaForCausalLM(config).bfloat16()
    plain = copy.deepcopy(model)
    report = mf.convert(model, "mxfp8", fuse=True)
    layer = "GemmaDecoderLayer is not a block that is known; of its parts: gated MLP"
    assert [(row.action, row.reason) for row in report.blocks] == [("fused", "gated MLP"), ("not fused", layer)]
    assert _relative(model(IDS).logits, plain(IDS).logits) < 0.1


def _with_head(family, recipe="mxfp8", **options):
    """A converted model whose head has a recipe too, without and with its loss in chunks."""
    apart, fused = _model(family), _model(family)
    placement = mf.Placement([("lm_head", recipe), ("*", "mxfp8")])
    mf.convert(apart, placement)
    return apart, fused, mf.convert(fused, placement, fuse=True)


@pytest.mark.parametrize(("family", "recipe"), [*((family, "mxfp8") for family in FAMILIES), (FAMILIES[0], None)])
def test_the_head_and_its_loss(family, recipe):
    """The loss and all gradients are those of the model's own loss function on its logits; None: bf16 keeps it."""
    _, fused, report = _with_head(family, recipe)
    assert "head and loss" in str(report)
    labels = IDS.clone()
    labels[0, :5] = 14
    calls = [
        {}, {"num_items_in_batch": 17}, {"num_items_in_batch": torch.tensor(5)}, {"ignore_index": 14},
        {"shift_labels": labels.flip(1)},
    ]  # fmt: skip
    for options in calls:
        results = []
        for is_chunked in (False, True):
            if is_chunked:
                out = fused(input_ids=IDS, labels=labels, **options)
                assert out.logits is None
                loss = out.loss
            else:
                loss = fused.loss_function(fused(input_ids=IDS).logits, labels, vocab_size=64, **options)
            loss.backward()
            results.append((loss.detach(), [parameter.grad for parameter in fused.parameters()]))
            fused.zero_grad()
        (want, wanted), (got, gradients) = results
        assert torch.allclose(got, want, rtol=1e-6)
        # A sum's gradient is cast before the division by the number of items, the original's after it. In high
        # precision it is rounded to bfloat16 before or after, and layers below round some elements to other codes.
        bound = 3 * BOUNDS["mxfp8"] if "num_items_in_batch" in options or recipe is None else 0
        if recipe is None:
            assert _relative(gradients[-1], wanted[-1]) <= 2 * 2.0**-9, "the head's own weight: two roundings"
        assert max(_relative(one, other) for one, other in zip(gradients, wanted, strict=True)) <= bound


def test_logits_where_they_are_asked_for():
    _, fused, _ = _with_head("Llama")
    copied = pickle.loads(pickle.dumps(fused))
    assert copied(input_ids=IDS, labels=IDS).logits is None
    assert fused(input_ids=IDS).logits.shape == (2, 12, 64)
    assert len(fused(input_ids=IDS, labels=IDS, output_hidden_states=True).hidden_states) == 3
    assert fused(input_ids=IDS, labels=IDS, logits_to_keep=12).logits.shape == (2, 12, 64)
    assert len(fused(input_ids=IDS, labels=IDS, return_dict=False)) > 1
    fused.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    assert fused(input_ids=IDS, labels=IDS).logits is not None
    del fused._loss_function
    assert fused.eval()(input_ids=IDS, labels=IDS).logits is not None
    mf.revert(fused.train())
    assert fused(input_ids=IDS, labels=IDS).logits is not None


def test_a_head_in_high_precision_ignores_the_autocast():
    _, fused, _ = _with_head("Qwen3", None)
    assert type(fused.lm_head) is torch.nn.Linear
    want = fused(input_ids=IDS, labels=IDS).loss
    with mf.autocast(recipe="nvfp4"):
        out = fused(input_ids=IDS, labels=IDS)
    assert out.logits is None
    assert torch.equal(out.loss, want)


def test_heads_whose_loss_stays_apart():
    """In high precision by default, and where a recipe keeps state; callers find the labels by the signature."""
    import inspect

    plain = _model("Qwen3")
    report = mf.convert(plain, "mxfp8", fuse=True)
    assert "head and loss" not in str(report)
    assert plain(input_ids=IDS, labels=IDS).logits is not None
    _, delayed, report = _with_head("Qwen3", "delayed")
    assert "of its head keeps state between calls" in str(report)
    assert delayed(input_ids=IDS, labels=IDS).logits is not None
    _, fused, _ = _with_head("Qwen3")
    assert inspect.signature(fused.forward) == inspect.signature(plain.forward)


def test_a_compiled_model_with_its_loss():
    _, fused, _ = _with_head("Qwen2")
    want = fused(input_ids=IDS, labels=IDS).loss
    out = torch.compile(fused, backend="aot_eager")(input_ids=IDS, labels=IDS)
    assert out.logits is None
    assert torch.allclose(out.loss, want, rtol=1e-2)  # layers are not fused in compiled code
    out.loss.backward()
    assert fused.lm_head.weight.grad.isfinite().all()
