"""Serve a model of examples/train_gpt.py: quantize its weights, say what that costs, and let it write.

    python examples/train_gpt.py --recipe nvfp4                          # writes runs/tiny/checkpoints/nvfp4.zip
    python examples/generate.py runs/tiny/checkpoints/nvfp4.zip --save runs/tiny/nvfp4
    microfloat inspect runs/tiny/nvfp4

Held-out loss and bits per byte stand before and after, so that a format is judged before it is served.
"""

import argparse
import io
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parent))

from gpt.data import load_corpus
from gpt.files import load_checkpoint
from gpt.model import GPT

import microfloat.torch as mf
from microfloat.errors import MicrofloatError


def load(path: Path) -> tuple[GPT, SimpleNamespace]:
    """The trained model in bfloat16, and the settings that it was trained with."""
    facts, state = load_checkpoint(path, "checkpoint", "Name a file that train_gpt.py wrote under runs/.")
    settings = SimpleNamespace(**facts["settings"])
    model = GPT(settings)
    loaded = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    if "folder" in loaded:  # of train_fsdp.py, whose ranks have written their shards there
        loaded["model"] = model.state_dict()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be
        dcp.load({"model": loaded["model"]}, checkpoint_id=path.with_name(loaded["folder"]), no_dist=True)
    model.load_state_dict({name: value for name, value in loaded["model"].items() if ".scaling_" not in name})
    return model.bfloat16().eval(), settings


@torch.no_grad()
def bits_per_byte(model: GPT, settings: SimpleNamespace, number: int) -> float:
    """Mean of -log2 of the probability of every held-out byte; 2 to its power is the perplexity of a byte."""
    batches = load_corpus(settings.corpus_bytes).held_out_batches(number, 16, settings.context)
    losses = [float(model.loss(torch.from_numpy(batch))) for batch in batches]
    return sum(losses) / len(losses) / math.log(2)


@torch.no_grad()
def write(model: GPT, prompt: str, count: int, context: int, temperature: float) -> str:
    """The prompt and `count` sampled bytes after it."""
    tokens = list(prompt.encode())
    for _ in range(count):
        logits = model(torch.tensor([tokens[-context:]]))[0, -1].float()
        tokens.append(int(torch.multinomial((logits / temperature).softmax(0), 1)))
    return bytes(tokens).decode(errors="replace")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a file that train_gpt.py or train_fsdp.py wrote")
    parser.add_argument("--format", default="nvfp4", help="of the weights (default: nvfp4)")
    parser.add_argument("--search", choices=("mse", "four_over_six"), help="search scales (four_over_six: NVFP4)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the quantized model as safetensors")
    parser.add_argument("--prompt", default="def ", help="what to continue")
    parser.add_argument("--bytes", type=int, default=200, help="how much to write")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--windows", type=int, default=32, help="held-out windows to judge by (default: 32)")
    options = parser.parse_args(arguments)
    if options.save is not None and options.save.exists():
        parser.error(f"--save: {options.save} exists already; name another folder, or remove it first")
    if not (options.prompt and options.bytes >= 0 and options.windows > 0 and options.temperature > 0):
        parser.error("needed a --prompt that is not empty, --bytes of 0 or more, --windows and --temperature above 0")
    try:
        model, settings = load(options.checkpoint)
        size = sum(value.nbytes for value in model.state_dict().values())
        before = bits_per_byte(model, settings, options.windows)
        print(mf.quantize_(model, mf.WeightOnly(options.format, scale_search=options.search)))
        small = sum(value.nbytes for value in model.state_dict().values())
        after = bits_per_byte(model, settings, options.windows)
        print(f"bits per byte: {before:.4f} in bfloat16, {after:.4f} in {options.format} ({after - before:+.4f})")
        print(f"bytes: {size:,} in bfloat16, {small:,} in {options.format}")
        if options.save is not None:
            print("wrote", *(options.save / name for name in mf.save_quantized(model, options.save)))
    except MicrofloatError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    print(write(model, options.prompt, options.bytes, settings.context, options.temperature))
    return 0


if __name__ == "__main__":
    sys.exit(main())
