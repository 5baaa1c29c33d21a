"""`watch_outputs`: a function that also returns what low precision did to the operands and products inside it.

The function is traced, and its jaxpr run again with the readings of `microfloat.jax.observing` as further results of
every jit, scan and shard_map around them. Nothing leaves by a callback: readings are arrays like any output.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import PartitionSpec, Sharding

from microfloat import watching as common
from microfloat.arguments import as_int
from microfloat.errors import invalid_type, invalid_value, kind_of
from microfloat.jax.observing import Subject, shown_p, watching
from microfloat.jax.transformations import like_in_variance, no_derivative, on_first_device, varying_axes
from microfloat.operands import TENSORS
from microfloat.watching import BINADES, DEFAULT_METRICS, METRICS, Entry, Measured, Record


def watch_outputs(
    fn: Callable[..., Any], tensors: Sequence[str] = TENSORS, metrics: Sequence[str] = DEFAULT_METRICS,
    what_if: Sequence[Any] = ("nvfp4",), *, rows: int = 128,
) -> Callable[..., tuple[Any, "Readings"]]:  # fmt: skip
    """A function that returns ``(fn(*arguments), readings)``: of every call of an op under a recipe, `Readings`.

    It goes around the gradient and inside jit: ``jax.jit(mj.watch_outputs(jax.value_and_grad(loss)))``. A training
    step that is called in sampled steps alone costs nothing in the others, which call `fn` as it is. Results have the
    bits of `fn`'s. Calls inside scan are read in every iteration; those inside a cond or a while_loop are not read.
    Modules are named by `jax.named_scope`, as Flax linen sets it, layers of Flax nnx by
    `microfloat.jax.nnx.watch_outputs`.

    `tensors`, `metrics`, `what_if` and `rows` are those of `microfloat.torch.watch`: operands that are measured, names
    of metrics, formats or Casts that are not in use, rows of an operand (a multiple of 128, from the middle of it).

    Raises InvalidValueError and InvalidTypeError for arguments that are none, NotSupportedError where the watched
    function is differentiated. Source: docs/watching.md.

    >>> import microfloat.jax as mj
    >>> op = mj.dot_general("mxfp8")
    >>> y, readings = mj.watch_outputs(op)(jnp.ones((4, 32)), jnp.ones((32, 16)), (((1,), (0,)), ((), ())))
    >>> sorted({record.operand for record in readings.records()})
    ['w', 'x', 'y']
    """
    if not callable(fn):
        raise invalid_type("fn", kind_of(fn), "a function, such as jax.value_and_grad(loss)")
    options = Measured.checked(tensors, metrics, what_if, rows)

    @wraps(fn)
    def watched(*arguments: Any, **keywords: Any) -> tuple[Any, Readings]:
        leaves, structure = jax.tree.flatten((arguments, keywords))
        at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | np.generic)]

        def flat(arrays: Sequence[Any]) -> Any:
            filled = dict(zip(at, arrays, strict=True))
            args, options = structure.unflatten([filled.get(index, leaf) for index, leaf in enumerate(leaves)])
            return fn(*args, **options)

        with watching(options):
            traced, shapes = jax.make_jaxpr(flat, return_shape=True)([leaves[index] for index in at])

        @jax.jit
        def run(inputs: list[Any], constants: list[Any]) -> tuple[list[Any], Readings]:
            found: list[_Found] = []
            return _evaluate(traced.jaxpr, constants, inputs, found), _numbered(found, options)

        results, readings = run(*_without_derivative(([leaves[index] for index in at], list(traced.consts))))
        return jax.tree.structure(shapes).unflatten(results), readings

    return watched


_without_derivative = no_derivative(
    "watch_outputs: got a derivative of a watched function, needed the gradient inside of it: "
    "mj.watch_outputs(jax.value_and_grad(loss)) instead of jax.value_and_grad(mj.watch_outputs(loss))."
)


class _Found(NamedTuple):
    """The numbers of one `shown_p` under named scopes. `leads`: the meaning of their leading axes."""

    scope: tuple[str, ...]
    stage: str
    op: str
    subjects: tuple[Subject, ...]
    numbers: Sequence[Array]
    leads: tuple[str, ...] = ()


class _Label(NamedTuple):
    module: str
    subject: Subject
    leads: tuple[str, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["numbers"], meta_fields=["labels", "metrics"])
@dataclass(frozen=True)
class Readings:
    """A pytree of sums, a small float32 array for each tensor, cast and product: an output of jit like any other.

    `records(step)` waits for the device and makes metrics of them; a `RecordLog` collects the records of many steps.
    """

    numbers: tuple[Array, ...]
    labels: tuple[_Label, ...]
    metrics: frozenset[str]

    def records(self, step: int = 0) -> list[Record]:
        """The records of this step."""
        log = RecordLog()
        log.add(step, self)
        return log.records


class RecordLog(common.RecordLog):
    """Records of many steps: ``log.add(step, readings)``, then records, table, files and pictures as of `mf.watch`."""

    def __init__(self, metrics: Sequence[str] = METRICS, ema: float = 0.9) -> None:
        super().__init__(metrics, ema)
        self._pending: list[tuple[int, Readings]] = []

    def add(self, step: int, readings: Readings) -> None:
        """Keep the readings of a step. The device is waited for when records are read, and for a step in an array."""
        if not isinstance(readings, Readings):
            raise invalid_type("readings", kind_of(readings), "the second result of a function of watch_outputs")
        number = as_int(step, invalid_value("step", repr(step), "the number of a step"))
        self._pending.append((number, readings))

    def _read(self) -> None:
        while self._pending:
            step, readings = self._pending[0]
            arrays = jax.device_get(readings.numbers)
            del self._pending[0]  # no sooner: Ctrl-C while the device is waited for leaves it
            for numbers, (module, subject, leads) in zip(arrays, readings.labels, strict=True):
                loops, table = _combined(np.asarray(numbers, np.float64), subject.kind, leads)
                for index, row in zip(np.ndindex(loops), table, strict=True):
                    name = module + "".join(f"[{number}]" for number in index)
                    found = dict(_metrics(subject, row.tolist(), readings.metrics))
                    self.take(Entry(step, name, *subject[:3]), found, readings.metrics)


def _combined(numbers: np.ndarray, kind: str, leads: tuple[str, ...]) -> tuple[tuple[int, ...], np.ndarray]:
    """(sizes of the loops, a row of numbers for each iteration): devices and batches are one tensor."""
    others = tuple(axis for axis in range(numbers.ndim - 1) if axis >= len(leads) or leads[axis] != "loop")
    if kind in ("rows", "product"):  # each device and each entry of a batch has a unit of its own
        unit, numbers = numbers[..., :1], numbers[..., 1:]
        numbers[..., :3] *= unit**2
        if kind == "rows":
            numbers[..., 7:8] *= unit
            numbers[..., -2 * BINADES :] *= unit**2
    combined = numbers.mean(axis=others) if kind == "noise" else numbers.sum(axis=others)
    if kind == "rows":  # the peak, and the quantiles of blocks
        combined[..., 7:11] = np.fmax.reduce(numbers[..., 7:11], axis=others)
    if kind == "tensor":
        combined[..., 3] = numbers[..., 3].max(axis=others)
    return combined.shape[:-1], combined.reshape(-1, combined.shape[-1])


def _metrics(subject: Subject, n: list[float], wanted: frozenset[str]) -> Any:
    """(name, value) pairs of one row of numbers."""
    if subject.kind == "tensor":
        found = common.of_tensor(int(sum(n[:3])), (n[0], n[1], n[3]))
        return found if subject.operand in TENSORS else (pair for pair in found if pair[0] != "amax")
    if subject.kind == "noise":
        return common.of_noise(subject.more, n)
    signal, noise, along, *more = n
    if subject.kind == "rows":
        return common.of_rows(wanted, subject.more, (signal, noise, signal + along, *more))
    return common.of_product(subject.more, (signal, noise, max(signal + 2 * along + noise, 0.0), signal + along))


def _numbered(found: Sequence[_Found], options: Measured) -> Readings:
    """Readings under the names of their modules; a backward has the name of its forward."""
    counts: dict[str, int] = {}
    opened: dict[str, list[str]] = {}
    numbers, labels = [], []
    for one in found:
        name = _module_of(one)
        if one.stage == "backward" and opened.get(name):
            module = opened[name].pop()
        else:
            count = counts[name] = counts.get(name, -1) + 1
            module = f"{name}#{count}" if count else name
            if one.stage == "kept":
                opened.setdefault(name, []).append(module)
        numbers += one.numbers
        labels += [_Label(module, subject, one.leads) for subject in one.subjects]
    return Readings(tuple(numbers), tuple(labels), options.metrics)


def _module_of(one: _Found) -> str:
    """``Block_0.Dense_1`` from the scopes of a call; linen's module of the op itself is left out."""
    scope = list(one.scope)
    if scope and re.fullmatch(rf"(DelayedScaling|{one.op})(Op|Einsum|RaggedDot)_\d+(\.\w+)?", scope[-1]):
        scope.pop()
    return ".".join(scope) or "dot_general"


_TRANSFORM = re.compile(r"\w+\(([^()]*)\)")
_OF_REMAT = ("checkpoint", "rematted_computation")


def _scope_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """The named scopes of an equation, without the transformations that JAX writes around them."""
    parts = str(eqn.source_info.name_stack).split("/")
    # The backward of a rematerialised call stands in the scopes of the call, then in its own, which are the same.
    last = max((at for at, part in enumerate(parts) if part.startswith("jvp(")), default=0)
    if any(part.startswith("transpose(") for part in parts[:last]):
        parts = parts[last:]
    text = "/".join(parts)
    while (plain := _TRANSFORM.sub(r"\1", text)) != text:
        text = plain
    return tuple(part for part in text.split("/") if part and part not in _OF_REMAT)


def _evaluate(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], found: list[_Found]) -> list[Any]:
    """The results of a jaxpr; readings inside are appended to `found`."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs, inner = [read(atom) for atom in eqn.invars], []
        rule = _RULES.get(eqn.primitive.name)
        if eqn.primitive is shown_p:
            results, numbers = _split(inputs, len(eqn.outvars))
            stage, op, subjects = (eqn.params[name] for name in ("stage", "op", "subjects"))
            inner = [_Found((), stage, op, subjects, numbers)]
        elif rule is not None and any(_is_watched(one) for one in jaxprs_in_params(eqn.params)):
            with eqn.ctx.manager:
                results = rule(eqn, inputs, inner)
        else:
            atoms = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
            alone = jaxpr.replace(constvars=[], invars=atoms, outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
            results = eval_jaxpr(alone, (), *map(read, atoms))
        scope = _scope_of(eqn) if inner else ()
        found += [one._replace(scope=scope + one.scope) for one in inner]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_watched(jaxpr: Jaxpr) -> bool:
    inner = (one for eqn in jaxpr.eqns for one in jaxprs_in_params(eqn.params))
    return any(eqn.primitive is shown_p for eqn in jaxpr.eqns) or any(map(_is_watched, inner))


def _numbers(found: Sequence[_Found]) -> list[Array]:
    return [array for one in found for array in one.numbers]


def _with_numbers(found: Sequence[_Found], numbers: Sequence[Array], *lead: str) -> list[_Found]:
    """`found` with numbers that a loop or a mesh returned; `lead`: the meaning of a new leading axis."""
    left = iter(numbers)
    return [one._replace(leads=(*lead, *one.leads), numbers=[next(left) for _ in one.subjects]) for one in found]


def _split(results: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    return list(results[:count]), list(results[count:])


def _inline(eqn: JaxprEqn, inputs: list[Any], found: list[_Found]) -> list[Any]:
    """Evaluate the function of a jit, or one with a rule for its derivative, which nobody asks for any more."""
    closed = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    inputs = _placed(inputs, eqn.params.get("in_shardings"))
    return _placed(_evaluate(closed.jaxpr, closed.consts, inputs, found), eqn.params.get("out_shardings"))


def _placed(arrays: list[Any], shardings: Sequence[Any] | None) -> list[Any]:
    """Arrays with the shardings that a jit asks for, and others as they are."""
    pairs = zip(arrays, shardings or [None] * len(arrays), strict=True)
    return [lax.with_sharding_constraint(x, one) if isinstance(one, Sharding) else x for x, one in pairs]


def _remat(eqn: JaxprEqn, inputs: list[Any], found: list[_Found]) -> list[Any]:
    """Evaluate a rematerialised region. Its backward computes the forward once more, which was read before."""
    is_again, inner = eqn.params["differentiated"], []
    if is_again and np.any(eqn.params["prevent_cse"]):
        inputs = list(lax.optimization_barrier(inputs))  # as JAX lowers it, so that XLA does compute it once more
    results = _evaluate(eqn.params["jaxpr"], (), inputs, inner)
    found += [one for one in inner if not (is_again and one.stage == "kept")]
    return results


def _scan(eqn: JaxprEqn, inputs: list[Any], found: list[_Found]) -> list[Any]:
    options, closed = eqn.params, eqn.params["jaxpr"]
    if "num_consts" in options:
        fixed, carried = options["num_consts"], options["num_carry"]
    else:  # JAX 0.11 describes operands and results by trees
        fixed, carried = (len(tree) for tree in options["ft_in"].unpack()[:2])
    constants, rest = _split(inputs, fixed)
    first, xs = _split(rest, carried)
    inner: list[_Found] = []

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Array]]]:
        inner.clear()
        carry, ys = _split(_evaluate(closed.jaxpr, closed.consts, (*constants, *carry, *x), inner), len(first))
        return carry, (ys, _numbers(inner))

    loop = {name: options[name] for name in ("length", "reverse", "unroll")}
    last, (ys, numbers) = lax.scan(body, first, xs, **loop)
    found += _with_numbers(inner, numbers, "loop")
    return [*last, *ys]


def _shard_map(eqn: JaxprEqn, inputs: list[Any], found: list[_Found]) -> list[Any]:
    """Evaluate on each device. Readings get an axis of devices; the first device of replicas has theirs."""
    options, inner = eqn.params, []
    # Versions of JAX have either name.
    axes = tuple(sorted(options.get("newly_manual_axes") or options.get("manual_axes") or ()))

    def run(*arguments: Any) -> tuple[list[Any], list[Array]]:
        inner.clear()
        results = _evaluate(options["jaxpr"], (), arguments, inner)
        return results, [by_device(array) for array in _numbers(inner)]

    def by_device(numbers: Array) -> Array:
        if options["check_vma"]:
            varying = varying_axes(numbers)
            numbers = like_in_variance(numbers, lax.pcast(jnp.zeros(()), axes, to="varying"))
            numbers = on_first_device(numbers, frozenset(axes) - varying)
        return numbers[None]

    mapped = jax.shard_map(
        run, mesh=options["mesh"], in_specs=tuple(options["in_specs"]),
        out_specs=(list(options["out_specs"]), PartitionSpec(axes)), check_vma=options["check_vma"],
        axis_names=frozenset(axes),
    )  # fmt: skip
    results, numbers = mapped(*inputs)
    found += _with_numbers(inner, numbers, "devices")
    return results


_RULES: dict[str, Callable[[JaxprEqn, list[Any], list[_Found]], list[Any]]] = {
    **dict.fromkeys(("jit", "pjit", "custom_vjp_call", "custom_jvp_call"), _inline),
    **dict.fromkeys(("checkpoint", "remat2", "remat"), _remat),
    "scan": _scan, "shard_map": _shard_map,
}  # fmt: skip
