"""Train a small transformer in bf16 and again under low-precision recipes, and see what each recipe costs.

    python examples/train_gpt.py                                     # bf16, fp8_current, mxfp8, nvfp4: two minutes
    python examples/train_gpt.py --recipe nvfp4,mxfp4 --steps 500
    python examples/train_gpt.py --ablate rht,sr,2d                  # NVFP4 without one of its aids each
    python examples/train_gpt.py --recipe nvfp4 --last-fraction-bf16 0.15
    python examples/train_gpt.py --recipe bf16_again,mxfp8           # is a gap more than chance?
    python examples/train_gpt.py --preset 124m --device cuda
    python examples/train_gpt.py --resume                            # after Ctrl-C: the same losses, bit for bit

The text is the running Python's own standard library, byte by byte (gpt/data.py): nothing is downloaded. Every run
starts from the same seed and sees the same batches. Parameters and optimizer are float32 and everything computes under
``torch.autocast(bfloat16)``; a recipe then quantizes the operands of the block's matrix products, and nothing else
differs: `Trainer.place_recipe` is all that turns a bf16 training into a low-precision one.

Results: a table, runs/NAME/loss_curves.png and runs/NAME/results.json.
"""

import os

# torch's OpenMP threads wait for each other by spinning. On cores that something else also uses, the default (read when
# torch is imported) makes a step tens of times slower; a short spin costs nothing where the cores are free.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpt import options as gpt_options
from gpt import report
from gpt.checkpointing import generator_states, load_checkpoint, restore_generators, save_checkpoint
from gpt.data import Corpus, load_corpus
from gpt.exchange import load_weights, save_record, save_weights
from gpt.model import GPT
from gpt.options import Options, Run, device_error
from gpt.recording import record_operands
from gpt.training import Training, run_command
from gpt.underflow import measure_underflow
from rich.console import Console
from torch import Tensor, nn

import microfloat.torch as mf
from microfloat.recipes import Placement

__all__ = ["Trainer", "load_corpus", "main", "parse_options"]


class Trainer(Training):
    """One run in torch: what gpt/training.py leaves to the framework."""

    suffix = ".pt"

    def __init__(self, run: Run, options: Options, corpus: Corpus) -> None:
        super().__init__(run, options, corpus)
        torch.manual_seed(options.seed)
        self.model = GPT(options.shape)
        if options.initial_weights is not None:
            self._start_from(options.initial_weights)
        if options.export_weights is not None and run is options.runs[0]:
            save_weights(options.export_weights, {name: p.numpy() for name, p in self.model.state_dict().items()})
        if run.disturbed:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1 + 2**-8 * (2 * torch.rand_like(parameter) - 1))  # a bfloat16 has eight bits
        self.model.to(options.device)
        self.place_recipe()
        self.optimizer = self._make_optimizer()

    # -------------------------------------------------------------------------------- what microfloat does

    def place_recipe(self) -> None:
        """Swap the blocks' nn.Linear for quantized ones (`lm_head` stays, by convert's own rule), or back again.

        Parameters are shared with the layers they came from, so the optimizer never notices.
        """
        if self.run.recipe is None:
            return
        if self.step >= self.options.bf16_from_step:
            mf.revert(self.model)
        elif self.options.bf16_blocks:
            rules = [(f"blocks.{index}.*", None) for index in self.options.bf16_blocks]
            mf.convert(self.model, Placement([*rules, ("blocks.*", self.run.recipe)]))
        else:
            mf.convert(self.model, self.run.recipe)

    def loss(self, tokens_BT: np.ndarray) -> Tensor:
        """The mean loss of a batch. x and w are bfloat16 before they are quantized; parameters stay float32.

        The converted layers have their recipe pinned; entering `mf.autocast` marks the steps of delayed scaling.
        """
        recipe = self.run.recipe
        with torch.autocast(self.options.device.type, torch.bfloat16), mf.autocast(recipe is not None, recipe):
            return self.model.loss(torch.from_numpy(tokens_BT).to(self.options.device))

    def quantized_layers(self) -> dict[str, nn.Module]:
        """The layers whose operands the report is about; the same ones in the baseline, where they round to bf16."""
        skipped = self.options.bf16_blocks
        return {
            f"blocks.{index}.{name}": layer
            for index, block in enumerate(self.model.blocks)
            if index not in skipped
            for name, layer in block.named_modules()
            if isinstance(layer, nn.Linear)
        }

    # ----------------------------------------------------------------------------------- ordinary training

    def _train_step(self) -> float:
        tokens_BT = self.batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)
        layers, recipe = self.quantized_layers(), self.run.recipe
        underflow = record = None
        with contextlib.ExitStack() as stack:
            if self.measuring:
                underflow = stack.enter_context(measure_underflow(dict.fromkeys(layers.values(), recipe)))
            if self.recording:
                record = stack.enter_context(record_operands(layers, recipe))
            loss = self.loss(tokens_BT)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if underflow is not None:
            self.result.underflow = underflow.fractions()
        if record is not None and self.options.record is not None:
            save_record(self.options.record, record)
        return loss.item()

    def evaluate(self) -> float:
        self.model.eval()
        heldout = super().evaluate()
        self.model.train()
        return heldout

    def held_out_loss(self, tokens_BT: np.ndarray) -> float:
        with torch.no_grad():
            return self.loss(tokens_BT).item()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW; weight decay on matrices only."""
        parameters = list(self.model.parameters())
        groups = [
            {"params": [parameter for parameter in parameters if parameter.dim() >= 2]},
            {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, self.options.lr, betas=(0.9, 0.95), weight_decay=self.options.weight_decay)

    def _start_from(self, path: Path) -> None:
        own = self.model.state_dict()
        weights = load_weights(path, {name: tuple(parameter.shape) for name, parameter in own.items()})
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})

    # ----------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict:
        """Everything that the rest of the run depends on."""
        return {
            **self.facts(),
            "model": self.model.state_dict(),  # delayed scaling keeps its scales and histories here
            "optimizer": None if self.result.finished else self.optimizer.state_dict(),
            "generators": generator_states(self.options.device),
        }

    def save(self, path: Path) -> None:
        save_checkpoint(path, self.state())

    load = staticmethod(load_checkpoint)

    def restore(self, state: dict) -> None:
        self.step, self.result = state["step"], report.Result(**state["result"])
        if self.result.finished:
            return
        if self.step > self.options.bf16_from_step:  # at that very step the switch is still to come
            self.place_recipe()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_generators(state["generators"], self.options.device)

    # ------------------------------------------------------------------------------- torch on this machine

    @staticmethod
    def prepare(options: Options, console: Console) -> int:
        """On CUDA, switch on torch's deterministic algorithms, which --resume needs."""
        if options.device_type == "cuda":
            # cuBLAS reads this when its first handle is made.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs bandwidth
            console.print(
                "torch's deterministic algorithms are on, so that --resume gives the same losses bit for bit."
            )
        return GPT(options.shape).parameter_count()

    @staticmethod
    def use_one_core() -> None:
        torch.set_num_threads(1)

    @staticmethod
    def environment() -> dict[str, Any]:
        return {"torch": str(torch.__version__), "threads": torch.get_num_threads()}

    @staticmethod
    def machine(options: Options) -> dict[str, Any]:
        threads = torch.get_num_threads() if options.jobs == 1 else 1
        facts = {"device": str(options.device), "runs_at_a_time": options.jobs, "torch_threads": threads}
        if options.device_type == "cuda":
            facts["gpu"] = torch.cuda.get_device_name(options.device)
        return report.machine(**facts)

    @staticmethod
    def versions() -> dict[str, str]:
        return {**report.versions("numpy", "triton"), "torch": str(torch.__version__)}


def find_device(name: str) -> tuple[torch.device, str]:
    """The device of that name and its type; "auto" is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # "meta" has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise device_error(name, str(error).splitlines()[0]) from None
    return device, device.type


def parse_options(arguments: list[str] | None = None) -> Options:
    """The command line, with a torch device."""
    return gpt_options.parse_options(arguments, "train_gpt.py", find_device, divides_cores=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command("train_gpt.py", parse_options, Trainer, arguments)


if __name__ == "__main__":
    sys.exit(main())
