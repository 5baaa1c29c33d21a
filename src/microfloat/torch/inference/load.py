"""Quantized models from checkpoints of every family that `microfloat.checkpoint` reads.

A record becomes a QuantizedTensor without a change of its bytes, and its layer a quantized one, as `quantize_` makes
them. Experts [E, N, K] keep a scale each.
"""

import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import ml_dtypes
import numpy as np
import torch
from torch import nn

from microfloat.arguments import as_bool
from microfloat.errors import CheckpointError, InvalidValueError, invalid_type, invalid_value, kind_of
from microfloat.formats import FORMATS, SCALE_FP32, ScaledFormat
from microfloat.recipes import Cast
from microfloat.recipes.inference import WeightActivation, WeightOnly
from microfloat.recipes.placement import ConversionReport, ConversionRow
from microfloat.torch.convert.experts import as_experts, remark_on, turned_in
from microfloat.torch.convert.swap import keep_slow_paths, pin_layer, planned_layers, report_of
from microfloat.torch.inference.joined import join, joined
from microfloat.torch.inference.quantize import LAYERS, Config, check_config
from microfloat.torch.nn.conv1d import as_linear, is_conv1d, tell_adapters
from microfloat.torch.nn.experts import ExpertsLayer, place_of, products_of
from microfloat.torch.tensor.checks import INPUT_DTYPES, check_model
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from microfloat.checkpoint import Record

Path = str | os.PathLike[str]


@overload
def load_quantized(
    path: Path, model: None = None, *, config: Config | None = None, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None, format: str = "auto", strict: bool = True,
) -> dict[str, torch.Tensor]: ...  # fmt: skip


@overload
def load_quantized(
    path: Path, model: nn.Module, *, config: Config | None = None, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None, format: str = "auto", strict: bool = True,
) -> ConversionReport: ...  # fmt: skip


def load_quantized(
    path: Path, model: nn.Module | None = None, *, config: Config | None = None, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None, format: str = "auto", strict: bool = True,
) -> dict[str, torch.Tensor] | ConversionReport:  # fmt: skip
    """Load a checkpoint of any family that `microfloat.checkpoint` reads; quantized weights stay as they are stored.

    Without a model: a dictionary from name to tensor, quantized ones as QuantizedTensors that present `dtype`, on
    `device` (None: the CPU). With one: its parameters and buffers take the values in their own dtypes, linear layers
    whose weights are stored quantized become quantized layers, and a report is returned; other quantized tensors are
    dequantized. Scales of a KV cache become attributes, such as `k_scale` and `v_scale`, of the module that they are
    stored under. `model` may be on the meta device, then its tensors are made on `device`, and buffers that no
    checkpoint holds are initialized by the model where it can (models of transformers). Of a weight that several layers
    share, one name in the file is enough, and it stays shared. `config`: of the layers whose weights are stored in its
    format; None quantizes activations as the checkpoint says. `format`: the family, as in `microfloat.checkpoint.load`.
    `strict` False loads the names that both have, and warns of the others.

    Warns of layers that engines join and whose scales differ, and of what is left on the meta device. Raises
    CheckpointError for damaged files, for names and shapes that do not fit, all of them listed, and for buffers of the
    meta device that nothing gives values, InvalidValueError for a config of other weights, InvalidTypeError for what is
    no config; then nothing has changed.
    """
    from microfloat import checkpoint
    from microfloat.checkpoint.records import some

    if config is not None:
        check_config("", config, False)
    strict = as_bool("strict", strict)
    target = _device(device)
    loaded = checkpoint.load(path, format=format)
    for finding in loaded.scale_findings:
        if finding.id == "fused-mismatch":
            warnings.warn(f"load_quantized: {finding}", UserWarning, stacklevel=2)
    if model is None:
        tensors = {name: as_tensor(array).to(target) for name, array in _beside(loaded).items()}
        return tensors | {name: _tensor_of(record, dtype).to(target) for name, record in loaded.items()}
    check_model(model)
    loaded, parts = joined(model, loaded, _named(model), strict)
    beside = _beside(loaded).items()
    attached = {name: (place, array) for name, array in beside if (place := _place_of(model, name)) is not None}
    turned = _turned(model, loaded)
    _check_names(model, loaded, attached, strict, turned)
    stored = {_in_stock(record).format.name for record in loaded.values() if record.format is not None}  # type: ignore[union-attr]
    if config is not None and _weight_format(config).name not in stored:
        raise invalid_value("config", f"{config!r}", f"one for weights as they are stored: {sorted(stored) or 'plain'}")
    if target.type != "meta":
        _initialize_tables(model, target, strict)
    rows, tied, refused = [], _tied(model), _refused(model)
    sources = _sources(model, loaded, tied)
    _untie(model, sources, tied)
    for name, source in sources.items():
        record = join(parts[source]) if source in parts else loaded[source]
        row = _load_one(model, name, record, loaded, config, target, refused, turned)
        rows += [] if row is None else [row]
    tell_adapters(model)
    keep_slow_paths(model)
    rows = list({row.name: row for row in rows[::-1]}.values())[::-1]  # experts have one for each parameter
    _tie_again(model, tied)
    for name, (place, array) in attached.items():
        key, values, module = name.rpartition(".")[2], as_tensor(array).float(), model.get_submodule(place)
        setattr(module, key, values.item() if values.numel() == 1 else values)
        vars(module)[OF_CACHE] = tuple(dict.fromkeys((*vars(module).get(OF_CACHE, ()), key)))
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]
    bare = [name for name, value in _named(model).items() if value.is_meta]
    if bare and target.type != "meta":
        warnings.warn(
            f"load_quantized: the checkpoint does not have {some(bare, 10)}, which are on the meta device still: what "
            "strict=False has left out, or buffers that no state dict holds. Give them values before the model is "
            "called.", UserWarning, stacklevel=2,
        )  # fmt: skip
    return report_of(model, rows)


OF_CACHE = "_scales_of_cache"  # the attribute of a module that names those which a checkpoint has given to it


def _beside(loaded: Mapping[str, "Record"]) -> dict[str, np.ndarray]:
    """The arrays that belong to modules, by name: scales for engines, and all that stands beside a quantized weight."""
    from microfloat.checkpoint.families.patterns import CACHE

    made = {}
    for name, record in loaded.items():
        parent, dot, key = name.rpartition(".")
        if record.format is None and key in CACHE:
            made[name] = record.codes
        made |= {f"{parent}{dot}{other}": array for other, array in record.extras.items()}
    return made


def _place_of(model: nn.Module, name: str) -> str | None:
    """The module, of its name or around that, that gets a scale of a KV cache as an attribute; None for others."""
    from microfloat.checkpoint.families.patterns import CACHE

    parent, _, key = name.rpartition(".")
    around = parent.rpartition(".")[0]
    place = parent if _has(model, parent) or not around else around
    if key not in CACHE or not _has(model, place):
        return None
    module = model.get_submodule(place)
    is_own = key in module._parameters or key in module._buffers
    is_of_cache = key != "output_scale" or isinstance(module, LAYERS)  # of a projection: that of its cache
    return place if is_of_cache and not is_own else None


def _device(device: object) -> torch.device:
    needed = "a torch.device, its name, such as 'cuda:0', or None"
    if not isinstance(device, torch.device | str | int | None):
        raise invalid_type("device", kind_of(device), needed)
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):  # of a name or number, and of a bool
        raise invalid_value("device", repr(device), needed) from None


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every name that they have."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _sources(model: nn.Module, loaded: Mapping[str, "Record"], tied: Sequence[Sequence[str]]) -> dict[str, str]:
    """The record that each parameter or buffer is loaded from: its own, or that of another name of it."""
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first.setdefault(id(module), name)

    def of_layer(name: str) -> str:
        parent, dot, key = name.rpartition(".")
        return f"{first[id(model.get_submodule(parent))]}{dot}{key}" if _has(model, parent) else name

    sources = {of_layer(name): name for name in loaded} | {name: name for name in loaded if of_layer(name) == name}
    for group in tied:
        found = [name for name in group if name in loaded]
        for name in group if found else ():
            sources.setdefault(of_layer(name), found[0])
    return sources


def _untie(model: nn.Module, sources: Mapping[str, str], tied: Sequence[Sequence[str]]) -> None:
    """Give memory of its own to what is one parameter of the model, and stands in the file under several names."""
    for first, *others in tied:
        for name in others:
            old = model.get_parameter(name)
            is_plain = not (old.is_meta or isinstance(old, QuantizedTensor))
            if is_plain and name in sources and sources[name] != sources[first]:
                parent, _, key = name.rpartition(".")
                own = nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad)
                setattr(model.get_submodule(parent), key, own)


def _tie_again(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Make one parameter again of those that were one and have the same values; others were stored apart."""
    for first, *others in tied:
        kept = model.get_parameter(first)
        for name in others:
            parent, _, key = name.rpartition(".")
            module, own = model.get_submodule(parent), model.get_parameter(name)
            if own is not kept and not own.is_meta and _is_same(own, kept):
                setattr(module, key, kept)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    is_quantized = isinstance(a, QuantizedTensor)
    if is_quantized != isinstance(b, QuantizedTensor) or (a.dtype, a.device) != (b.dtype, b.device):
        return False
    if is_quantized:
        return torch.equal(a, b)
    return torch.equal(*(one.detach().reshape(-1).view(torch.uint8) for one in (a, b)))  # the bits, NaN's too


def _check_names(
    model: nn.Module, loaded: Mapping[str, "Record"], attached: Collection[str], strict: bool, turned: Collection[str]
) -> None:
    """Raise CheckpointError where names or shapes do not fit; of names, warn if not `strict`."""
    from microfloat.checkpoint.records import some

    existing, needed = _named(model), {}
    for name in model.state_dict():
        if name in existing:
            needed.setdefault(id(existing[name]), []).append(name)  # tied ones need one of their names
    missing = [names[0] for names in needed.values() if not any(one in loaded for one in names)]
    unknown = [name for name in loaded if name not in attached and not _is_taken(name, existing)]
    problems, hint = [], _other_prefix(unknown, missing)
    if strict:
        problems = [f"{name} is missing" for name in missing] + [f"{name} is unknown to the model" for name in unknown]
    elif missing or unknown:
        count = len(loaded) - len(unknown)
        parts = [f"unknown to the model: {some(unknown, 10)}"] if unknown else []
        parts += [f"not in the checkpoint: {some(missing, 10)}"] if missing else []
        warnings.warn(
            f"load_quantized: strict=False has loaded {count or 'nothing'} of the {len(loaded)} names of the "
            f"checkpoint; {'; '.join(parts)}.{hint}", UserWarning, stacklevel=3,
        )  # fmt: skip
    for name, record in loaded.items():
        shape = tuple(record.logical_shape)
        # Experts of some families are stored the other way round, and the weights of a Conv1D are.
        may_turn = record.format is not None and (len(shape) == 3 or name.rpartition(".")[0] in turned)
        other = (*shape[:-2], shape[-1], shape[-2]) if may_turn else shape
        if name in existing and tuple(existing[name].shape) not in (shape, other):
            problems.append(f"{name} has shape {shape}, the model's {tuple(existing[name].shape)}")
        kind = existing[name].dtype if name in existing else torch.float32
        if record.format is not None and not (kind.is_floating_point and kind.itemsize > 1):
            problems.append(f"{name} is quantized, the model's has {kind}, which does not hold its values")
        # AWQ multiplies the input of a layer, SVDQuant adds a low-rank branch: the weight alone gives wrong results.
        beside = sorted(set(record.extras) & {"pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b"})
        if beside:
            problems.append(
                f"{name} has {', '.join(beside)}, which no layer applies (checkpoint.convert folds a scale)"
            )
    if problems:
        raise CheckpointError(
            f"load_quantized: got a checkpoint that does not fit the {type(model).__name__}: {'; '.join(problems)}. "
            f"Needed the names and shapes of the model; strict=False loads the names that both have.{hint}"
        )


def _is_taken(name: str, existing: Mapping[str, torch.Tensor]) -> bool:
    owner = name.removesuffix("input_amax")
    return name in existing or (owner != name and (owner + "weight" in existing or owner[:-1] in existing))


def _other_prefix(unknown: Iterable[str], missing: Iterable[str]) -> str:
    """A sentence about the prefix under which most names of the file would be those of the model, or nothing."""
    ends: dict[str, str] = {}
    for name in missing:
        for start, end in _cuts(name):
            ends.setdefault(end, start)
    votes: Counter[tuple[str, str]] = Counter()
    for name in unknown:
        found = next(((start, ends[end]) for start, end in _cuts(name) if end in ends), None)
        votes.update([] if found is None else [found])
    if not votes:
        return ""
    (theirs, ours), count = votes.most_common(1)[0]
    remedy = f"a module whose {theirs!r} is the model" + (f"'s {ours!r}" if ours else "")
    if not theirs:
        remedy = f"model.get_submodule({ours!r})"
    return f" {count} would fit with the prefix {ours!r} in place of {theirs!r}: load into {remedy}."


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """A name cut in two at each dot, the shortest beginning first; the end has a module in it."""
    parts = name.split(".")
    return ((".".join(parts[:at]), ".".join(parts[at:])) for at in range(max(len(parts) - 1, 1)))


@torch.no_grad()
def _load_one(
    model: nn.Module, name: str, record: "Record", loaded: Mapping[str, "Record"], config: Config | None,
    device: torch.device, refused: Mapping[str, str], turned: Collection[str],
) -> ConversionRow | None:  # fmt: skip
    """Load one record of those `loaded`; the row of a quantized one."""
    parent, _, key = name.rpartition(".")
    if not _has(model, parent):
        return None
    module = model.get_submodule(parent)
    old = getattr(module, key, None)
    if not isinstance(old, torch.Tensor):
        return None
    target = device if old.is_meta else old.device
    tensor = _tensor_of(record, old.dtype if old.dtype in INPUT_DTYPES else torch.float32).to(target)
    if not isinstance(tensor, QuantizedTensor):
        _take(module, key, old, tensor)
        return None
    shape, why = (tensor.shape[-2], tensor.shape[-1]) if tensor.dim() > 1 else None, "it belongs to no linear layer"
    of_conv1d, is_turned = parent in turned and is_conv1d(module), turned_in(module).get(key)
    fits = key == "weight" and (of_conv1d or (isinstance(module, LAYERS) and tensor.shape == old.shape))
    if is_turned is not None:  # a matrix for each expert
        shown = old.transpose(1, 2) if is_turned else old
        fits = tensor.shape == shown.shape and (parent in turned) == is_turned
    if fits:
        places = (parent, record.name.rpartition(".")[0])  # the second one holds what it is shared with
        places = places if is_turned is None else (name,)
        amax = next((loaded[at] for one in places if (at := f"{one}.input_amax") in loaded), None)
        chosen, reason = _config_of(record, tensor, config, amax is not None)
        why = refused.get(parent, reason) if old.dtype in INPUT_DTYPES else f"its {key} has {old.dtype}"
        if chosen is not None and old.dtype in INPUT_DTYPES and parent not in refused:
            layer = module
            if of_conv1d:
                as_linear(module)
            elif is_turned is not None:
                as_experts(parent, module)
                layer = next(one for one in products_of(module) if place_of(one)[1] == key)
            pin_layer(parent if layer is module else name, layer, chosen)
            module._pinned, module._pin_token = layer._pinned, layer._pin_token  # type: ignore
            held = tensor.transpose(1, 2) if is_turned else tensor
            setattr(module, key, nn.Parameter(held, requires_grad=old.requires_grad))
            if chosen.is_static:
                kept = _static_amax(record, chosen) if amax is None else _tensor_of(amax, torch.float32)
                layer.register_buffer("input_amax", None if kept is None else kept.to(target))
            reason = "; ".join(filter(None, (reason, remark_on(module, model) if is_turned is not None else "")))
            return ConversionRow(parent, shape, "loaded", chosen, reason)
    values = tensor.dequantize(old.dtype)
    turns = parent in turned or values.shape != old.shape
    _take(module, key, old, values.transpose(-1, -2).contiguous() if turns else values)
    return ConversionRow(parent, shape, "dequantized", None, why)


def _turned(model: nn.Module, loaded: Mapping[str, "Record"]) -> set[str]:
    """The modules whose weights the file stores the other way round: a Conv1D's, and experts [experts, out, in].

    The shapes tell, of one weight for all of its module: some are square, as gpt-oss's down_proj. Where all are, those
    of the family of gpt-oss are turned.
    """
    existing, votes = _named(model), dict[str, set[bool]]()
    square, flat = set(), {}
    for name, record in loaded.items():
        shape, parent = tuple(record.logical_shape), name.rpartition(".")[0]
        if record.format is None or name not in existing:
            continue
        if len(shape) != 3:
            if is_conv1d(model.get_submodule(parent)):
                flat[parent] = shape, tuple(existing[name].shape)
        elif shape[1] != shape[2]:
            votes.setdefault(parent, set()).add(tuple(existing[name].shape) != shape)
        elif record.source is not None and record.source.family.startswith("gptoss:"):
            square.add(parent)
    if {stored != old for stored, old in flat.values() if stored[0] != stored[1]} != {False}:  # as `save_quantized`
        square |= {parent for parent, (stored, old) in flat.items() if stored == old[::-1]}
    return {parent for parent, found in votes.items() if found == {True}} | (square - votes.keys())


def _has(model: nn.Module, parent: str) -> bool:
    try:
        model.get_submodule(parent)
    except AttributeError:
        return False
    return True


def _refused(model: nn.Module) -> dict[str, str]:
    """The layers that cannot store a quantized weight, each with the reason."""
    rows, _ = planned_layers(model, WeightOnly(), (*LAYERS, ExpertsLayer), None, ())
    return {row.name: row.reason for row in rows if row.action == "skipped"}


def _take(module: nn.Module, key: str, old: torch.Tensor, values: torch.Tensor) -> None:
    """Give a parameter or buffer its values, in place where it has memory."""
    if not old.is_meta and not isinstance(old, QuantizedTensor):
        old.copy_(values)
    elif isinstance(old, nn.Parameter):
        setattr(module, key, nn.Parameter(values.to(old.dtype), requires_grad=old.requires_grad))
    else:
        setattr(module, key, values.to(old.dtype))


def _tensor_of(record: "Record", dtype: torch.dtype) -> torch.Tensor:
    """The QuantizedTensor of a record, which presents `dtype`; a plain record as it is stored."""
    if record.format is None:
        return as_tensor(record.codes)
    q = QuantizedTensor.from_record(_in_stock(record), dtype=dtype)
    # Nobody says that float32 scales of a file are powers of two, as those of the default rules are.
    is_one_level = q.format.scale.name == "E4M3" and q.tensor_scale is None
    cast = Cast(q.format, "amax" if q.format.scale.name == "FP32" else "one_level_e4m3" if is_one_level else None)
    return QuantizedTensor(q.codes, q.scale, q.tensor_scale, cast, axis=q.axis, shape=q.shape, dtype=dtype)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor with the values of an array, in torch's dtype of that name."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name in UNKNOWN_TO_NUMPY:
        return torch.from_numpy(array.view(f"u{array.itemsize}").copy()).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array.copy())


def _in_stock(record: "Record") -> "Record":
    """The record in the stock format of its values: E8M0 scales of FP8 tiles, rows and tensors are float32 there."""
    fmt = record.format
    if fmt is None or record.scale is None or fmt.scale.name != "E8M0" or FORMATS.get(fmt.name) == fmt:
        return record
    kind = (fmt.element, SCALE_FP32, fmt.block, fmt.tensor_scale)
    stock = (one for one in FORMATS.values() if (one.element, one.scale, one.block, one.tensor_scale) == kind)
    if (made := next(stock, None)) is None:
        return record
    return replace(record, format=made, scale=record.scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


UNKNOWN_TO_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


def _weight_format(config: Config) -> ScaledFormat:
    assert config.fprop.rhs is not None
    return config.fprop.rhs.format


def _config_of(
    record: "Record", tensor: QuantizedTensor, config: Config | None, has_amax: bool
) -> tuple[Config | None, str]:
    """The config of a layer, and why it is not the one that its checkpoint asks for; None: it has to be dequantized."""
    fmt = tensor.format
    if config is not None and _weight_format(config) == fmt:
        return config, ""
    if FORMATS.get(fmt.name) != fmt:
        return None, f"{fmt.name} is no format that a layer stores: the weight is dequantized"
    scheme, inputs = record.activation.get("scheme", "none"), record.activation.get("format")
    if scheme == "none":
        return WeightOnly(fmt.name), ""
    kept = "activations stay in high precision: "
    if scheme == "static" and record.activation.get("scale") is None and not has_amax:
        return WeightOnly(fmt.name), (
            f"{kept}the checkpoint announces a static scale and has none; config=WeightActivation(..., "
            "scales='static') and microfloat.torch.calibrate measure it"
        )
    named = fmt.name.replace("128x128", "1x128") if inputs is None else inputs.name
    try:
        return WeightActivation(named, weight=fmt.name, scales=scheme), ""
    except InvalidValueError as error:
        return WeightOnly(fmt.name), f"{kept}{str(error).partition('.')[0]}"


def _static_amax(record: "Record", config: Config) -> torch.Tensor | None:
    """The amax of the largest scale that the checkpoint holds, f32(scale * capacity); None where it holds none."""
    x = config.fprop.lhs
    scale = record.activation.get("scale")
    if x is None or scale is None:
        return None
    capacity = x.format.element.max if x.rule.two_level is None else x.rule.two_level.capacity
    return torch.tensor(np.float32(np.asarray(scale).max()) * np.float32(capacity), dtype=torch.float32)


@torch.no_grad()
def _initialize_tables(model: nn.Module, device: torch.device, strict: bool) -> None:
    """Give buffers on the meta device that no state dict holds their values, on `device`, by the model's own means.

    Buffers with values move there from a model whose parameters are on the meta device.

    Raises CheckpointError, and changes nothing, where `strict` and one of them cannot be made.
    """
    saved = model.state_dict().keys()
    lost: dict[str, dict[str, torch.Tensor]] = {}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in saved:
            parent, _, key = name.rpartition(".")
            lost.setdefault(parent, {})[key] = buffer
    left = {name: buffers for name, buffers in lost.items() if not _is_initialized(model, name, buffers, device)}
    for name, buffers in (lost if strict else left).items() if left else ():
        _put(model.get_submodule(name), buffers)
    if left and strict:
        names = [f"{name}.{key}".lstrip(".") for name, buffers in left.items() for key in buffers]
        raise CheckpointError(
            f"load_quantized: got buffers on the meta device, which no checkpoint holds: {', '.join(names)}. "
            "Build it under accelerate.init_empty_weights(), which makes buffers with their values and only parameters "
            "on the meta device, or give them values first."
        )
    if all(parameter.is_meta for parameter in model.parameters()):  # and its buffers were made where torch makes them
        for name, buffer in model.named_buffers():
            parent, _, key = name.rpartition(".")
            if not buffer.is_meta:
                _put(model.get_submodule(parent), {key: buffer.to(device)})


def _put(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    for key, buffer in buffers.items():
        setattr(module, key, buffer)


def _is_initialized(model: nn.Module, name: str, buffers: Mapping[str, torch.Tensor], device: torch.device) -> bool:
    """Make the buffers of a module; True where its initialization has written every element, whatever was there."""
    module, parts, made = model.get_submodule(name), name.split(".") if name else [], []
    # The innermost module around it, or itself, that initializes modules as those of transformers do.
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1))
    owner = next((one for one in around if callable(getattr(one, "_init_weights", None))), None)
    for fill in (0, 1):
        _put(module, {key: torch.full_like(buffer, fill, device=device) for key, buffer in buffers.items()})
        try:
            with torch.random.fork_rng(devices=[]):
                if owner is not None and all(parameter.is_meta for parameter in module.parameters()):
                    owner._init_weights(module)  # type: ignore[operator]
                if next(module.parameters(), None) is None:
                    module.to(device)
        except Exception:  # of code that somebody else wrote for another purpose
            return False
        made.append([getattr(module, key) for key in buffers])
    return all(torch.equal(*pair) for pair in zip(*made, strict=True))
