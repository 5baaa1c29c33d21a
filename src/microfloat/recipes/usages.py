"""The arguments of `quantize` beside its tensor, which the oracle, torch and JAX check alike."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from microfloat.arguments import axes_of, for_each
from microfloat.errors import invalid_value
from microfloat.formats import ScaledFormat
from microfloat.recipes.cast import Cast, as_cast

CastLike: TypeAlias = Cast | ScaledFormat | str


class Usage(NamedTuple):
    """One cast of a matrix, with what `quantize` takes for it."""

    cast: Cast
    axis: int
    stream: Any
    amax: Any
    scale_enc: Any


def usages_of(cast: Any, axis: Any, ndim: int, stream: Any, amax: Any, scale_enc: Any) -> tuple[Usage, ...]:
    """The casts that one call of `quantize` makes: one, or two for a pair of axes.

    A pair of arguments holds one for each axis. Any other argument serves both; an amax or an encode scale serves those
    of two casts that take it. Raises InvalidValueError and InvalidTypeError.
    """
    axes = axes_of(axis, ndim)
    casts = [as_cast(one) for one in for_each("cast", cast, len(axes))]

    def of_each(argument: str, value: Any, takes: list[bool]) -> tuple[Any, ...]:
        values = for_each(argument, value, len(axes))
        if isinstance(value, tuple | list) or not any(takes):
            return values
        return tuple(one if taken else None for one, taken in zip(values, takes, strict=True))

    amaxes = of_each("amax", amax, [one.takes_amax for one in casts] if len(axes) == 2 else [])
    scales = of_each("scale_enc", scale_enc, [one.is_delayed for one in casts] if len(axes) == 2 else [])
    streams = for_each("stream", stream, len(axes))
    return tuple(Usage(*one) for one in zip(casts, axes, streams, amaxes, scales, strict=True))


# An argument and its value -> a float32 array of the framework; and that -> values that can be compared here and now,
# None where there are none, as while a compiler traces.
Convert: TypeAlias = Callable[[str, Any], Any]
Read: TypeAlias = Callable[[Any], Any]


def given_amax(amax: Any, cast: Cast, rows: int, convert: Convert, read: Read) -> Any:
    """The amax that replaces the measured one, float32 () or [R, 1]; InvalidValueError for one that does not fit."""
    if amax is None:
        return None
    if not cast.takes_amax:
        raise invalid_value(
            "amax", f"a value with {cast.format}, rule {cast.scale_rule!r}, {type(cast.scaling).__name__} scaling",
            "None: only a tensor amax can be replaced (fp8_tensor with Current scaling, nvfp4, nvfp4_row, nvfp4_2d)",
            "Delayed scaling takes scale_enc= instead." if cast.is_delayed else "",
        )  # fmt: skip
    array = convert("amax", amax)
    needed = (rows, 1) if cast.format.tensor_scale == "row" else ()
    if not needed and tuple(array.shape) == (1,):  # as buffers of amaxes often are
        array = array.reshape(())
    if tuple(array.shape) != needed:
        raise invalid_value("amax", f"shape {tuple(array.shape)}", f"shape {needed} for {cast.format}")
    values = read(array)
    if values is not None and not bool((values >= 0).all()):
        raise invalid_value("amax", values.tolist(), "values >= 0, not NaN", "An amax is a maximum of magnitudes.")
    return array


def given_scale_enc(scale_enc: Any, is_delayed: bool, convert: Convert, read: Read) -> Any:
    """The encode scale, float32 (), of a delayed cast, else None; InvalidValueError for one that does not fit."""
    if (scale_enc is not None) != is_delayed:
        raise invalid_value(
            "scale_enc", "None" if is_delayed else "a value",
            "a float32 for a cast with Delayed scaling, None otherwise",
            "The first step uses 1.0." if is_delayed else "Leave it out here.",
        )  # fmt: skip
    if scale_enc is None:
        return None
    array = convert("scale_enc", scale_enc)
    if math.prod(array.shape) != 1:
        raise invalid_value("scale_enc", f"shape {tuple(array.shape)}", "one positive finite float32")
    array = array.reshape(())
    values = read(array)
    if values is not None and not 0 < float(values) < math.inf:
        raise invalid_value("scale_enc", float(values), "one positive finite float32")
    return array
