"""`QuantizedTensor`: codes and scales that present the shape and dtype of the tensor they came from.

Legend: R = rows of the operand form, C = its contraction length (docs/numerics.md, "Operand form of an array").
Its operations are the functions of the aten modules; every other one raises an error that names `.dequantize()`.
"""

import contextlib
import copy
import dataclasses
import math
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import torch

from microfloat.arguments import check_sizes, normalize_axis
from microfloat.errors import NotSupportedError, invalid_type, invalid_value, kind_of
from microfloat.formats import ScaledFormat
from microfloat.layout import array_layout, leading_axes, scale_shape
from microfloat.recipes import Cast, Current, Delayed, Hadamard
from microfloat.recipes._serialize import cast_from_data, cast_to_data
from microfloat.torch import backends
from microfloat.torch._typing import Options
from microfloat.torch.backends.base import Operand, dtype_name
from microfloat.torch.reference._elements import codes_dtype
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.packing import as_bytes, check_width, pack_fp6, unpacked, width_of

if TYPE_CHECKING:
    from microfloat.checkpoint import Record

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INIT_VAL = "_high_precision_init_val"  # the attribute of a parameter that `quantized_model_init` has asked to keep it
_NOTHING = contextlib.nullcontext()
_ABSENT: NoReturn = None  # type: ignore[assignment]  # a missing argument of QuantizedTensor(q), which is a Parameter
# Functions of torch -> their functions for a plain and a quantized tensor, which give None for other arguments. Filled
# once, by `nn.quantized_products`; bounded by its number of functions.
PRODUCTS: dict[Callable, Callable[..., torch.Tensor | None]] = {}
UNKNOWN: Any = object()  # the root of a slice that came through a compiler, which keeps parts only
_PARTS = ("codes", "scale", "tensor_scale")
_FIELDS = (*_PARTS, "cast", "axis", "root", "_shape", "_dtype")


# Cast, axis, dtype, True for a slice, and (dimensions, contraction length) where the parts give others.
Flattened: TypeAlias = tuple[Cast, int, torch.dtype, bool, tuple[int, int] | None]


class QuantizedTensor(torch.Tensor):
    """A quantized tensor: ``value = decode(codes) * scale * tensor_scale``, blocks along the contraction axis.

    * `codes`: operand form (contraction axis last, leading axes kept); float8 dtypes for 8-bit elements, uint8 for 4
      and 6 bit, 4-bit codes packed two per byte, the even one in the low nibble.
    * `scale`: uint8 bytes (E8M0, E4M3) or float32; () per tensor, 2-D for tiles, else one entry per block of a row.
    * `tensor_scale`: float32 of shape () or [R, 1], or None. The one scale of a tensor (`scale` per tensor, or
      `tensor_scale`) may be one for each expert of [E, N, K], of shape [E].
    * `cast`, whose `format` and `hadamard` are attributes too; `axis`: the contraction axis of `shape`, >= 0.
    * `shape`, `dtype`: those of the original; `dequantize` and products return `dtype` unless told otherwise.
    * `root`: the tensor that a slice was cut from, None for a tensor with scales of its own.
    * `stride()` is that of the codes, counted in elements; the contraction axis is the innermost one in memory.

    Made by `microfloat.torch.quantize` or `QuantizedTensor.from_parts`. ``QuantizedTensor(q, requires_grad=False)`` is
    the Parameter of another one, for packages that call the class of a parameter. It can be moved, cloned, saved,
    viewed where no block is cut, and multiplied with another QuantizedTensor; other operations raise InvalidTypeError:
    nothing dequantizes in silence. In-place arithmetic (an optimizer's step) dequantizes, applies and requantizes with
    the same Cast; float32 scales that still serve are kept. Writing into a slice leaves the rest of the tensor as it
    is: where both share one scale, the values are quantized under that scale, which grows by a power of two first if it
    is too small. Source: docs/numerics.md 7.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor | None
    cast: Cast
    axis: int
    root: "QuantizedTensor | None"
    _shape: Sequence[int]
    _dtype: torch.dtype
    _is_shard = False  # of a parameter that ranks share: `microfloat.torch.distributed.fsdp_quantized`
    _is_filled = False  # by a checkpoint, piece by piece, so that elements beside a piece need not keep their values

    @staticmethod
    def __new__(
        cls: type, codes: torch.Tensor, scale: torch.Tensor = _ABSENT, tensor_scale: torch.Tensor | None = None,
        cast: Cast = _ABSENT, *, axis: int = -1, shape: Sequence[int] = (), dtype: torch.dtype = _ABSENT,
        root: "QuantizedTensor | None" = None, requires_grad: bool = False,
    ) -> "QuantizedTensor":  # fmt: skip
        if scale is _ABSENT:
            if not isinstance(codes, QuantizedTensor):
                remedy = (
                    "microfloat.torch.quantize makes one of values, QuantizedTensor.from_parts one of codes and scales."
                )
                raise invalid_type("data", _described(codes), "a QuantizedTensor", remedy)
            return torch.nn.Parameter(codes, requires_grad=requires_grad)  # type: ignore[return-value]
        if not (isinstance(cast, Cast) and isinstance(codes, torch.Tensor)):
            raise invalid_type(
                "QuantizedTensor", f"codes of {kind_of(codes)} under a cast of {kind_of(cast)}", "a tensor and a Cast",
                "QuantizedTensor.from_parts(codes, scale, tensor_scale, format) checks and wraps parts.",
            )  # fmt: skip
        strides = _strides_of(codes, axis, shape, cast.format)
        # A view that inference mode makes of an ordinary tensor is ordinary too, as its codes are.
        with torch.inference_mode(codes.is_inference()) if torch.is_inference_mode_enabled() else _NOTHING:
            wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, tuple(shape), strides=strides, dtype=dtype, device=codes.device
            )
        torch._C._set_throw_on_mutable_data_ptr(wrapper)  # code that reads memory past our methods gets an error
        wrapper.codes, wrapper.scale, wrapper.tensor_scale = codes, scale, tensor_scale
        # Delayed scaling has done its work once codes exist; requantizing has only the tensor itself to go by.
        wrapper.cast = dataclasses.replace(cast, scaling=Current()) if isinstance(cast.scaling, Delayed) else cast
        wrapper.axis, wrapper.root = axis, root
        wrapper._shape, wrapper._dtype = shape, dtype  # as torch presents them, for readers in every call
        return wrapper

    if TYPE_CHECKING:  # torch.Tensor has another one

        def __init__(self, *arguments: object, **options: object) -> None: ...

    @classmethod
    def from_parts(
        cls, codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, format: ScaledFormat | str,
        *, axis: int = -1, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32,
        hadamard: Hadamard | None = None, packed: bool = False,
    ) -> "QuantizedTensor":  # fmt: skip
        """Wrap codes and scales that exist already, for instance of a checkpoint. Nothing is copied.

        `codes`, `scale`, `tensor_scale`: as the attributes of that name; `format`: a ScaledFormat or its name. `shape`
        None is that of the codes (unpacked), which have their contraction axis last; a vector has one row of codes,
        [1, K], and ``shape=(K,)``. `packed`: the codes are bytes as `packed_codes` gives them; those of FP6 are then
        unpacked into a copy. Block scales and FP4 codes may also be in torch's dtypes for them (float8_e8m0fnu,
        float8_e4m3fn, float4_e2m1fn_x2); their bytes are kept. Raises InvalidValueError for shapes that do not fit each
        other, InvalidTypeError for dtypes.
        """
        if not isinstance(format, str | ScaledFormat):
            raise invalid_type("format", type(format), "a ScaledFormat such as formats.MXFP8, or its name")
        if hadamard is not None and not isinstance(hadamard, Hadamard):
            raise invalid_type("hadamard", type(hadamard), "None or Hadamard(size, sign_mask)")
        cast, token = _operators.constants_of_parts(format, tensor_scale is None, hadamard)
        storage = _operators.storage_of(token)
        if not isinstance(codes, torch.Tensor):
            raise invalid_type("codes", type(codes), f"a torch.Tensor of torch.{storage.codes_dtype}")
        if storage.codes_dtype == "uint8":
            codes = as_bytes(codes, storage.format.element.name)
        scale = as_bytes(scale, storage.format.scale.name)
        if packed:
            codes = unpacked(codes, storage, shape, axis)
        if shape is None:
            last = codes.shape[-1] * storage.codes_per_byte if codes.dim() else 1
            shape = (*codes.shape[:-1], last)
            if normalize_axis(axis, len(shape)) != len(shape) - 1:
                shape = (shape[1], shape[0])
        needed, remedy = "a tuple of sizes, ints >= 0", "It is the shape of the original tensor."
        shape = check_sizes("shape", shape, needed, remedy, kinds=(int, torch.SymInt))
        axis = normalize_axis(axis, len(shape))
        if dtype not in INPUT_DTYPES:
            raise invalid_type("dtype", dtype, "torch.float32, torch.bfloat16 or torch.float16")
        _check_parts(codes, scale, tensor_scale, token, axis, shape)
        if codes.requires_grad or scale.requires_grad or (tensor_scale is not None and tensor_scale.requires_grad):
            tensor_scale = None if tensor_scale is None else tensor_scale.detach()
            codes, scale = codes.detach(), scale.detach()
        return cls(codes, scale, tensor_scale, cast, axis=axis, shape=shape, dtype=dtype)

    @classmethod
    def from_record(cls, record: "Record", *, dtype: torch.dtype = torch.float32) -> "QuantizedTensor":
        """The tensor of a quantized `microfloat.checkpoint.Record`, over the mapped file where the layout allows it.

        `dtype`: what `dequantize` returns. Raises CheckpointError for a record whose scales are missing or do not fit,
        InvalidTypeError for a plain one.
        """
        codes, scale, level, fmt = record.parts(per_expert=True)
        wrapped = codes_dtype(fmt.element)
        return cls.from_parts(
            _wrapped(codes).view(wrapped), _wrapped(scale), None if level is None else _wrapped(level), fmt,
            axis=record.axis, shape=record.logical_shape, dtype=dtype, packed=fmt.element.bits == 6,
        )  # fmt: skip

    def to_record(self, name: str) -> "Record":
        """The `microfloat.checkpoint.Record` of this tensor under `name`; it shares memory on a CPU."""
        from microfloat.checkpoint import Record

        got = f"a QuantizedTensor ({self.format})"
        if self.hadamard is not None:
            remedy = "No checkpoint holds a Hadamard transform; dequantize first."
            raise invalid_type("to_record", got, "a tensor without one", remedy)
        scale, level = (None if part is None else part.detach().cpu() for part in (self.scale, self.tensor_scale))
        if self.is_per_expert:
            scale, level = (part if part is None or part.dim() != 1 else part[:, None, None] for part in (scale, level))
        if self.format.is_tile and self.codes.dim() > 2:
            if self.codes.shape[-2] % (self.format.block[0] or 1):
                remedy = "Its tiles reach over several matrices; quantize them one by one."
                raise invalid_type("to_record", got, "whole tiles in every matrix", remedy)
            scale = scale.reshape(*self.codes.shape[:-2], -1, scale.shape[-1])  # type: ignore[union-attr]
        if level is not None and self.format.tensor_scale == "row":
            level = level.reshape(*self.codes.shape[:-1], 1)
        return Record(
            name, self.packed_codes().detach().cpu().numpy(), scale.numpy(),  # type: ignore[union-attr]
            None if level is None else level.numpy(), self.format, tuple(self.shape),
            axis=self.axis,
        )  # fmt: skip

    @classmethod
    def from_operand(
        cls, operand: Operand, cast: Cast, *, axis: int, shape: Sequence[int], dtype: torch.dtype
    ) -> "QuantizedTensor":
        """The tensor of an operand form, with the leading axes of the original `shape`; `axis` >= 0."""
        shape = tuple(shape)
        return cls(
            operand.codes.contiguous().view(*leading_axes(shape, axis), operand.codes.shape[1]),
            operand.scale.reshape(scale_shape(cast.format, shape, axis, tuple(operand.scale.shape))),
            operand.tensor_scale, cast, axis=axis, shape=shape, dtype=dtype,
        )  # fmt: skip

    def to_operand(self) -> Operand:
        """The matrix [R, C] that a GEMM sees, sharing storage."""
        codes, scale, tensor_scale, fmt = self.codes, self.scale, self.tensor_scale, self.format
        rows = math.prod(codes.shape[:-1])
        if self.is_per_expert:  # each row has the scale of its expert
            of_rows = self.upper.repeat_interleave(codes.shape[1])[:, None]
            scale, tensor_scale = (of_rows, None) if tensor_scale is None else (scale, of_rows)
            fmt = dataclasses.replace(fmt, block=(1, None)) if tensor_scale is None else fmt
            if fmt.is_tile:  # and so has the part of a tile in it; tiles end where an expert does
                scale = scale.repeat_interleave(fmt.block[0] or 1, 0)[:rows]
                fmt = dataclasses.replace(fmt, block=(1, fmt.block[1]))
        if codes.dim() != 2:
            codes = codes.reshape(rows, codes.shape[-1])
        if scale.dim() > 2:
            scale = scale.reshape(rows, scale.shape[-1])
        length = self._shape[self.axis] if self._shape else 1
        return Operand(codes, scale, tensor_scale, fmt, rows, length, self.hadamard)

    @property
    def upper(self) -> torch.Tensor:
        """The part that the most elements share: the tensor scale, else the scale."""
        return self.scale if self.tensor_scale is None else self.tensor_scale

    @property
    def is_per_expert(self) -> bool:
        """True for experts [E, N, K], each of which has a scale of its own where a tensor has one."""
        return self.upper.dim() == 1

    @property
    def format(self) -> ScaledFormat:
        """The ScaledFormat."""
        return self.cast.format

    @property
    def hadamard(self) -> Hadamard | None:
        """The Hadamard transform that the codes are under, or None."""
        return self.cast.hadamard

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """A plain tensor of the original shape in `dtype` (None: this tensor's)."""
        dtype = self.dtype if dtype is None else dtype
        if dtype not in (*INPUT_DTYPES, torch.float64):
            raise invalid_type("dtype", dtype, "a floating-point dtype of at least 16 bits")
        if self.requires_grad and torch.is_grad_enabled() and not _operators.transforms_active():
            return Decoded.apply(self, dtype)
        if _operators.is_tracing(self.codes):
            parts = (self.codes, self.scale, self.tensor_scale)
            return torch.ops.microfloat.dequantize(*parts, self.token, self.axis, self.shape, dtype)
        _operators.refuse_transforms("dequantize", is_verb=True)
        return self.decoded(dtype)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """`dequantize` where values are at hand."""
        values = backends.choose("reference", self.device).dequantize(self.to_operand(), dtype)
        if values.shape == self.shape and self.axis == self.dim() - 1:
            return values  # no view, since autograd lets nobody write into a view that a Function returns
        if self.dim() < 2:
            return values.reshape(self.shape)
        return values.view(*leading_axes(tuple(self.shape), self.axis), values.shape[1]).movedim(-1, self.axis)

    def packed_codes(self) -> torch.Tensor:
        """The codes as uint8 bytes without gaps, operand form: FP6 four in three bytes, others as they are stored."""
        codes = self.codes.view(torch.uint8)
        return pack_fp6(codes) if width_of(self.format) == 6 else codes

    def parts(self) -> dict[str, torch.Tensor]:
        """The plain tensors of this one, by attribute name."""
        return dict(zip(_PARTS, self.part_list(), strict=False))

    def part_list(self) -> list[torch.Tensor]:
        """Codes, scale, and tensor scale where there is one."""
        return [self.codes, self.scale] if self.tensor_scale is None else [self.codes, self.scale, self.tensor_scale]

    @property
    def token(self) -> str:
        """The Cast as a string, which is how compiled code carries it."""
        return _operators.token_of(self.cast)

    def map_parts(
        self, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
    ) -> "QuantizedTensor":
        """This tensor with `function` applied to each of its plain tensors, and its dtype replaced by `dtype`."""
        tensor_scale = None if self.tensor_scale is None else function(self.tensor_scale)
        codes, scale, dtype = function(self.codes), function(self.scale), self.dtype if dtype is None else dtype
        return self._remade(codes, scale, tensor_scale, axis=self.axis, shape=self.shape, dtype=dtype)

    def _remade(
        self, codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, *, axis: int,
        shape: Sequence[int], dtype: torch.dtype, root: "QuantizedTensor | None" = None,
    ) -> "QuantizedTensor":  # fmt: skip
        """A tensor of these parts under the same Cast."""
        return type(self)(codes, scale, tensor_scale, self.cast, axis=axis, shape=shape, dtype=dtype, root=root)

    def __get_tensor_shard__(self, index: object) -> "QuantizedTensor":
        """The tensor that a distributed checkpoint reads, or fills with the pieces of another one."""
        vars(view := self.map_parts(lambda part: part))["_is_filled"] = True
        return view

    def _about_parameter(self) -> dict:
        return vars(self)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The CPU copy of a parameter's initial value that `quantized_model_init` was asked to keep, or None."""
        return self._about_parameter().get(INIT_VAL)

    def clear_high_precision_init_val(self) -> None:
        """Free that copy."""
        self._about_parameter().pop(INIT_VAL, None)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: Sequence[object] = (), kwargs: Options | None = None
    ) -> object:
        """Products with a plain tensor run as `microfloat.torch.linear`; other functions are torch's own."""
        product = PRODUCTS.get(func)
        if product is not None and (result := product(*args, **(kwargs or {}))) is not None:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # `__torch_dispatch__` is `aten_table.dispatch`.

    def __tensor_flatten__(self) -> tuple[list[str], Flattened]:
        """Names of the parts, and the other fields, with those sizes, where they are numbers, that the parts lack."""
        more = None
        if type(self.shape[self.axis]) is int and type(self.codes.shape[-1]) is int:
            told = _shape_of(self.codes, self.cast, self.axis)
            more = None if len(told) == self.dim() and told == self.shape else (self.dim(), self.shape[self.axis])
        return list(self.parts()), (self.cast, self.axis, self.dtype, self.root is not None, more)

    def _stable_hash_for_caching(self) -> str:
        parts = [(name, part.dtype, tuple(part.shape)) for name, part in self.parts().items()]
        return f"{self.token} {self.axis} {self.dtype} {tuple(self.shape)} {parts}"

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, torch.Tensor], context: Flattened,
        outer_size: Sequence[int] | None = None, outer_stride: Sequence[int] | None = None,
    ) -> "QuantizedTensor":  # fmt: skip
        cast, axis, dtype, is_slice, more = context
        if outer_size is None:  # of a caller that leaves it to the parts
            outer_size = _shape_of(parts["codes"], cast, axis)
            if more is not None:
                outer_size = (more[1],) if more[0] == 1 else (*outer_size[:axis], more[1], *outer_size[axis + 1 :])
        return QuantizedTensor(
            parts["codes"], parts["scale"], parts.get("tensor_scale"), cast, axis=axis, shape=outer_size, dtype=dtype,
            root=UNKNOWN if is_slice else None,
        )  # fmt: skip

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        described = (f"{name}={dtype_name(part.dtype)}{list(part.shape)}" for name, part in self.parts().items())
        transform = f", {self.hadamard}" if self.hadamard else ""
        device = f", device='{self.device}'" if self.device.type != "cpu" else ""
        return (
            f"QuantizedTensor({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, axis={self.axis}, "
            f"{', '.join(described)}{transform}{device})"
        )

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> "QuantizedTensor":
        """Itself, or a copy whose codes and scales are contiguous."""
        if all(part.is_contiguous() for part in self.parts().values()):
            return self
        return self.map_parts(lambda part: part.clone(memory_format=torch.contiguous_format))

    def __setattr__(self, name: str, value: object) -> None:
        """Parts may be replaced by parts that fit; the cast and the axis are fixed."""
        if name in ("cast", "axis") and name in self.__dict__:
            raise NotSupportedError(
                f"{name}: got an assignment, but {name} of a QuantizedTensor is fixed. "
                "Make another tensor with QuantizedTensor.from_parts."
            )
        if name in _PARTS and "axis" in self.__dict__:
            parts = (value if name == part else getattr(self, part) for part in _PARTS)
            _check_parts(*parts, self.token, self.axis, tuple(self.shape))  # type: ignore[misc]
        super().__setattr__(name, value)

    @property
    def data(self) -> "QuantizedTensor":  # type: ignore[override]
        """This tensor detached; assigning another QuantizedTensor takes over its parts."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: object) -> None:
        if not isinstance(value, QuantizedTensor):
            remedy = "Write values with copy_(values), which quantizes them."
            raise invalid_type("data", _described(value), "a QuantizedTensor", remedy)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        vars(self).update({name: vars(value)[name] for name in _FIELDS})

    def share_memory_(self) -> "QuantizedTensor":
        """Move codes and scales to shared memory; returns this tensor."""
        for part in self.parts().values():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """All parts are in shared memory."""
        return all(part.is_shared() for part in self.parts().values())

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales; ``numel() * element_size()`` counts the values."""
        return sum(part.nbytes for part in self.part_list())

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage without memory, of `nbytes` bytes; torch's checkpoints compare sizes and save the parts."""
        if _operators.is_tracing(self.codes):
            return super().untyped_storage()
        return torch.UntypedStorage(self.nbytes, device="meta")

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedTensor":
        result = self.map_parts(lambda part: part.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            result = torch.nn.Parameter(result, requires_grad=self.requires_grad)
        memo[id(self)] = result
        for name, value in attached_to(self).items():
            setattr(result, name, copy.deepcopy(value, memo))
        return result  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., object], tuple[object, ...]]:
        is_parameter = isinstance(self, torch.nn.Parameter)
        description = {
            "cast": cast_to_data(self.cast), "axis": self.axis, "shape": list(self.shape), "dtype": self.dtype,
            "requires_grad": self.requires_grad if is_parameter else None,
        }  # fmt: skip
        # A slice is saved as a tensor of its own.
        whole = self if self.root is None else typing.cast(QuantizedTensor, self.clone())
        codes = whole.codes.view(torch.uint8)  # torch cannot unpickle float8 storages of a plain pickle
        return _rebuild_quantized_tensor, (codes, whole.scale, whole.tensor_scale, description)


def _described(value: object) -> object:
    return f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value)


def tensors_of(
    parts: Sequence[torch.Tensor], casts: Sequence[Cast], tokens: Sequence[str], axes: Sequence[int],
    shape: Sequence[int], dtype: torch.dtype,
) -> list[QuantizedTensor]:  # fmt: skip
    """The tensors whose parts an operator has returned one after another.

    `tokens`: of the casts; a compiler takes both as constants.
    """
    made = []
    for cast, token, axis in zip(casts, tokens, axes, strict=True):
        held = 3 if _operators.storage_of(token).tensor_scale else 2
        level = parts[2] if held == 3 else None
        made.append(QuantizedTensor(parts[0], parts[1], level, cast, axis=axis, shape=shape, dtype=dtype))
        parts = parts[held:]
    return made


def attached_to(q: QuantizedTensor) -> dict[str, object]:
    """Attributes besides the tensor's own: the copy of its initial value, and attributes that a user has set."""
    own = (*_FIELDS, "whole", "_is_filled", "_is_param")
    return {name: value for name, value in vars(q).items() if name not in own}


class Decoded(torch.autograd.Function):
    """The values of a stored weight, whose gradient goes to it."""

    @staticmethod
    def forward(ctx: object, weight: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        return weight.dequantize(dtype)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _rebuild_quantized_tensor(
    codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, description: Options
) -> QuantizedTensor:
    """The tensor that a file or a pickle describes, its parts checked, since a file may be damaged."""
    cast = cast_from_data(description["cast"])
    if cast is None:
        raise invalid_value("cast", "None in a saved tensor", "a description of a Cast", "The file is damaged.")
    axis, shape = description["axis"], tuple(description["shape"])
    codes = codes.view(codes_dtype(cast.format.element))
    _check_parts(codes, scale, tensor_scale, cast.contents, axis, shape)
    q = QuantizedTensor(codes, scale, tensor_scale, cast, axis=axis, shape=shape, dtype=description["dtype"])
    if description["requires_grad"] is None:
        return q
    return torch.nn.Parameter(q, requires_grad=description["requires_grad"])  # type: ignore[return-value]


torch.serialization.add_safe_globals([_rebuild_quantized_tensor, QuantizedTensor])


def _wrapped(array: np.ndarray) -> torch.Tensor:
    """A tensor over the memory of a NumPy array, which is private to this process; a copy of read-only memory."""
    view = array.view()
    try:
        view.flags.writeable = True
    except ValueError:
        view = array.copy()
    return torch.from_numpy(view)


def _check_parts(
    codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, token: str, axis: int,
    shape: tuple[int, ...],
) -> None:  # fmt: skip
    """Dtypes, devices and shapes of the parts of one quantized tensor (docs/numerics.md 7.1)."""
    storage = _operators.storage_of(token)
    fmt, layout = storage.format, array_layout(storage, shape, axis)
    for name, expected, part in zip(layout._fields, layout, (codes, scale, tensor_scale), strict=True):
        if expected is None:
            if part is not None:
                raise invalid_value(name, "a tensor", f"None for {fmt.name}, cast without a tensor scale")
            continue
        needed = f"a tensor of torch.{expected.dtype} for {fmt.name}"
        if not isinstance(part, torch.Tensor) or isinstance(part, QuantizedTensor):
            raise invalid_type(name, type(part), needed)
        if part.dtype != getattr(torch, expected.dtype):
            raise invalid_type(name, part.dtype, needed, "View or convert it first.")
        size = expected.shape
        if size == () and len(shape) == 3 and part.dim() == 1:
            size = shape[:1]  # one for each expert
        if tuple(part.shape) != tuple(size):
            needed = f"shape {tuple(size)} for {fmt.name} of shape {shape}, axis {axis}"
            remedy = "Stored parts are in operand form, unpadded, the contraction axis last."
            raise invalid_value(name, f"shape {tuple(part.shape)}", needed, remedy)
        if part.device != codes.device:
            raise invalid_value(name, f"a tensor on {part.device}", f"one on {codes.device}, where the codes are")
        if part.numel() and any(size > 1 and not step for size, step in zip(part.shape, part.stride(), strict=True)):
            got, needed = f"an expanded tensor of strides {part.stride()}", "memory of its own for every entry"
            raise invalid_value(name, got, needed, "Call .contiguous() first.")
    check_width(codes, fmt)


def _shape_of(codes: torch.Tensor, cast: Cast, axis: int) -> tuple[int, ...]:
    """The shape of a tensor of two dimensions or more with these codes, if its contraction length is not padded."""
    *leading, width = codes.shape
    return (*leading[:axis], width * cast.format.element.codes_per_byte, *leading[axis:])


def _strides_of(codes: torch.Tensor, axis: int, shape: Sequence[int], fmt: ScaledFormat) -> tuple[int, ...]:
    """Strides in elements: those of the codes, whose rows may be padded; the contraction axis is innermost.

    The leading axes of the codes are those of `shape` without `axis`.
    """
    *leading, last = codes.stride()
    if codes.is_contiguous():  # padding of a row shows where rows are strided only
        leading, last = [max(shape[axis], 1)] if shape else [], 1
        for size in reversed(codes.shape[1:-1]):
            leading.insert(0, leading[0] * max(size, 1))
    else:
        per_byte = 2 if width_of(fmt) == 4 else 1
        leading = [stride * per_byte for stride in leading]
    if len(shape) < 2:
        return (last,) * len(shape)
    return (*leading[:axis], last, *leading[axis:])
