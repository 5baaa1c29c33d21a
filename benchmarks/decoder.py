"""A decoder layer of an 8B model, forward + backward (d.layer.*), and transformers' Llama (d.llama.*), and bfloat16.
Decoder layers of mixtures of experts: `benchmarks.mixture`.

Layer: x [4, 4096, 4096], 32 heads of 128, 8 of keys and values, causal, MLP of 14336 with SwiGLU, RMSNorm, rotary
embedding, no bias. `torch`: the layer of plain modules, as transformers writes it; `ours`: `TransformerLayer` in
bfloat16 and under recipes, on the same parameters. A step clears all gradients and runs forward and backward. Peak
memory is that of a step after three, less the parameters and their gradients.

Llama: transformers' model of three such layers, vocabulary 32768, 4 x 4096 tokens, loss and a fused AdamW step;
converted with ``microfloat.torch.convert(model, recipe, fuse=True)``, in eager mode and with every layer compiled;
torchao's float8 training beside it, compiled.
"""

import argparse
import copy
import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import microfloat.torch as mf
from benchmarks import _torchao
from benchmarks._recipes import RECIPES
from benchmarks._report import Report, Row
from benchmarks.mixture import mixture_rows
from microfloat.torch.timing import in_turn

SIZES = {"width": 4096, "hidden": 14336, "heads": 32, "kv": 8, "batch": 4, "tokens": 4096}
QUICK = {"width": 64, "hidden": 96, "heads": 4, "kv": 2, "batch": 2, "tokens": 16}
LAYER = {"delayed": "d.layer.delayed", "current": "d.layer.current", "row": "d.layer.row", "block": "d.layer.block",
         "mxfp8.folded": "d.layer.mxfp8.folded", "nvfp4": "d.layer.nvfp4",
         "nvfp4.folded": "d.layer.nvfp4.folded"}  # fmt: skip


class PlainNorm(nn.Module):
    """RMSNorm in float32, operation by operation, as transformers' models have it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x, in its dtype."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotation in x's dtype, operation by operation."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class PlainLayer(nn.Module):
    """The decoder layer of plain modules, with the keys of `TransformerLayer`."""

    def __init__(self, width: int, hidden: int, heads: int, kv: int) -> None:
        super().__init__()
        size = width // heads
        self.size = size
        self.input_layernorm, self.post_attention_layernorm = PlainNorm(width), PlainNorm(width)
        outputs = {"q_proj": width, "k_proj": kv * size, "v_proj": kv * size, "o_proj": width}
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, n, bias=False) for name, n in outputs.items()})
        self.mlp = nn.ModuleDict({
            "gate_proj": nn.Linear(width, hidden, bias=False), "up_proj": nn.Linear(width, hidden, bias=False),
            "down_proj": nn.Linear(hidden, width, bias=False),
        })  # fmt: skip

    def forward(self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """y in the shape of x."""
        h, attn = self.input_layernorm(x), self.self_attn
        q, k, v = (attn[f"{name}_proj"](h).unflatten(-1, (-1, self.size)).transpose(1, 2) for name in "qkv")
        q, k = turned(q, *position_embeddings), turned(k, *position_embeddings)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attn["o_proj"](y.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


class Bench:
    """Inputs and parameters of all candidates."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, sizes = options.device, QUICK if options.quick else SIZES
        self.sizes = sizes
        shape = {key: sizes[key] for key in ("width", "hidden", "heads", "kv")}
        torch.manual_seed(0)
        where = {"device": self.device, "dtype": torch.bfloat16}
        self.plain = PlainLayer(**shape).to(**where)
        size = (sizes["batch"], sizes["tokens"], sizes["width"])
        self.x, self.g = torch.randn(size, **where, requires_grad=True), torch.randn(size, **where)
        rotary = mf.RotaryEmbedding(sizes["width"] // sizes["heads"], device=self.device, dtype=torch.bfloat16)
        cos, sin = rotary(sizes["tokens"])
        self.embeddings = cos[None], sin[None]

    def build(self, recipe: str | None) -> mf.TransformerLayer:
        """Our layer with the plain layer's parameters."""
        sizes = self.sizes
        layer = mf.TransformerLayer(
            sizes["width"], sizes["hidden"], sizes["heads"], sizes["kv"], device=self.device, dtype=torch.bfloat16,
            recipe=None if recipe is None else RECIPES[recipe],
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # delayed scaling starts fresh
            layer.load_state_dict(self.plain.state_dict())
        if recipe is None:
            for module in layer.modules():
                if isinstance(module, mf.Linear):
                    module.pin(None)
        return layer

    def step(self, layer: nn.Module, x: torch.Tensor | None = None, g: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward, gradients cleared first; one autocast, since delayed scaling updates at its exit."""
        x, g = self.x if x is None else x, self.g if g is None else g
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None
        with mf.autocast():
            y = layer(x, position_embeddings=self.embeddings)
        y.backward(g)
        return y

    def peak_gib(self, layer: nn.Module) -> float | None:
        """The highest point of a step beyond parameters, their gradients, x and its gradient."""
        if self.device != "cuda":
            return None
        for _ in range(3):
            self.step(layer)
        torch.cuda.synchronize()
        resident = torch.cuda.memory_allocated() - sum(p.grad.nbytes for p in layer.parameters() if p.grad is not None)
        torch.cuda.reset_peak_memory_stats()
        self.step(layer)
        torch.cuda.synchronize()
        own = sum(p.nbytes for p in layer.parameters())
        return (torch.cuda.max_memory_allocated() - resident - own) / 2**30

    def clear(self, *layers: nn.Module) -> None:
        """Give back gradients and cached memory."""
        for tensor in (self.x, *(p for layer in layers for p in layer.parameters())):
            tensor.grad = None


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference by that of b."""
    return float((a - b).float().norm() / b.float().norm().clamp_min(1e-30))


def measure(report: Report, bench: Bench, name: str, recipe: str | None) -> None:
    """Time and memory of one candidate beside the plain layer."""
    layer = bench.build(recipe)
    want = bench.step(bench.plain).detach()
    wanted = [bench.x.grad.clone(), bench.plain.self_attn["k_proj"].weight.grad.clone()]  # type: ignore[union-attr]
    for _ in range(2):  # delayed scaling knows its scales from the second step on
        got = bench.step(layer).detach()
    errors = [relative(got, want), relative(bench.x.grad, wanted[0]),  # type: ignore[arg-type]
              relative(layer.self_attn.k_proj.weight.grad, wanted[1])]  # type: ignore[arg-type]  # fmt: skip
    bound = 0.02 if recipe is None else 0.4 if recipe.startswith("nvfp4") else 0.12
    if max(errors) > bound:
        report.skip(name, f"differs from bfloat16 by {max(errors):.3f}, bound {bound}", recipe=recipe or "bf16")
        return
    del want, wanted, got
    used, used_plain = bench.peak_gib(layer), bench.peak_gib(bench.plain)
    calls = {"bf16": lambda i: bench.step(bench.plain), "ours": lambda i: bench.step(layer)}
    times = in_turn(calls, bench.device, 600, least=12)
    row = Row(name, recipe=recipe or "bf16", backend="native" if bench.device == "cuda" else "reference")
    row.shape, row.mode, row.ratio_of = tuple(bench.x.shape), "eager", "bf16"
    row.timed(times["ours"], times["bf16"])
    row.extra = {"relative_errors_y_dx_dwk": [round(error, 4) for error in errors]}
    if used is not None and used_plain is not None:
        row.extra |= {"peak_gib_above_weights": round(used, 3), "bf16_peak_gib_above_weights": round(used_plain, 3)}
    report.add(row)
    bench.clear(layer)


LLAMA = ("delayed", "current", "row", "block", "mxfp8.folded")


class Llama:
    """The model of transformers, and steps of copies of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = QUICK if options.quick else SIZES
        config = LlamaConfig(
            hidden_size=sizes["width"], intermediate_size=sizes["hidden"], num_hidden_layers=3,
            num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv"], max_position_embeddings=4096,
            vocab_size=256 if options.quick else 32768, attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        self.device = options.device
        self.base = LlamaForCausalLM(config).to(options.device, torch.bfloat16).train()
        shape = (sizes["batch"], sizes["tokens"])
        self.ids = torch.randint(0, config.vocab_size, shape, device=options.device)

    def build(self, recipe: str | None, compiled: bool, fuse: bool) -> nn.Module:
        """A copy under a recipe; "torchao.NAME": torchao's."""
        model = copy.deepcopy(self.base)
        if recipe is not None and recipe.startswith("torchao."):
            head, model.lm_head = model.lm_head, nn.Identity()  # type: ignore[assignment]
            model = _torchao.float8_training(model, recipe.removeprefix("torchao."))
            model.lm_head = head  # type: ignore[assignment]
        elif recipe is not None:
            mf.convert(model, RECIPES[recipe], fuse=fuse)
        if compiled:
            for layer in model.model.layers:  # type: ignore[union-attr]
                layer.compile(backend="inductor" if self.device == "cuda" else "aot_eager")
        return model

    def stepper(self, model: nn.Module) -> Callable[[int], float]:
        """Forward, backward and AdamW; one autocast, since delayed scaling updates at its exit."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step(index: int) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with mf.autocast():
                loss = model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step  # type: ignore[return-value]


def measure_llama(report: Report, bench: Llama, recipe: str, mode: str, fuse: bool = True) -> None:
    """Time of a step beside bfloat16 in the same mode."""
    torch._dynamo.reset()
    ours = bench.stepper(bench.build(recipe, mode == "compiled", fuse))
    plain = bench.stepper(bench.build(None, mode == "compiled", False))
    losses = [float(ours(0)), float(plain(0))]
    ours(0)
    bound = 0.05 * abs(losses[1])
    name = f"d.llama.{mode}.{recipe}" if fuse or recipe.startswith("torchao") else f"d.llama.{mode}.{recipe}.apart"
    if not abs(losses[0] - losses[1]) < bound:
        report.skip(name, f"loss {losses[0]:.4f} against {losses[1]:.4f}", recipe=recipe, mode=mode)
        return
    times = in_turn({"bf16": plain, "ours": ours}, bench.device, 600, least=8)
    row = Row(name, recipe=recipe, backend="torchao" if recipe.startswith("torchao") else "native")
    row.shape, row.mode, row.ratio_of = tuple(bench.ids.shape), mode, "bf16"
    row.timed(times["ours"], times["bf16"])
    row.extra = {"first_losses": [round(loss, 5) for loss in losses]}
    report.add(row)


def llama_rows(report: Report, options: argparse.Namespace) -> None:
    """All rows d.llama.*."""
    wanted = [
        (recipe, mode, fuse) for mode in ("eager", "compiled") for recipe in (*LLAMA, "torchao.tensorwise")
        for fuse in (True, False)
        if not (recipe.startswith("torchao") and (mode == "eager" or not fuse)) and (fuse or recipe == "delayed")
        and report.wants(f"d.llama.{mode}.{recipe}" + ("" if fuse else ".apart"))
    ]  # fmt: skip
    if not wanted:
        return
    if importlib.util.find_spec("transformers") is None:
        report.skip("d.llama", "transformers is not installed")
        return
    bench = Llama(options)
    for recipe, mode, fuse in wanted:
        if recipe.startswith("torchao.") and (why := _torchao.missing_training(options.device)):
            report.skip("d.llama.torchao", why, recipe=recipe, mode=mode, backend="torchao")
            continue
        call = functools.partial(measure_llama, report, bench, recipe, mode, fuse)
        report.attempt(f"d.llama.{mode}.{recipe}", call, recipe=recipe, mode=mode)


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """The rows that were asked for."""
    report = Report(options, arguments)
    rows: list[tuple[str, str | None]] = [("d.layer.bf16", None), *((name, recipe) for recipe, name in LAYER.items())]
    rows = [row for row in rows if report.wants(row[0])]
    bench = Bench(options) if rows else None
    for name, recipe in rows:
        report.attempt(name, functools.partial(measure, report, bench, name, recipe), recipe=recipe or "bf16")
    del bench
    llama_rows(report, options)
    mixture_rows(report, options)
    return report.finish()
