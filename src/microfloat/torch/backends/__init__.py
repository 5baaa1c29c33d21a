"""The backends of the torch front end, and the explicit choice between them.

A backend is a module with the functions of `base.Backend`; `torch.reference` defines their results. Adding one is one
entry in `_REGISTRY`. A backend is imported when it is chosen, and nothing falls back in silence: `choose` returns the
backend of that name, or raises with the `Support.reason`.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from microfloat.chips import Chip, chip_named
from microfloat.errors import NotSupportedError, install_hint, invalid_type, invalid_value, unknown_name
from microfloat.layout import Layout, layout_of
from microfloat.routes import Entries, OperandSpec, family_of
from microfloat.support import Support
from microfloat.torch._upper import upper
from microfloat.torch.backends.base import Backend


def _reference_support(device: torch.device) -> Support:
    reason = f"the reference backend runs on any device ({device.type}): plain torch ops, not accelerated"
    missing = "" if device.type == "cpu" else _why_no_kernels(device)
    return Support(True, False, f"{reason}; kernels need {missing}" if missing else reason)


def _why_no_kernels(device: torch.device) -> str:
    """The unmet need of the kernels for tensors on `device`; "" where they run."""
    if _PRETENDED and device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"an NVIDIA GPU, and the device is {device.type}"
    if torch.version.hip is not None:
        return "an NVIDIA GPU, and this torch is a ROCm build, for AMD GPUs"
    if importlib.util.find_spec("triton") is None:
        return f"the package triton, which is not installed (on Linux: {install_hint('triton')})"
    return ""


# The answers of the backends with kernels, where these run.
BY_KERNELS = {
    "native": Support(True, True, "fused cast kernels and the vendor's GEMMs; explain(recipe) says which"),
    "triton": Support(True, False, "fused cast kernels; GEMMs by torch ops in float32"),
}


def _kernel_support(name: str, device: torch.device) -> Support:
    missing = _why_no_kernels(device)
    return Support(False, False, f"the {name} backend needs {missing}") if missing else BY_KERNELS[name]


# name -> (its answer, given without importing it; its module), in the order of preference of "auto".
_REGISTRY: dict[str, tuple[Callable[[torch.device], Support], str]] = {
    "native": (functools.partial(_kernel_support, "native"), "microfloat.torch.launch.native"),
    "triton": (functools.partial(_kernel_support, "triton"), "microfloat.torch.launch.triton"),
    "reference": (_reference_support, "microfloat.torch.reference"),
}
NAMES = ("auto", *reversed(_REGISTRY))


# The chips of the `pretend` contexts that are entered, and True where their kernels are interpreted.
_PRETENDED: list[tuple[Chip, bool]] = []


@contextlib.contextmanager
def pretend(*, chip: str, interpreted: bool = True) -> Iterator[None]:
    """Answer for another chip than the one at hand: the seam for tests, in this process alone.

    `chip`: a name such as "h200" or "sm_100". While this is entered, tensors on the CPU run the native backend of that
    chip, by its routes; GEMMs are what torch has on a CPU, where torch refuses to multiply scales of blocks by a
    ValueError of its own. `interpreted`: its kernels run in Triton's interpreter (which Triton decides when it is
    imported: TRITON_INTERPRET=1); else plain torch operations cast, to the same bytes. Raises InvalidValueError for
    unknown names.
    """
    named = chip_named(chip)
    if named is None:
        raise invalid_value("chip", repr(chip), "the name of a GPU, such as 'h200', 'b200' or 'sm_90'")

    def forget() -> None:
        CHOSEN.clear()
        upper("forget_schedules")()

    _PRETENDED.append((named, interpreted))
    forget()
    try:
        yield
    finally:
        _PRETENDED.pop()
        forget()


def chip_of(device: torch.device) -> Chip:
    """The chip behind a CUDA device. Raises NotSupportedError for a GPU of another maker."""
    return _PRETENDED[-1][0] if _PRETENDED else _chip_of(device)


@functools.cache  # one entry for each GPU; asking CUDA takes longer than a launch
def _chip_of(device: torch.device) -> Chip:
    if torch.version.hip is not None:
        raise NotSupportedError(
            f"{device}: got a ROCm build of torch, for AMD GPUs, needed an NVIDIA GPU. Use backend='reference'."
        )
    capability = torch.cuda.get_device_capability(device)
    return Chip(capability, capability != (9, 0) or (not _why_no_kernels(device) and upper("own_gemm_is_there")()))


def device_index(device: torch.device) -> int:
    """The number of a CUDA device, -1 for any other."""
    return -1 if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index


def check_name(backend: str, argument: str = "backend") -> str:
    """The name of a backend itself; for others raises InvalidTypeError or InvalidValueError with the nearest name."""
    if not isinstance(backend, str):
        raise invalid_type(argument, type(backend), "one of " + ", ".join(repr(name) for name in NAMES))
    if backend not in NAMES:
        raise unknown_name(argument, backend, NAMES)
    return backend


def support(backend: str, device: torch.device) -> Support:
    """The answer of `backend` for `device`: available, accelerated, and why; "auto" answers for its choice."""
    return resolve(backend, device)[1]


def resolve(backend: str, device: torch.device) -> tuple[str, Support]:
    """The name of the backend that runs, which "auto" chooses by `device`, and its answer."""
    if backend != "auto":
        return check_name(backend), _REGISTRY[backend][0](device)
    answers = ((name, supports(device)) for name, (supports, _) in _REGISTRY.items())
    return next((name, answer) for name, answer in answers if answer.available)


# Answers of `choose`, one for each name and device: every call of a layer asks, and looking for packages takes longer
# than a launch.
CHOSEN: dict[tuple[str, torch.device], Backend] = {}


def choose(backend: str, device: torch.device) -> Backend:
    """The module of `backend` for tensors on `device`; NotSupportedError with the reason where it cannot run."""
    found = CHOSEN.get((backend, device))
    if found is not None:
        return found
    name, verdict = resolve(backend, device)
    if not verdict.available:
        raise NotSupportedError(f"backend={name!r}: {verdict.reason}. Use backend='auto' or 'reference'.")
    chosen: Any = importlib.import_module(_REGISTRY[name][1])
    if name != "reference" and _PRETENDED and not _PRETENDED[-1][1]:
        reference = importlib.import_module(_REGISTRY["reference"][1])
        parts = {key: getattr(reference, key) for key in reference.__all__}
        parts |= {key: getattr(chosen, key) for key in ("name", "chip_of", "scaled_matmul")}
        chosen = SimpleNamespace(**parts | {"no_programs": "kernels are left out"})
    CHOSEN[backend, device] = chosen
    return chosen


def amax_of(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a tensor of any shape, float32 (), 0 for a tensor without elements; NaN is ignored."""
    matrix = values.reshape(-1, values.shape[-1] if values.numel() else 1)
    return choose("auto", values.device).amax(matrix).reshape(())


def layouts_of(backend: Backend, entries: Entries, rows: int, length: int) -> tuple[Layout | None, Layout | None]:
    """Layouts of the operands of a matrix [rows, length]; None in high precision, and where there is no operand.

    Sizes may be symbols of a compiler.
    """
    row, column = entries
    programs = backend.programs
    paired = programs is not None and programs.is_one_pass(row and row.spec, column and column.spec)
    made = []
    for entry, sizes in ((row, (rows, length)), (column, (length, rows))):
        made.append(
            None if entry is None or entry.cast is None
            else layout_of(
                entry.cast, *sizes, entry.form, of_transpose=entry.operand.transposed, paired=paired,
                turned=entry.turned,
            )
        )  # fmt: skip
    return made[0], made[1]


def why_by_torch(backend: Backend, *specs: OperandSpec | None) -> str:
    """Reason for casts of these operands by torch operations, "" if launches make them.

    Raises NotSupportedError where a backend that was asked for by name has no kernel.
    """
    if backend.no_programs:
        return backend.no_programs
    refusal = next((why for spec in specs if spec is not None and (why := family_of(spec.cast)[1])), "")
    if refusal and backend.is_strict:
        raise NotSupportedError(f"the {backend.name} backend has no kernel for {refusal}. Use backend='reference'.")
    return refusal and f"no kernel for {refusal}"
