"""Flax: the operators of linen and nnx, the names of `flax.linen.fp8_ops`, their state and its serialization."""

from dataclasses import replace
from typing import Any

import numpy as np
from flax import serialization

from microfloat.errors import invalid_type, invalid_value
from microfloat.jax.array import QuantizedArray
from microfloat.jax.scaling import DelayedState


def _register(kind: type, *names: str) -> None:
    """Register `kind`: its state dicts hold these fields; static fields come from the target."""

    def to_state_dict(value: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(value, name)) for name in names}

    def from_state_dict(target: Any, state: Any) -> Any:
        if not isinstance(state, dict) or set(state) != set(names):
            got = sorted(state) if isinstance(state, dict) else type(state)
            raise invalid_type("state", got, f"the state dict of a {kind.__name__}: {', '.join(names)}")
        fields = {name: serialization.from_state_dict(getattr(target, name), state[name], name) for name in names}
        for name, restored in fields.items() if isinstance(target, QuantizedArray) else ():
            own = getattr(target, name)
            if _form(restored) != _form(own):  # bytes of another format, which would read as other numbers
                remedy = "Restore into an array of the same format and shape."
                raise invalid_value(name, _form(restored), f"{_form(own)}, as the target has it", remedy)
        return replace(target, **fields)

    serialization.register_serialization_state(kind, to_state_dict, from_state_dict, override=True)


def _form(array: Any) -> str:
    return "None" if array is None else f"{np.dtype(array.dtype)}{list(np.shape(array))}"


_register(QuantizedArray, "codes", "scale", "tensor_scale")
_register(DelayedState, "x", "w", "dy")
