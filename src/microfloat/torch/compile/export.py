"""Programs of torch's own operations alone, exported from converted models for inference."""

import torch

from microfloat.errors import NotSupportedError
from microfloat.passes import CastInputs
from microfloat.routes import routes_of
from microfloat.torch import backends, context, reference
from microfloat.torch._typing import Maybe, Options
from microfloat.torch.linear.schedule import Schedule, autocast_dtype
from microfloat.torch.tensor.checks import check_model
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

PLAINLY = False  # True while `export` traces


def export(
    model: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: Options | None = None,
    *,
    dynamic_shapes: Options | tuple | list | None = None,
) -> torch.export.ExportedProgram:
    """``torch.export`` of a converted model for inference, as a program of torch's own operations alone.

    It quantizes, decodes and multiplies by plain operations, to the codes of the layers, and runs where this library is
    not installed. ``torch.export.export`` itself keeps the layers as operators of this library, which are faster.
    Parameters as there. Raises InvalidTypeError for anything but a module, NotSupportedError for a recipe whose fprop
    rounds stochastically and for experts. Source: docs/training.md.
    """
    global PLAINLY
    check_model(model)
    # Their codes become parameters of the program, and integers cannot ask for a gradient.
    stored = [one for one in model.parameters() if isinstance(one, QuantizedTensor) and one.requires_grad]
    PLAINLY = True
    try:
        for parameter in stored:
            parameter.requires_grad_(False)
        with torch.no_grad():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
            return program.run_decompositions()
    finally:
        PLAINLY = False
        for parameter in stored:
            parameter.requires_grad_(True)


def in_torch_operations(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe, token: str, scales: tuple[Maybe, Maybe | list[torch.Tensor]]
) -> torch.Tensor:
    """``x @ weight.T + bias`` in such a program; `scales`: of x and w, or an amax, and the weights of a joint one."""
    recipe, module = context.recipe_of(token)._keeping_nothing(), backends.choose("reference", x.device)
    if any(cast is not None and cast.is_stochastic for cast in recipe.fprop.casts):
        raise NotSupportedError(
            "export: got a recipe whose fprop rounds stochastically, needed nearest rounding in an exported program."
        )
    routes = routes_of(recipe, module.chip_of(x.device))
    compute = autocast_dtype(x.device.type) or x.dtype
    schedule = Schedule(recipe, module, routes, x, weight, None, compute, False, False)
    inputs = CastInputs(amax=scales[0]) if schedule.is_static else CastInputs(scales[0])
    w_inputs = CastInputs(scales[1])
    joint = scales[1]
    if schedule.is_joint and joint is not None:
        w_inputs = CastInputs(amax=torch.stack([reference.amax(one).reshape(()) for one in joint]).amax())
    return schedule.forward(x, weight, bias, inputs, w_inputs)[0]
