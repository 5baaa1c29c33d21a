"""quantize, dequantize and scaled_matmul as opaque operators: what tracing compilers see of them.

A compiler must not look inside: Inductor turns divisions into approximate ones on CUDA, and host-side decisions would
break its graphs (docs/numerics.md 1.5). In eager mode these operators are not used. Casts travel as strings, since
operators take no objects; a token is derived from the Cast's contents and means the same in another process.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from microfloat.arguments import normalize_axis
from microfloat.errors import NotSupportedError
from microfloat.formats import ScaledFormat
from microfloat.layout import Storage, array_layout
from microfloat.recipes import Cast, Hadamard, as_cast
from microfloat.recipes._serialize import cast_of, format_from_data
from microfloat.recipes.core import as_scaled_format

_library = torch.library.Library("microfloat", "FRAGMENT")
_library.define(
    "quantize(Tensor x, str cast, int axis, Tensor? seed, int stream, Tensor? amax, Tensor? scale_enc, str backend) "
    "-> Tensor[]"
)
_library.define(
    "dequantize(Tensor codes, Tensor scale, Tensor? tensor_scale, str cast, int axis, SymInt[] shape, ScalarType dtype)"
    " -> Tensor"
)
_library.define(
    "scaled_matmul(Tensor[] a, str a_cast, int a_axis, SymInt[] a_shape, Tensor[] b, str b_cast, int b_axis, "
    "SymInt[] b_shape, Tensor? bias, ScalarType dtype, str accumulate, str backend) -> Tensor"
)


def is_tracing(tensor: Any) -> bool:
    """True where this Python code runs under a compiler's tracing, or on the meta device, rather than on values."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return isinstance(tensor, torch.Tensor) and tensor.is_meta


def has_tangent(*tensors: Any) -> bool:
    """True where a tensor carries a tangent of forward-mode AD."""
    return forward_ad._current_level >= 0 and any(
        isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


def refuse_transforms(operation: str, x: Any = None) -> None:
    """Raise NotSupportedError inside a transform of torch.func, where torch.jit records, and for a tangent of `x`."""
    transforms = torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
    if transforms or has_tangent(x):
        raise NotSupportedError(
            f"{operation}: got a transform of torch.func (vmap, grad, jvp, ...), forward-mode AD or torch.jit.trace "
            "around it, needed an ordinary call: it has no derivative and no batching rule. Call it on whole batches, "
            "outside of the transform."
        )


def token_of(cast: Cast) -> str:
    """The token of a Cast; Dynamo takes the result as a constant, if it holds the Cast as one."""
    return cast.contents


def constant_cast(cast: Cast | ScaledFormat | str) -> Cast:
    """`as_cast` as a constant for Dynamo, which takes functions of strings for that, but (torch 2.11) not of Casts."""
    if isinstance(cast, Cast):
        return _written_cast(cast.contents)
    return _default_cast(cast.contents) if isinstance(cast, ScaledFormat) else _named_cast(cast)


def constant_token(cast: Cast | ScaledFormat | str) -> str:
    """The token of `constant_cast`, by the same ways."""
    if isinstance(cast, Cast):
        return cast.contents
    return _default_token(cast.contents) if isinstance(cast, ScaledFormat) else _named_token(cast)


def constants_of_parts(fmt: ScaledFormat | str, is_one_level: bool, hadamard: Hadamard | None) -> tuple[Cast, str]:
    """The Cast that parts of a format follow, and its token, by the same ways: two levels need a tensor scale."""
    name = fmt if isinstance(fmt, str) else None
    contents = None if isinstance(fmt, str) else fmt.contents
    signs = None if hadamard is None else hadamard.sign_mask
    return _cast_of_parts(name, contents, is_one_level, signs), _token_of_parts(name, contents, is_one_level, signs)


def _token_of_parts(name: str | None, contents: str | None, is_one_level: bool, signs: int | None) -> str:
    return _cast_of_parts(name, contents, is_one_level, signs).contents


def _cast_of_parts(name: str | None, contents: str | None, is_one_level: bool, signs: int | None) -> Cast:
    fmt = as_scaled_format(name) if name is not None else format_from_data(json.loads(str(contents)))
    rule = "one_level_e4m3" if is_one_level and fmt.scale.name == "E4M3" else None
    return Cast(fmt, rule, hadamard=None if signs is None else Hadamard(16, signs))


def storage_of(token: str) -> Storage:
    """The storage of a cast; Dynamo takes the result as a constant."""
    cast = cast_of(token)
    return Storage.of(cast.format, cast.hadamard, cast.tensor_scale)


def _written_cast(contents: str) -> Cast:
    return cast_of(contents)


def _default_cast(contents: str) -> Cast:
    return as_cast(format_from_data(json.loads(contents)))


def _default_token(contents: str) -> str:
    return _default_cast(contents).contents


def _named_cast(name: str) -> Cast:
    return as_cast(name)


def _named_token(name: str) -> str:
    return as_cast(name).contents


# What torch.compiler.assume_constant_result does; that function would import all of Dynamo.
for _function in (
    token_of, storage_of, _cast_of_parts, _token_of_parts, _written_cast, _default_cast, _default_token, _named_cast,
    _named_token,
):  # fmt: skip
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _quantize(
    x: torch.Tensor, token: str, axis: int, seed: Any, stream: int, amax: Any, scale_enc: Any, backend: str
) -> list[torch.Tensor]:
    from microfloat.torch.ops import quantize_values

    parts = quantize_values(x, cast_of(token), axis, seed, stream, amax, scale_enc, backend).part_list()
    # Kernels write 1x128 scales column-major; a compiler relies on the strides that the fake promises.
    return [part.contiguous() for part in parts]


def fake_quantize(
    x: torch.Tensor, token: str, axis: int, seed: Any, stream: int, amax: Any, scale_enc: Any, backend: str
) -> list[torch.Tensor]:
    """Tensors as `quantize` returns them, without values."""
    shape = tuple(x.shape)
    layout = array_layout(storage_of(token), shape, normalize_axis(axis, len(shape)))
    return [x.new_empty(part.shape, dtype=getattr(torch, part.dtype)) for part in layout if part is not None]


def _tensor(parts: Sequence[Any], token: str, axis: int, shape: Any, dtype: torch.dtype) -> Any:
    from microfloat.torch.tensor import QuantizedTensor

    codes, scale, *rest = parts
    return QuantizedTensor(codes, scale, rest[0] if rest else None, cast_of(token), axis=axis, shape=shape, dtype=dtype)


def _dequantize(
    codes: torch.Tensor, scale: torch.Tensor, tensor_scale: Any, token: str, axis: int, shape: Any, dtype: torch.dtype
) -> torch.Tensor:
    return _tensor((codes, scale, tensor_scale), token, axis, shape, torch.float32).decoded(dtype).contiguous()


def _fake_dequantize(
    codes: torch.Tensor, scale: torch.Tensor, tensor_scale: Any, token: str, axis: int, shape: Any, dtype: torch.dtype
) -> torch.Tensor:
    return codes.new_empty(shape, dtype=dtype)


def _scaled_matmul(
    a: Any, a_token: str, a_axis: int, a_shape: Any, b: Any, b_token: str, b_axis: int, b_shape: Any,
    bias: Any, dtype: torch.dtype, accumulate: str, backend: str,
) -> torch.Tensor:  # fmt: skip
    from microfloat.torch.ops import multiply_values

    left, right = _tensor(a, a_token, a_axis, a_shape, dtype), _tensor(b, b_token, b_axis, b_shape, dtype)
    return multiply_values(left, right, bias, dtype, accumulate, backend)


def _fake_scaled_matmul(
    a: Any, a_token: str, a_axis: int, a_shape: Any, b: Any, b_token: str, b_axis: int, b_shape: Any,
    bias: Any, dtype: torch.dtype, accumulate: str, backend: str,
) -> torch.Tensor:  # fmt: skip
    rows = [1, 1]
    for side, (shape, axis) in enumerate(((a_shape, a_axis), (b_shape, b_axis))):
        for position, size in enumerate(shape):
            rows[side] = rows[side] * (1 if position == axis else size)
    return a[0].new_empty(rows, dtype=dtype)


for _name, _run, _fake in (
    ("quantize", _quantize, fake_quantize),
    ("dequantize", _dequantize, _fake_dequantize),
    ("scaled_matmul", _scaled_matmul, _fake_scaled_matmul),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"microfloat::{_name}", _fake, lib=_library)
