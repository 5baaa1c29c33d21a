"""Triton's interpreter in a process of its own, without the work whose results it throws away.

Nine tenths of what Triton 3.6 does for an operation on a small block serve no result: every integer operation is done
once more in 64 bits for an assertion that is off, every call of a function looks through all of `triton.language`, and
every value describes its type anew. Without that the same operations run on the same data, many times as fast.
"""

import functools
import inspect
import math
import os
import sys
from dataclasses import replace

from tests.processes import other_process


def interpreting(run, first=None):
    """``call(case)`` does ``run(case)`` in a process that interprets kernels; its exceptions are raised here.

    `first`: what the process does first, if not `begin`.
    """
    return functools.partial(other_process(first or begin), run)


def begin():
    """First thing in a process, before anything imports triton: whether it interprets is decided there."""
    assert "triton" not in sys.modules, "triton was imported before: it compiles kernels and would interpret none"
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    if triton.__version__.startswith("3.6."):  # another one is interpreted as it comes
        _check_no_overflows()
        _call_builtins_at_once()
        _replace_builtins_once()
        _describe_types_once()
        _describe_tuples_late()
        _look_numpy_types_up_once()
        _keep_handles_plain()
        _unwrap_constants_at_once()
        _type_operands_at_once()
        _reduce_whole_slices()


def _check_no_overflows():
    """The check of integer operations ends in a `device_assert`, which does nothing unless `debug` is on."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _replace_builtins_once():
    """Interpreted builtins stay in `triton.language`: nothing else runs in this process that would need the others."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace_builtins, replaced = interpreter._patch_lang, set()

    @functools.cache
    def languages(function):
        values = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(value.__name__ for value in values if value in (tl, tl.core))

    def once(function):
        if languages(function) not in replaced:
            replaced.add(languages(function))
            replace_builtins(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = once


def _call_builtins_at_once():
    """An interpreted builtin calls the function itself, not by way of one that asks for the semantic which it gets."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    def replace_builtin(of, name, member, builder, scope):
        function, semantic = getattr(member, "__wrapped__", member), TritonSemantic(builder)

        def call(*arguments, _semantic=None, **options):
            return function(*arguments, _semantic=semantic, **options)

        scope.set_attr(of, name, call)

    interpreter._patch_attr = replace_builtin


def _keep_handles_plain():
    """A handle of data is made without a look at the size of its elements: wrong ones would be wrong bytes.

    And no operation changes its operands, which may be constants: the arithmetic shift does otherwise.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def begin(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def shift(self, lhs, rhs):
        signed = [np.dtype(f"int{8 * side.data.itemsize}") for side in (lhs, rhs)]
        shifted = np.right_shift(lhs.data.astype(signed[0]), rhs.data.astype(signed[1]))
        return TensorHandle(shifted, lhs.dtype.scalar)

    TensorHandle.__init__, InterpreterBuilder.create_ashr = begin, shift


def _unwrap_constants_at_once():
    """Values that are no constants of the compiler, nor lists that may hold some, are themselves."""
    from triton.language import core

    unwrap, plain = core._unwrap_if_constexpr, (core.tensor, int, float, bool, core.dtype, type(None))

    def unwrap_at_once(value):
        kind = type(value)
        return value.value if kind is core.constexpr else value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrap_at_once


def _type_operands_at_once():
    """Operands of one type need no conversion, and NumPy broadcasts what a block meets: numbers, and other blocks.

    They are described as what they are broadcast to. What is made of them has that shape.
    """
    from triton.language import core, semantic

    check, constants, joined = semantic.TritonSemantic.binary_op_type_checking_impl, {}, {}

    def constant(self, number, other, divides):
        """The number as a scalar of the other operand's type, or None where the pair has another one, or is wrong."""
        if not isinstance(other, core.tensor) or not isinstance(number, int | float) or number != number:
            return None
        dtype = other.dtype
        key = dtype.name, type(number), number, divides
        if key not in constants:
            kind = None if dtype.is_ptr() else self.to_tensor(number).dtype
            kind = kind and self.computation_type_impl(dtype, False, kind, True, divides)
            fits = kind == dtype and not (kind.is_int() and not _holds(kind, number))
            constants[key] = self.scalar_constant(number, kind) if fits else None
        return constants[key]

    def joint_type(one, other):
        """Type of both blocks once they are broadcast, or None if they have other numbers of axes."""
        key = one.scalar.name, one.sizes, other.sizes
        if key not in joined:
            pairs = list(zip(one.sizes, other.sizes, strict=False))
            fit = len(one.sizes) == len(other.sizes) and all(a == b or 1 in (a, b) for a, b in pairs)
            joined[key] = core.block_type(one.scalar, [max(pair) for pair in pairs]) if fit else None
        return joined[key]

    def check_at_once(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        first = lhs if isinstance(lhs, core.tensor) else constant(self, lhs, rhs, div_or_mod)
        second = rhs if isinstance(rhs, core.tensor) else constant(self, rhs, lhs, div_or_mod)
        if arithmetic_check and first is not None and second is not None:
            one, other = first.type, second.type
            if _alike(first.dtype, second.dtype, div_or_mod):
                if one.is_block() and other.is_block():
                    both = one if one.sizes == other.sizes else joint_type(one, other)
                else:
                    both = one if one.is_block() else other
                if both is not None:
                    first = first if one is both else core.tensor(first.handle, both)
                    return first, second if other is both else core.tensor(second.handle, both)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.TritonSemantic.binary_op_type_checking_impl = check_at_once


def _holds(kind, number):
    return kind.get_int_min_value() <= number <= kind.get_int_max_value()


def _alike(one, other, divides):
    """True for numbers of one type, but not halves that are divided: quotients are made in float32."""
    if one.name != other.name or one.is_ptr():
        return False
    return not divides or not one.is_floating() or one.primitive_bitwidth >= 32


def _describe_types_once():
    """Types of blocks and the shapes of their values are read only: equal ones share what describes them.

    Values of one shape need no broadcast, which is seen at once where their types share the shape.
    """
    from triton.language import core, semantic

    describe, known, shapes = core.block_type.__init__, {}, {}
    no_axes = core.tuple([]), core.constexpr(1)

    def describe_once(self, element_ty, shape):
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        found = known.get((element_ty.name, sizes))
        if found is None or (found["element_ty"] is not element_ty and found["element_ty"] != element_ty):
            describe(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            axes = core.tuple([core.constexpr(size) for size in self.shape])
            found = {**self.__dict__, "sizes": sizes, "of_values": (axes, core.constexpr(math.prod(self.shape)))}
            known[element_ty.name, sizes] = found
        self.__dict__.update(found)

    def begin(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_values if type.is_block() else no_axes

    core.block_type.__init__, core.tensor.__init__ = describe_once, begin
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self, lhs, rhs):
        of_lhs, of_rhs = lhs.type, rhs.type
        same = isinstance(of_lhs, core.block_type) and isinstance(of_rhs, core.block_type)
        return (lhs, rhs) if same and of_lhs.shape is of_rhs.shape else broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_if_needed


def _describe_tuples_late():
    """The name of a tuple's type, which names those of all its values, is made when something reads it."""
    from triton.language import core

    def begin(self, types, fields=None):
        self.types, self.fields = types, fields or [""] * len(types)

    def name(self):
        return f"[{','.join(f'{field}:{kind}' for field, kind in zip(self.fields, self.types, strict=True))}]"

    core.tuple_type.__init__, core.tuple_type.name = begin, property(name)


def _look_numpy_types_up_once():
    """NumPy's type of a type, without a table of all of them for each question."""
    from triton.runtime import interpreter

    look_up, known = interpreter._get_np_dtype, {}

    def once(tt_dtype):
        name = tt_dtype.scalar.name
        if name not in known:
            known[name] = look_up(tt_dtype)
        return known[name]

    interpreter._get_np_dtype = once


def _reduce_whole_slices():
    """A reduction by a function of the kernels: upper half with lower half, as the lanes of a warp do.

    None of them depends on the order: they are maxima and exact counts.
    """
    import numpy as np
    from triton.runtime.interpreter import ReduceOps

    element_by_element = ReduceOps.generic_reduce

    def generic_reduce(self, input):
        if len(input) != 1 or self.axis is None or self.keep_dims:
            return element_by_element(self, input)
        kind, data = input[0].dtype, np.moveaxis(input[0].handle.data, self.axis, 0)
        while len(data) > 1:
            half = len(data) // 2
            assert 2 * half == len(data), "axes are powers of two"
            made = self.combine_fn.fn(self.to_tensor(data[:half], kind), self.to_tensor(data[half:], kind))
            data = made.handle.data
        return [self.to_tensor(data[0], kind)]

    ReduceOps.generic_reduce = generic_reduce
