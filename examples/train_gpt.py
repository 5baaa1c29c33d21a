"""Train a small transformer in bf16 and again under low-precision recipes, and see what each recipe costs.

    python examples/train_gpt.py                                     # bf16, fp8_current, mxfp8, nvfp4: two minutes
    python examples/train_gpt.py --recipe nvfp4,mxfp4 --steps 500
    python examples/train_gpt.py --ablate rht,sr,2d                  # NVFP4 with each of its techniques missing in turn
    python examples/train_gpt.py --recipe nvfp4 --last-fraction-bf16 0.15
    python examples/train_gpt.py --recipe bf16_again,mxfp8           # is a gap more than chance?
    python examples/train_gpt.py --preset 124m --device cuda --compile --cuda-graph
    python examples/train_gpt.py --resume                            # after Ctrl-C: the same losses, bit for bit

Ctrl-C or SIGTERM stops it after the step under way; a second one ends it at once, and the last checkpoint is whole.

The text is the running Python's own standard library, byte by byte (gpt/data.py): nothing is downloaded. Every run
starts from the same seed and sees the same batches. Parameters and optimizer are float32 and everything computes under
``torch.autocast(bfloat16)``; a recipe then quantizes the operands of the block's matrix products, and nothing else
differs: `Trainer.place_recipe` is all that turns a bf16 training into a low-precision one.

Results: a table, runs/NAME/loss_curves.png and runs/NAME/results.json.
"""

import argparse
import contextlib
import os

# torch's OpenMP threads wait for each other by spinning. On cores that something else also uses, the default (read when
# torch is imported) makes a step tens of times slower; a short spin costs nothing where the cores are free.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import copy
import io
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from gpt import options as gpt_options
from gpt.data import Corpus
from gpt.files import Arrays
from gpt.model import GPT, products
from gpt.options import Options
from gpt.report import Result
from gpt.runs import Training, run_command
from torch import Tensor, nn

import microfloat.torch as mf
from microfloat.errors import invalid_value
from microfloat.torch.tensor.seeds import draw_seed


class Trainer(Training):
    """One run in torch."""

    program = "train_gpt.py"
    foreach: bool | None = None  # of the optimizer

    def __init__(self, name: str, options: Options, corpus: Corpus) -> None:
        super().__init__(name, options, corpus)
        torch.manual_seed(options.seed)
        self.model = GPT(options)
        weights = self.first_weights({key: tensor.numpy() for key, tensor in self.model.state_dict().items()})
        self.model.load_state_dict({key: torch.from_numpy(array) for key, array in weights.items()})
        self.model.to(options.device)
        self.place_recipe()
        self.distribute()
        if options.compile:
            self.model.compile(fullgraph=True)
        parameters = list(self.model.parameters())
        matrices = {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": options.weight_decay}
        others = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(
            [matrices, others], options.lr, betas=(0.9, 0.95), foreach=self.foreach, capturable=options.cuda_graph
        )
        self.graph: GraphedStep | None = None

    def distribute(self) -> None:
        """Divide the model over processes, before its optimizer is made: here there is one."""

    def place_recipe(self) -> None:
        """Swap the blocks' nn.Linear for quantized ones, or from `bf16_from_step` on back again.

        Parameters are shared with the layers they came from, so the optimizer never notices.
        """
        self.graph = None  # its kernels are those of the recipe before
        if self.recipe is None:
            return
        if self.step >= self.options.bf16_from_step:
            mf.revert(self.model)
        else:
            mf.convert(self.model, self.options.placement(self.recipe))

    def loss(self, tokens_BT: np.ndarray | Tensor, model: GPT | None = None) -> Tensor:
        """The mean loss of a batch. x and w are bfloat16 before they are quantized; parameters stay float32.

        The converted layers have their recipe pinned; entering `mf.autocast` marks the steps of delayed scaling.
        """
        with (
            torch.autocast(self.options.device_type, torch.bfloat16),
            mf.autocast(self.recipe is not None, self.recipe),
            contextlib.nullcontext() if self.options.compile else products(self.options.device_type),
        ):
            return (model or self.model).loss(torch.as_tensor(tokens_BT, device=self.options.device))

    def train(self, stopped: Any, show: Any) -> Result:
        """As every run, with its layers watched if --watch asks for it."""
        if self.options.watch is None:
            return super().train(stopped, show)
        with mf.watch(self.model, every=self.options.watch) as watched:
            result = super().train(stopped, show)
        watched.to_csv(self.options.folder / f"{self.name}_watch.csv")
        watched.plot(self.options.folder / f"{self.name}_watch.png")
        return result

    def train_step(self) -> float:
        """One optimizer step on `batch`; returns its loss."""
        rate = self.options.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            # A replay of a graph reads the rate from the device.
            group["lr"] = torch.as_tensor(rate, device=self.options.device) if self.options.cuda_graph else rate
        if not self.options.cuda_graph:
            return self.update(self.batch()).item()
        self.graph = self.graph or GraphedStep(self)
        return self.graph(self.batch()).item()

    def update(self, tokens_BT: np.ndarray | Tensor) -> Tensor:
        """Forward, backward and optimizer step on a batch; returns the loss, on its device."""
        loss = self.loss(tokens_BT)
        loss.backward()
        self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def clip_gradients(self) -> None:
        """Scale all gradients down where their norm is above 1."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def held_out_loss(self, tokens_BT: np.ndarray) -> float:
        """The loss alone."""
        with torch.no_grad():
            return self.loss(tokens_BT).item()

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters as they are now."""
        return {name: tensor.cpu().numpy() for name, tensor in mf.plain_state_dict(self.model).items()}

    def operands(self, rows: int | None) -> dict[str, Arrays]:
        """x, w, y, dy and dw of every quantized layer in this step, at most `rows` rows of each, as float32.

        Also the call seed where something is stochastic, and the scales of delayed scaling. The step is computed once
        more on a copy of the model, so the training does not notice. In the baseline they are those of the same layers.
        """
        twin = self.twin()
        layers = {name: layer for name, layer in twin.named_modules() if isinstance(layer, nn.Linear)}
        layers = {name: layer for name, layer in layers.items() if self.options.has_recipe(name)}
        found: dict[str, Arrays] = {name: {} for name in layers}
        devices = [self.options.device] if self.options.device_type == "cuda" else []

        def matrix(tensor: Tensor) -> np.ndarray:
            return tensor.detach().flatten(0, -2)[:rows].float().cpu().numpy()

        def before(arrays: Arrays, layer: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
            with torch.random.fork_rng(devices):  # the seed that the layer is about to draw
                if self.recipe is not None and self.recipe.is_stochastic:
                    arrays["seed"] = draw_seed(self.options.device).cpu().numpy().astype(np.uint32)
            for operand in ("x", "w", "dy") if self.recipe is not None and self.recipe.is_delayed else ():
                arrays[f"{operand}_scale"] = getattr(layer, f"scaling_{operand}_scale").cpu().numpy().copy()
            arrays["x"], arrays["w"] = matrix(inputs[0].bfloat16()), matrix(layer.weight.bfloat16())

        def after(arrays: Arrays, _: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            arrays["y"] = matrix(output)
            output.register_hook(lambda dy: arrays.update(dy=matrix(dy)))

        for name, layer in layers.items():
            layer.register_forward_pre_hook(partial(before, found[name]))
            layer.register_forward_hook(partial(after, found[name]))
        with torch.random.fork_rng(devices):
            self.loss(self.batch(), twin).backward()
        for name, layer in layers.items():
            found[name]["dw"] = matrix(layer.weight.grad)
        return found

    def twin(self) -> GPT:
        """A copy of the model, to compute a step more on."""
        return copy.deepcopy(self.model)

    def dump(self) -> bytes:
        """Everything that the rest of the run depends on."""
        state = {
            "model": self.model.state_dict(),  # delayed scaling keeps its scales and histories here
            "optimizer": None if self.result.finished else self.optimizer.state_dict(),
            "cpu_generator": torch.get_rng_state(),  # stochastic rounding draws its call seeds from these
            "cuda_generator": torch.cuda.get_rng_state(self.options.device)
            if self.options.device_type == "cuda"
            else None,
        }
        torch.save(state, buffer := io.BytesIO())
        return buffer.getvalue()

    def load(self, dumped: bytes) -> None:
        """Continue where `dump` was called; no code in the bytes is run."""
        state = torch.load(io.BytesIO(dumped), map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["cpu_generator"])
        if self.options.device_type == "cuda":
            torch.cuda.set_rng_state(state["cuda_generator"], self.options.device)

    @staticmethod
    def prepare_cuda() -> str:
        """Switch on torch's deterministic algorithms, which --resume needs."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS's first handle is made
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs bandwidth
        return "torch's deterministic algorithms are on, so that --resume gives the same losses bit for bit."


class GraphedStep:
    """`Trainer.update` as a CUDA graph: three steps that compile what it launches, then replays (docs/training.md)."""

    warm = 3

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.steps, self.stream = trainer, 0, torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        self.tokens_BT = torch.as_tensor(trainer.batch(), device=trainer.options.device)
        self.rates = [torch.empty_like(group["lr"]) for group in trainer.optimizer.param_groups]

    def __call__(self, tokens_BT: np.ndarray) -> Tensor:
        """The loss of a step on a batch."""
        self.tokens_BT.copy_(torch.from_numpy(tokens_BT))
        for rate, group in zip(self.rates, self.trainer.optimizer.param_groups, strict=True):
            group["lr"] = rate.copy_(group["lr"])
        self.steps += 1
        if self.steps <= self.warm:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.trainer.update(self.tokens_BT)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss.detach()
        if self.steps == self.warm + 1:
            with torch.cuda.graph(self.graph):
                self.loss = self.trainer.update(self.tokens_BT).detach()
        self.graph.replay()
        return self.loss


def find_device(name: str) -> tuple[torch.device, str, str | None]:
    """Device, its type and the GPU's name; "auto" is CUDA where there is one."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    torch.ones(1, device=device).item()  # "meta" has no values
    return device, device.type, torch.cuda.get_device_name(device) if device.type == "cuda" else None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this example alone."""
    parser.add_argument("--cuda-graph", action="store_true", help="replay every step from the fourth on as a CUDA "
                        "graph, which takes no host time (on a GPU)")  # fmt: skip


def parse_options(arguments: list[str] | None = None) -> Options:
    """Parse and check the command line. Raises InvalidValueError whose message names the flag."""
    options = gpt_options.parse_options(
        arguments, Trainer.program, find_device, divides_cores=True, add_flags=add_flags
    )  # fmt: skip
    if options.cuda_graph and options.device_type != "cuda":
        raise invalid_value("--cuda-graph", f"a step on {options.device_type}", "a CUDA device", "Leave it out.")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(Trainer, lambda: parse_options(arguments))


if __name__ == "__main__":
    sys.exit(main())
