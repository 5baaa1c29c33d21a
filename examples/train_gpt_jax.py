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
"""

import functools
import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt import options as gpt_options
from gpt.data import Corpus
from gpt.files import Arrays
from gpt.model_jax import GPT, set_weights, weights_of
from gpt.options import Options
from gpt.report import Result
from gpt.runs import Training, run_command

import microfloat.jax as mj
import microfloat.jax.nnx as mnnx


@functools.cache
def adamw(rates: tuple[float, ...], weight_decay: float) -> optax.GradientTransformation:
    """Clipping and AdamW, weight decay on matrices only. Cached: equal optimizers share their compiled steps."""
    table = np.asarray(rates, np.float32)
    matrices = functools.partial(jax.tree.map, lambda parameter: parameter.ndim >= 2)
    adamw = optax.adamw(lambda count: jnp.asarray(table)[count], 0.9, 0.95, weight_decay=weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def optimize(model: GPT, optimizer: mnnx.Optimizer, tokens_BT: jax.Array) -> jax.Array:
    """One step; `mnnx.value_and_grad` includes the state of delayed scaling, `mnnx.Optimizer` advances it."""
    loss, gradients = mnnx.value_and_grad(GPT.loss)(model, tokens_BT)
    optimizer.update(model, gradients)
    return loss


run_step = nnx.jit(optimize)
watch_step = nnx.jit(mnnx.watch_outputs(optimize))  # compiled when --watch first calls it
evaluate = nnx.jit(GPT.loss)


class Trainer(Training):
    """One run in JAX."""

    program = "train_gpt_jax.py"

    def __init__(self, name: str, options: Options, corpus: Corpus) -> None:
        super().__init__(name, options, corpus)
        self.watched = mj.RecordLog()
        jax.config.update("jax_default_device", options.device)
        self.model = GPT(options, nnx.Rngs(options.seed))
        set_weights(self.model, self.first_weights(weights_of(self.model)))
        self.place_recipe()
        rates = tuple(options.learning_rate(step) for step in range(options.steps))
        self.optimizer = mnnx.Optimizer(self.model, adamw(rates, options.weight_decay), wrt=nnx.Param)

    def place_recipe(self) -> None:
        """Give the blocks' nnx.Linear their recipe, or take it away again; parameters stay as they are."""
        if self.recipe is not None:
            recipe = None if self.step >= self.options.bf16_from_step else self.recipe
            rngs = nnx.Rngs(sr_rng=self.options.seed)  # of stochastic rounding
            mnnx.convert(self.model, self.options.placement(recipe), rngs=rngs)

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters as they are now, under the names of the torch model's."""
        return weights_of(self.model)

    def train_step(self) -> float:
        """One optimizer step on `batch`; returns its loss. Every `--watch`-th returns what its layers did, too."""
        batch = jnp.asarray(self.batch(), jnp.int32)
        if self.options.watch is None or self.step % self.options.watch:
            return float(run_step(self.model, self.optimizer, batch))
        loss, readings = watch_step(self.model, self.optimizer, batch)
        self.watched.add(self.step, readings)
        return float(loss)

    def train(self, stopped: Any, show: Any) -> Result:
        """As every run; --watch then writes the records of the layers under a recipe, and their pictures."""
        result = super().train(stopped, show)
        if self.watched.records:
            self.watched.to_csv(self.options.folder / f"{self.name}_watch.csv")
            self.watched.plot(self.options.folder / f"{self.name}_watch.png")
        return result

    def held_out_loss(self, tokens_BT: np.ndarray) -> float:
        """The loss alone."""
        return float(evaluate(self.model, jnp.asarray(tokens_BT, jnp.int32)))

    def operands(self, rows: int | None) -> dict[str, Arrays]:
        """As in train_gpt.py: x, w, y, dy and dw of every quantized layer in this step, seeds and delayed scales."""
        graph, parameters, rest = nnx.split(self.model, nnx.Param, ...)
        tokens_BT = jnp.asarray(self.batch(), jnp.int32)

        def loss(parameters: nnx.State, found: dict[str, dict[str, jax.Array]]) -> jax.Array:
            model = nnx.merge(graph, parameters, rest, copy=True)
            for path, layer in nnx.iter_modules(model):
                name = ".".join(map(str, path))
                if isinstance(layer, nnx.Linear) and self.options.has_recipe(name):
                    found[name] = {}
                    layer.dot_general = nnx.static(watched(layer.dot_general, found[name], rows))
            return model.loss(tokens_BT)

        @jax.jit
        def record(parameters: nnx.State) -> dict[str, dict[str, jax.Array]]:
            jax.grad(loss)(parameters, found := {})
            return found

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a gradient is taken with respect to parameters but not to the delayed")
            found = record(parameters)
        return jax.tree.map(
            lambda array: np.asarray(array if array.dtype == np.uint32 else array.astype(np.float32)), found
        )

    def dump(self) -> bytes:
        """Everything that the rest of the run depends on, random keys as their words."""
        leaves = jax.tree.leaves(nnx.state(self.modules()))
        np.savez(buffer := io.BytesIO(), *(np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves))
        return buffer.getvalue()

    def load(self, dumped: bytes) -> None:
        """Continue where `dump` was called; no code in the bytes is run."""
        leaves, structure = jax.tree.flatten(nnx.state(self.modules()))
        with np.load(io.BytesIO(dumped), allow_pickle=False) as file:
            arrays = [jnp.asarray(file[name]) for name in file.files]
        pairs = zip(leaves, arrays, strict=True)
        restored = [jax.random.wrap_key_data(array) if is_key(leaf) else array for leaf, array in pairs]
        nnx.update(self.modules(), structure.unflatten(restored))

    def modules(self) -> tuple:
        """Objects whose state a checkpoint holds; delayed scaling keeps its scales and histories in the model."""
        return (self.model,) if self.result.finished else (self.model, self.optimizer)

    @staticmethod
    def prepare_cuda() -> str:
        """Nothing; what to know about --resume."""
        return "XLA chooses kernels by timing them: --resume gives losses that agree, not to the last bit."


def is_key(value: jax.Array) -> bool:
    """True for random keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def watched(op: Callable[..., jax.Array], found: dict[str, jax.Array], rows: int | None) -> Callable[..., jax.Array]:
    """A dot_general that calls `op` and notes what goes in and out, forward and backward."""

    def matrix(array: jax.Array) -> jax.Array:
        return array.reshape(-1, array.shape[-1])[:rows]

    def dot_general(lhs: jax.Array, rhs: jax.Array, numbers: Any, **options: Any) -> jax.Array:
        if isinstance(op, mnnx.DotGeneral) and op.sr_rng is not None:
            options["key"] = op.sr_rng()  # what the op would draw itself
            found["seed"] = jax.random.bits(options["key"], (2,), "uint32")
        if isinstance(op, mnnx.DotGeneral) and op.recipe.is_delayed:
            scales = mj.scaling.encode_scales(op.state())
            found.update({f"{operand}_scale": scales[operand] for operand in ("x", "w", "dy")})

        def forward(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
            y, pull = jax.vjp(lambda lhs, rhs: op(lhs, rhs, numbers, **options), lhs, rhs)
            found.update(x=matrix(lhs), w=matrix(rhs.T), y=matrix(y))
            return y, pull

        def backward(pull: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
            dx, dw = pull(dy)
            found.update(dy=matrix(dy), dw=matrix(dw.T))
            return dx, dw

        product = jax.custom_vjp(lambda lhs, rhs: forward(lhs, rhs)[0])
        product.defvjp(forward, backward)
        return product(lhs, rhs)

    return dot_general


def find_device(name: str) -> tuple[jax.Device, str, str | None]:
    """Device, its type and the GPU's name; "auto" is JAX's default."""
    kind, _, index = name.partition(":")
    device = jax.devices(None if name == "auto" else kind)[int(index or 0)]
    return (device, "cuda", device.device_kind) if device.platform == "gpu" else (device, device.platform, None)


parse_options = functools.partial(
    gpt_options.parse_options, program=Trainer.program, find_device=find_device, divides_cores=False
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(Trainer, lambda: parse_options(arguments))


if __name__ == "__main__":
    sys.exit(main())
