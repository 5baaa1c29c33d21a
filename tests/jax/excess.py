"""Excess precision: on a GPU, XLA may leave out conversions to a narrower float that is widened again.

A CPU makes every conversion that is written, so a program that depends on one gives other bits there. `evaluate` runs
a function operation by operation as the GPU might: beside every narrow float goes the wide value that it was rounded
from, arithmetic in bfloat16 is that of float32, and a widening conversion takes the wide value. A function is safe if
its results do not change.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

# Operations through which XLA moves a conversion, and arithmetic that it computes in float32 for bfloat16.
_SHAPES = {
    "broadcast_in_dim", "concatenate", "copy", "copy_p", "expand_dims", "pad", "reshape", "rev", "roll", "slice",
    "squeeze", "transpose",
}  # fmt: skip
_ARITHMETIC = {
    "abs", "add", "clamp", "cos", "div", "exp", "integer_pow", "log", "max", "min", "mul", "neg", "reduce_max",
    "reduce_min", "reduce_sum", "select_n", "sign", "sin", "sqrt", "square", "sub", "tanh",
}  # fmt: skip
_COMPARISONS = {"eq", "ge", "gt", "is_finite", "le", "lt", "ne"}
_INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class Value:
    """An array, and the float32 that it was rounded from, if it was."""

    def __init__(self, array, wide=None):
        self.array, self.wide = array, wide

    @property
    def kept(self):
        """The value that arithmetic reads."""
        return self.array if self.wide is None else self.wide


def _is_narrow(dtype):
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def evaluate(function, *arguments):
    """``function(*arguments)`` with excess precision."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    values = _run(closed.jaxpr, closed.consts, [Value(jnp.asarray(leaf)) for leaf in jax.tree.leaves(arguments)])
    return jax.tree.unflatten(jax.tree.structure(shape), [value.array for value in values])


def _run(jaxpr, consts, arguments):
    environment = dict(zip(jaxpr.constvars, map(Value, consts), strict=True))
    environment.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom):
        return Value(jnp.asarray(atom.val, atom.aval.dtype)) if isinstance(atom, Literal) else environment[atom]

    for equation in jaxpr.eqns:
        results = _equation(equation, [read(atom) for atom in equation.invars])
        environment.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(equation, values):
    name, parameters = equation.primitive.name, equation.params
    if name == "cond":
        index = int(values[0].array)
        branch = parameters["branches"][index]
        return _run(branch.jaxpr, branch.consts, values[1:])
    inner = next((parameters[key] for key in _INLINED if key in parameters), None)
    if inner is not None and name not in ("scan", "while", "custom_partitioning"):
        return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)
    out = equation.outvars[0].aval.dtype
    if name == "convert_element_type" and jnp.issubdtype(values[0].array.dtype, jnp.floating):
        return [_converted(values[0], out)]
    if name in _SHAPES and any(value.wide is not None for value in values):
        wide = _bind(equation, [value.kept.astype(jnp.float32) for value in values])[0]
        return [Value(wide.astype(out), wide)]
    has_wide = any(value.wide is not None for value in values)
    if name in _COMPARISONS and has_wide:
        return [Value(_bind(equation, [value.kept.astype(jnp.float32) for value in values])[0])]
    if name in _ARITHMETIC and (out == jnp.bfloat16 or (has_wide and _is_narrow(out))):
        operands = [
            value.kept.astype(jnp.float32) if _is_narrow(value.array.dtype) else value.array for value in values
        ]
        wide = _bind(equation, operands)[0]
        return [Value(wide.astype(out), wide)]
    return [Value(array) for array in _bind(equation, [value.array for value in values])]


def _converted(value, out):
    if not jnp.issubdtype(out, jnp.floating):
        return Value(value.array.astype(out))
    wide = value.kept
    if _is_narrow(out):
        return Value(wide.astype(out), wide.astype(jnp.float32))
    return Value(wide.astype(out))


def _bind(equation, arrays):
    parameters = dict(equation.params)
    if "out_dtype" in parameters:
        parameters["out_dtype"] = arrays[0].dtype
    result = equation.primitive.bind(*arrays, **parameters)
    return list(result) if equation.primitive.multiple_results else [result]
