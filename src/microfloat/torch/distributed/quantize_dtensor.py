"""`quantize` of a DTensor: every rank casts its part, to the bytes that one process would make of the whole.

Blocks lie within one rank, and one scale of several ranks comes from the largest of their amaxes.
"""

import math

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from microfloat.arguments import normalize_axis
from microfloat.errors import NotSupportedError, invalid_value
from microfloat.recipes import Cast, as_cast
from microfloat.recipes.usages import CastLike
from microfloat.torch import backends
from microfloat.torch._typing import Seed
from microfloat.torch.scaling.amax_reduction import largest
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.checks import check_tensor
from microfloat.torch.tensor.ops import Real, quantize_values


def quantize_sharded(
    x: DTensor, cast: CastLike, axis: int, seed: Seed, stream: int, amax: Real, scale_enc: Real, backend: str
) -> DTensor:
    """The DTensor, placed as `x`, whose local tensor is this rank's part of ``quantize(x.full_tensor(), ...)``.

    All ranks of the mesh call. Raises NotSupportedError for parts of a sum and for casts that depend on more than a
    part and an amax, InvalidValueError for parts that cut a block.
    """
    cast = as_cast(cast)
    if isinstance(axis, tuple | list) or _operators.is_tracing(x):
        got = "a pair of axes" if isinstance(axis, tuple | list) else "compiled code"
        raise NotSupportedError(
            f"quantize: got {got} for a DTensor, needed one axis and eager mode. Call it for each axis, outside of it."
        )
    if not all(type(one) in (Replicate, Shard) for one in x.placements):
        raise NotSupportedError(
            f"quantize: got a DTensor placed {x.placements}, needed Shard and Replicate alone, since codes of parts of "
            "a sum are no parts of its codes. Call x.redistribute(placements=...) first."
        )
    local, last = x.to_local().detach(), normalize_axis(axis, x.dim())
    check_tensor("x", local)
    cut = [(i, one.dim % x.dim()) for i, one in enumerate(x.placements) if isinstance(one, Shard)]
    cut = [(i, dim) for i, dim in cut if x.device_mesh.size(i) > 1]
    _check_cast(cast, seed, amax, cut, x.device_mesh.size())
    _check_blocks(x, cast, last, cut)
    if cast.takes_amax and amax is None and not cast.is_static:
        is_of_rows = cast.tensor_scale == "row"
        groups = [x.device_mesh.get_group(i) for i, dim in cut if dim == last or not is_of_rows]
        if groups:
            amax = largest(_amax(local, last, is_of_rows), groups)
    made = quantize_values(local, cast, axis, seed, stream, amax, scale_enc, backend)
    shape = [*x.shape[:last], *x.shape[last + 1 :], x.shape[last]]  # in the order of the codes
    stride = torch.empty(shape, device="meta").movedim(-1, last).stride()
    return DTensor.from_local(
        made, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=stride,  # type: ignore[arg-type]
    )  # fmt: skip


def _check_cast(cast: Cast, seed: Seed, amax: Real, cut: list[tuple[int, int]], ranks: int) -> None:
    """Raise for a cast that depends on more than a part and an amax."""
    got = ""
    if cast.is_stochastic and (cut or (seed is None and ranks > 1)):
        got = "stochastic rounding, whose noise counts the elements of the whole"
    elif cut and cast.hadamard is not None and cast.takes_amax:
        got = "a Hadamard transform before an amax of several ranks"
    elif cut and isinstance(amax, torch.Tensor) and amax.dim() > 0:
        got = "an amax for each row, of which a rank has some"
    if got:
        remedy = "Quantize x.full_tensor(), or leave it out."
        raise NotSupportedError(f"quantize: got {got}, for a DTensor whose parts lie on {ranks} ranks. {remedy}")


def _check_blocks(x: DTensor, cast: Cast, axis: int, cut: list[tuple[int, int]]) -> None:
    """Raise InvalidValueError where ranks divide a block, or a byte of two codes."""
    height, width = cast.format.block
    parts = list(x.shape)
    for i, dim in cut:
        parts[dim] = -(-parts[dim] // x.device_mesh.size(i))  # as torch.chunk cuts it
        if dim == axis:
            needs_all = width is None and not (cast.takes_amax and height is None)
            unit = math.lcm(width or 1, cast.format.element.codes_per_byte, cast.hadamard.size if cast.hadamard else 1)
            size = parts[dim]
        else:  # rows in front of the last are counted together
            inner = math.prod(size for d, size in enumerate(x.shape[dim + 1 :], dim + 1) if d != axis)
            outer = math.prod(size for d, size in enumerate(x.shape[:dim]) if d != axis)
            needs_all = height is None and width is not None
            unit, size = height or 1, parts[dim] * inner
            needs_all |= unit > 1 and outer > 1
        if parts[dim] < x.shape[dim] and (needs_all or size % unit):
            raise invalid_value(
                "x", f"a DTensor of shape {tuple(x.shape)} in parts of {parts[dim]} along dimension {dim}",
                "whole scopes of scales on one rank" if needs_all else f"parts of whole blocks of {cast.format.name}, "
                f"multiples of {unit}",
                "Place it otherwise, x.redistribute(placements=...), or quantize x.full_tensor().",
            )  # fmt: skip


def _amax(local: torch.Tensor, axis: int, is_of_rows: bool) -> torch.Tensor:
    """The amax of a rank's part, () or [R, 1]; NaN is ignored."""
    if not is_of_rows:
        return backends.amax_of(local)
    matrix = local.movedim(axis, -1).reshape(-1, local.shape[axis]) if local.dim() else local.reshape(1, 1)
    magnitudes = matrix.float().abs().masked_fill(matrix.isnan(), 0.0)
    return torch.nn.functional.pad(magnitudes, (0, 1)).amax(1, keepdim=True)  # of a rank without columns: 0
