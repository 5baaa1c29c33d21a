"""All that a format or a cast is, as JSON, worked out from plain values.

Compiled code may build formats and casts: Dynamo follows their constructors and takes these two functions for
constants, since it cannot look into the encoder of JSON (microfloat.torch marks them).
"""

import json

__all__ = ["contents_of_cast", "contents_of_format"]


def contents_of_format(name: str, element: tuple, scale: tuple, block: tuple, tensor_scale: str | None) -> str:
    """The `contents` of a ScaledFormat; `element` and `scale` are pairs of names and values."""
    numbers = {
        "name": name, "element": dict(element), "scale": dict(scale), "block": block, "tensor_scale": tensor_scale,
    }  # fmt: skip
    return json.dumps(numbers, sort_keys=True)


def contents_of_cast(
    fmt: str, scale_rule: str | None, rounding: str, hadamard: tuple[int, int] | None, scaling: str, numbers: tuple
) -> str:
    """The `contents` of a Cast; `fmt` are those of its format, `numbers` the pairs of names and values of `scaling`."""
    data = {
        "format": json.loads(fmt), "scale_rule": scale_rule, "rounding": rounding,
        "hadamard": hadamard and {"size": hadamard[0], "sign_mask": hadamard[1]},
        "scaling": {"kind": scaling, **dict(numbers)},
    }  # fmt: skip
    return json.dumps(data, sort_keys=True)
