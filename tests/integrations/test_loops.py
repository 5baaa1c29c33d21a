"""A converted model in Accelerate and Lightning: mixed precision, accumulation, checkpoints that resume bit for bit."""

import runpy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError  # noqa: E402

pytestmark = pytest.mark.slow("needs a training package that make test does not install")


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def _batches():
    torch.manual_seed(1)
    return [torch.randn(16, 32) for _ in range(8)]


# ---------------------------------------------------------------------------------------------------------- Accelerate


def _accelerate(accelerate, recipe, *, steps, accumulate, folder=None, resume=None):
    """Train by Accelerate: the losses; `folder`: where to save at the end, `resume`: from where to go on."""
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=accumulate, step_scheduler_with_optimizer=False
    )
    batches, model = _batches()[steps], _network()
    mf.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if resume is not None:
        accelerator.load_state(resume)
    losses = []
    for x in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x).float(), x)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if folder is not None:
        accelerator.save_state(folder)
    accelerator.end_training()
    return losses


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "delayed"])
def test_accelerate_is_a_loop_of_ones_own(accelerate, recipe):  # features B8
    got = _accelerate(accelerate, recipe, steps=slice(8), accumulate=2)
    batches, model = _batches(), _network()
    mf.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    want = []
    for index, x in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        loss = nn.functional.mse_loss(y.float(), x)
        (loss / 2).backward()
        want.append(loss.item())
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert got == want
    assert got[-1] < got[0]


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
def test_accelerate_saves_and_loads_its_state(accelerate, recipe, tmp_path):  # features S14
    whole = _accelerate(accelerate, recipe, steps=slice(8), accumulate=1)
    folder = str(tmp_path / "state")
    first = _accelerate(accelerate, recipe, steps=slice(4), accumulate=1, folder=folder)
    torch.manual_seed(99)  # the generator's state comes from the folder, too
    rest = _accelerate(accelerate, recipe, steps=slice(4, 8), accumulate=1, resume=folder)
    assert first + rest == whole


@pytest.mark.parametrize(
    "config", [mf.WeightOnly("mxfp8"), mf.WeightOnly("nvfp4", prefill="dequantized"), mf.WeightActivation("fp8_row")]
)
def test_accelerate_offloads_stored_weights(accelerate, config, tmp_path):
    """It makes parameters of the class that it finds, and moves values in and out around every call."""
    model, x = _network(), torch.randn(80, 32)
    mf.quantize_(model, config, exclude=())
    y, few = model(x), model(x[:2])
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(model(x), y)
        assert torch.equal(model(x[:2]), few)
        assert model[0].weight.is_meta
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    other = _network()
    mf.quantize_(other, config, exclude=())
    with pytest.raises(InvalidTypeError, match="got a QuantizedTensor"):
        accelerate.disk_offload(other, tmp_path, execution_device=torch.device("cpu"))


# ----------------------------------------------------------------------------------------------------------- Lightning

quiet = pytest.mark.filterwarnings(
    # Lightning calls what torch deprecates, and remarks on tiny runs on a CPU.
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
    "ignore:The 'train_dataloader' does not have many workers",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:The number of training batches",
    "ignore:GPU available but not used",
)


@pytest.fixture
def example(lightning, repository):
    return runpy.run_path(str(repository / "examples" / "lightning_recipe.py"))


@pytest.fixture
def fit(lightning, example, tmp_path):
    def run(recipe, *, plugin=None, resume=None, name="run"):
        losses = []

        class Record(lightning.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, index):
                losses.append(outputs["loss"].item())

        batches = _batches()
        torch.manual_seed(0)
        module = example["Autoencoder"]()
        keep = {"filename": "{step}", "every_n_epochs": 1, "save_top_k": -1}
        callbacks = [Record(), lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / name, **keep)]
        if plugin is None:
            callbacks.append(example["ConvertCallback"](recipe))
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, callbacks=callbacks, logger=False, enable_progress_bar=False,
            enable_model_summary=False, plugins=plugin, precision=None if plugin else "bf16-mixed",
        )  # fmt: skip
        if resume is None:
            torch.manual_seed(2)
        trainer.fit(module, torch.utils.data.DataLoader(torch.cat(batches), batch_size=16), ckpt_path=resume)
        return module, losses

    return run


@quiet
@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_lightning_fits_and_resumes(fit, tmp_path, recipe):  # features B8
    module, losses = fit(recipe)
    assert len(losses) == 16
    assert losses[-1] < losses[0]
    assert isinstance(module.layers[0], mf.Linear)
    again, rest = fit(recipe, resume=tmp_path / "run" / "step=8.ckpt")
    assert rest == losses[8:]
    for (key, value), (_, other) in zip(module.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(value, other), key


@quiet
def test_a_precision_plugin_of_lightning_may_convert(fit, lightning):
    """For recipes without state; see the example's docstring."""

    class Precision(lightning.pytorch.plugins.precision.MixedPrecision):
        def convert_module(self, module):
            mf.convert(module, "mxfp8")
            return module

    _, losses = fit("mxfp8", plugin=Precision("bf16-mixed", "cpu"))
    _, want = fit("mxfp8", name="again")
    assert losses == want


@quiet
def test_the_example_runs(example, capsys):
    example["main"]()
    printed = capsys.readouterr().out
    assert "2 of 2 linear layers run in low precision" in printed
    assert "loss 0." in printed
