"""Answers of tests to the questions that launchers ask about the device."""

import sys


def answer(**functions):
    """Put functions in the place of those of `torch.launch.program`, wherever they are imported; that module itself."""
    from microfloat.torch.launch import (
        program,
        triton,  # noqa: F401
    )

    for name, module in list(sys.modules.items()):
        if name.startswith("microfloat."):
            for function in functions.keys() & vars(module).keys():
                setattr(module, function, functions[function])
    program.forget_programs()
    return program
