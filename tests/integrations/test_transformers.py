"""A converted model in transformers: its Trainer, its checkpoints and files, and generation with a KV cache."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402

pytestmark = [
    pytest.mark.slow("needs a training package that make test does not install"),
    # transformers asks its models by a name that it deprecates itself.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]


@pytest.fixture
def train(transformers, llama, sequences, tmp_path, accelerate):
    """Train a tiny model with the Trainer: the model, and the loss of every step."""

    def run(recipe, *, fuse=False, resume=None, steps=6, folder="run", **options):
        model = llama()
        if recipe:
            mf.convert(model, recipe, fuse=fuse)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2,
            lr_scheduler_type="constant", logging_steps=1, save_steps=3, report_to=[], use_cpu=True, bf16=True, seed=1,
            disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=sequences)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return run


@pytest.mark.parametrize("fuse", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "delayed"])
def test_the_trainer_trains_and_resumes(train, recipe, fuse):  # features B8, S14
    model, losses = train(recipe, fuse=fuse)
    assert losses[-1] < losses[0]
    again, rest = train(recipe, fuse=fuse, resume="run/checkpoint-3")
    assert rest == losses  # those of the first three steps come from the checkpoint
    for (name, value), (_, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(value, other), name  # scales and amax histories too


def test_losses_stay_near_those_of_bfloat16(train):
    _, plain = train(None, folder="plain")
    for recipe in ("mxfp8", "fp8_current"):
        _, losses = train(recipe, folder=recipe)
        assert losses == pytest.approx(plain, rel=0.02)
        assert losses != plain


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
def test_the_trainers_gradient_checkpointing_changes_no_bit(train, recipe):
    _, losses = train(recipe, steps=3)
    for use_reentrant in (False, True):
        options = {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": use_reentrant},
        }
        _, again = train(recipe, steps=3, folder=f"recomputed-{use_reentrant}", **options)
        assert again == losses


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
def test_plain_models_read_what_converted_ones_save(transformers, llama, tmp_path, recipe):  # features K1
    model = llama()
    mf.convert(model, recipe)
    ids = torch.arange(32).reshape(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    plain = mf.plain_state_dict(model)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "plain", state_dict=dict(plain))  # save_pretrained empties it
    for folder in ("whole", "plain"):
        read, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not report["missing_keys"]
        has_state = folder == "whole" and recipe == "delayed"
        assert all(".scaling_" in key for key in report["unexpected_keys"])
        assert bool(report["unexpected_keys"]) == has_state
        assert all(torch.equal(value, plain[name]) for name, value in read.state_dict().items())
    # And back: a converted model reads its scaling state from the same files.
    other = llama()
    mf.convert(other, recipe)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))


# With scales of a token alone (blocks of a row, rows), what a token gets does not depend on those beside it. A scale of
# a whole tensor does: fp8_current, nvfp4.
@pytest.mark.parametrize("recipe", ["fp8_row", "fp8_block", "mxfp8", "mxfp4", "delayed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache_is_that_without(llama, family, recipe):  # features I10
    model = llama(family).eval()
    mf.convert(model, recipe)
    prompt = torch.arange(10).reshape(2, 5) * 5 % 64
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0,
               "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    kept, again = (model.generate(prompt, use_cache=use_cache, **options) for use_cache in (True, False))
    assert kept.sequences.shape == (2, 11)
    assert torch.equal(kept.sequences, again.sequences)
    for step, other in zip(kept.logits, again.logits, strict=True):
        assert torch.allclose(step, other, atol=1e-4)


LAYERS = {
    "Llama": {}, "Mistral": {}, "Qwen3": {"qk_norm": True},
    "Qwen2": {"bias": True, "options": mf.LayerOptions(out_bias=False, mlp_bias=False)},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_our_layer_has_the_keys_and_values_of_theirs(llama, family):  # features M8
    model = llama(family).eval()
    plain = model.model.layers[0]
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter) / 5)
    layer = mf.TransformerLayer(32, 48, 4, 2, **LAYERS[family])
    layer.load_state_dict(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 32)
    embeddings = model.model.rotary_emb(x, torch.arange(9)[None])
    theirs = plain(x, attention_mask=None, position_embeddings=embeddings)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    for tables in (embeddings, mf.RotaryEmbedding(8)(9)):
        assert torch.allclose(layer(x, position_embeddings=tables), theirs, atol=1e-5)
