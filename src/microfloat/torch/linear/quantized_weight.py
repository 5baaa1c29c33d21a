"""Steps that cast a weight of which codes exist already: stored as such, or gathered by FSDP2."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from microfloat.passes import CastInputs
from microfloat.recipes import Cast
from microfloat.routes import Entries, first_delayed
from microfloat.torch import backends, reference
from microfloat.torch.backends import layouts_of
from microfloat.torch.backends.base import NO_PARTS, Backend, Operands, Parts, aligned, parts_of, record_amax_
from microfloat.torch.linear.gathered_weight import Gathered, in_form
from microfloat.torch.reference import transpose_operand
from microfloat.torch.tensor.checks import is_abstract
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor


class StoredCast:
    """The operands of a weight stored as codes: these, or folded to rows, where the casts agree, else cast anew."""

    __slots__ = ("_backend", "_compute", "_layouts", "_shape", "_step", "_stored", "entries", "program", "reason")

    def __init__(
        self, backend: Backend, weight: QuantizedTensor, entries: Entries, compute: torch.dtype, step: Callable
    ) -> None:
        """`step`: makes the step that casts the other operands."""
        self.entries, self.program, self._backend, self._compute = entries, None, backend, compute
        self.reason = "the weight is stored as codes; operands of other casts are cast from the values of the codes"
        self._stored = tuple(
            entry is not None and entry.form in ("codes", "rows") and _is_stored(weight, entry.cast)
            and (not entry.operand.transposed or entry.cast.transposes)  # type: ignore[union-attr]
            for entry in entries
        )  # fmt: skip
        self._shape, self._layouts = weight.shape, layouts_of(backend, entries, *weight.shape)
        remaining = tuple(None if stored else entry for stored, entry in zip(self._stored, entries, strict=True))
        self._step = None
        if any(entry is not None for entry in remaining):
            is_read = any(entry is not None and entry.cast is not None for entry in remaining)  # not in high precision
            example = weight.decoded(compute) if is_read else weight.codes.new_empty(0, dtype=compute)
            self._step = step(backend, example, remaining)  # type: ignore[arg-type]

    is_bound, names = False, "stored codes"

    @property
    def makes(self) -> bool:
        """True where operands are cast anew, or folded."""
        return self._step is not None or any(entry is not None and entry.form == "rows" for entry in self.entries)

    @property
    def made_bytes(self) -> int:
        """The bytes of a row operand that `makes` makes, else 0; a column operand in high precision is a view of it."""
        row, layout = self.entries[0], self._layouts[0]
        if row is None or (self._stored[0] and row.form == "codes"):
            return 0
        if layout is None:
            return math.prod(self._shape) * self._compute.itemsize
        parts = [part for part in layout if part is not None]
        return sum(math.prod(part.shape) * getattr(torch, part.dtype).itemsize for part in parts)

    @property
    def delayed(self) -> Cast | None:
        """The first delayed cast, by whose scaling the amax is recorded; stored codes of the row were scaled before."""
        return first_delayed(entry and entry.cast for entry in self.entries[self._stored[0] :])

    def __call__(
        self, weight: QuantizedTensor, stream: int, words: torch.Tensor | None, inputs: CastInputs
    ) -> Operands:
        made = Operands()
        if self._step is not None:
            made = self._step(_values_of(weight, self._compute), stream, words, inputs)
        if inputs.record is not None and (self._step is None or self._step.delayed is None):
            record_amax_(inputs.record, reference.amax(weight.decoded(self._compute)))
        for index, (stored, entry) in enumerate(zip(self._stored, self.entries, strict=True)):
            if stored and entry is not None:
                operand = transpose_operand(weight.to_operand()) if index else weight.to_operand()
                layout, backend = self._layouts[index], None if is_abstract(operand.codes) else self._backend
                operand = in_form(operand, entry.form, entry.turned, layout, backend or reference)  # type: ignore[arg-type]
                parts = _aligned(parts_of(operand, entry, layout, backend))
                if index:
                    made.column = parts
                else:
                    made.row = parts
        return made


def _values_of(weight: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """`QuantizedTensor.decoded`, by a kernel where there is one, which writes rows one behind the other."""
    codes = weight.codes
    if weight.axis != 1 or not (codes.is_cuda and codes.is_contiguous()) or is_abstract(codes):
        return weight.decoded(dtype)
    whole = weight.to_operand()
    parts = (aligned(part) for part in (whole.codes, whole.scale, whole.tensor_scale))
    operand = replace(whole, **dict(zip(("codes", "scale", "tensor_scale"), parts, strict=True)))
    return backends.choose("auto", codes.device).dequantize(operand, dtype)


def _aligned(parts: Parts) -> Parts:
    """Parts that begin where GEMMs read them; the parts of one expert may begin anywhere in the tensors of all.

    In an exported program they have no address, and stay as they are, since torch's operations read any address.
    """
    return parts if parts.codes is None or is_abstract(parts.codes) else Parts(*map(aligned, parts))


def _is_stored(weight: QuantizedTensor, cast: Cast | None) -> bool:
    return cast is not None and weight.cast == replace(cast, scaling=weight.cast.scaling)


class GatheredCast:
    """The operands of a weight that was gathered as codes, in the forms that GEMMs read."""

    __slots__ = ("_backend", "_compute", "_layouts", "_step", "entries", "program", "reason")

    is_bound, names, makes = False, "gathered codes", False
    measures = ()  # amaxes of the whole tensor, which the gather has reduced

    def __init__(
        self, backend: Backend, shape: Sequence[int], entries: Entries, compute: torch.dtype, step: Callable
    ) -> None:
        """`step`: makes the step that casts values where the gathered codes do not serve."""
        self.entries, self.program, self._backend, self._compute, self._step = entries, None, backend, compute, step
        self.reason = "the weight was gathered as codes"
        self._layouts = layouts_of(backend, entries, *shape)

    @property
    def delayed(self) -> Cast | None:
        """The first delayed cast, by whose scaling the amax is recorded."""
        return first_delayed(entry and entry.cast for entry in self.entries)

    def __call__(self, weight: Gathered, stream: int, words: torch.Tensor | None, inputs: CastInputs) -> Operands:
        made = [NO_PARTS, NO_PARTS]
        for index, (entry, layout) in enumerate(zip(self.entries, self._layouts, strict=True)):
            if entry is None:
                continue
            operand = None
            if entry.cast is not None and layout is not None:
                transposed = entry.operand.transposed
                operand = weight.contents.operand(entry.cast, transposed, self._compute, inputs.scale_enc)
            if operand is None:
                values = weight.contents.values().to(self._compute)
                return self._step(self._backend, values, self.entries, 0)(values, stream, words, inputs)
            operand = in_form(operand, entry.form, entry.turned, layout, self._backend)
            made[index] = _aligned(parts_of(operand, entry, layout, self._backend))
        if inputs.record is not None and self.delayed is not None:
            record_amax_(inputs.record, weight.contents.amax)  # type: ignore[arg-type]
        return Operands(*made)
