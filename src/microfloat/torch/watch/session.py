"""`watch`: per layer, operand and GEMM, the metrics of a training or of an inference, at sampled steps.

A step is a call of the model with its backward. In a sampled one every call of a layer is shown to a `_Listener`, which
casts parts of x, w and dy once more, to the bytes that the layer computed with, and sums on the device what
`microfloat.metrics` defines (`watch.readings`). Between sampled steps nothing listens. No tensor of the
model, no seed, no history and no generator is touched, so that watched steps give the bits of unwatched ones.

Legend: M = rows of x, K = in features, N = out features.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from microfloat.arguments import check_int
from microfloat.errors import invalid_value
from microfloat.formats import ScaledFormat
from microfloat.operands import OPERANDS_OF, TENSORS, Operand
from microfloat.passes import CastInputs
from microfloat.recipes import Cast
from microfloat.recipes.explanation import operands_of as formats_of
from microfloat.routes import entries_of
from microfloat.torch import backends
from microfloat.torch._typing import Options
from microfloat.torch.backends.base import Backend, capturing, current_device, dtype_name
from microfloat.torch.linear.observer import OBSERVERS, Listener
from microfloat.torch.linear.schedule import Schedule, as_matrix
from microfloat.torch.nn.experts import ExpertProduct, ExpertsLayer
from microfloat.torch.nn.linear import RecipeLayer
from microfloat.torch.tensor.checks import check_model
from microfloat.torch.tensor.dispatch_modes import are_named, outside_of_modes
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor
from microfloat.torch.watch.readings import Sample, Source, quantized, read_noise, read_product, read_rows
from microfloat.watching import DEFAULT_METRICS, OF_PRODUCT, OF_SAMPLE, Entry, Measured, RecordLog

_NOTHING = CastInputs()
_AS_IT_IS = contextlib.nullcontext()


class watch(RecordLog):
    """Records of a model's operands and GEMMs: ``with mf.watch(model, every=100) as w:`` around the training loop.

    `model`: the module that the loop calls, compiled or not. A step is one call of it and the backward of that call;
    every `every`-th is sampled, the first one included. Calls without gradients count in inference alone: a validation
    inside a training is no step. Where that does not fit (several calls make one step, or the loop calls something
    else), call ``w.step()`` at the beginning of every step: then it counts, and not the calls.

    `tensors`: the operands that are measured, of x, w and dy. `metrics`: names of METRICS; "sr_noise" and "rel_mse" are
    computed on demand. `what_if`: formats or Casts that are not in use, whose metrics are computed for x, w and dy too.
    `rows`: rows of an operand that are measured in a sampled step, a multiple of 128; which ones moves on from sample
    to sample. amax and the counts of NaN and infinity are those of whole tensors. `layers`: the number of layers that
    are measured in a sampled step, which move on likewise; None measures all, as ``w.snapshot()`` does once. `ema`: the
    decay of amax_ema.

    Every layer under a recipe is watched (Linear, fused, attention, grouped: one group), and every nn.Linear in high
    precision outside compiled code, for its tensors and for `what_if`. Compiled code runs as it is: its operators are
    observed, so that nothing is compiled again. Nothing is observed while a CUDA graph is captured or replayed.

    Raises InvalidValueError and InvalidTypeError for arguments that are none. Source: docs/watching.md.

    >>> from microfloat.torch import Linear
    >>> with watch(layer := Linear(32, 16, recipe="mxfp8"), what_if=()) as w:
    ...     layer(torch.ones(4, 32)).sum().backward()
    >>> sorted({record.operand for record in w.records if record.metric == "relative_error"})
    ['dw', 'y']
    """

    def __init__(
        self, model: nn.Module, every: int = 100, tensors: Sequence[str] = TENSORS,
        metrics: Sequence[str] = DEFAULT_METRICS, what_if: Sequence[Cast | ScaledFormat | str] = ("nvfp4",), *,
        rows: int = 128, layers: int | None = 16, ema: float = 0.9,
    ) -> None:  # fmt: skip
        check_model(model)
        super().__init__(metrics, ema)
        self.layers = None if layers is None else check_int("layers", layers, 1, 2**31 - 1)
        self.every = check_int("every", every, 1, 2**63 - 1)
        self.measured = Measured.checked(tensors, metrics, what_if, rows)
        self._model = model
        self._count, self._sampled = -1, 0  # the number of this step, and of samples of a layer so far
        self._watched: list[nn.Module] = []  # in turn, and the number of those that have been measured
        self._measured, self._is_whole = 0, False
        self._chosen: frozenset[nn.Module] = frozenset()
        self._explicit, self._trains = False, False
        self._before: Callable[..., object] | None = None
        self._caller_in_place: Callable[..., object] | None = None
        self._sample = Sample()  # the one that is being taken
        self._samples: list[Sample] = []  # and those that nobody has read yet
        self._names: dict[nn.Module, str] = {}
        self._calls: dict[str, int] = {}
        self._open: dict[str, list[_Call]] = {}
        self._hooks: list[RemovableHandle] = []
        self._owners = _Owners(())

    def __enter__(self) -> "watch":
        if self._caller_in_place is not None:
            raise invalid_value("watch", "one that is open already", "one that is not", "Make a second mf.watch.")
        root = getattr(self._model, "_orig_mod", self._model)
        self._names = _names_in(root)
        self._owners = _Owners([module for module in self._names if isinstance(module, RecipeLayer)])
        self._watched = [module for module in self._names if isinstance(module, RecipeLayer | nn.Linear)]
        own = self._model.__dict__
        self._before = own.get("_compiled_call_impl")
        self._caller_in_place = own["_compiled_call_impl"] = self._caller()
        self._follows, self._seen_backward, self._leader = not self._explicit, False, ""
        if self._follows:
            OBSERVERS.append(self)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._follows = False
        self._end_step()
        self._take_out()
        if self._count < 0 and kind is None:
            warnings.warn(
                f"watch: no call of the {type(self._model).__name__} was seen, so that nothing was recorded. Watch the "
                "module that the loop calls, or call w.step() at the beginning of every step.",
                UserWarning, stacklevel=2,
            )  # fmt: skip

    def step(self, number: int | None = None) -> None:
        """Begin a step, the next one or that of this number; from now on calls of the model do not count as steps."""
        if self._caller_in_place is None:
            needed = "one inside of its with statement: with mf.watch(model) as w"
            raise invalid_value("w.step", "a call of a watch that is not open", needed)
        self._explicit, self._follows = True, False
        self._begin_step(self._count + 1 if number is None else check_int("number", number, 0, 2**63 - 1))

    def snapshot(self) -> None:
        """Measure every layer in the next sampled step, whatever `layers` says."""
        self._is_whole = True

    def _caller(self) -> Callable[..., object]:
        """The call of the model, before which a step begins."""

        def run(*arguments: object, **options: object) -> object:
            if not (self._explicit or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1):
                self._follows, with_grad = False, torch.is_grad_enabled()
                self._trains |= with_grad
                if with_grad or not self._trains:
                    self._begin_step(self._count + 1)
                else:
                    self._end_step()
            return (self._before or self._model._call_impl)(*arguments, **options)

        run.watch = self  # type: ignore[attr-defined]
        if "torch._dynamo" in sys.modules:  # Dynamo may be on its way to the forward: it is to pass through this frame
            return sys.modules["torch._dynamo"].decorators.skip(run)
        return run

    def _take_out(self) -> None:
        """Take this watch out of the call of the model, where later watches that are still open may stand before it."""
        own, mine, self._caller_in_place = self._model.__dict__, self._caller_in_place, None
        caller = own.get("_compiled_call_impl")
        if mine is None:
            return
        if caller is mine:
            if self._before is None:
                del own["_compiled_call_impl"]
            else:
                own["_compiled_call_impl"] = self._before
            return
        while isinstance(later := getattr(caller, "watch", None), watch):
            if later._before is mine:
                later._before = self._before
                return
            caller = later._before

    def _begin_step(self, number: int) -> None:
        self._end_step()
        self._count = number
        if number % self.every:
            return
        self._calls.clear()
        # The next layers in turn; a layer that they come back to is measured in its next rows.
        count = len(self._watched)
        number = count if self.layers is None or self._is_whole else min(self.layers, count)
        turn = [self._watched[(self._measured + index) % count] for index in range(number)]
        self._chosen, self._is_whole = frozenset(turn), False
        self._measured += number
        self._sampled = -(-self._measured // max(count, 1))
        if self._follows:
            return
        OBSERVERS.append(self)
        if not _is_compiled(self._model):
            for module in self._names:
                if isinstance(module, nn.Linear) and not isinstance(module, RecipeLayer):
                    self._hooks.append(module.register_forward_hook(self._see_plain_call))

    def _end_step(self) -> None:
        if self in OBSERVERS and not self._follows:
            OBSERVERS.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._open.clear()
        if self._sample and not capturing():  # a graph would do it again at every replay
            self._close()

    def listener(
        self, schedule: Schedule, layers: Sequence[RecipeLayer], weight: torch.Tensor | None, is_backward: bool
    ) -> Listener | None:
        """The listener of one call; see `microfloat.torch.linear.observer`."""
        if schedule.device >= 0 and torch.cuda.is_current_stream_capturing():
            return None
        if weight is not None:
            layers = self._owners.of(weight)
            begins = not is_backward and (self._seen_backward or self._count < 0)
            if not layers and (not self._follows or begins or self._is_sampled()):
                with _plainly():
                    layers = self._owners.joined_in(weight)
        if not layers or any(layer not in self._names for layer in layers):
            return None
        name = _joint_name([self._names[layer] for layer in layers])
        again = torch._C._current_graph_task_id() != -1  # a recomputation: its forward was measured before
        if self._follows and (weight is None or not self._follow(name, is_backward, again)):
            return None
        if layers[0] not in self._chosen:
            return None
        if is_backward:
            opened = self._open.get(name)
            call = opened.pop() if opened else _Call(self, self._numbered(name), layers, schedule)
            call.schedule = schedule
            return call
        call = _Call(self, name if again else self._numbered(name), layers, schedule, again)
        if weight is not None:
            self._open.setdefault(name, []).append(call)
        return call

    def _follow(self, name: str, is_backward: bool, again: bool) -> bool:
        """Count the steps of compiled code whose caller is not the watched module, but a wrapper of it or a function.

        A forward after a backward begins one; in inference that of the layer that began one. True in sampled ones.
        """
        if is_backward:
            self._seen_backward = self._trains = True
        elif not again and (self._seen_backward or (not self._trains and self._leader in ("", name))):
            self._seen_backward, self._leader = False, name
            self._begin_step(self._count + 1)
        return self._is_sampled()

    def _is_sampled(self) -> bool:
        return self._count >= 0 and self._count % self.every == 0

    def see_plain(self, layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        """The tensors of a call in high precision."""
        if self._follows or layer not in self._chosen or not x.numel() or torch._C._current_graph_task_id() != -1:
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        call = _Call(self, self._numbered(self._names[layer]), (layer,), None)
        call.see_x(x, _NOTHING)
        call.see_w(layer.weight, _NOTHING)  # type: ignore[arg-type]
        call.see_y(y, getattr(layer, "added_bias", layer.bias))  # type: ignore[arg-type]
        if y.requires_grad:
            y.register_hook(lambda dy: call.see_dy(dy, _NOTHING, True, True))

    def _see_plain_call(self, layer: nn.Module, inputs: tuple, y: torch.Tensor) -> None:
        if inputs and isinstance(y, torch.Tensor):
            self.see_plain(layer, inputs[0], y)

    def _numbered(self, name: str) -> str:
        """The name of a module, with the number of its call where it is called again in one step."""
        count = self._calls.get(name, 0)
        self._calls[name] = count + 1
        return f"{name}#{count}" if count else name

    def _part(self, size: int) -> slice:
        """The part of an axis that is measured in this sample."""
        return self.measured.part(size, self._sampled - 1)

    def _close(self) -> None:
        with _plainly():
            if self._samples:
                self._samples[-1].unpin()
            self._sample.close()
        self._samples.append(self._sample)
        self._sample = Sample()

    def _read(self) -> None:
        if self._sample:
            self._close()
        while self._samples:
            made = self._samples[0].read()
            del self._samples[0]  # no sooner: Ctrl-C while the device is waited for leaves it
            for entry, found in made:
                self.take(entry, found)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """No gradients, and no modes of torch's dispatcher."""
    with torch.no_grad(), outside_of_modes():
        yield


class _Call:
    """The listener of one call: measures each tensor as it comes, and keeps the parts that the products need.

    Of x the columns that the measured part of dw reads stay from forward to backward, [M, rows]; nothing else does.
    """

    def __init__(
        self, session: watch, name: str, layers: Sequence[Any], schedule: Schedule | None, is_again: bool = False
    ) -> None:
        self.session, self.name, self.layers, self.schedule = session, name, layers, schedule
        self.step, self.is_again = session._count, is_again
        self.group: int | None = None
        self.x: torch.Tensor | None = None
        self.w: torch.Tensor | None = None
        self.x_columns: torch.Tensor | None = None
        self.dy_seen: torch.Tensor | None = None
        self.of_x = self.of_w = _NOTHING

    def see_x(self, x: torch.Tensor, inputs: CastInputs) -> None:
        """x before its cast."""
        self.x, self.of_x = x, inputs

    def see_w(self, w: torch.Tensor, inputs: CastInputs) -> None:
        """The weight."""
        self.w, self.of_w = w, inputs

    def see_y(self, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The result of fprop: x and w are measured now."""
        assert self.x is not None
        with self._quietly(y):
            x, self.x = self._rows(self.x, self.of_x, self._dtype), None
            w, y = self._weight(), self._rows(y, self.of_x)
            if x.numel() == 0 or w.numel() == 0:
                return
            self.rows, self.k, self.n = (self.session._part(size) for size in (len(x), x.shape[1], w.shape[0]))
            self.x_columns = x[:, self.k].clone()
            if self.is_again:
                return
            self._operand("x", x, self.of_x, (True, self._wants("wants_dw")))
            has_own = self.of_w.seed is not None or self.schedule is None
            of_w = self.of_w if has_own else self.of_w._replace(seed=self.of_x.seed)
            self._operand("w", w, of_w, (True, self._wants("wants_dx")))
            if bias is not None:
                bias = bias.detach() if self.group is None else bias.detach()[self.group]
            starts = self.rows.start, self.n.start
            self._product("fprop", "y", y, (x[self.rows], w[self.n]), starts, bias)

    def see_dy(self, dy: torch.Tensor, inputs: CastInputs, wants_dx: bool, wants_dw: bool) -> None:
        """The gradient before its cast."""
        with self._quietly(dy):
            dy = self._rows(dy, inputs, self._dtype)
            if self.x_columns is None or dy.numel() == 0:
                return
            self._operand("dy", dy, inputs, (wants_dx, wants_dw))
            self.dy_seen = dy

    def see_gradients(self, dx: torch.Tensor | None, dw: torch.Tensor | None) -> None:
        """The results of dgrad and of wgrad."""
        dy = self.dy_seen
        if dw is not None:  # which comes alone where it was delayed
            self.dy_seen = None
        result = dx if dx is not None else dw
        if dy is None or result is None or self.x_columns is None:
            return
        with self._quietly(result):
            if dx is not None:
                dx = self._rows(dx, self.of_x)
                starts = self.rows.start, self.k.start
                self._product("dgrad", "dx", dx, (dy[self.rows], self._weight()[:, self.k].t()), starts)
            if dw is not None:
                dw = dw.detach() if self.group is None else dw.detach()[self.group]
                starts = self.n.start, self.k.start
                self._product("wgrad", "dw", dw, (dy[:, self.n].t(), self.x_columns.t()), starts)

    def _operand(self, tensor: str, matrix: torch.Tensor, inputs: CastInputs, uses: tuple[bool, bool]) -> None:
        """The metrics of both operands of a tensor that are in use, and of the formats that might be."""
        session, schedule, measured = self.session, self.schedule, self.session.measured
        if tensor not in measured.tensors:
            return
        operands, casts = OPERANDS_OF[tensor], [None, None]
        if schedule is not None:
            entries = entries_of(schedule.recipe, schedule.routes, tensor, *uses)
            casts = [None if entry is None else entry.cast for entry in entries]
        first, cast = (operands[0], casts[0]) if uses[0] else (operands[1], casts[1])
        source, add = Source(self._backend(matrix.device), matrix), session._sample.add
        parts = session._part(matrix.shape[0]), session._part(matrix.shape[1])
        entry = self._entry(first, dtype_name(matrix.dtype) if cast is None else cast.format.name)
        add(entry, source.read())
        if cast is None and not measured.metrics.isdisjoint(OF_SAMPLE):
            add(entry, read_rows(source.backend, matrix[parts[0]], None, measured.metrics))
        asked = [(operand, one, inputs) for operand, one in zip(operands, casts, strict=True) if one is not None]
        asked += [(operands[0], one, _NOTHING) for one in measured.not_in_use(casts)]
        for operand, cast, of_cast in asked:
            if cast.is_stochastic and of_cast.seed is None:  # of a format that is not in use: any seed will do
                of_cast = of_cast._replace(seed=torch.zeros(2, dtype=torch.int64, device=matrix.device))
            turned = operand.transposed
            options: Options = {"stream": operand.stream, "batch": self.group or 0, "scale_enc": of_cast.scale_enc}
            made = quantized(source, cast, turned, parts[turned], seed=of_cast.seed, **options)
            entry = self._entry(operand, cast.format.name)
            add(entry, read_rows(source.backend, made.x, made, measured.metrics))
            if cast.is_stochastic and "sr_noise" in measured.metrics:
                add(entry, read_noise(source, cast, turned, parts[turned], options))

    def _product(
        self, gemm: str, name: str, whole: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor],
        starts: tuple[int, int], bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """The counts of a result, and the error of its part that is the product ``a @ b.T`` of two factors."""
        table = None if self.schedule is None else getattr(self.schedule.recipe, gemm)
        formats = dtype_name(whole.dtype) if table is None else formats_of(table)
        entry, add = Entry(self.step, self.name, gemm, name, formats), self.session._sample.add
        add(entry, Source(self._backend(whole.device), whole).read(with_amax=False))
        if table is not None and not self.session.measured.metrics.isdisjoint(OF_PRODUCT):
            (row, column), (a, b) = starts, factors
            result = whole[row : row + len(a), column : column + len(b)]
            bias = None if bias is None else bias[column : column + len(b)]
            add(entry, read_product(table, result, a, b, bias))

    def _entry(self, operand: Operand, fmt: str) -> Entry:
        return Entry(self.step, self.name, operand.gemm, operand.tensor, fmt)

    def _wants(self, name: str) -> bool:
        return self.schedule is not None and getattr(self.schedule, name)

    @property
    def _dtype(self) -> torch.dtype | None:
        """The dtype that casts read; None in high precision, where each tensor has its own."""
        return None if self.schedule is None else self.schedule.dtype

    def _rows(self, x: torch.Tensor, inputs: CastInputs, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x as a matrix, in a dtype or in its own: the rows of the group that is measured, of an ordinary call all."""
        matrix = as_matrix(x.detach(), dtype)
        if inputs.groups is None:
            return matrix
        slices = inputs.groups.slices
        if self.group is None:
            used = [index for index, rows in enumerate(slices) if rows.start < rows.stop] or [0]
            self.group = used[(self.session._sampled - 1) % len(used)]
            self.name += f"[{self.group}]"
        return matrix[slices[self.group]]

    def _weight(self) -> torch.Tensor:
        """The weight [N, K], of the group that is measured, in the dtype that its cast reads."""
        w = self.w if self.w is not None else torch.cat([layer.weight.detach() for layer in self.layers])
        w = w.detach() if self.group is None else w[self.group].detach()
        dtype = self._dtype or w.dtype
        if isinstance(w, QuantizedTensor):
            return w.dequantize(dtype)
        return w if w.dtype == dtype else w.to(dtype)

    def _backend(self, device: torch.device) -> Backend:
        return backends.choose("auto", device) if self.schedule is None else self.schedule.backend

    def _quietly(self, tensor: torch.Tensor) -> contextlib.AbstractContextManager:
        """No gradients, autocast or modes of torch's dispatcher, and the tensor's device; mostly nothing changes."""
        kind, index = tensor.device.type, tensor.get_device()
        is_elsewhere = index >= 0 and index != current_device()
        is_autocast = torch.is_autocast_enabled(kind)
        if not (is_elsewhere or is_autocast or torch.is_grad_enabled() or are_named()):
            return _AS_IT_IS
        stack = contextlib.ExitStack()
        stack.enter_context(_plainly())
        if is_autocast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if is_elsewhere:
            stack.enter_context(torch.cuda.device(index))
        return stack


class _Owners:
    """The layers of weights that observed calls read.

    A weight that a compiler has joined has memory of its own: its layers are found by values, for which the host waits.
    """

    def __init__(self, layers: Sequence[RecipeLayer]) -> None:
        self._layers = layers
        self._by_address: dict[int, RecipeLayer] = {}  # an entry for each layer

    def of(self, weight: torch.Tensor) -> list[RecipeLayer]:
        """The layer with this weight, as a list of one; an empty list for another tensor."""
        address = _address_of(weight)
        layer = self._by_address.get(address)
        if layer is None or _address_of(layer.weight) != address:  # memory of weights moves under FSDP
            self._by_address = {}
            for one in self._layers:
                self._by_address.setdefault(_address_of(one.weight), one)
            layer = self._by_address.get(address)
        return [] if layer is None else [layer]

    def joined_in(self, weight: torch.Tensor) -> list[RecipeLayer]:
        """The layers whose first rows are those of the parts of this weight, empty where a part has no layer."""
        found: list[RecipeLayer] = []
        row = 0
        while row < weight.shape[0]:
            part = weight[row : row + 1]
            layer = next((
                one for one in self._layers if one not in found and one.weight.dim() == weight.dim() == 2
                and one.weight.shape[1:] == weight.shape[1:] and torch.equal(one.weight[:1].to(part.dtype), part)
            ), None)  # fmt: skip
            if layer is None:
                return []
            found.append(layer)
            row += layer.weight.shape[0]
        return found


def _names_in(root: nn.Module) -> dict[nn.Module, str]:
    """The names of a model's modules; a layer of experts is its products, each under the name of its parameter."""
    found = {module: name for name, module in root.named_modules() if not isinstance(module, ExpertsLayer)}
    return {
        module: ".".join([*name.split(".")[:-2], module.name]) if isinstance(module, ExpertProduct) else name
        for module, name in found.items()
    }  # fmt: skip


def _joint_name(names: Sequence[str]) -> str:
    """``a.q+k+v`` of a.q, a.k and a.v."""
    prefix = names[0].rpartition(".")[0]
    cut = len(prefix) + 1 if prefix else 0
    return "+".join([names[0], *(name[cut:] for name in names[1:])])


def _address_of(weight: torch.Tensor) -> int:
    return (weight.part_list()[0] if isinstance(weight, QuantizedTensor) else weight).data_ptr()


def _is_compiled(model: nn.Module) -> bool:
    """True for a model whose call, or that of a part of it, is compiled."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None and not isinstance(module, nn.Linear)
        for module in model.modules() if module is not model
    ) or hasattr(model, "_orig_mod") or hasattr(model.__dict__.get("_compiled_call_impl"), "compiled")  # fmt: skip
