"""Vectors of 16 numbers of 32 bits as values in functions that numba compiles: operators, loads and stores.

What LLVM makes of a loop over elements depends on the loop; lanes are vectors in its input already. They take one
register with AVX-512, two with AVX2, four with NEON. Loads and stores know the end of their line: what lies behind it
is read as zeros and is not written.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

GROUP = 16
INFINITY = 0x7F800000


# ---- lanes -------------------------------------------------------------------------------------------------------


class Lanes(types.Type):
    """numba's type of a vector of GROUP numbers; `number` is the type of one, `vector` that of LLVM."""

    def __init__(self, number: Any, lane: ir.Type) -> None:
        super().__init__(f"{number} x {GROUP}")
        self.number, self.vector = number, ir.VectorType(lane, GROUP)


INTS, FLOATS = Lanes(types.int32, ir.IntType(32)), Lanes(types.float32, ir.FloatType())
WORDS, MASK = Lanes(types.int16, ir.IntType(16)), Lanes(types.boolean, ir.IntType(1))


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.vector)


def _numbers(values: Any, bits: int = 32) -> ir.Constant:
    values = list(values)
    return ir.Constant(ir.VectorType(ir.IntType(bits), len(values)), values)


def _as_lanes(context: Any, builder: Any, kind: Lanes, given: Any, value: Any) -> Any:
    """A value as lanes of a kind: a number is in every lane."""
    if isinstance(given, Lanes):
        return value
    number = context.cast(builder, value, given, kind.number)
    one = builder.insert_element(ir.Constant(kind.vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, _numbers([0] * GROUP))


def _lane_by_lane(builds: dict[Lanes, Callable], result: Lanes | None = None) -> Any:
    """An intrinsic of two operands, lanes or numbers, by how it is built for a kind of lanes."""

    @intrinsic
    def apply(_typing: Any, a: Any, b: Any) -> Any:
        kind = a if isinstance(a, Lanes) else b

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pair = (_as_lanes(context, builder, kind, *given) for given in zip(sig.args, args, strict=True))
            return builds[kind](builder, *pair)

        return (result or kind)(a, b), generate

    return apply


def _operator(function: Callable, result: Lanes | None = None, **builds: Callable) -> None:
    """Let an operator work on lanes, and on lanes and numbers.

    It is written for numba's lowering: a function that numba compiles would be compiled for every pair of types.
    """
    of_kind = {{"ints": INTS, "floats": FLOATS}[kind]: build for kind, build in builds.items()}

    @infer_global(function)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            kind = next((given for given in args if given in of_kind), None)
            return None if kind is None else (result or kind)(*args)

    for kind, build in of_kind.items():

        def generate(
            context: Any, builder: Any, sig: Any, args: Any, kind: Lanes = kind, build: Callable = build
        ) -> Any:  # fmt: skip
            pair = (_as_lanes(context, builder, kind, *given) for given in zip(sig.args, args, strict=True))
            return build(builder, *pair)

        for pair in ((kind, kind), (kind, types.Number), (types.Number, kind)):
            lower_builtin(function, *pair)(generate)


_Builder = ir.IRBuilder
_operator(operator.add, ints=_Builder.add, floats=_Builder.fadd)
_operator(operator.sub, ints=_Builder.sub, floats=_Builder.fsub)
_operator(operator.mul, floats=_Builder.fmul)
_operator(operator.truediv, floats=_Builder.fdiv)
_operator(operator.and_, ints=_Builder.and_)
_operator(operator.or_, ints=_Builder.or_)
_operator(operator.lshift, ints=_Builder.shl)
_operator(operator.rshift, ints=_Builder.lshr)  # the sign is a bit like others


def _comparison(sign: str) -> dict[str, Callable]:
    return {
        "ints": lambda builder, a, b: builder.icmp_signed(sign, a, b),
        "floats": lambda builder, a, b: builder.fcmp_ordered(sign, a, b),
    }


_operator(operator.gt, MASK, **_comparison(">"))
_operator(operator.ge, MASK, **_comparison(">="))
_operator(operator.lt, MASK, **_comparison("<"))
_operator(operator.eq, MASK, **_comparison("=="))


def _chosen(sign: str) -> Any:
    """The second operand where it is larger, or smaller, than the first: the first where one of them is NaN."""
    compared = _comparison(sign)
    return _lane_by_lane({
        kind: lambda builder, a, b, name=name: builder.select(compared[name](builder, b, a), b, a)
        for kind, name in ((INTS, "ints"), (WORDS, "ints"), (FLOATS, "floats"))
    })  # fmt: skip


larger, smaller = _chosen(">"), _chosen("<")


@intrinsic
def where(_typing: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where the mask is set, elsewhere b; at least one of them is lanes."""
    kind = a if isinstance(a, Lanes) else b

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pair = (_as_lanes(context, builder, kind, sig.args[i], args[i]) for i in (1, 2))
        return builder.select(args[0], *pair)

    return kind(mask, a, b), generate


@intrinsic
def bits_of(_typing: Any, values: Any) -> Any:
    """The 32 bits of every float32."""
    return INTS(values), lambda context, builder, sig, args: builder.bitcast(args[0], INTS.vector)


@intrinsic
def floats_of(_typing: Any, bits: Any) -> Any:
    """The float32 of every 32 bits."""
    return FLOATS(bits), lambda context, builder, sig, args: builder.bitcast(args[0], FLOATS.vector)


@intrinsic
def lane_numbers(_typing: Any) -> Any:
    return INTS(), lambda context, builder, sig, args: _numbers(range(GROUP))


def _reduced(context: Any, builder: Any, name: str, *operands: Any) -> Any:
    kind = ir.FunctionType(operands[-1].type.element, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}"), operands)


@intrinsic
def largest(_typing: Any, values: Any) -> Any:
    """The largest of GROUP int32."""
    name = f"smax.v{GROUP}i32"
    return types.int32(values), lambda context, builder, sig, args: _reduced(context, builder, name, *args)


@intrinsic
def added(_typing: Any, start: Any, values: Any) -> Any:
    """start + lane 0 + lane 1 + ..., each sum rounded, in this order."""
    name = f"fadd.v{GROUP}f32"
    return types.float32(types.float32, values), lambda context, builder, sig, args: _reduced(
        context, builder, name, *args
    )


# ---- memory ------------------------------------------------------------------------------------------------------


def _place(context: Any, builder: Any, kind: Any, array: Any, start: Any, size: int) -> tuple:
    """Pointer to an element of a line, how many elements are left, and if they are `size` or more."""
    made = context.make_array(kind)(context, builder, array)
    left = builder.sub(cgutils.unpack_tuple(builder, made.shape)[0], start)
    return builder.gep(made.data, [start]), left, builder.icmp_signed(">=", left, ir.Constant(left.type, size))


def _read(context: Any, builder: Any, kind: Any, array: Any, start: Any, size: int = GROUP) -> Any:
    """A vector of `size` elements of a line; those behind its end are zeros."""
    pointer, left, are_all = _place(context, builder, kind, array, start, size)
    vector, item = ir.VectorType(pointer.type.pointee, size), context.get_abi_sizeof(pointer.type.pointee)
    with builder.if_else(are_all, likely=True) as (then, otherwise):
        with then:
            whole, after_whole = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1), builder.block
        with otherwise:
            copy = cgutils.alloca_once(builder, vector)
            builder.store(ir.Constant(vector, None), copy)
            cgutils.raw_memcpy(builder, builder.bitcast(copy, pointer.type), pointer, left, item)
            part, after_part = builder.load(copy), builder.block
    found = builder.phi(vector)
    found.add_incoming(whole, after_whole)
    found.add_incoming(part, after_part)
    return found


def _write(context: Any, builder: Any, vector: Any, kind: Any, array: Any, start: Any) -> None:
    """Put a vector into a line; elements behind its end are dropped."""
    size, item = vector.type.count, context.get_abi_sizeof(vector.type.element)
    pointer, left, are_all = _place(context, builder, kind, array, start, size)
    with builder.if_else(are_all, likely=True) as (then, otherwise):
        with then:
            builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=1)
        with otherwise:
            copy = cgutils.alloca_once(builder, vector.type)
            builder.store(vector, copy)
            cgutils.raw_memcpy(builder, pointer, builder.bitcast(copy, pointer.type), left, item)


def _reader(result: Lanes, builds: dict[Any, Callable], size: int = GROUP) -> Any:
    """An intrinsic that reads lanes from a position of a line, built from `size` elements of it by their type."""

    @intrinsic
    def load(_typing: Any, line: Any, _at: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builds[line.dtype](builder, _read(context, builder, sig.args[0], *args, size))

        return result(line, types.int64), generate

    return load


def _writer(build: Callable) -> Any:
    """An intrinsic that writes lanes from a position of a line on, as `build` makes them for the type of the line."""

    @intrinsic
    def store(_typing: Any, values: Any, line: Any, _at: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            number = context.get_value_type(line.dtype)
            _write(context, builder, build(builder, args[0], number), sig.args[1], *args[1:])
            return context.get_dummy_value()

        return types.void(values, line, types.int64), generate

    return store


def _wide(builder: Any, raw: Any) -> Any:
    return builder.zext(raw, INTS.vector)


def _bfloat16(builder: Any, words: Any) -> Any:
    """bfloat16 is the upper half of a float32."""
    return builder.bitcast(builder.shl(_wide(builder, words), _numbers([16] * GROUP)), FLOATS.vector)


def _nibbles(builder: Any, raw: Any) -> Any:
    """8 bytes -> 16 codes, the lower half of a byte first."""
    pairs = builder.zext(raw, ir.VectorType(ir.IntType(64), 8))
    spread = builder.or_(pairs, builder.shl(pairs, _numbers([28] * 8, 64)))
    return builder.bitcast(builder.and_(spread, _numbers([0xF0000000F] * 8, 64)), INTS.vector)


def _sixes(builder: Any, raw: Any) -> Any:
    """12 bytes -> 16 codes: three bytes are a word of four codes, the lowest bits first."""
    picks = [byte for lane in range(GROUP) for byte in (*range(lane // 4 * 3, lane // 4 * 3 + 3), 12)]
    zeros = ir.Constant(raw.type, None)
    words = builder.bitcast(builder.shuffle_vector(raw, zeros, _numbers(picks)), INTS.vector)
    shifted = builder.lshr(words, _numbers(6 * (lane % 4) for lane in range(GROUP)))
    return builder.and_(shifted, _numbers([63] * GROUP))


def _float16(builder: Any, words: Any) -> Any:
    """The exponent of float16 is moved by 112, which makes numbers of subnormal ones; infinity and NaN keep theirs."""
    half = _wide(builder, words)
    masked = lambda bits: builder.and_(half, _numbers([bits] * GROUP))  # noqa: E731
    shift, exponent = _numbers([13] * GROUP), _numbers([0x7C00] * GROUP)
    scaled = builder.bitcast(builder.shl(masked(0x7FFF), shift), FLOATS.vector)
    scaled = builder.fmul(scaled, ir.Constant(FLOATS.vector, [2.0**112] * GROUP))
    is_special = builder.icmp_signed("==", masked(0x7C00), exponent)
    special = builder.select(is_special, _numbers([INFINITY] * GROUP), _numbers([0] * GROUP))
    bits = builder.or_(builder.bitcast(scaled, INTS.vector), special)
    sign = builder.shl(masked(0x8000), _numbers([16] * GROUP))
    return builder.bitcast(builder.or_(bits, sign), FLOATS.vector)


def _in_pairs(builder: Any, codes: Any, _number: Any) -> Any:
    """16 codes of four bits -> 8 bytes."""
    pairs = builder.bitcast(codes, ir.VectorType(ir.IntType(64), 8))
    joined = builder.or_(pairs, builder.lshr(pairs, _numbers([28] * 8, 64)))
    return builder.trunc(joined, ir.VectorType(ir.IntType(8), 8))


def _fitting(builder: Any, values: Any, number: Any) -> Any:
    """The low bits of integers, as many as the line takes; others as they are."""
    vector = ir.VectorType(number, GROUP)
    return values if values.type == vector else builder.trunc(values, vector)


def _same(_builder: Any, raw: Any) -> Any:
    return raw


_WIDENED = {types.float32: _same, types.uint16: _bfloat16, types.int16: _float16}
values_at = _reader(FLOATS, _WIDENED)
integers_at = _reader(INTS, {types.int32: _same, types.uint8: _wide})
nibbles_at, sixes_at = _reader(INTS, {types.uint8: _nibbles}, 8), _reader(INTS, {types.uint8: _sixes}, 12)
store, store_pairs = _writer(_fitting), _writer(_in_pairs)


@intrinsic
def stored_magnitudes_at(_typing: Any, line: Any, _at: Any) -> Any:
    """Values without their signs as they are stored: words, or the bits of float32. Their order is that of integers."""
    kind = INTS if line.dtype == types.float32 else WORDS

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        raw = builder.bitcast(_read(context, builder, sig.args[0], *args), kind.vector)
        bits = kind.number.bitwidth
        return builder.and_(raw, _numbers([(1 << bits - 1) - 1] * GROUP, bits))

    return kind(line, types.int64), generate


@intrinsic
def widened(_typing: Any, stored: Any, line: Any) -> Any:
    """The bits as float32 of values as they are stored in a line."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(_WIDENED[line.dtype](builder, args[0]), INTS.vector)

    return INTS(stored, line), generate


@intrinsic
def across(_typing: Any, maxima: Any, _at: Any) -> Any:
    """The largest lane of each of the GROUP vectors from a position on: lane i is that of vector i.

    Two vectors become one, that of the larger of neighbouring lanes, until one vector is left.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        firsts = [builder.add(args[1], ir.Constant(args[1].type, GROUP * vector)) for vector in range(GROUP)]
        vectors = [_read(context, builder, sig.args[0], args[0], first) for first in firsts]
        even, odd = _numbers(range(0, 2 * GROUP, 2)), _numbers(range(1, 2 * GROUP, 2))
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            halves = [(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd)) for a, b in pairs]
            vectors = [builder.select(builder.icmp_signed(">", low, high), low, high) for low, high in halves]
        return vectors[0]

    return INTS(maxima, types.int64), generate
