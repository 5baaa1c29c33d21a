"""The encoding that the rows of families share, and the contents of their configurations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from microfloat.checkpoint.records import Activation, Record
from microfloat.formats import FP8_ROW, FP8_TENSOR, FP8_1x128, ScaledFormat
from microfloat.recipes import Cast

Arrays = dict[str, np.ndarray]
# E8M0 scales are bytes: the dtype F8_E8M0 is younger than most readers.
_SCALES = {"E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "E8M0": np.dtype(np.uint8)}
_CODES = {"E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "E5M2": np.dtype(ml_dtypes.float8_e5m2)}


class Written(NamedTuple):
    """The cast that a family is written with, and the activations that its configuration announces.

    `joint`: members of a fused group share one scale though the format has no tensor scale, as its producer does.
    `stacked`: the readers that expect the experts of a layer as one tensor: none (""), those of models whose experts
    are [E, N, K] ("rows"), or of every model that has them ("any").
    """

    cast: Cast
    activation: str = "none"
    activation_format: ScaledFormat | None = None
    joint: bool = False
    stacked: str = ""


# A kind of quantized layer: its format, the scheme of its inputs, and their format.
Kind = tuple[ScaledFormat, str, ScaledFormat | None]


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint to be written: modules of each kind, modules in high precision, and the producer.

    `family`: the family of the first quantized parameter. `kv_cache`: the KV cache is FP8.
    """

    family: str
    kinds: Mapping[Kind, list[str]]
    ignore: list[str] = field(default_factory=list)
    kv_cache: bool = False
    producer: Mapping[str, str] = field(default_factory=dict)


class Configuration(NamedTuple):
    """`quantization_config` of config.json, and other documents by file name."""

    quantization: dict[str, Any]
    documents: Mapping[str, Any] = MappingProxyType({})


def lacks_scale(fmt: ScaledFormat, activation: Activation) -> bool:
    """True for an input that needs a stored scale (of NVFP4 the tensor scale) and has none."""
    scheme = activation.get("scheme", "none")
    if scheme == "none" or activation.get("scale") is not None:
        return False
    return scheme == "static" or activation_format(fmt, activation).tensor_scale is not None


def kind_of_layer(fmt: ScaledFormat, activation: Activation) -> Kind:
    """The kind of a layer, by the format of its weight and its activations."""
    scheme = activation.get("scheme", "none")
    return fmt, scheme, None if scheme == "none" else activation_format(fmt, activation)


def activation_format(fmt: ScaledFormat, activation: Activation) -> ScaledFormat:
    """The format of a layer's input: the record's own, else the usual one beside such a weight."""
    found = activation.get("format")
    if found is not None:
        return found
    if fmt.scale.bits == 8:
        return fmt
    if activation.get("scheme") == "static":
        return FP8_TENSOR
    return FP8_1x128 if fmt.is_tile else FP8_ROW


def tensor_name(parameter: str, suffix: str) -> str:
    """The name of a tensor of a parameter: a suffix that begins with a point takes the place of `.weight`."""
    if not suffix.startswith("."):
        return parameter + suffix
    return (f".{parameter}".removesuffix(".weight") + suffix).lstrip(".")


def encode_parts(family: Any, record: Record, dtype: np.dtype) -> Arrays:
    """The tensors of a record by the numbers of its family's row, by name.

    `dtype`: of FP32 scales, in a family that stores them in the dtype of the model. FP4 and FP6 codes and E8M0
    scales are bytes; a divisor that the record was read with is written as it was.
    """
    fmt = record.format
    assert fmt is not None, record.name
    assert record.scale is not None, record.name
    made = {record.name + family.codes[0]: record.codes.view(_CODES.get(fmt.element.name, np.uint8))}
    scale, leading = record.scale, record.logical_shape[:-2]
    if fmt.is_per_tensor:
        scale = scale.reshape(leading or family.scalars)
    if fmt.scale.bits == 32:
        scale = scale.astype(dtype if family.model_scales else np.float32, copy=False)
    else:
        scale = scale.view(_SCALES[fmt.scale.name])
    made[tensor_name(record.name, family.scale[0])] = scale
    if family.tensor_scale is not None and record.tensor_scale is not None:
        made[record.name + family.tensor_scale] = _scalar(family, record, "tensor_scale", record.tensor_scale, leading)
    folder, _, leaf = record.name.rpartition(".")
    of_input = record.activation.get("scale")
    if of_input is not None:
        last = family.input_scales[0]
        name = f"{record.name}_{last}" if leaf != "weight" else f"{folder}.{last}" if folder else last
        made[name] = _scalar(family, record, "input_scale", of_input, ())
    for last, array in record.extras.items():
        made[f"{folder}.{last}" if folder else last] = array
    return made


def _scalar(family: Any, record: Record, role: str, value: np.ndarray, leading: tuple[int, ...]) -> np.ndarray:
    """A global scale as the family stores it."""
    value = np.asarray(value, np.float32)
    if family.divides:
        divisor = record.source.divisors.get(role) if record.source else None
        with np.errstate(all="ignore"):
            value = np.asarray(np.float32(1) / value if divisor is None else divisor, np.float32)
    return value.reshape(leading or (family.scalars if value.size == 1 else value.size))
