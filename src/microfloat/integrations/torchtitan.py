"""A recipe in torchtitan: a quantization converter, which rewrites the configuration of a model before it is built.

    model_registry("8B", converters=[MicrofloatConverter.Config(recipe="mxfp8")])

Linears and experts keep their parameters, names, initialisation and sharding; their products run under the recipe, on
any machine. Experts need no padded rows, so that their token dispatcher stays. Source: torchtitan 0.3, whose protocol
is `torchtitan.protocols.model.ModelConfigConverter`.
"""

# pyright: reportMissingImports=false

import functools
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, cast

import torch

from microfloat.errors import NotSupportedError, invalid_type, missing_package
from microfloat.recipes import Placement, Recipe
from microfloat.recipes.names import as_recipe
from microfloat.recipes.placement import DEFAULT_EXCLUDE
from microfloat.torch.nn.grouped_linear import grouped_matmul
from microfloat.torch.nn.linear import Linear
from microfloat.torch.scaling import regions as scaling

if find_spec("torchtitan") is None:
    raise missing_package("torchtitan", "microfloat.integrations.torchtitan", "torchtitan")

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common import linear as titan
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

__all__ = ["MicrofloatConverter", "MicrofloatLinear"]


class MicrofloatLinear(Linear, Module):
    """torchtitan's Linear whose three products run under a recipe; FSDP2 shards it, tensor parallelism does not."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Linear.Config):
        """The fields of torchtitan's Linear, and the recipe."""

        recipe: Any = None

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config.in_features, config.out_features, config.bias, recipe=config.recipe)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        scaling.reset_scaling(self)  # delayed scaling: the scales were made on the meta device

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the parameters as torchtitan's modules do; raises NotSupportedError under tensor parallelism."""
        if parallel_dims.tp_enabled:
            raise NotSupportedError(
                "parallelize: got tensor parallelism of torchtitan, whose layers hand over local parts, needed its "
                "degree 1. Use FSDP2 and expert parallelism, or microfloat.torch.distributed on a model of your own."
            )
        super().parallelize(parallel_dims)


@functools.cache
def _experts_under(parent: type) -> type:
    """A subclass of the experts `parent` whose products run under the recipe of its configuration."""
    config_class: Any = cast(Any, parent).Config

    class MicrofloatExperts(parent):
        @dataclass(kw_only=True, slots=True)
        class Config(config_class):
            recipe: Any = None

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.recipe = config.recipe

        def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            sizes = torch.diff(offs, prepend=offs.new_zeros(1))
            return grouped_matmul(A, B_t.transpose(-2, -1), sizes, recipe=self.recipe)

    MicrofloatExperts.__name__ = MicrofloatExperts.__qualname__ = f"Microfloat{parent.__name__}"
    return MicrofloatExperts


class MicrofloatConverter(QuantizationConverter):
    """Puts Linears and experts of a model's configuration under a recipe.

    ``convert(model_config)`` returns it with Linears as `MicrofloatLinear` and experts as subclasses of their own
    class. Linears of other classes than torchtitan's own stay, and are named in the log with heads, routers and what
    `exclude` names. Raises InvalidTypeError and InvalidValueError for an unknown recipe, NotSupportedError for experts
    under delayed scaling.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """`recipe`: a Recipe, its name, or a Placement. `exclude`: shell patterns over names of layers that stay in
        high precision; by default heads and routers."""

        recipe: str | Recipe | Placement = "fp8_current"
        exclude: list[str] = field(default_factory=lambda: list(DEFAULT_EXCLUDE))

    def __init__(self, config: Config) -> None:
        self.config = config
        if isinstance(config.exclude, str):
            raise invalid_type("exclude", repr(config.exclude), "a list of name patterns, such as ['output']")
        self.recipe = config.recipe if isinstance(config.recipe, Placement) else as_recipe(config.recipe)

    def convert(self, model_config: Any) -> Any:
        """The configuration with all chosen layers under the recipe; it is changed in place."""
        found = [*model_config.traverse(titan.Linear.Config), *model_config.traverse(GroupedExperts.Config)]
        names, kept = [name for name, *_ in found], []
        given = self.recipe
        recipes = given.resolve(names) if isinstance(given, Placement) else dict.fromkeys(names, given)
        for name, old, parent, attribute in found:
            excluded = any(fnmatchcase(name, pattern) for pattern in self.config.exclude)
            new = None if excluded else _under(recipes.get(name), name, old)
            if new is None:
                kept.append(name)
            elif parent is None:
                model_config = new
            elif isinstance(parent, list):
                parent[attribute] = new
            else:
                setattr(parent, attribute, new)
        logger.info(
            f"microfloat: {len(names) - len(kept)} layers under {self.recipe!r}; kept: {', '.join(kept) or '-'}"
        )
        return model_config


def _under(recipe: Recipe | None, name: str, config: Any) -> Any:
    """The configuration of a layer under its recipe, or None for a layer that stays as it is."""
    owner = type(config)._owner
    is_linear = isinstance(config, titan.Linear.Config)
    if recipe is None or (is_linear and owner is not titan.Linear):
        return None
    if not is_linear and recipe.is_delayed:
        raise NotSupportedError(
            f"recipe: got delayed scaling for the experts {name!r}, whose scales have no place in their state dict. "
            "Take a recipe with current scaling, or name them in `exclude`."
        )
    layer: Any = MicrofloatLinear if is_linear else _experts_under(owner)
    return layer.Config(**{one.name: getattr(config, one.name) for one in fields(config)}, recipe=recipe)
