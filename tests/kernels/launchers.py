"""What launchers ask about the device, answered by tests."""

import sys


def answer(**functions):
    """Put functions in the place of those of `_launch`, wherever launchers have them; `_launch` itself."""
    from microfloat.torch.backends.triton import _launch, _together  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("microfloat."):
            for function in functions.keys() & vars(module).keys():
                setattr(module, function, functions[function])
    return _launch
