"""Quantized models as checkpoints of the families that `microfloat.checkpoint` writes.

Bytes are those of the tensors; only names, and the layout of scales, are those of a family.
"""

import json
import pathlib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

from microfloat.errors import invalid_value
from microfloat.recipes.core import folds_beside
from microfloat.torch._typing import Options
from microfloat.torch.backends.base import dtype_name
from microfloat.torch.convert.experts import turned_in
from microfloat.torch.inference.joined import taken_apart
from microfloat.torch.inference.load import OF_CACHE, UNKNOWN_TO_NUMPY, Path, as_tensor
from microfloat.torch.inference.quantize import Config
from microfloat.torch.nn.conv1d import TransposedLinear
from microfloat.torch.nn.experts import ExpertProduct, ExpertsLayer, place_of, products_of
from microfloat.torch.nn.linear import RecipeLayer
from microfloat.torch.tensor.checks import check_model
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from microfloat.checkpoint import Record


def save_quantized(model: nn.Module, path: Path, *, format: str = "microfloat:native", **options: Any) -> list[str]:
    """Write a model whose weights are quantized as a checkpoint of the family `format`; returns the names of shards.

    The default holds every format; "ct:nvfp4", "modelopt:nvfp4" and other targets of `microfloat.checkpoint.convert`
    are what serving engines read. Plain parameters are written as they are, static scales as the family's input scales,
    and the scales of a KV cache that a checkpoint has given to modules under their names. A folder gets config.json and
    generation_config.json of a model of transformers, so that transformers and engines open it; the files of the
    tokenizer are the caller's (``tokenizer.save_pretrained(path)``). `options`: those of `microfloat.checkpoint.save`
    (config, max_shard_size, producer, progress); `config` is taken in place of the model's own. Raises as that does,
    and InvalidValueError for a model without quantized weights, except for a plain one in the default format,
    or of a KV cache with scales.

    Warns, for the families of serving engines, of layers that engines join and whose scales differ: `quantize_` gives
    them one, and a plain state dict that is loaded later gives each its own again; and of layers that are written as
    weight-only because the scale of their inputs was not measured; and of layers of a model of transformers that a
    known reader of the family does not read. FP8 activations beside MX and NVFP4 weights are told in the default format
    alone: others hold the weight, and `load_quantized` takes the config. Warns too where a given configuration ties a
    head to an embedding which `quantize_` has untied.
    """
    from microfloat import checkpoint

    is_folder = not str(path).endswith(".safetensors")
    has_config = options.get("config") is not False
    records, options = _to_write(model, format, options, is_folder)
    shards = checkpoint.save(records, path, format=format, **options)
    generation = getattr(model, "generation_config", None)
    if is_folder and has_config and generation is not None and hasattr(generation, "to_json_string"):
        (pathlib.Path(path) / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")
    return shards


def contents(model: nn.Module, format: str) -> tuple[dict[str, torch.Tensor], Options, dict[str, str]]:
    """The tensors, the JSON documents by file name, and the metadata of the folder that `save_quantized` writes."""
    from microfloat.checkpoint._saving import planned

    records, options = _to_write(model, format, {}, True)
    plan = planned(records, format, options.get("config", True))
    tensors: dict[str, torch.Tensor] = {}
    for job in plan.jobs:
        job.fill(lambda name, array, start: tensors.update({name: as_tensor(array)}))
    return tensors, dict(plan.documents), dict(plan.metadata)


def _to_write(model: nn.Module, format: str, options: Options, is_folder: bool) -> tuple[list["Record"], Options]:
    """The records of a model, and the options of `checkpoint.save` with the model's own configuration."""
    from microfloat.checkpoint.families import family_named
    from microfloat.checkpoint.integrity import scale_findings
    from microfloat.checkpoint.records import NO_ACTIVATION

    options = dict(options)
    check_model(model)
    is_native = isinstance(format, str) and family_named(format) == "microfloat:native"
    amaxes = () if is_native else "input_amax"  # elsewhere they are scales of the family
    records = [record_of(model, name, value) for name, value in model.state_dict().items() if not name.endswith(amaxes)]
    for index, one in enumerate(() if is_native else records):
        of_input = one.activation.get("format")  # of FP8 beside MX or NVFP4, for which other families have no word
        if one.format is not None and of_input is not None and folds_beside(of_input, one.format):
            records[index] = replace(one, activation=NO_ACTIVATION)
    cached = _cache_scales(model)
    records += cached
    records = records if is_native or str(format).startswith("gptoss") else taken_apart(model, records)
    quantized = [record for record in records if record.format is not None]
    trains = any(isinstance(getattr(one, "pinned", None), Config) for one in model.modules())
    if not quantized and (trains or not (is_native or cached)):
        got = " weights, which convert lets train as plain ones" if trains else " weights"
        raise invalid_value(
            "model", f"a {type(model).__name__} without quantized{got}", "codes to write",
            "Call microfloat.torch.quantize_(model, config) first.",
        )  # fmt: skip
    for finding in () if is_native else scale_findings(quantized, "keep"):
        if finding.id == "fused-mismatch":
            warnings.warn(f"save_quantized: {finding}", UserWarning, stacklevel=3)
    untied = [name for name, layer in model.named_modules() if "_untied_from" in vars(layer)]
    made = config_of_model(model, not untied) if is_folder and options.get("config", True) is True else None
    if made is not None:
        options["config"] = made
        for text, count in _complaints(quantized, format, made).items() if not is_native else ():
            warnings.warn(f"save_quantized: {text}: {count} layers.", UserWarning, stacklevel=3)
    own, given = getattr(model, "config", None), options.get("config")
    ties = given if isinstance(given, Mapping) else {"tie_word_embeddings": getattr(own, "tie_word_embeddings", False)}
    if untied and ties.get("tie_word_embeddings"):
        warnings.warn(
            f"save_quantized: the configuration has tie_word_embeddings, while quantize_ gave {', '.join(untied)} "
            "codes of its own, in whose place readers would take the embedding. Set it to False.", UserWarning,
            stacklevel=3,
        )  # fmt: skip
    if cached and options.get("config", True) is not False:  # as a source that announces them does
        base = options["config"] if isinstance(options.get("config"), Mapping) else {}
        options["config"] = {**base, "quantization_config": {"kv_cache_scheme": True}}
    return records, options


def _complaints(quantized: list["Record"], format: str, config: Mapping[str, object]) -> Counter[str]:
    """The kinds of failure of known readers of the format, each with the number of layers that it is about."""
    from microfloat.checkpoint._saving import SAVED, WRITTEN, family_for
    from microfloat.checkpoint.families.readers import Layer, complaints

    kind, dtype = str(config.get("model_type")), str(config.get("dtype") or config.get("torch_dtype") or "")
    found: Counter[str] = Counter()
    for one in quantized if format in (*SAVED, *WRITTEN) else ():
        family = family_for(one, format).name  # type: ignore[union-attr]
        found.update(complaints(Layer(family, one.format, one.name, one.logical_shape, kind, dtype=dtype)))
    return found


def _cache_scales(model: nn.Module) -> list["Record"]:
    """The scales of a KV cache that `load_quantized` has given to modules."""
    from microfloat.checkpoint import Record

    made = []
    for name, module in model.named_modules():
        for key in vars(module).get(OF_CACHE, ()):
            array = np.atleast_1d(np.asarray(getattr(module, key), np.float32))
            made.append(Record(f"{name}.{key}".lstrip("."), array, logical_shape=array.shape))
    return made


def config_of_model(model: nn.Module, is_tied: bool) -> dict[str, object] | None:
    """The config.json that `save_pretrained` writes, None for other models; `is_tied`: its head may be tied."""
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(config, "to_json_string", None)):
        return None
    made = json.loads(config.to_json_string())
    made["architectures"] = [type(model).__name__]
    dtype = getattr(model, "dtype", None)
    if isinstance(dtype, torch.dtype):
        made["torch_dtype" if "torch_dtype" in made else "dtype"] = dtype_name(dtype)
    if not is_tied:
        made["tie_word_embeddings"] = False
    return made


def record_of(model: nn.Module, name: str, value: torch.Tensor) -> "Record":
    from microfloat.checkpoint import Record

    owner, _, last = name.rpartition(".")
    if last == "input_amax" and isinstance(product := model.get_submodule(owner), ExpertProduct):
        name = f"{owner.rpartition('.products.')[0]}.{product.name}.{last}"
    if not isinstance(value, QuantizedTensor):
        value = value.detach().cpu().contiguous()
        known = dtype_name(value.dtype)
        if known in UNKNOWN_TO_NUMPY:
            integers = value.view({1: torch.uint8, 2: torch.uint16}[value.element_size()]).numpy()
            return Record(name, integers.view(getattr(ml_dtypes, known)), logical_shape=tuple(value.shape))
        return Record(name, value.numpy(), logical_shape=tuple(value.shape))
    layer, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    stored = value.t() if isinstance(layer, TransposedLinear) else value  # [out, in], as of any Linear
    if isinstance(layer, ExpertsLayer):
        stored = value.transpose(1, 2) if turned_in(layer)[key] else value
        layer = next(one for one in products_of(layer) if place_of(one)[1] == key)
    record = stored.to_record(name)  # type: ignore[union-attr,attr-defined]
    recipe = layer.pinned if isinstance(layer, RecipeLayer) else None
    x = recipe.fprop.lhs if isinstance(recipe, Config) else None
    if x is None:
        return record
    amax, capacity = getattr(layer, "input_amax", None), x.format.element.max
    capacity = capacity if x.rule.two_level is None else x.rule.two_level.capacity
    scale = None if amax is None else np.float32(amax.item()) / np.float32(capacity)
    scheme = "static" if recipe is not None and recipe.is_static else "dynamic"
    return replace(record, activation={"scheme": scheme, "scale": scale, "format": x.format})
