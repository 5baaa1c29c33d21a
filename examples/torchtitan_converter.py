"""A recipe in torchtitan: a model converter, which the trainer calls once before it shards and once per step.

    python examples/torchtitan_converter.py        # a trainer in miniature, on any machine

torchtitan builds a model on the meta device, hands it to converters, and only then applies tensor parallelism,
activation checkpointing, torch.compile and FSDP. A converter is a class of two methods, `ModelConverter` below, written
out here so that nothing of torchtitan is imported: that of releases until spring 2026. Inside torchtitan inherit
from its own, whose other methods have defaults. Releases that know converters by name take
`register_model_converter(MicrofloatConverter, "microfloat")`; those after them take the settings in the list of
converters, and call `Settings.build`. Later ones rewrite the configuration of a model, and take no such converter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn

import microfloat.torch as mf


class ModelConverter(Protocol):
    """Methods that a trainer calls; `model` may be the parts of a pipeline that this rank holds."""

    def convert(self, model: nn.Module) -> None:
        """Change the model in place, before it is sharded or compiled."""

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Called after every step of the optimizer."""


CONVERTERS: dict[str, Callable[..., ModelConverter]] = {}


def register(name: str) -> Callable[[type], type]:
    """Make a class known to `build` by a name."""

    def note(converter: type) -> type:
        if name in CONVERTERS:
            raise ValueError(f"a converter {name!r} is registered already")
        CONVERTERS[name] = converter
        return converter

    return note


@dataclass(frozen=True)
class Settings:
    """A job's options of its recipe."""

    recipe: str = "fp8_current"  # a name that microfloat.recipes.from_name knows
    high_precision: tuple[str, ...] = ()  # shell patterns over layer names, beside heads and routers

    def build(self, *, parallel_dims: Any = None, model_compile_enabled: bool = False) -> "MicrofloatConverter":
        """The converter of these settings."""
        return MicrofloatConverter(self, parallel_dims)


def settings_of(job_config: Any) -> Settings:
    """The settings from a job's configuration: itself, its section `microfloat`, or the defaults."""
    return job_config if isinstance(job_config, Settings) else getattr(job_config, "microfloat", None) or Settings()


@register("microfloat")
class MicrofloatConverter:
    """Pins a recipe to the Linears of a model, on the meta device as well; parameters and their names stay."""

    def __init__(self, job_config: Any, parallel_dims: Any = None):
        self.settings, self.reports = settings_of(job_config), []

    def convert(self, model: nn.Module) -> None:
        """Convert one model, or one part of a pipeline. Patterns that match nothing in this part are fine."""
        chosen = self.settings

        def is_low_precision(name: str, module: nn.Module) -> bool:
            return not any(fnmatchcase(name, pattern) for pattern in chosen.high_precision)

        self.reports.append(mf.convert(model, chosen.recipe, filter=is_low_precision))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Bring the scales of delayed scaling up to date on all ranks; other recipes have nothing to do.

        A checkpoint saved after the step by one rank alone is then complete.
        """
        for part in model if isinstance(model, list) else [model]:
            mf.update_scaling(part)


def build(names: Sequence[str], job_config: Any, parallel_dims: Any = None) -> list[ModelConverter]:
    """The converters of these names, in their order."""
    unknown = [name for name in names if name not in CONVERTERS]
    if unknown:
        raise ValueError(f"converters: got {unknown}, needed names among {sorted(CONVERTERS)}")
    return [CONVERTERS[name](job_config, parallel_dims) for name in names]


class Block(nn.Module):
    """A feed-forward block with torchtitan's names."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.w1, self.w3 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, 4 * dim, bias=False)
        self.w2 = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x plus a SwiGLU of its norm."""
        h = self.norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, vocabulary: int = 64, dim: int = 32, depth: int = 2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleDict({str(index): Block(dim) for index in range(depth)})
        self.output = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.output(x)


@dataclass
class JobConfig:
    """The part of a job's configuration that is used here."""

    microfloat: Settings | None = None
    converters: tuple[str, ...] = ("microfloat",)


def train(job_config: JobConfig, steps: int = 20) -> tuple[nn.Module, list[ModelConverter], list[float]]:
    """The order of torchtitan's trainer: meta device, converters, memory, optimizer with its hook, steps."""
    with torch.device("meta"):
        model = Model()
    converters = build(job_config.converters, job_config)
    for converter in converters:
        converter.convert(model)
    # Here torchtitan applies tensor parallelism, activation checkpointing, torch.compile and FSDP.
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for converter in converters:
        optimizer.register_step_post_hook(lambda *_, converter=converter: converter.post_optimizer_hook([model]))
    tokens, losses = torch.arange(256).reshape(8, 32) * 5 % 64, []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, converters, losses


if __name__ == "__main__":
    _, (made,), recorded = train(JobConfig(Settings("mxfp8")))
    print(*made.reports, sep="\n")
    print(f"loss {recorded[0]:.3f} -> {recorded[-1]:.3f}")
