"""Decoder layers of mixtures of experts as transformers has them, forward + backward (d.mixtral.*, d.deepseek.*).

Mixtral-like: 4 x 4096 tokens of 4096, 32 heads of 128, 8 of keys and values, 8 experts of 14336, two a token.
DeepSeek-like: 2 x 4096 tokens of 7168, latent attention with 128 heads, 64 experts of 2048 (V3 has 256), eight a
token, and a shared one. Beside the layer in bfloat16, whose experts run in torch's grouped matmul, stands a copy
converted with ``microfloat.torch.convert(model, recipe, fuse=True)``. A step clears all gradients and runs forward and
backward.
"""

import argparse
import copy
import functools
import importlib.util

import torch
from torch import nn

import microfloat.torch as mf
from benchmarks._recipes import RECIPES, sqnr_db
from benchmarks._report import Report, Row
from microfloat.torch.timing import in_turn

NAMES = ("delayed", "current", "row", "block", "mxfp8.folded", "nvfp4")
MIXTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 0,
}  # fmt: skip
# Sizes of a quick run, of both.
QUICK = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 2,
}  # fmt: skip
# Name of the rows -> class of the model, its sizes, and the shape of x without the width.
LAYERS = {"mixtral": ("Mixtral", MIXTRAL, (4, 4096)), "deepseek": ("DeepseekV3", DEEPSEEK, (2, 4096))}
# Largest relative error of what a layer adds to its input and to its gradient, all tokens going to the same experts.
BOUND = {"bf16": 0.02, "nvfp4": 0.5}
LARGEST = 0.15


class Bench:
    """A model of one layer, its input and the gradient of its output."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        import transformers

        kind, sizes, shape = LAYERS[name]
        if options.quick:
            sizes, shape = {key: QUICK.get(key, value) for key, value in sizes.items()}, (2, 16)
            sizes["num_key_value_heads"] = 4 if name == "deepseek" else 2
        self.device = options.device
        config = getattr(transformers, f"{kind}Config")(
            **sizes, num_hidden_layers=1, vocab_size=256, max_position_embeddings=4096, use_cache=False,
            initializer_range=sizes["hidden_size"] ** -0.5,  # the layer adds as much as it gets
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(self.device):
            self.plain = getattr(transformers, f"{kind}Model")(config).to(torch.bfloat16).train()
            self.x = torch.randn(*shape, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            self.g = torch.randn_like(self.x)
            self.embeddings = self.plain.rotary_emb(self.x, torch.arange(shape[1])[None])
        self.routing: tuple[torch.Tensor, ...] = ()  # numbers and weights of the experts of each token, in bfloat16
        self.want = self.added(self.plain)

    def build(self, recipe: str) -> nn.Module:
        """A converted copy; "bf16": as it is."""
        model = copy.deepcopy(self.plain)
        if recipe != "bf16":
            report = mf.convert(model, RECIPES[recipe], fuse=True)
            assert "layers.0.mlp.experts" in report.converted, report
        return model

    def step(self, model: nn.Module) -> list[torch.Tensor]:
        """What the layer adds to x, and to the gradient; one autocast, since delayed scaling updates at its exit."""
        self.clear(model)
        with mf.autocast():
            y = model.layers[0](self.x, position_embeddings=self.embeddings)  # type: ignore[index]
        y = y[0] if isinstance(y, tuple) else y
        y.backward(self.g)
        return [y.detach(), self.x.grad]  # type: ignore[list-item]

    def added(self, model: nn.Module) -> list[torch.Tensor]:
        """The parts of a step that the residual connection does not pass on; tokens go where those of bfloat16 go.

        A router that saw other digits takes another expert for some tokens, which is no error of any product.
        """

        def same_experts(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            self.routing = self.routing or tuple(one.detach() for one in arguments[1:])
            return arguments[0], *self.routing

        handle = model.layers[0].mlp.experts.register_forward_pre_hook(same_experts)  # type: ignore[index]
        try:
            self.step(model)
            y, dx = self.step(model)  # delayed scaling knows its scales from the second step on
        finally:
            handle.remove()
        self.clear(model)
        return [y - self.x.detach(), dx - self.g]

    def clear(self, model: nn.Module) -> None:
        """Give back the gradients."""
        for tensor in (self.x, *model.parameters()):
            tensor.grad = None


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference by that of b."""
    return float((a - b).float().norm() / b.float().norm().clamp_min(1e-30))


def measure(report: Report, bench: Bench, name: str, recipe: str) -> None:
    """Time of one candidate beside the layer in bfloat16."""
    model = bench.build(recipe)
    errors = [relative(got, want) for got, want in zip(bench.added(model), bench.want, strict=True)]
    bound = BOUND.get(recipe, LARGEST)
    if not max(errors) < bound:
        report.skip(name, f"differs from bfloat16 by {max(errors):.3f}, bound {bound}", recipe=recipe)
        return
    calls = {"bf16": lambda i: bench.step(bench.plain), "ours": lambda i: bench.step(model)}
    times = in_turn(calls, bench.device, 800, least=8)
    row = Row(name, recipe=recipe, backend="native" if bench.device == "cuda" else "reference", ratio_of="bf16")
    row.shape, row.sqnr_db = tuple(bench.x.shape), sqnr_db(max(errors))
    row.timed(times["ours"], times["bf16"])
    row.extra = {"relative_errors_y_dx": [round(error, 4) for error in errors]}
    report.add(row)
    bench.clear(bench.plain)


def mixture_rows(report: Report, options: argparse.Namespace) -> None:
    """All rows d.mixtral.* and d.deepseek.*."""
    for layer in LAYERS:
        rows = [(f"d.{layer}.{recipe}", recipe) for recipe in ("bf16", *NAMES)]
        rows = [row for row in rows if report.wants(row[0])]
        if not rows:
            continue
        if importlib.util.find_spec("transformers") is None:
            report.skip(f"d.{layer}", "transformers is not installed")
            continue
        bench = report.attempt(f"d.{layer}", functools.partial(Bench, options, layer))
        for name, recipe in rows if bench is not None else ():
            report.attempt(name, functools.partial(measure, report, bench, name, recipe), recipe=recipe)
