"""The training of train_gpt.py in JAX and Flax nnx: the same model, text, flags and report.

    python examples/train_gpt_jax.py                                 # bf16, fp8_current, mxfp8, nvfp4
    python examples/train_gpt_jax.py --recipe nvfp4 --steps 500
    python examples/train_gpt_jax.py --initial-weights w.safetensors # weights of either script's --export-weights
    python examples/train_gpt_jax.py --preset 124m --device cuda
    python examples/train_gpt_jax.py --resume                        # after Ctrl-C: the same losses, bit for bit

Parameters and optimizer are float32, linear layers compute in bfloat16; a recipe then quantizes the operands of the
blocks' matrix products, and nothing else differs: `Trainer.place_recipe` is all that turns a bf16 training into a
low-precision one. From equal initial weights every weight quantizes to the bytes of the torch run, and so does every
operand that is the same in both; sums differ in their last bits, so the curves agree closely and not exactly.

Results: a table, runs/NAME/loss_curves.png and runs/NAME/results.json.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt import options as gpt_options
from gpt import report
from gpt.data import Corpus, load_corpus
from gpt.exchange import load_weights, save_record, save_weights
from gpt.options import Options, Run, device_error
from gpt.training import Training, run_command
from gpt_jax.checkpointing import arrays_of, load_checkpoint, save_checkpoint, set_arrays
from gpt_jax.model import GPT, set_weights, weights_of
from gpt_jax.watching import operands_of, underflow
from rich.console import Console

import microfloat.jax.nnx as mnnx
from microfloat.recipes import Placement

__all__ = ["Trainer", "load_corpus", "main", "parse_options"]


@functools.cache
def adamw(rates: tuple[float, ...], weight_decay: float) -> optax.GradientTransformation:
    """Clipping and AdamW, weight decay on matrices only. Cached: equal optimizers share their compiled steps."""
    table = np.asarray(rates, np.float32)
    tx = optax.adamw(
        lambda count: jnp.asarray(table)[count], b1=0.9, b2=0.95, weight_decay=weight_decay,
        mask=lambda params: jax.tree.map(lambda parameter: parameter.ndim >= 2, params),
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


@nnx.jit
def train_step(model: GPT, optimizer: mnnx.Optimizer, tokens_BT: jax.Array) -> jax.Array:
    """One step; `mnnx.value_and_grad` includes the state of delayed scaling, `mnnx.Optimizer` advances it."""
    loss, gradients = mnnx.value_and_grad(GPT.loss)(model, tokens_BT)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def held_out_loss(model: GPT, tokens_BT: jax.Array) -> jax.Array:
    """The loss alone."""
    return model.loss(tokens_BT)


class Trainer(Training):
    """One run in JAX: what gpt/training.py leaves to the framework."""

    suffix = ".npz"

    def __init__(self, run: Run, options: Options, corpus: Corpus) -> None:
        super().__init__(run, options, corpus)
        self.model = GPT(options.shape, nnx.Rngs(options.seed))
        if options.initial_weights is not None:
            own = weights_of(self.model)
            shapes = {name: array.shape for name, array in own.items()}
            set_weights(self.model, load_weights(options.initial_weights, shapes))
        if options.export_weights is not None and run is options.runs[0]:
            save_weights(options.export_weights, weights_of(self.model))
        if run.disturbed:
            noise = np.random.default_rng(options.seed)
            disturbed = {  # by up to 2^-8: a bfloat16 has eight bits
                name: (array * (1 + 2**-8 * noise.uniform(-1, 1, array.shape))).astype(np.float32)
                for name, array in weights_of(self.model).items()
            }
            set_weights(self.model, disturbed)
        self.place_recipe()
        rates = tuple(self.learning_rate(step) for step in range(options.steps))
        self.optimizer = mnnx.Optimizer(self.model, adamw(rates, options.weight_decay), wrt=nnx.Param)

    # -------------------------------------------------------------------------------- what microfloat does

    def place_recipe(self) -> None:
        """Give the blocks' nnx.Linear their recipe, or take it away again; parameters stay as they are."""
        if self.run.recipe is None:
            return
        recipe = None if self.step >= self.options.bf16_from_step else self.run.recipe
        rules = [(f"blocks.{index}.*", None) for index in self.options.bf16_blocks]
        rngs = nnx.Rngs(sr_rng=self.options.seed)  # of stochastic rounding
        mnnx.convert(self.model, Placement([*rules, ("blocks.*", recipe)]), rngs=rngs)

    def quantized_layers(self) -> list[str]:
        """The layers whose operands the report is about; the same ones in the baseline, where they round to bf16."""
        skipped = tuple(f"blocks.{index}." for index in self.options.bf16_blocks)
        names = (
            ".".join(map(str, path))
            for path, module in nnx.iter_modules(self.model)
            if isinstance(module, nnx.Linear) and path[0] == "blocks"
        )
        return [name for name in names if not name.startswith(skipped)]

    # ----------------------------------------------------------------------------------- ordinary training

    def _train_step(self) -> float:
        tokens_BT = jnp.asarray(self.batch(), jnp.int32)
        if self.measuring or self.recording:
            operands = operands_of(self.model, tokens_BT, self.quantized_layers())
            if self.measuring:
                self.result.underflow = underflow(self.model, operands, self.run.recipe)
            if self.recording and self.options.record is not None:
                save_record(self.options.record, operands)
        return float(train_step(self.model, self.optimizer, tokens_BT))

    def held_out_loss(self, tokens_BT: np.ndarray) -> float:
        return float(held_out_loss(self.model, jnp.asarray(tokens_BT, jnp.int32)))

    # ----------------------------------------------------------------------------------------- checkpoints

    def save(self, path: Path) -> None:
        arrays = arrays_of("model", self.model)
        if not self.result.finished:
            arrays |= arrays_of("optimizer", self.optimizer)
        save_checkpoint(path, self.facts(), arrays)

    load = staticmethod(load_checkpoint)

    def restore(self, state: dict) -> None:
        self.step, self.result = state["step"], report.Result(**state["result"])
        if self.result.finished:
            return
        if self.step > self.options.bf16_from_step:  # at that very step the switch is still to come
            self.place_recipe()
        set_arrays("model", self.model, state["arrays"])
        set_arrays("optimizer", self.optimizer, state["arrays"])

    # --------------------------------------------------------------------------------- JAX on this machine

    @staticmethod
    def prepare(options: Options, console: Console) -> int:
        """Compute on the chosen device."""
        jax.config.update("jax_default_device", options.device)
        if options.device_type == "cuda":
            console.print("XLA chooses kernels by timing them: --resume gives losses that agree, not to the last bit.")
        model = nnx.eval_shape(lambda: GPT(options.shape, nnx.Rngs(0)))
        return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))

    @staticmethod
    def environment() -> dict[str, Any]:
        return {"jax": jax.__version__, "cpus": len(jax.devices("cpu"))}

    @staticmethod
    def machine(options: Options) -> dict[str, Any]:
        facts = {"device": str(options.device)}
        if options.device_type == "cuda":
            facts["gpu"] = options.device.device_kind
        return report.machine(**facts)

    @staticmethod
    def versions() -> dict[str, str]:
        return report.versions("numpy", "jax", "jaxlib", "flax", "optax")


def find_device(name: str) -> tuple[jax.Device, str]:
    """The device of that name and its type; "auto" is JAX's default."""
    kind, _, index = name.partition(":")
    try:
        devices = jax.devices() if name == "auto" else jax.devices(kind)
        device = devices[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        raise device_error(name, str(error).splitlines()[0]) from None
    return device, "cuda" if device.platform == "gpu" else device.platform


def parse_options(arguments: list[str] | None = None) -> Options:
    """The command line, with a JAX device."""
    return gpt_options.parse_options(arguments, "train_gpt_jax.py", find_device, divides_cores=False)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command("train_gpt_jax.py", parse_options, Trainer, arguments)


if __name__ == "__main__":
    sys.exit(main())
