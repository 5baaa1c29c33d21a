"""Opaque operators, for compilers that trace: their definition, their constants, and the transforms they refuse.

A compiler must not look inside: Inductor turns divisions into approximate ones on CUDA, and host-side decisions would
break its graphs (docs/numerics.md 1.5). In eager mode these operators are not used. Casts travel as strings, since
operators take no objects; a token is derived from the Cast's contents and means the same in another process.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import forward_ad

from microfloat.errors import NotSupportedError, invalid_value
from microfloat.formats import ScaledFormat
from microfloat.layout import Storage
from microfloat.recipes import Cast, Hadamard, as_cast
from microfloat.recipes._serialize import cast_from_data, cast_of, format_from_data
from microfloat.recipes.cast import as_scaled_format
from microfloat.torch.reference._grid import mode_count, transforms_active

if TYPE_CHECKING:
    from torch._functorch.autograd_function import VmapInfo

_library = torch.library.Library("microfloat", "FRAGMENT")


def is_tracing(tensor: object) -> bool:
    """True where operators must be called: for a compiler, a transform of torch.func, or the meta device."""
    if torch.compiler.is_compiling() or mode_count() or transforms_active():
        return True
    return isinstance(tensor, torch.Tensor) and tensor.is_meta


def has_tangent(*tensors: object) -> bool:
    """True where a tensor has a tangent of forward-mode AD, or may have one inside another transform."""
    if forward_ad._current_level < 0:
        return False
    return any(
        isinstance(tensor, torch.Tensor) and (is_followed(tensor) or forward_ad.unpack_dual(tensor).tangent is not None)
        for tensor in tensors
    )


def is_followed(tensor: torch.Tensor) -> bool:
    """True for a tensor that a transform of torch.func wraps."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


_OF_LAYERS = (
    "Call the layer on a batch and use loss.backward() or torch.autograd.grad, one gradient at a time, or run it under "
    "autocast(enabled=False)."
)
_OF_VERBS = (
    "vmap may be around it; fake_quantize has a gradient, also of torch.func.grad. Nothing has a forward-mode "
    "derivative."
)


def refuse_transforms(operation: str, *tensors: object, is_verb: bool = False) -> None:
    """Raise NotSupportedError inside transforms of torch.func, where torch.jit records, and for forward-mode tangents.

    `is_verb`: an operation on tensors, whose operator has a rule for vmap, but no derivative for torch.func.grad.
    """
    transforms = transforms_active()
    if transforms and is_verb:
        transforms = any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)
    if transforms or torch._C._get_tracing_state() is not None or has_tangent(*tensors):
        raise refusal_of_transforms(operation, is_verb=is_verb)


def refusal_of_transforms(operation: str, *, is_verb: bool = False) -> NotSupportedError:
    """The error of an operation that has no derivative or no batching rule where one is asked for."""
    return NotSupportedError(
        f"{operation}: got a transform of torch.func (vmap, grad, jvp, jacrev, ...), forward-mode AD, batched "
        f"gradients or torch.jit.trace around {'it' if is_verb else 'a quantized layer'}, needed an ordinary "
        f"{'call' if is_verb else 'forward and backward'}. {_OF_VERBS if is_verb else _OF_LAYERS}"
    )


def drawn_seed(x: torch.Tensor) -> torch.Tensor:
    """A call seed from the default generator of x's device, drawn by an operator."""
    if transforms_active():
        raise invalid_value(
            "seed", "None with a stochastic cast inside a transform of torch.func", "a seed, or one for each example",
            "Draw it outside: vmap(lambda x, seed: quantize(x, cast, seed=seed))(xs, seeds), seeds int64 [B, 2].",
        )  # fmt: skip
    return torch.ops.microfloat.draw_seed(device=x.device, apart=torch.empty(0, device=x.device))


def token_of(cast: Cast) -> str:
    """The token of a Cast, a constant for Dynamo where the Cast is one."""
    return cast.contents


def constants_of(cast: Cast | ScaledFormat | str) -> tuple[Cast, str]:
    """A Cast and its token as constants for Dynamo, which calls functions of strings, but (torch 2.11) not of Casts."""
    described = _text_of(cast)
    return _cast_of_text(*described), _token_of_text(*described)


def _text_of(cast: Cast | ScaledFormat | str) -> tuple[str, str]:
    if isinstance(cast, Cast):
        return "cast", cast.contents
    return ("format", cast.contents) if isinstance(cast, ScaledFormat) else ("name", cast)


def _cast_of_text(kind: str, text: str) -> Cast:
    """The Cast, with all of its parts, made anew for each trace.

    Dynamo cannot guard an object that it has met in a constant first, and compares objects by identity: a constant that
    shared its format with `microfloat.formats`, or with a tensor that compiled code has returned, would break code that
    names a format and passes its object too.
    """
    if kind == "format":
        return Cast(format_from_data(json.loads(text)))
    cast = cast_from_data(json.loads(text if kind == "cast" else as_cast(text).contents))
    assert cast is not None
    return cast


def _token_of_text(kind: str, text: str) -> str:
    return _cast_of_text(kind, text).contents


def constants_of_parts(fmt: ScaledFormat | str, is_one_level: bool, hadamard: Hadamard | None) -> tuple[Cast, str]:
    """The Cast that codes and scales of a format follow, and its token; two levels need a tensor scale."""
    turned = None if hadamard is None else (hadamard.size, hadamard.sign_mask)
    token = _token_of_parts(*_text_of(fmt), is_one_level, turned)
    return (_cast_of_text("cast", token) if torch.compiler.is_compiling() else cast_of(token)), token


def _token_of_parts(kind: str, text: str, is_one_level: bool, hadamard: tuple[int, int] | None) -> str:
    fmt = as_scaled_format(text) if kind == "name" else format_from_data(json.loads(text))
    rule = "one_level_e4m3" if is_one_level and fmt.scale.name == "E4M3" else None
    return Cast(fmt, rule, hadamard=None if hadamard is None else Hadamard(*hadamard)).contents


def storage_of(token: str) -> Storage:
    """The storage of a cast, a constant for Dynamo."""
    cast = cast_of(token)
    return Storage.of(cast.format, cast.hadamard, cast.tensor_scale)


# As torch.compiler.assume_constant_result marks a function, which would import all of Dynamo.
for _function in (token_of, storage_of, _token_of_parts, _cast_of_text, _token_of_text):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


Rule = Callable[..., tuple[object, object]]  # results, and the batch axis of each


def define(
    schema: str, run: Callable, fake: Callable | None = None, *, batches: bool | None = True,
    tags: Sequence[torch.Tag] = (),
) -> None:  # fmt: skip
    """Define an operator: `run` on values, `fake` without them (None: it needs values).

    `batches`: vmap runs each example alone; False: it is refused by name; None: its arguments are no batches.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"microfloat::{name}", fake, lib=_library)
    if batches:
        torch.library.register_vmap(f"microfloat::{name}", _each_alone(name), lib=_library)
    elif batches is not None:

        def refuse(*_: object) -> NoReturn:
            raise refusal_of_transforms(f"microfloat::{name}")

        torch.library.register_vmap(f"microfloat::{name}", refuse, lib=_library)


def _each_alone(name: str) -> Rule:
    """The rule of an operator for a batch: each example alone, the results stacked."""

    def example(value: Any, dim: int | list | None, index: int) -> Any:
        if isinstance(dim, list | tuple):
            return [example(one, its_dim, index) for one, its_dim in zip(value, dim, strict=True)]
        if dim is None:
            return value
        if not value.shape[dim]:  # an example of an empty batch, for the shapes of the results
            return value.new_zeros([size for axis, size in enumerate(value.shape) if axis != dim])
        return value.select(dim, index)

    def run(info: "VmapInfo", in_dims: Sequence[int | list | None], *args: object) -> tuple[object, object]:
        operator = getattr(torch.ops.microfloat, name)
        made = [
            operator(*(example(value, dim, index) for value, dim in zip(args, in_dims, strict=True)))
            for index in range(max(info.batch_size, 1))
        ]
        if isinstance(made[0], torch.Tensor):
            return _stacked(made)[: info.batch_size], 0
        return [_stacked(parts)[: info.batch_size] for parts in zip(*made, strict=True)], [0] * len(made[0])

    return run


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if parts[0].is_floating_point() and parts[0].itemsize == 1:  # torch joins bytes, not float8
        return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.stack(list(parts))
