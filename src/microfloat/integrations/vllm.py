"""Folders in NVFP4 and MX formats in vLLM: ``vllm serve FOLDER --quantization microfloat``.

vLLM calls `register` by the entry point ``vllm.general_plugins``. The method takes codes and scales as they are stored,
sliced by vLLM's own loaders, and multiplies as the layers of `microfloat.torch.load_quantized` do: weight-only, or with
FP8 activations where the model's configuration has ``"microfloat": {"activation": "fp8_row"}``. Source: vLLM 0.33.

Legend: N = out features of a rank, K = in features of a rank, P = weights of a layer, E = experts.
"""

# pyright: reportMissingImports=false

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from microfloat.checkpoint.families import FAMILIES, Family
from microfloat.checkpoint.families.writing import tensor_name
from microfloat.checkpoint.folder import announced
from microfloat.errors import CheckpointError, NotSupportedError, invalid_value, missing_package
from microfloat.formats import SCALE_E8M0, ScaledFormat
from microfloat.recipes import Recipe
from microfloat.recipes.inference import WeightActivation, WeightOnly
from microfloat.torch.inference.joined import BY_ROW
from microfloat.torch.nn.experts import routed
from microfloat.torch.nn.grouped_linear import GroupedLinear
from microfloat.torch.nn.linear import Linear
from microfloat.torch.reference._elements import codes_dtype
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if find_spec("vllm") is None:
    raise missing_package("vllm", "microfloat.integrations.vllm", "vllm")

from vllm.model_executor.layers import fused_moe, linear
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

__all__ = ["MicrofloatConfig", "register"]

_NAME = "microfloat"
_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "targets")  # names of modules in configurations
_SLICED = {"codes": ModelWeightParameter, "scale": GroupQuantScaleParameter}  # the others have no axis of a weight
_INSTEAD = "Leave out --quantization microfloat, or write the folder again with `microfloat convert`."


class MicrofloatConfig(QuantizationConfig):
    """The quantization method "microfloat", with its options.

    `activation`: the format of activations; None leaves them in high precision, and then `prefill` is that of
    `WeightOnly`, but None by default: copies of weights would take the memory that vLLM plans for its cache.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config: Mapping[str, Any] = dict(config)
        self.activation: str | None = None
        self.prefill: str | None = None

    @classmethod
    def get_name(cls) -> str:
        """The name of the method."""
        return _NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes of activations."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere, from which on the kernels of the library run."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The file of ModelOpt that describes a quantization where config.json does not."""
        return ["hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MicrofloatConfig":
        """The method for the quantization_config of a folder."""
        return cls(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None) -> str | None:
        """The name of the method for folders of other methods, where the user has asked for it."""
        return _NAME if user_quant == _NAME else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Take the options under "microfloat" of the model's configuration, or of ``--hf-overrides``."""
        options = getattr(hf_config, _NAME, None) or {}
        if not isinstance(options, dict) or options.keys() - {"activation", "prefill"}:
            raise invalid_value(_NAME, repr(options), 'a dictionary such as {"activation": "fp8_row"}')
        self.activation, self.prefill = options.get("activation"), options.get("prefill")

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Give the modules of the configuration the names that they have in vLLM's model."""

        def renamed(key: str, value: Any) -> Any:
            if isinstance(value, dict):
                value = hf_to_vllm_mapper.apply_dict(value) if key == "quantized_layers" else value
                return {name: renamed(name, inner) for name, inner in value.items()}
            return hf_to_vllm_mapper.apply_list(value) if key in _LISTS and value else value

        self.config = renamed("", self.config)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a linear layer or of experts; None for other modules and for experts in high precision."""
        if isinstance(layer, linear.LinearBase):
            parent, dot, last = prefix.rpartition(".")
            names = [f"{parent}{dot}{part}" for part in self.packed_modules_mapping.get(last, [last])]
            family = self._family(prefix, names)
            return linear.UnquantizedLinearMethod() if family is None else MicrofloatLinearMethod(self, family, prefix)
        if isinstance(layer, fused_moe.RoutedExperts):
            keys = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
            names = [f"{prefix}.{e}.{key}" for e in range(layer.global_num_experts) for key in keys]
            family = self._family(prefix, names)
            return None if family is None else MicrofloatMoEMethod(self, family, prefix, layer)
        return None

    def _family(self, prefix: str, names: Iterable[str]) -> Family | None:
        """The family of all weights of a layer, None in high precision; NotSupportedError for others."""
        (said, *_) = announced({"config.json": {"quantization_config": self.config}})
        found = {(said.scheme_of(name).families or ("high precision",))[0] for name in names}
        if found == {"high precision"} and not said.refusal:
            return None
        family = next((one for one in FAMILIES if {one.name} == found), None)
        if family is None or family.format is None or family.format.scale.bits != 8 or family.rank == 3:
            got = said.refusal or f"{' and '.join(sorted(found))}, needed one NVFP4 or MX format for each layer."
            raise NotSupportedError(f"{prefix}: got {got} {_INSTEAD}")
        return family

    def recipe_of(self, fmt: ScaledFormat) -> Recipe:
        """The product of weights in a format."""
        if self.activation is None:
            return WeightOnly(fmt.name, prefill=self.prefill)
        return WeightActivation(fmt.name, self.activation)


class _Method:
    """The part that linear layers and experts share: tensors as the folder has them, and products made of these."""

    def __init__(self, config: MicrofloatConfig, family: Any, prefix: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.config, self.family, self.prefix = config, family, prefix
        self.format: ScaledFormat = family.format
        config.recipe_of(family.format)  # or an error before anything is loaded
        suffixes = {"codes": family.codes[0], "scale": family.scale[0], "tensor_scale": family.tensor_scale}
        self.names = {role: tensor_name("weight", suffix) for role, suffix in suffixes.items() if suffix is not None}
        scale = torch.uint8 if family.format.scale == SCALE_E8M0 else torch.float8_e4m3fn
        self.dtypes = {"codes": codes_dtype(family.format.element), "scale": scale}
        self.names["input_scale"] = family.input_scales[0]  # which vLLM does not leave out, and nothing reads

    def tensors(self, sizes: list[int], k: int, whole: int, *leading: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Role, name and memory of each tensor of weights [size, k]; NotSupportedError where k cuts blocks of whole."""
        block = self.format.block[1] or k
        if k != whole and k % block:
            needed = f"a multiple of {block}, the block of {self.format.name}. Serve it on fewer ranks"
            raise NotSupportedError(f"{self.prefix}: got {k} in features on each rank, needed {needed}.")
        widths = {"codes": -(-k * self.format.element.bits // 8), "scale": -(-k // block)}
        for role, name in self.names.items():
            if role in widths:  # 255 is NaN as a scale
                shape, dtype = (*leading, sum(sizes), widths[role]), self.dtypes[role]
                yield role, name, torch.full(shape, 255, dtype=torch.uint8).view(dtype)
            else:
                yield role, name, torch.full((*leading, len(sizes)), torch.nan, dtype=torch.float32)

    def loading(self, role: str, loader: Callable) -> Callable:
        """The loader, which gets codes and block scales as bytes; CheckpointError for those that are none."""

        @functools.wraps(loader)
        def load(param: nn.Parameter, loaded_weight: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if loaded_weight.itemsize > 1 or loaded_weight.dtype == torch.float8_e5m2:
                needed = f"those of {self.family.name}. {_INSTEAD}"
                raise CheckpointError(f"{self.prefix}: got {role} of {loaded_weight.dtype}, needed {needed}")
            return loader(param, loaded_weight.view(param.dtype), *arguments, **options)

        return load if role in _SLICED else loader

    def product(self, layer: nn.Module, prefix: str, sizes: list[int], k: int, dtype: torch.dtype) -> nn.Module:
        """The layer of products of the loaded weight [.., N, K], whose parameters have rows of `sizes` and go.

        Where the tensor scales [.., P] of its parts differ, every row gets that of its part, so that no value changes.
        """
        parts = {role: getattr(layer, prefix + name).data for role, name in self.names.items()}
        for name in self.names.values():
            delattr(layer, prefix + name)
        fmt, levels = self.format, parts.get("tensor_scale")
        if (parts["scale"].view(torch.uint8) == 255).any() or (levels is not None and levels.isnan().any()):
            needed = f"{', '.join(self.names.values())} without NaN. Export the model again."
            raise CheckpointError(f"{self.prefix}: got a layer without all of its scales, needed {needed}")
        if levels is not None:
            levels = torch.ones_like(levels) / levels if self.family.divides else levels
            if bool((levels == levels[..., :1]).all()):
                levels = levels[..., 0].contiguous()
            else:
                rows = torch.tensor(sizes, device=levels.device)
                fmt, levels = BY_ROW[fmt.name], levels.repeat_interleave(rows, -1).unsqueeze(-1)
        options: Any = {"shape": (*parts["codes"].shape[:-1], k), "dtype": dtype, "packed": fmt.element.bits == 6}
        weight = QuantizedTensor.from_parts(parts["codes"], parts["scale"], levels, fmt, **options)
        *experts, n, _ = weight.shape
        kind: Any = GroupedLinear if experts else Linear
        made = kind(*experts, k, n, bias=False, device="meta", recipe=self.config.recipe_of(fmt))
        made.weight = nn.Parameter(weight, requires_grad=False)
        return made


@linear.register_weight_loader_v2_supported_method
class MicrofloatLinearMethod(_Method, linear.LinearMethodBase):
    """A linear layer over codes: one `microfloat.torch.Linear`, under the recipe of the configuration."""

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Register the tensors of the folder as parameters, by which vLLM's loaders slice them."""
        k, loader = input_size_per_partition, extra_weight_attrs["weight_loader"]
        self.made = output_partition_sizes, k, params_dtype
        for role, name, data in self.tensors(output_partition_sizes, k, input_size):
            dims = {"input_dim": 1, "output_dim": 0} if role in _SLICED else {}
            kind: Any = _SLICED.get(role, PerTensorScaleParameter)
            layer.register_parameter(name, kind(data=data, weight_loader=self.loading(role, loader), **dims))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make one quantized weight of what was loaded, without a change of a byte."""
        layer.product = self.product(layer, "", *self.made)
        layer.register_parameter("weight", layer.product.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y [.., N] of x [.., K]."""
        if layer.product.bias is not bias:
            layer.product.bias = bias
        return layer.product(x)


class MicrofloatMoEMethod(_Method, fused_moe.FusedMoEMethodBase):
    """Experts over codes: two grouped products under the recipe of the configuration."""

    def __init__(self, config: MicrofloatConfig, family: Family, prefix: str, layer: Any) -> None:
        super().__init__(config, family, prefix, layer.moe_config)
        self.act_fn = nn.SiLU()
        kind, place = layer.activation.value, layer.moe_config.moe_parallel_config
        refused = {
            f"the gate {kind}": kind != "silu" or layer.swiglu_limit is not None,
            "biases or router weights on the input": self.moe.has_bias or layer.apply_router_weight_on_input,
            "expert or data parallelism": place.use_ep or place.dp_size > 1,
        }
        for words in (words for words, is_there in refused.items() if is_there):
            raise NotSupportedError(f"{prefix}: got experts with {words}, which this method does not run. {_INSTEAD}")

    def create_weights(self, layer: Any, num_experts: int, **sizes: Any) -> None:
        """Register the tensors of the folder as parameters, by which vLLM's loaders slice them."""
        hidden, half = sizes["hidden_size"], sizes["intermediate_size_per_partition"]
        self.made = {"w13_": ([half, half], hidden), "w2_": ([hidden], half)}
        self.dtype, loader = sizes["params_dtype"], sizes["weight_loader"]
        whole = {"w13_": hidden, "w2_": half * self.moe.moe_parallel_config.tp_size}
        for prefix, (rows, k) in self.made.items():
            for role, name, data in self.tensors(rows, k, whole[prefix], num_experts):
                param: Any = nn.Parameter(data, requires_grad=False)
                param.quant_method = "group" if role in _SLICED else "tensor"
                param.weight_loader = self.loading(role, loader)
                layer.register_parameter(prefix + name, param)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make two quantized weights of what was loaded, without a change of a byte."""
        made = {prefix: self.product(layer, prefix, *sizes, self.dtype) for prefix, sizes in self.made.items()}
        layer.products = nn.ModuleDict(made)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM multiplies here."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **shared: Any
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, of this rank's part of them."""
        return routed(self, layer.products, x, topk_ids, topk_weights)


def register() -> None:
    """Make the quantization method known to vLLM, which calls this in each of its processes."""
    register_quantization_config(_NAME)(MicrofloatConfig)
