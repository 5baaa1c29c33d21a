"""microfloat as a quantization method of transformers, for the `quantization_config` of `from_pretrained`.

    MicrofloatConfig("nvfp4")                     weights become codes while they are loaded, as `quantize_` makes them
    MicrofloatConfig(recipe="mxfp8", fuse=True)   the loaded model is converted for training, as by `convert`

Importing this module registers the method "microfloat". Every decision is taken by `quantize_` and `convert`
themselves: which layers stay in high precision, which of them share a scale, and what is said about them.
"""

import copy
import os
import pathlib
import warnings
from collections import ChainMap
from collections.abc import Mapping, Sequence, Set
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, Self, cast

import torch
from torch import nn

from microfloat.arguments import check_bool
from microfloat.errors import NotSupportedError, invalid_type, invalid_value, kind_of, missing_package, unknown_name
from microfloat.recipes import Placement, Recipe, WeightActivation, WeightOnly
from microfloat.recipes.inference import as_stored
from microfloat.recipes.names import as_recipe
from microfloat.recipes.placement import ConversionReport, as_placement
from microfloat.torch.backends.base import dtype_name
from microfloat.torch.convert.swap import convert, revert
from microfloat.torch.inference.load import load_quantized
from microfloat.torch.inference.quantize import Config, Storage, check_config, plan_storage
from microfloat.torch.inference.save import contents
from microfloat.torch.nn.experts import form_of
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if find_spec("transformers") is None:
    raise missing_package("transformers", "microfloat.integrations.transformers", "integrations")

from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

__all__ = ["MicrofloatConfig", "MicrofloatQuantizer", "load_pretrained"]

_METHOD = "microfloat"
_CLASSES: dict[str, type[Config]] = {"WeightOnly": WeightOnly, "WeightActivation": WeightActivation}
_FIELDS = ("config", "recipe", "fuse", "modules_to_not_convert")


@register_quantization_config(_METHOD)
class MicrofloatConfig(QuantizationConfigMixin):
    """What `from_pretrained` makes of the layers of a model: codes to serve, or layers that train under a recipe.

    `config`: the name of a format, such as "nvfp4" for ``WeightOnly("nvfp4")``, a `WeightOnly` or `WeightActivation`,
    or a Placement (or dictionary) of them by name pattern, or its file, as `quantize_` takes them. `recipe`: in its
    place, a recipe for training, its name, a config whose codes the weights train to become, a Placement or its file,
    as `convert` takes them, with `fuse`. `modules_to_not_convert`: names or patterns of modules that stay in high
    precision with all that is in them, besides those that `quantize_` and `convert` leave out. Raises InvalidTypeError
    and InvalidValueError for other arguments.
    """

    def __init__(
        self, config: str | Config | Placement | Mapping[str, Config | None] | None = None, *,
        recipe: str | Recipe | Placement | None = None, fuse: bool = False,
        modules_to_not_convert: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        check_bool("fuse", fuse)
        if (config is None) == (recipe is None):
            got = "neither of them" if config is None else f"{config!r}, and recipe={recipe!r}"
            remedy = "MicrofloatConfig('nvfp4') serves, MicrofloatConfig(recipe='mxfp8') trains."
            raise invalid_value("config", got, "either config or recipe", remedy)
        if fuse and recipe is None:
            raise invalid_value("fuse", True, "a recipe beside it, whose layers are fused")
        names = modules_to_not_convert if isinstance(modules_to_not_convert, Sequence | Set | None) else [0]
        if isinstance(names, str) or not all(isinstance(one, str) for one in names or ()):
            raise invalid_type("modules_to_not_convert", repr(modules_to_not_convert), "a list of names of modules")
        self.quant_method = _METHOD  # type: ignore
        config, recipe = as_placement(config), as_placement(recipe)
        self.config = None if config is None else _as_config(config)
        recipe = _as_config(recipe) if isinstance(recipe, Mapping) else recipe  # of a dictionary, a config that trains
        self.recipe = recipe if recipe is None or isinstance(recipe, Placement) else as_recipe(recipe)
        self.fuse = fuse
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.saved_as: dict[str, object] | None = None  # the quantization_config of the folder that was saved

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, object], return_unused_kwargs: bool = False, **kwargs: object) -> Self:
        """The configuration of a dictionary, as `to_dict` gives it."""
        options = {name: value for name, value in config_dict.items() if name != "quant_method"}
        for name in options:
            if name not in _FIELDS:
                raise unknown_name("quantization_config", name, _FIELDS)
        taken = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
        made = cls(**(options | taken))  # type: ignore[arg-type]
        return (made, kwargs) if return_unused_kwargs else made  # type: ignore[return-value]

    def to_dict(self) -> dict[str, object]:
        """The arguments as plain data, a recipe by its name; of a model that was saved, what its folder says."""
        if self.saved_as is not None:
            return copy.deepcopy(self.saved_as)
        made = {name: _as_plain(getattr(self, name)) for name in _FIELDS}
        return {"quant_method": _METHOD, **{name: value for name, value in made.items() if value not in (None, False)}}

    def leaves_in(self, name: str, module: nn.Module) -> bool:
        """False for a layer that `modules_to_not_convert` names, by itself or by what is around it."""
        parts = name.split(".")
        around = [".".join(parts[start:end]) for end in range(1, len(parts) + 1) for start in range(end)]
        return not any(fnmatchcase(one, pattern) for pattern in self.modules_to_not_convert or () for one in around)


def _as_config(config: object) -> Config | Placement:
    """The config or Placement that an argument stands for."""
    if isinstance(config, str):
        return WeightOnly(config)
    config = as_stored(config) if isinstance(config, Placement) else config
    if isinstance(config, Mapping) and "class" in config:
        name = config["class"]
        if name not in _CLASSES:
            raise unknown_name("config", str(name), _CLASSES)
        return _CLASSES[name](**{key: value for key, value in config.items() if key != "class"})
    if isinstance(config, Mapping | list):
        rules = config.items() if isinstance(config, Mapping) else config  # in JSON, whose objects have no order
        config = Placement([(name, None if one is None else _as_config(one)) for name, one in rules])  # type: ignore[misc]
    for pattern, one in config.rules if isinstance(config, Placement) else [("", config)]:
        check_config(pattern, one, isinstance(config, Placement))
    return cast(Config | Placement, config)


def _as_plain(value: object) -> object:
    """Plain data in the place of a config or a recipe."""
    if isinstance(value, Placement):
        return [[pattern, _as_plain(one)] for pattern, one in value.rules]
    if isinstance(value, Config):
        return {"class": type(value).__name__, **value.arguments()}
    return value.label if isinstance(value, Recipe) else value


@register_quantizer(_METHOD)
class MicrofloatQuantizer(HfQuantizer):
    """The calls that transformers makes while it loads a model under a `MicrofloatConfig`.

    A weight is quantized when it and all that share its scale have been read, and the plain ones are let go before
    the next are read. What has not become codes by the end (a layer whose weight the file does not have, or that is
    tied) becomes them then.
    """

    requires_calibration = False
    is_trainable = True  # type: ignore[assignment]  # adapters train around codes
    report: ConversionReport

    def __init__(self, quantization_config: MicrofloatConfig, **kwargs: object) -> None:
        if not isinstance(quantization_config, MicrofloatConfig):
            raise invalid_type("quantization_config", kind_of(quantization_config), "a MicrofloatConfig")
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False  # also where a configuration of the model names the method
        self._dtype: torch.dtype | None = None  # in which weights are read
        self._storage: Storage | None = None
        self._groups: dict[str, _Group] = {}  # by the name of each weight that is quantized while it is loaded
        self._places: Mapping[str, Any] = {}  # by the name of a module
        self._codes: dict[str, dict[str, nn.Parameter]] = {}  # by layer, while accelerate makes its hooks

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the model, as it is."""
        self._dtype = dtype
        return dtype

    def validate_environment(self, *args: object, device_map: object = None, **kwargs: object) -> None:
        """Take the places of modules, of which accelerate makes hooks when there are several, or a disk."""
        places = device_map if isinstance(device_map, Mapping) else {}
        self._places = places if len({*places.values()}) > 1 or "disk" in places.values() else {}

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **kwargs: object
    ) -> nn.Module:
        options: Any = self.quantization_config
        _check_plain(checkpoint_files)
        names = [name for name, _ in model.named_modules()]
        for pattern in options.modules_to_not_convert or ():
            if all(MicrofloatConfig.leaves_in(options, name, model) for name in names):  # type: ignore
                needed = f"names or patterns of modules of the {type(model).__name__}"
                raise invalid_value("modules_to_not_convert", repr(pattern), needed)
        if options.config is None:
            return model
        self._storage = plan_storage(model, options.config, options.leaves_in)
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}  # type: ignore
        for members in self._storage.groups():
            weights = {
                f"{name}.{key}" for name in members
                for key in (getattr(form_of(self._storage.layers[name]), "turned", None) or ("weight",))
            }  # fmt: skip
            plain = [
                type(one) is nn.Parameter and one.dtype == self._dtype for one in map(model.get_parameter, weights)
            ]
            if all(plain) and not weights & tied:
                self._groups |= dict.fromkeys(weights, _Group(members, weights))
        return model

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: object) -> bool:
        """True for a weight that becomes codes while it is loaded."""
        return param_name in self._groups

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element of a parameter, on average, when it is loaded."""
        group = self._groups.get(param_name)
        if group is None or self._storage is None:
            return param.element_size()
        rhs = self._storage.configs[group.layers[0]].fprop.rhs
        return param.element_size() if rhs is None else rhs.format.bits_per_element / 8

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that takes a weight as it is read."""
        return _Store(self)

    def take(self, model: nn.Module, name: str, value: torch.Tensor, missing: set[str]) -> bool:
        """Give a weight to its layer, and store the codes of its group when that is whole; False if it has none."""
        group, (parent, _, key) = self._groups.get(name), name.rpartition(".")
        module = model.get_submodule(parent)
        if group is None or self._storage is None or module._parameters[key].shape != value.shape:  # type: ignore[union-attr]
            self._groups.pop(name, None)  # so that transformers says that its shape does not fit
            return False
        setattr(module, key, _loaded(nn.Parameter(value)))
        missing.discard(name)
        group.waiting.discard(name)
        if not group.waiting:
            self._storage.store(group.layers)
            for one in (one for one, other in self._groups.items() if other is group):
                stored = _loaded(model.get_parameter(one))
                if self._places:  # its hooks ask for addresses, which codes do not have
                    path, _, key = one.rpartition(".")
                    self._codes.setdefault(path, {})[key] = stored
                    model.get_submodule(path)._parameters[key] = _loaded(nn.Parameter(torch.empty(0)))
        return True

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: object) -> nn.Module:  # type: ignore
        options: Any = self.quantization_config
        if self._storage is not None:
            if self._codes:
                _put_back(model, self._codes, self._places)
            for name in self._storage.configs.keys() - self._storage.stored:
                if hasattr(model.get_submodule(name), "_hf_hook"):
                    got = f"{name}, whose weight the file lacks or shares with another, with a hook of accelerate"
                    raise invalid_value("device_map", got, "one device for all modules", "Or leave this layer out.")
            self.report = self._storage.complete(model)
            return model
        if offloaded := [*_offloading(model)]:
            got = f"{offloaded[0] or 'a model'} offloaded under a recipe, where it would get no gradients"
            raise invalid_value("device_map", got, "a device for every module that trains")
        self.report = convert(model, options.recipe, filter=options.leaves_in, fuse=options.fuse)
        conversions = getattr(model, "_weight_conversions", None)  # of names, which a plain model keeps
        self.remove_quantization_config(model)
        if conversions is not None:
            model._weight_conversions = conversions
        for module in model.modules():
            if hasattr(getattr(module, "config", None), "_is_quantized"):
                del module.config._is_quantized  # type: ignore[union-attr]
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        return revert(model).to(dtype)

    def is_serializable(self) -> bool:  # type: ignore
        """True: `save_pretrained` writes the folder of `save_quantized`, in a dialect of compressed-tensors."""
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:  # type: ignore
        """The tensors and the metadata of the file of a model, whose configuration then describes them."""
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}
        if any(one.is_meta for one in model.parameters()):
            got = "weights that are offloaded or on meta"
            raise invalid_value("save_pretrained", got, "weights in memory", "Load the model without offloading.")
        dialect, notes = _dialect_of(model)
        tensors, documents, metadata = contents(model, dialect)
        for note in notes:
            warnings.warn(f"save_pretrained: {note}. load_pretrained reads it.", UserWarning, stacklevel=3)
        self.quantization_config.saved_as = documents["config.json"]["quantization_config"]  # type: ignore
        model._weight_conversions = []  # type: ignore[assignment]  # the names are those of the file already
        return tensors, metadata

    @property
    def is_qat_trainable(self) -> bool:
        """True where weights stay plain and train under a recipe; codes themselves do not train."""
        return self.quantization_config.recipe is not None  # type: ignore


class _Group:
    """Layers whose weights share a scale, and the names of the weights that have not been read."""

    def __init__(self, layers: Sequence[str], weights: set[str]) -> None:
        self.layers, self.waiting = layers, set(weights)


class _Store(ConversionOps):
    """Hands weights to the quantizer in place of the loader; others go on as they are."""

    def __init__(self, quantizer: MicrofloatQuantizer) -> None:
        self.quantizer = quantizer

    def convert(  # type: ignore
        self, input_dict: dict[str, torch.Tensor | list[torch.Tensor]], *args: object, model: nn.Module,
        missing_keys: set[str] | None = None, **kwargs: object,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """The tensors that the loader is to place itself."""
        values = {name: one[0] if isinstance(one, list) else one for name, one in input_dict.items()}
        missing = set() if missing_keys is None else missing_keys
        return {name: one for name, one in values.items() if not self.quantizer.take(model, name, one, missing)}  # type: ignore


def _put_back(model: nn.Module, codes: dict[str, dict[str, nn.Parameter]], places: Mapping[str, Any]) -> None:
    """Give layers their codes, by accelerate's hooks where they are offloaded: to memory, or to the offload folder."""
    hooks = _offloading(model)
    while codes:
        name, held = codes.popitem()
        layer, around = model.get_submodule(name), name
        layer._parameters.update(held)
        if name not in hooks:
            continue
        while around not in places and around:
            around = around.rpartition(".")[0]
        if places.get(around) == "disk":
            if hooks[name].weights_map.dataset.save_folder is None:
                raise invalid_value("offload_folder", "none", f"a folder to which the codes of {name} are written")
            path = pathlib.Path(hooks[name].weights_map.dataset.save_folder) / f"{name}.pt"
            torch.save(held, path.with_name(f"{name}.part"))
            path.with_name(f"{name}.part").replace(path)  # models that read the old file keep it
            held = torch.load(path, mmap=True)
        hooks[name].weights_map = ChainMap(held, hooks[name].weights_map)
        hooks[name].tied_params_map = None  # by addresses
        layer._parameters.update({key: nn.Parameter(one.to("meta"), one.requires_grad) for key, one in held.items()})


def _offloading(model: nn.Module) -> dict[str, Any]:
    """Those hooks of accelerate that move weights in for each call, by the name of the module."""
    hooks = {name: getattr(module, "_hf_hook", None) for name, module in model.named_modules()}
    return {
        name: one for name, hook in hooks.items()
        for one in getattr(hook, "hooks", (hook,)) if getattr(one, "offload", False)
    }  # fmt: skip


def _loaded(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, which transformers then does not initialize."""
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _check_plain(files: Sequence[str] | None) -> None:
    """Refuse a folder that is quantized by a method which transformers does not know, and takes for plain weights."""
    from microfloat.checkpoint import detect

    family = detect(pathlib.Path(files[0]).parent).family if files and files[0].endswith(".safetensors") else "plain"
    if family != "plain":
        raise invalid_value(
            "quantization_config", f"a MicrofloatConfig for weights that are quantized already ({family})",
            "a folder of plain weights", "load_pretrained(folder) of this module keeps its codes.",
        )  # fmt: skip


def _dialect_of(model: Any) -> tuple[str, list[str]]:
    """The first dialect of compressed-tensors that holds the formats of a model, and how transformers fails at it."""
    from microfloat.checkpoint._saving import SAVED
    from microfloat.checkpoint.families.readers import Layer, complaints

    stored = {name: one for name, one in model.state_dict().items() if isinstance(one, QuantizedTensor)}
    formats = {one.format for one in stored.values()}
    for dialect, families in SAVED.items():
        holding = {fmt: one.name for fmt in formats for one in families if one.holds(fmt)}
        if dialect.startswith("ct:") and len(holding) == len(formats):
            notes, kind, dtype = set(), model.config.model_type, dtype_name(model.dtype)
            for name, one in stored.items():
                named = "experts.0.of.weight" if one.dim() == 3 else name
                layer = Layer(holding[one.format], one.format, named, tuple(one.shape[-2:]), kind, dtype=dtype)
                notes.update(complaints(layer))
            return dialect, sorted(notes)
    raise NotSupportedError(
        f"save_pretrained: got weights in {', '.join(sorted(fmt.name for fmt in formats))}, needed formats that "
        "compressed-tensors holds. microfloat.torch.save_quantized(model, path) writes any; load_pretrained reads it."
    )


def load_pretrained(
    folder: str | os.PathLike[str], model_class: type = AutoModelForCausalLM, *, config: Config | None = None,
    dtype: torch.dtype | None = None, device: torch.device | str | None = None,
) -> PreTrainedModel:  # fmt: skip
    """A model of transformers from a folder of any dialect that `microfloat.checkpoint` reads, its codes kept.

    `model_class`: an Auto class, or the class of the model. `dtype`: that of parameters that are not quantized, by
    default the folder's. `config` and `device`: as in `load_quantized`, which reads the weights and raises what it
    raises. ``model.hf_quantizer.report`` says what became of each layer; `save_pretrained` writes the codes again.
    """
    if not (pathlib.Path(folder) / "config.json").is_file():
        raise invalid_value("folder", repr(os.fspath(folder)), "a folder with config.json and the weights")
    settings = AutoConfig.from_pretrained(folder)
    for one in (settings, settings.get_text_config()):
        if hasattr(one, "quantization_config"):
            del one.quantization_config  # type: ignore
    kind = getattr(model_class, "config_class", None) if isinstance(model_class, type) else int
    if kind is not None and not isinstance(settings, kind):
        raise invalid_type("model_class", repr(model_class), f"an Auto class, or one for a {type(settings).__name__}")
    dtype = dtype or settings.dtype or torch.bfloat16  # type: ignore
    make = getattr(model_class, "from_config", None) or model_class._from_config  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = make(settings, dtype=dtype)
    _give_codes(model, folder, config, device)
    if (pathlib.Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _give_codes(model: Any, folder: str | os.PathLike[str], config: Config | None, device: Any) -> None:
    """Load a folder of any dialect into a model, which says afterwards in its configuration how it is quantized."""
    report = load_quantized(folder, model, config=config, device=device)
    stored = {row.name: row.recipe for row in report if isinstance(row.recipe, Config)}
    if stored:
        kinds = set(stored.values())
        quantizer = MicrofloatQuantizer(MicrofloatConfig(kinds.pop() if len(kinds) == 1 else stored))  # type: ignore
        quantizer.report, model.hf_quantizer = report, quantizer  # type: ignore
        model.is_quantized, model.quantization_method = True, _METHOD
        model.config.quantization_config = quantizer.quantization_config


class ModelOptConfig(QuantizationConfigMixin):
    """The configuration of a folder of ModelOpt, which transformers does not know and would take for plain weights."""

    def __init__(self, **stated: object) -> None:
        vars(self).update(stated, quant_method="modelopt")


class ModelOptQuantizer(MicrofloatQuantizer):
    """Gives a model the codes of its folder, once transformers has built it and passed over the tensors in it."""

    def __init__(self, quantization_config: ModelOptConfig, **kwargs: object) -> None:
        super().__init__(MicrofloatConfig("nvfp4"), **kwargs)  # type: ignore  # until the folder says what it holds
        self.quantization_config = quantization_config

    def update_device_map(self, device_map: Any) -> dict[str, Any]:
        """One device for all codes, under "auto" a GPU where there is one; several are refused."""
        places = {str(one) for one in (device_map.values() if isinstance(device_map, Mapping) else [device_map])}
        place = places.pop()
        if places or place in ("balanced", "balanced_low_0", "sequential", "meta", "disk"):
            raise NotSupportedError(
                f"device_map: got {device_map!r} for codes of ModelOpt, needed one device, such as 'cuda:0', or 'cpu'. "
                "accelerate.cpu_offload(model, execution_device=0) moves them to a device layer by layer."
            )
        place = {"None": "cpu", "auto": "cuda:0" if torch.cuda.is_available() else "cpu"}.get(place, place)
        self._device = f"cuda:{place}" if place.isdigit() else place
        return {"": self._device}

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: object) -> Any:
        self._folder = pathlib.Path((checkpoint_files or [""])[0]).parent
        model._keys_to_ignore_on_load_unexpected = {".*"}
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """None: the tensors are passed over."""
        return []

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: object) -> bool:
        """True: every tensor of the files is passed over."""
        return True

    def take(self, model: nn.Module, name: str, value: torch.Tensor, missing: set[str]) -> bool:
        """True: a tensor counts as loaded, and so do those that no file has under the name of the model."""
        missing.clear()
        return True

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: object) -> nn.Module:  # type: ignore
        model.tie_weights()  # type: ignore[operator]  # whose names no file has
        _give_codes(model, self._folder, None, self._device)
        return model


if "modelopt" not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config("modelopt")(ModelOptConfig)
    register_quantizer("modelopt")(ModelOptQuantizer)
