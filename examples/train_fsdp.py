"""Train the transformer of train_gpt.py on several GPUs, or in several processes on a CPU: FSDP2, and tensor parallel.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --recipe mxfp8              # every rank has half of each batch
    torchrun --nproc-per-node 2 examples/train_fsdp.py --recipe fp8_current --low-precision-gather
    torchrun --nproc-per-node 8 examples/train_fsdp.py --preset 124m --tp 2 --dp 4
    torchrun --nproc-per-node 4 examples/train_fsdp.py --resume                    # after Ctrl-C on any number of ranks

Model, text, batches, recipes and table are those of train_gpt.py, and so are the losses, but for the order of sums: the
ranks share every batch. Parameters and optimizer are float32 shards; the matrices of a block are gathered in bfloat16,
or as the codes and scales of the recipe, and everything else in float32. A checkpoint is a folder to which every rank
writes its shards (torch.distributed.checkpoint), so that no rank ever holds the whole model and any number of ranks
reads it, and a file of rank 0 that names the folder. Its metadata is a pickle: resume from your own checkpoints alone.
"""

import argparse
import contextlib
import datetime
import io
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import train_gpt
from gpt import options as gpt_options
from gpt.model import GPT
from gpt.options import Options
from gpt.report import Result
from gpt.runs import run_command
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

import microfloat.torch as mf
from microfloat.errors import CheckpointError, MicrofloatError, RankError, invalid_value
from microfloat.torch.distributed import (
    ColwiseParallel,
    RowwiseParallel,
    check_ranks,
    low_precision_all_gather,
    named_failures,
    precompute_scales,
)

TIMEOUT = datetime.timedelta(minutes=5)  # of a rank that waits for another one
WORLD = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets these
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
# Flags of train_gpt.py that only one process can follow.
ONE_PROCESS = ("compile", "watch", "record")
# Results are gathered from the ranks of a column-parallel matrix, since q, k and v of a head lie far apart in its rows.
TENSOR_PARALLEL = {
    "qkv": partial(ColwiseParallel, output_layouts=Replicate()),
    "out": partial(RowwiseParallel, input_layouts=Replicate()),
    "gate_up": partial(ColwiseParallel, output_layouts=Replicate()),
    "down": partial(RowwiseParallel, input_layouts=Replicate()),
}


class Trainer(train_gpt.Trainer):
    """One run over all ranks."""

    program = "train_fsdp.py"
    writes = RANK == 0
    launcher = ("torchrun", "--nproc-per-node", str(WORLD)) if WORLD > 1 else None
    patience = 20.0  # torchrun sends a second signal after that of the terminal
    saved_step: int | None = None  # of the newest shards on disk

    @staticmethod
    def tells(error: MicrofloatError) -> bool:
        """Of a failure of other ranks every rank tells; what is wrong for all of a host, its first one."""
        if LOCAL_RANK == 0 or isinstance(error, RankError):
            return True
        time.sleep(3)  # torchrun ends all ranks when one has ended
        return False

    @staticmethod
    def first(function: Any) -> None:
        """Call it on rank 0, before the others go on; all raise what it raises."""
        failed: list[MicrofloatError | None] = [None]
        if RANK == 0:
            try:
                function()
            except MicrofloatError as error:
                failed[0] = error
        dist.broadcast_object_list(failed)
        if failed[0] is not None:
            raise failed[0]

    def distribute(self) -> None:
        """Divide matrices over the `--tp` ranks of a group, then every parameter over the `--dp` ranks."""
        options = self.options
        self.foreach = False if options.tp > 1 else None  # in one call torch takes parameters of one mesh
        check_ranks(self.model)
        self.mesh = init_device_mesh(options.device_type, (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
        self.part = self.mesh["dp"].get_local_rank()
        if options.tp > 1:
            # Of whole tensors, gathered at the end along one axis after the other.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            # Of results that are changed in place, which no block does.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            for block in self.model.blocks:
                parallelize_module(block, self.mesh["tp"], {name: make() for name, make in TENSOR_PARALLEL.items()})
        if options.low_precision_gather and self.recipe is not None:
            low_precision_all_gather(self.model)
        for block in self.model.blocks:
            matrices = [getattr(block, name) for name in TENSOR_PARALLEL]
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(matrices, mesh=self.mesh["dp"], mp_policy=policy)
        fully_shard(self.model, mesh=self.mesh["dp"])

    def clip_gradients(self) -> None:
        """As in one process; torch's own function takes gradients of one mesh, and those of matrices have two axes."""
        grads, norms = [parameter.grad for parameter in self.model.parameters()], []
        for grad in grads:
            axes = zip(grad.device_mesh.mesh_dim_names, grad.placements, strict=True)
            cut = [axis for axis, placement in axes if not placement.is_replicate()]
            # Of the ranks that hold the same part, one counts it.
            counts = all(axis in cut or self.mesh.get_local_rank(axis) == 0 for axis in ("dp", "tp"))
            norms.append(torch.linalg.vector_norm(grad.to_local()) * counts)
        square = torch.linalg.vector_norm(torch.stack(norms)) ** 2
        dist.all_reduce(square)
        factor = (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.to_local().mul_(factor)

    def train(self, stopped: Any, show: Any) -> Result:
        """As every run; all ranks stop after the same step."""
        self.is_asked, self.stops = stopped, False
        return super().train(lambda: self.stops, show)

    def batch(self) -> np.ndarray:
        """This rank's windows of the step's batch."""
        return super().batch()[self.part :: self.options.dp]

    def train_step(self) -> float:
        """One step; the mean loss of all ranks."""
        loss = super().train_step()
        if self.options.low_precision_gather:
            precompute_scales(self.model)
        told = torch.tensor([loss, float(bool(self.is_asked()))], device=self.options.device)
        dist.all_reduce(told)
        self.stops = told[1].item() > 0
        return told[0].item() / WORLD

    def twin(self) -> GPT:
        """The whole model on every rank, with the same weights and scales."""
        with torch.random.fork_rng([self.options.device] if self.options.device_type == "cuda" else []):
            model = GPT(self.options).to(self.options.device)
        if self.recipe is not None:
            mf.convert(model, self.options.placement(self.recipe))
        model.load_state_dict(whole(self.model.state_dict()))
        return model

    def weights(self) -> dict[str, np.ndarray]:
        """The whole parameters as they are now."""
        return {name: tensor.cpu().numpy() for name, tensor in whole(mf.plain_state_dict(self.model)).items()}

    def save(self) -> None:
        """Write shards, then the file that names them, after which earlier shards are not needed."""
        super().save()
        if self.writes:
            for folder in self.file.parent.glob(f"{self.file.stem}.step*"):
                if folder.name != f"{self.file.stem}.step{self.step}":
                    shutil.rmtree(folder, ignore_errors=True)

    def dump(self) -> bytes:
        """Save the shards of this step, unless it has been done; the name of their folder, and the generators' state.

        The generators of all ranks are in one state.
        """
        folder = self.file.with_name(f"{self.file.stem}.step{self.step}")
        if self.saved_step != self.step:
            mf.update_scaling(self.model)
            self.first(partial(shutil.rmtree, folder, ignore_errors=True))  # of a run that ended while it wrote
            with named_checkpoint(folder):
                dcp.save(self.shards(), checkpoint_id=folder)
            self.saved_step = self.step
        state = {"folder": folder.name, "cpu_generator": torch.get_rng_state()}
        if self.options.device_type == "cuda":
            state["cuda_generator"] = torch.cuda.get_rng_state(self.options.device)
        torch.save(state, buffer := io.BytesIO())
        return buffer.getvalue()

    def load(self, dumped: bytes) -> None:
        """Continue where `dump` was called, maybe on another number of ranks: each reads what its shards need."""
        state = torch.load(io.BytesIO(dumped), map_location="cpu", weights_only=True)
        shards, folder = self.shards(), self.file.with_name(state["folder"])
        with named_checkpoint(folder):
            dcp.load(shards, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=shards["model"], optim_state_dict=shards["optimizer"]
        )
        self.saved_step = self.step
        torch.set_rng_state(state["cpu_generator"])
        if self.options.device_type == "cuda":
            torch.cuda.set_rng_state(state["cuda_generator"], self.options.device)

    def shards(self) -> dict[str, Any]:
        """Parameters, scaling state and optimizer, of which this rank holds its shards."""
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))


@contextlib.contextmanager
def named_checkpoint(folder: Path) -> Iterator[None]:
    """Turn an error of torch.distributed.checkpoint, which all ranks get, into one that says what to do."""
    try:
        yield
    except (dcp.api.CheckpointException, OSError) as error:
        raise CheckpointError(
            f"checkpoint {folder}: {error}. To train this recipe from the start, delete {folder.name} and the file "
            "beside it that has the recipe's name; or put a good copy in its place."
        ) from error


def whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with every sharded tensor gathered; all ranks call it."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def find_device(name: str) -> tuple[torch.device, str, str | None]:
    """This rank's device, its type and the GPU's name; "auto" is CUDA where every rank of the host has a GPU."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if name == "auto":
        name = "cuda" if torch.cuda.device_count() >= per_host else "cpu"
    if name == "cuda":
        name = f"cuda:{LOCAL_RANK}"
        torch.cuda.set_device(LOCAL_RANK)
    return train_gpt.find_device(name)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this example alone, in place of those that it refuses."""
    for action in parser._actions:
        if action.dest in (*ONE_PROCESS, "jobs"):
            action.help = argparse.SUPPRESS
    parser.add_argument("--dp", type=int, metavar="N", help="ranks that share a batch, and the parameters (default: "
        "all, divided by --tp)")  # fmt: skip
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each matrix (default: 1)")
    parser.add_argument("--low-precision-gather", action="store_true", help="gather weights as codes and scales of the "
        "recipe, where their shards allow it")  # fmt: skip


def parse_options(arguments: list[str] | None) -> Options:
    """Parse and check the command line. Raises InvalidValueError whose message names the flag."""
    options = gpt_options.parse_options(arguments, Trainer.program, find_device, False, add_flags)
    for name in ONE_PROCESS:
        if getattr(options, name):
            raise invalid_value(f"--{name}", getattr(options, name), "nothing", "train_gpt.py has it, on one device.")
    if options.bf16_from_step < options.steps:
        needed = "--last-in blocks: sharded layers keep their recipe"
        raise invalid_value("--last-in", options.last_in, needed)
    if options.tp < 1 or WORLD % options.tp:
        raise invalid_value("--tp", options.tp, f"a divisor of the number of ranks, {WORLD}")
    options.dp = WORLD // options.tp if options.dp is None else options.dp
    if options.dp * options.tp != WORLD:
        needed = f"{WORLD // options.tp}: --dp times --tp is the number of ranks, {WORLD}"
        raise invalid_value("--dp", options.dp, needed, "torchrun --nproc-per-node sets that number.")
    if options.batch % options.dp:
        raise invalid_value("--batch", options.batch, f"a multiple of --dp, {options.dp}")
    if options.tp > 1 and (options.dim % options.tp or options.hidden % options.tp):
        raise invalid_value("--tp", options.tp, f"a divisor of --dim, {options.dim}, and of --hidden, {options.hidden}")
    return options


def begin_group(options: Options) -> None:
    """Join the ranks that torchrun has started; without it, a world of one."""
    device = options.device if options.device_type == "cuda" else None  # of NCCL
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device else "gloo", timeout=TIMEOUT, device_id=device)
    else:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if device else "gloo", timeout=TIMEOUT, device_id=device, **alone)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""

    def parse() -> Options:
        options = parse_options(arguments)
        begin_group(options)
        return options

    try:
        with named_failures():
            return run_command(Trainer, parse)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
