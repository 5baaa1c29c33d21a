"""The rows f.*: norms and activations that write codes, beside the same work in parts.

Unfused: torch's own operation, compiled where there is a GPU, and then the cast of its result. Fused codes are compared
with the reference's codes of the value that the producer stands for, rounded to bfloat16 (docs/numerics.md, section 6).
"""

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.quantize_rows import Case, State, delayed_state, specs
from microfloat.passes import CastInputs
from microfloat.recipes import Cast, Delayed
from microfloat.torch import reference
from microfloat.torch.launch import triton as backend
from microfloat.torch.launch.prologues import Activation, ActivationGradient, Norm, Producer

EPS = 1e-5


def known(state: State) -> State:
    """The options of a delayed cast, none for others."""
    return {name: state[name] for name in ("scale_enc", "record") if name in state}


def written(producer: Producer, cast: Cast, *given: State) -> Any:
    """Both operands of each value of a producer, and its statistics."""
    return backend.codes(producer, *specs(cast, cast), *(CastInputs(**one) for one in given))


def maybe_compiled(function: Any, x: torch.Tensor) -> Any:
    """Compiled on a GPU, for each shape anew; --quick on a CPU runs it as it is."""
    return torch.compile(function, dynamic=False) if x.is_cuda else function


def cases() -> list[Case]:
    """Every id of fused producers."""
    delayed, mx8 = Cast("fp8_tensor", scaling=Delayed()), Cast("mxfp8")
    return [
        norm("f.rmsnorm.fp8", delayed, 4, 15.8), norm("f.rmsnorm.mxfp8", mx8, 4.0625, 15.8),
        swiglu("f.swiglu.fp8", delayed, 6, 26.8), swiglu("f.swiglu.mxfp8", mx8, 6.0625, 35.2),
        swiglu_backward("f.swiglu_bwd.fp8", delayed, 10, 52.4),
    ]  # fmt: skip


def norm(row_id: str, cast: Cast, size: float, instructions: float) -> Case:
    """RMSNorm to codes of both layouts."""

    def state(x: torch.Tensor) -> State:
        made = delayed_state(x) if cast.is_delayed else {}
        weight = torch.randn(x.shape[1], device=x.device).to(x.dtype)
        plain = maybe_compiled(lambda x, weight: F.rms_norm(x, x.shape[1:], weight, EPS), x)
        return {**made, "weight": weight, "plain": plain}

    def run(x: torch.Tensor, s: State) -> Any:
        (both,), statistics = written(Norm(x, s["weight"], None, EPS, "rms"), cast, known(s))
        s["inverse"] = statistics.inverse
        return both

    def expected(x: torch.Tensor, s: State) -> Any:
        # Sums of another order give other statistics: the codes are those of the statistics that came back.
        values = (x.float() * s["inverse"][:, None] * s["weight"].float()).to(x.dtype)
        return reference.quantize_both(values, cast, cast, scale_enc=s.get("scale_enc"))

    def unfused(x: torch.Tensor, s: State) -> Any:
        return backend.quantize_both(s["plain"](x, s["weight"]), cast, cast, **known(s))

    return Case(row_id, run, expected, size, instructions=instructions, state=state, unfused=unfused)


def swiglu_state(x: torch.Tensor, cast: Cast) -> State:
    """`up` and the gradient of the product beside x, which is the gate."""
    made = delayed_state(x) if cast.is_delayed else {}
    up, grad = (torch.randn(x.shape, device=x.device).to(x.dtype) for _ in range(2))
    return {**made, "up": up, "grad": grad}


def swiglu(row_id: str, cast: Cast, size: float, instructions: float) -> Case:
    """silu(gate) * up to codes of both layouts."""

    def state(x: torch.Tensor) -> State:
        return {**swiglu_state(x, cast), "plain": maybe_compiled(lambda gate, up: F.silu(gate) * up, x)}

    def expected(x: torch.Tensor, s: State) -> Any:
        ((value, _),), _ = backend.values(Activation(x, s["up"], "silu"))
        return reference.quantize_both(value, cast, cast, scale_enc=s.get("scale_enc"))

    return Case(
        row_id, lambda x, s: written(Activation(x, s["up"], "silu"), cast, known(s))[0], expected, size,
        instructions=instructions, state=state,
        unfused=lambda x, s: backend.quantize_both(s["plain"](x, s["up"]), cast, cast, **known(s)),
    )  # fmt: skip


def swiglu_gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, as a compiler gets them."""
    sigmoid = torch.sigmoid(gate.float())
    slope = sigmoid * (1 + gate.float() * (1 - sigmoid))
    return (grad.float() * up.float() * slope).to(gate.dtype), (grad.float() * gate.float() * sigmoid).to(gate.dtype)


def swiglu_backward(row_id: str, cast: Cast, size: float, instructions: float) -> Case:
    """Gradients of gate and up to codes of both layouts each."""

    def state(x: torch.Tensor) -> State:
        made = swiglu_state(x, cast)
        return {**made, "record2": torch.zeros_like(made["record"]), "plain": maybe_compiled(swiglu_gradients, x)}

    def run(x: torch.Tensor, s: State) -> Any:
        second = {"scale_enc": s["scale_enc"], "record": s["record2"]}
        return written(ActivationGradient(s["grad"], x, s["up"], "silu"), cast, known(s), second)[0]

    def expected(x: torch.Tensor, s: State) -> Any:
        made, _ = backend.values(ActivationGradient(s["grad"], x, s["up"], "silu"))
        return [reference.quantize_both(one.value, cast, cast, scale_enc=s["scale_enc"]) for one in made]

    def unfused(x: torch.Tensor, s: State) -> Any:
        gate, up = s["plain"](s["grad"], x, s["up"])
        first = backend.quantize_both(gate, cast, cast, scale_enc=s["scale_enc"], record=s["record"])
        return first, backend.quantize_both(up, cast, cast, scale_enc=s["scale_enc"], record=s["record2"])

    return Case(row_id, run, expected, size, instructions=instructions, state=state, unfused=unfused)
