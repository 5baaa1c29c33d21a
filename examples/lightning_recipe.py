"""A recipe in Lightning: a callback that converts the module before a checkpoint is restored.

Needs lightning, which microfloat does not depend on: ``pip install lightning && python examples/lightning_recipe.py``.
The optimizer, the strategy and the precision stay Lightning's; under ``precision="bf16-mixed"`` Linears read bfloat16.

The conversion is a callback and not a precision plugin, because Lightning lets plugins convert a module only after it
has loaded a checkpoint into it, and a plain nn.Linear refuses the scaling state of delayed scaling. A module of your
own may as well call `microfloat.torch.convert` at the end of its `__init__` or `configure_model`.
"""

import lightning
import torch
from torch import nn

import microfloat.torch as mf
from microfloat.recipes import Placement, Recipe


class ConvertCallback(lightning.Callback):
    """``mf.convert(module, recipe, **options)`` when a fit, a validation or a test begins; `report` is its answer."""

    def __init__(self, recipe: Recipe | Placement | str, **options):
        self.recipe, self.options, self.report = recipe, options, None

    def setup(self, trainer, pl_module, stage):
        """Convert; a module that was converted before is pinned anew, and keeps its scaling state."""
        self.report = mf.convert(pl_module, self.recipe, **self.options)


class Autoencoder(lightning.LightningModule):
    """Something to train."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def training_step(self, batch, index):
        """The loss of one batch."""
        loss = nn.functional.mse_loss(self.layers(batch).float(), batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """One optimizer over all parameters; converting does not replace them."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    """Train for twenty steps under MXFP8."""
    torch.manual_seed(0)
    callback = ConvertCallback("mxfp8")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="auto", devices=1, precision="bf16-mixed", callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Autoencoder(), torch.utils.data.DataLoader(torch.randn(320, 32), batch_size=16))
    print(callback.report)
    print(f"loss {float(trainer.callback_metrics['loss']):.4f}")


if __name__ == "__main__":
    main()
