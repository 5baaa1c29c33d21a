"""Store a trained model in every format for serving, and say what each costs on text that it has not seen.

    python examples/study.py run --rows bf16 --seeds 0 --keep bf16          # writes runs/study/bf16.0.safetensors
    python examples/post_training.py runs/study/bf16.0.safetensors          # a table; --json FILE writes all of it

Of each format: the held-out loss above that of the plain model, and the divergence of its distribution of the next
token (KL, nats per token), with twice their standard error over windows. Computes in bfloat16 on a GPU and in float32
on a CPU; the weights are those of the file, in bfloat16.

Then one batch of training text through the model under every recipe for training: the error of each product against
float32 (SQNR in dB), and the cosine between the gradient of each weight and that of float32.
"""

import argparse
import contextlib
import copy
import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpt.model import products
from pretraining.model import Model, Size
from pretraining.rows import BASELINE, ROWS
from pretraining.run import environment
from pretraining.text import Text, load_text
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

import microfloat.torch as mf
from microfloat.errors import MicrofloatError
from microfloat.recipes import Recipe

CALIBRATION = 16  # windows of training text for static scales
PLAIN = "bf16"


class Served(NamedTuple):
    """A way to serve the model: what one writes to have it, the config of its weights, the format of its cache."""

    group: str
    name: str
    config: Recipe | None = None
    cache: str | None = None
    method: str = "nearest"


def ways() -> list[Served]:
    """All formats for serving, the plain model first."""
    four_over_six, mse, static = {"scale_search": "four_over_six"}, {"scale_search": "mse"}, {"scales": "static"}
    small = ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4")
    weights = (
        *((name, {}) for name in ("fp8_row", "mxfp8", *small)),
        ("mxfp4", mse),
        ("nvfp4", mse),
        ("nvfp4", four_over_six),
    )
    both = (
        ("nvfp4", {"activation": "fp8_row"}),
        ("mxfp4", {"activation": "fp8_row"}),
        ("mxfp8", {"weight": "mxfp4"}),
        *((name, {}) for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", *small, "nvfp4_row")),
        ("fp8_tensor", static),
        ("nvfp4", static),
        ("nvfp4", four_over_six),
    )
    found = [Served("", PLAIN)]
    for group, config, arguments in (("weights", mf.WeightOnly, weights), ("both", mf.WeightActivation, both)):
        for name, options in arguments:
            told = "".join(f', {key}="{value}"' for key, value in options.items())
            found.append(Served(group, f'{config.__name__}("{name}"{told})', config(name, **options)))
    for name in ("mxfp4", "nvfp4"):
        found.append(Served("weights", f'WeightOnly("{name}"), method="gptq"', mf.WeightOnly(name), method="gptq"))
    caches = ("fp8", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4")
    return [*found, *(Served("cache", f'KVCache(format="{name}")', cache=name) for name in caches)]


def load(file: Path, text: Text) -> tuple[Model, Size, dict[str, Any]]:
    """The trained model in float32, its size, and the facts of its run."""
    if not file.is_file():
        raise MicrofloatError(f"weights: got {file}, which is no file. Train one with `study.py run --keep bf16`.")
    with safe_open(file, "pt") as stored:
        facts = json.loads((stored.metadata() or {}).get("run", "null"))
        if facts is None:
            raise MicrofloatError(f"weights: got {file}, which `study.py run --keep` has not written. Train one.")
        weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    size = Size(**facts["size"])
    entries = weights["embedding.weight"].shape[0]
    if entries != text.entries:
        needed = f"one of {entries} entries, on which {file.name} was trained"
        raise MicrofloatError(f"--text: got a text of {text.entries} tokens' entries, needed {needed}.")
    model = Model(size, entries)
    model.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    return model, size, facts


def serve(model: Model, way: Served, calibrate: Callable[[Model], None]) -> tuple[Model, float]:
    """A copy of the model that is served this way, and the bits of an element of what is stored so."""
    made = copy.deepcopy(model)
    made.head.weight = made.embedding.weight = model.embedding.weight  # once for all
    if way.cache is not None:
        for block in made.blocks:
            block.cache = Cached(way.cache)
        return made, math.nan  # known after the first call
    if way.config is None:
        return made, 16.0
    if way.method != "nearest":
        with mf.calibrate(made):
            calibrate(made)
    mf.quantize_(made, way.config, filter=lambda name, _: name.startswith("blocks."), fuse=(), method=way.method)
    if way.config.is_static:
        with mf.calibrate(made):
            calibrate(made)
    stored = [layer.weight for layer in made.blocks.modules() if isinstance(layer, nn.Linear)]
    return made, 8 * sum(one.nbytes for one in stored) / sum(one.numel() for one in stored)


class Cached:
    """Keys and values [B, H, T, E] as a KVCache of `format` gives them back."""

    def __init__(self, format: str) -> None:
        self.format, self.bits = format, math.nan

    def __call__(self, k_BHTE: Tensor, v_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, length, head_dim = k_BHTE.shape
        options = {"device": k_BHTE.device, "dtype": k_BHTE.dtype, "format": self.format}
        cache = mf.KVCache(batch, length, heads, head_dim, **options)
        k_BTHE, v_BTHE = cache.update(k_BHTE.transpose(1, 2).contiguous(), v_BHTE.transpose(1, 2).contiguous())
        self.bits = 8 * cache.nbytes / (k_BHTE.numel() + v_BHTE.numel())
        return k_BTHE.transpose(1, 2), v_BTHE.transpose(1, 2)


def log_probabilities(model: Model, tokens_BT: Tensor) -> Tensor:
    """Logarithms of the distribution of each next token, float32 [B, T, entries]."""
    x_BTD = model.embedding(tokens_BT)
    for block in model.blocks:
        x_BTD = block(x_BTD, model.cos, model.sin)
    return model.head(model.norm(x_BTD)).float().log_softmax(-1)


@torch.no_grad()
def measure(models: dict[str, Model], batches: Iterator[np.ndarray], device: torch.device) -> dict[str, np.ndarray]:
    """Of each model, loss and divergence from the first one: [windows, 2]."""
    found: dict[str, list[Tensor]] = {name: [] for name in models}
    for batch in batches:
        tokens = torch.from_numpy(batch).to(device)
        plain = None
        for name, model in models.items():
            logs = log_probabilities(model, tokens[:, :-1])
            plain = logs if plain is None else plain
            losses = -logs.gather(-1, tokens[:, 1:, None])[..., 0].double().mean(1)
            divergences = (plain.exp() * (plain - logs)).sum(-1).double().mean(1)
            found[name].append(torch.stack((losses, divergences), 1).cpu())
    return {name: torch.cat(parts).numpy() for name, parts in found.items()}


def mean_of(values: np.ndarray) -> list[float]:
    """The mean over windows, and twice its standard error."""
    error = 2 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return [float(f"{value:.4g}") for value in (float(values.mean()), error)]


def compare(model: Model, size: Size, text: Text, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way to serve the model, on each kind of held-out text."""
    device = torch.device(options.device)
    windows = max(2, options.tokens // size.context)
    model = copy.deepcopy(model).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    calibration = torch.from_numpy(text.batch(0, 0, CALIBRATION, size.context)).to(device)

    @torch.no_grad()
    def calibrate(made: Model) -> None:
        for part in calibration[:, :-1].split(4):
            log_probabilities(made, part)

    chosen = [way for way in ways() if options.only in way.name or way.name == PLAIN]
    made = {way.name: serve(model, way, calibrate) for way in chosen}
    models = {name: one for name, (one, _) in made.items()}
    found, at_once = {}, 16 if device.type == "cuda" else 2
    for kind in text.held_out:
        batches = text.held_out_batches(kind, at_once, size.context, -(-windows // at_once))
        found[kind] = measure(models, iter(batches), device)
    results = []
    for way in chosen:
        one, bits = made[way.name]
        if way.cache is not None:
            bits = one.blocks[0].cache.bits
        values = {kind: of_kind[way.name] for kind, of_kind in found.items()}
        above = {kind: mean_of(of_kind[way.name][:, 0] - of_kind[PLAIN][:, 0]) for kind, of_kind in found.items()}
        results.append({
            "name": way.name, "group": way.group, "bits": round(bits, 3),
            "loss": {kind: round(float(value[:, 0].mean()), 5) for kind, value in values.items()}, "above": above,
            "divergence": {kind: mean_of(value[:, 1]) for kind, value in values.items()},
        })  # fmt: skip
        divergence = ", ".join(f"{kind} {value[0]:.5f}" for kind, value in results[-1]["divergence"].items())
        losses = ", ".join(f"{kind} {value[0]:+.5f}" for kind, value in above.items())
        print(f"{way.name:52} {bits:6.3f} bits  loss {losses}  KL {divergence}", flush=True)
    return results


RECIPES = (BASELINE, "fp8_current", "fp8_block", "mxfp8", "mxfp6", "nvfp4", "nvfp4_no_2d", "nvfp4_folded", "mxfp4")


def gradients(model: Model, size: Size, text: Text, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One batch of training text under each recipe for training, layer by layer."""
    device = torch.device(options.device)
    batch = text.batch(0, size.steps, options.batch, size.context)
    tokens = torch.from_numpy(batch).to(device)
    model = copy.deepcopy(model).to(device)
    exact = gradients_of(model, tokens)
    results = []
    for row in RECIPES:
        made = copy.deepcopy(model)
        recipe = ROWS[row].recipe
        if recipe is not None:
            mf.convert(made.blocks, recipe)
        torch.manual_seed(0)
        with mf.watch(made, every=1, what_if=(), layers=None, metrics=("relative_error",)) as watched:
            found = gradients_of(made, tokens, torch.bfloat16)
        cosines = {name: cosine(found[name], exact[name]) for name in exact}
        errors: dict[str, dict[str, float]] = {}
        for record in watched.records:
            if record.metric == "relative_error" and record.value > 0:  # not the expected one beside it
                errors.setdefault(record.gemm, {})[record.module] = round(-20 * math.log10(record.value), 3)
        results.append({"row": row, "cosine": cosines, "sqnr": errors})
        decibels = ", ".join(f"{gemm} {np.median([*of.values()]):.1f} dB" for gemm, of in errors.items())
        print(f"{row:16} median cosine {np.median([*cosines.values()]):.5f}  {decibels}", flush=True)
    return results


def gradients_of(model: Model, tokens: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Gradients of the weights of the blocks, computed in float32, or under torch.autocast."""
    model.zero_grad(set_to_none=True)
    kind = tokens.device.type
    mixed = torch.autocast(kind, dtype) if dtype is not None else contextlib.nullcontext()
    with mixed, products(kind):
        model(tokens).backward()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "head"}
    return {name: layer.weight.grad for name, layer in layers.items() if layer.weight.grad is not None}


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle between two tensors."""
    return round(float(functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0)), 6)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("weights", type=Path, help="ROW.SEED.safetensors of study.py run --keep ROW")
    parser.add_argument("--text", type=Path, help="the text that the model was trained on, as in study.py")
    parser.add_argument("--tokens", type=int, default=4096, help="held-out tokens of each kind of text (a GPU: 131072)")
    parser.add_argument("--batch", type=int, default=8, help="windows of training text for the gradients")
    parser.add_argument("--only", default="", help="ways to serve whose name has this in it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where all results go")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    try:
        text = load_text(options.text)
        model, size, facts = load(options.weights, text)
        began = time.time()
        served = compare(model, size, text, options)
        trained = gradients(model, size, text, options) if not options.only else []
    except MicrofloatError as error:
        print(f"post_training.py: {error}", file=sys.stderr)
        return 2
    told = {
        "command": f"python examples/post_training.py {options.weights} --text {options.text} "
        f"--tokens {options.tokens} --batch {options.batch}",
        "date": datetime.datetime.fromtimestamp(time.time(), datetime.UTC).date().isoformat(),
        "run": facts, "tokens": options.tokens, "batch": options.batch, "seconds": round(time.time() - began),
        "environment": environment(torch.device(options.device)), "served": served, "gradients": trained,
    }  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
