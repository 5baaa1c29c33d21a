"""Functional collectives on a QuantizedTensor: codes and scales travel, as bytes."""

import math

import torch

from microfloat.errors import NotSupportedError
from microfloat.torch._tensor_ops.table import Arguments, Operator, Options, raw, refusal, register, upper_name
from microfloat.torch.tensor import QuantizedTensor

__all__: list[str] = []


def _gather(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """The rows of all ranks below each other, what quantizing the gathered values gives: scales are those of rows."""
    q, *rest = args
    if not isinstance(q, QuantizedTensor) or q._is_shard:  # full_tensor asks for shards of a parameter
        raise refusal(func, args, kwargs)
    size = kwargs.get("group_size", rest[0] if rest else 1)
    height = q.format.block[0] or 1
    if q.axis == 0 or getattr(q, upper_name(q)).dim() < 2 or math.prod(q.shape[:-1]) % height:
        raise NotSupportedError(
            f"all_gather_into_tensor: got a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}, axis {q.axis}, "
            f"needed rows along the first axis, whole tiles of {height} rows, and a scale for each block or row. "
            "Ranks have scales of their own for whole tensors: gather values, or cast under one amax and gather parts."
        )
    parts = [func(raw(part.contiguous()), *rest, **kwargs).view(part.dtype) for part in q.part_list()]
    shape = (q.shape[0] * size, *q.shape[1:])
    return type(q)(
        parts[0], parts[1], parts[2] if len(parts) > 2 else None, q.cast, axis=q.axis, shape=shape, dtype=q.dtype
    )


def _wait(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    return args[0].map_parts(lambda part: func(raw(part)).view(part.dtype))


if torch.distributed.is_available():
    register(torch.ops._c10d_functional.all_gather_into_tensor.default)(_gather)
    register(torch.ops._c10d_functional.wait_tensor.default)(_wait)
