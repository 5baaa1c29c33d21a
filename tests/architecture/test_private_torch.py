"""Lines of `microfloat.torch` that use private parts of torch, which any version may change."""

import re

import pytest

PRIVATE = re.compile(
    r"(?<!microfloat\.)\btorch\.(\w+\.)*_[a-zA-Z]|\baten\._[a-z]|^\s*from torch(\.\w+)* import .*\b_[a-z]", re.MULTILINE
)
BUDGET = 89  # only ever lowered
# Module -> why torch's public parts do not do. All names exist in torch 2.7 to 2.13.
REASONS = {
    "autocast": "whether Dynamo traces a frame",
    "backends/base": "the current stream and device, a tenth of the host time of torch.cuda",
    "compile/operators": "whether a backward runs; one launch for all histories",
    "context": "a function that Dynamo leaves alone, without importing Dynamo",
    "distributed/tp_dtensor": "a DTensor without the checks of every call",
    "distributed/fsdp": "FSDP2's hooks for a gathered tensor take a subclass; the operators that it is given",
    "distributed/fsdp_quantized": "a parameter that is written while autograd keeps it",
    "distributed/tp_gather": "the backward that runs now, and its end",
    "distributed/tp_schedule": "a collective's promise is waited for; a view that is none for autograd",
    "distributed/tp_styles": "the hooks of torch's own parallel styles, told by their module",
    "inference/quantize": "whether Dynamo is there, without importing it",
    "launch/gemms": "the vendor's FP8 GEMMs with less host time than F.scaled_mm",
    "launch/prologues": "the backward of RMSNorm as one kernel",
    "launch/program": "the fastest empty tensor; whether a stream records a graph",
    "linear/fold_counts": "whether a stream records a graph",
    "linear/function": "functorch and forward mode are refused; gradients that nobody asks for",
    "linear/fused_input": "a view that is none for autograd",
    "linear/gathered_weight": "a tensor without memory, and the operators that it is given",
    "linear/schedule": "a view that is none for autograd",
    "linear/weight_cache": "the type of FSDP2's objects",
    "nn/linear": "whether Dynamo is on; whether a backward runs; a forward that is not traced",
    "nn/merged": "functorch is refused",
    "nn/sdpa": "functorch is refused; the kernel that torch would choose",
    "reference/_grid": "whether a mode of torch's dispatcher, or a transform of functorch, is on",
    "scaling/buffers": "one launch for all histories; writes of kernels are counted",
    "scaling/regions": "whether a backward runs",
    "tensor/aten_reads": "operators that a tensor subclass is given",
    "tensor/aten_shapes": "operators that a tensor subclass is given",
    "tensor/aten_table": "aliasing and trees of a tensor subclass; whether vmap runs",
    "tensor/checks": "tensors without values are told by their class",
    "tensor/custom_ops": "functorch is refused; whether a trace or a mode is on",
    "tensor/dispatch_modes": "whether a mode of torch's dispatcher is on, and a call outside of it",
    "tensor/quantized_tensor": "a tensor without memory of its own, and calls below __torch_function__",
    "watch/session": "Dynamo passes through a frame; whether a backward runs",
}


@pytest.mark.parametrize(
    ("line", "is_private"),
    [
        ("x = torch._C._cuda_getDevice()", True), ("    from torch._subclasses import FakeTensor", True),
        ("from torch.utils._pytree import tree_map", True), ("register(aten._to_copy.default)", True),
        ("from torch.utils import _pytree", True), ("from microfloat.torch._typing import Maybe", False),
        ("from microfloat.torch.reference._grid import ceil_to", False), ("y = torch.mm(a, b)", False),
    ],
)  # fmt: skip
def test_private_parts_are_found(line, is_private):
    assert bool(PRIVATE.search(line)) is is_private


def test_private_parts_of_torch_are_few_and_explained(repository):
    torch = repository / "src" / "microfloat" / "torch"
    found = {}
    for path in sorted(torch.rglob("*.py")):
        lines = [line for line in path.read_text().splitlines() if PRIVATE.search(line)]
        if lines:
            found[path.relative_to(torch).with_suffix("").as_posix()] = lines
    assert set(found) == set(REASONS)
    count = sum(map(len, found.values()))
    assert count <= BUDGET, f"{count} lines, {BUDGET} may be: {found}"
