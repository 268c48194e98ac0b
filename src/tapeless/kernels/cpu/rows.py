"""The maximum of a row, and the softmax of attention, in whole vectors.

Rows are short and of any length; LLVM processes a remainder that does not fill a vector element by element, which costs more
than the rest of the row. Here a row is padded to whole vectors, and invisible elements are masked.
Numba's own maximum propagates NaN and is not vectorised; this one does not, and its callers detect NaN by the sum of
exponentials.
Tested by: tests/kernels/cpu/test_rows.py."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tapeless.kernels.cpu import functions as f
from tapeless.kernels.cpu.jit import FLOAT, HALF, inlined, wide
from tapeless.kernels.cpu.tile import INDEX, INTEGERS, VECTOR, WIDTH, spread

LANES = ir.VectorType(INDEX, WIDTH)


def _constant(x: Any) -> Any:
    return ir.Constant(VECTOR, [float(x)] * WIDTH)


def _exp(builder: Any, x: Any) -> Any:
    """functions.exp of every lane, by the same steps."""

    def times_plus(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=["contract"]), c, flags=["contract"])

    x = builder.select(builder.fcmp_ordered("<", x, _constant(f.LOWEST)), _constant(f.LOWEST), x)
    x = builder.select(builder.fcmp_ordered(">", x, _constant(f.HIGHEST)), _constant(f.HIGHEST), x)
    shifted = times_plus(x, _constant(f.LOG2_E), _constant(f.SHIFT))
    n = builder.fsub(shifted, _constant(f.SHIFT))
    r = times_plus(n, _constant(-f.LN2_LOW), times_plus(n, _constant(-f.LN2_HIGH), x))
    series = _constant(f.C6)
    for c in (f.C5, f.C4, f.C3, f.HALF):
        series = times_plus(series, r, _constant(c))
    series = builder.fadd(times_plus(builder.fmul(series, r), r, r), _constant(1))
    bits = builder.sub(builder.bitcast(shifted, INTEGERS), ir.Constant(INTEGERS, [f.SHIFT_BITS - 127] * WIDTH))
    return builder.fmul(series, builder.bitcast(builder.shl(bits, ir.Constant(INTEGERS, [23] * WIDTH)), VECTOR))


def _each_vector(
    builder: Any, n: Any, visible: Any, carried: Sequence[Any], body: Callable[[Any, Any, Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Run `body(offset, seen, carried) -> carried` for every vector of a row of n; seen: which lanes are visible."""
    slots = []
    for value in carried:
        slot = cgutils.alloca_once(builder, value.type)
        builder.store(value, slot)
        slots.append(slot)
    lanes, limit = ir.Constant(LANES, list(range(WIDTH))), spread(builder, visible, LANES)
    with cgutils.for_range_slice(builder, INDEX(0), n, INDEX(WIDTH), intp=INDEX) as (offset, _):
        seen = builder.icmp_signed("<", builder.add(spread(builder, offset, LANES), lanes), limit)
        for slot, value in zip(slots, body(offset, seen, [builder.load(slot) for slot in slots]), strict=True):
            builder.store(value, slot)
    return [builder.load(slot) for slot in slots]


def _place(builder: Any, start: Any, offset: Any) -> Any:
    return builder.bitcast(builder.gep(start, [offset]), VECTOR.as_pointer())


def _reduced(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes as one number, halves onto halves."""
    width = WIDTH
    while width > 1:
        width //= 2
        half = ir.VectorType(ir.IntType(32), width)
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(half, list(range(first, first + width)))) for first in (0, width)
        )
        vector = combine(low, high)
    return builder.extract_element(vector, ir.IntType(32)(0))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def _largest_of_vectors(typingctx, x):
    """Of x (n,), n >= WIDTH; float32 or bfloat16. The last vector is the last WIDTH numbers, some of them seen before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(x)(context, builder, args[0])
        (n,) = cgutils.unpack_tuple(builder, array.shape)
        last = builder.sub(n, INDEX(WIDTH))

        def find(offset: Any, seen: Any, carried: Any) -> Any:
            whole = builder.select(builder.icmp_signed("<", offset, last), offset, last)
            return [_larger(builder, _widened(builder, array.data, whole), carried[0])]

        (tops,) = _each_vector(builder, n, n, [_constant(-np.inf)], find)
        return _reduced(builder, tops, lambda a, b: _larger(builder, a, b))

    return types.float32(x), codegen


def _widened(builder: Any, start: Any, offset: Any) -> Any:
    """A vector of float32 from an array of them, or of bfloat16."""
    pointer = builder.gep(start, [offset])
    if pointer.type.pointee == FLOAT:
        return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(pointer, ir.VectorType(HALF, WIDTH).as_pointer()), align=2)
    bits = builder.shl(builder.zext(halves, INTEGERS), ir.Constant(INTEGERS, [16] * WIDTH))
    return builder.bitcast(bits, VECTOR)


@inlined
def largest(x):  # (n,) float32 or bfloat16
    """The maximum; with a NaN in x it may be any element, but the callers' sum of exponentials is NaN then."""
    if len(x) >= WIDTH:
        return _largest_of_vectors(x)
    top = np.float32(-np.inf)
    for i in range(len(x)):
        top = max(top, wide(x[i]))
    return top


@intrinsic
def softmax_row(typingctx, z, at, n, visible, scale):
    """z[at : at + n], n a multiple of WIDTH, becomes exponentials of scale z for the first `visible`, and zeros; returns their
    sum and the largest scale z. A NaN among them makes the sum NaN."""
    signature = types.UniTuple(types.float32, 2)(z, types.intp, types.intp, types.intp, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = builder.gep(context.make_array(z)(context, builder, args[0]).data, [args[1]])
        zero, lowest = _constant(0), _constant(-3.0e38)

        def find(offset: Any, seen: Any, carried: Any) -> Any:
            value = builder.select(seen, builder.load(_place(builder, start, offset), align=4), lowest)
            return [_larger(builder, value, carried[0])]

        (tops,) = _each_vector(builder, args[2], args[3], [lowest], find)
        top = builder.fmul(_reduced(builder, tops, lambda a, b: _larger(builder, a, b)), args[4])
        shift, factor = spread(builder, top, VECTOR), spread(builder, args[4], VECTOR)

        def exponentials(offset: Any, seen: Any, carried: Any) -> Any:
            place = _place(builder, start, offset)
            scaled = builder.fmul(builder.load(place, align=4), factor)
            e = builder.select(seen, _exp(builder, builder.fsub(scaled, shift)), zero)
            builder.store(e, place, align=4)
            return [builder.fadd(carried[0], e)]

        (sums,) = _each_vector(builder, args[2], args[3], [zero], exponentials)
        total = _reduced(builder, sums, builder.fadd)
        return context.make_tuple(builder, signature.return_type, [total, top])

    return signature, codegen


@intrinsic
def softmax_row_backward(typingctx, p, dp, at, n, visible, scale, lse):
    """From scores z in p and dp: p = exp(scale z - lse), dz = p (dp - sum(p dp) / sum(p)), zeros after the first `visible`."""
    signature = types.void(p, dp, types.intp, types.intp, types.intp, types.float32, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts = [
            builder.gep(context.make_array(kind)(context, builder, value).data, [args[2]])
            for kind, value in ((p, args[0]), (dp, args[1]))
        ]
        factor, shift, zero = spread(builder, args[5], VECTOR), spread(builder, args[6], VECTOR), _constant(0)

        def exponentials(offset: Any, seen: Any, carried: Any) -> Any:
            place, dplace = (_place(builder, start, offset) for start in starts)
            scaled = builder.fmul(builder.load(place, align=4), factor)
            e = builder.select(seen, _exp(builder, builder.fsub(scaled, shift)), zero)
            d = builder.select(seen, builder.load(dplace, align=4), zero)
            builder.store(e, place, align=4)
            return [builder.fadd(carried[0], e), builder.fadd(carried[1], builder.fmul(e, d))]

        totals = _each_vector(builder, args[3], args[4], [zero, zero], exponentials)
        total, against = (_reduced(builder, vector, builder.fadd) for vector in totals)
        taken = spread(builder, builder.fdiv(against, total), VECTOR)

        def gradient(offset: Any, seen: Any, carried: Any) -> Any:
            place, dplace = (_place(builder, start, offset) for start in starts)
            dz = builder.fmul(builder.load(place, align=4), builder.fsub(builder.load(dplace, align=4), taken))
            builder.store(builder.select(seen, dz, zero), dplace, align=4)
            return []

        _each_vector(builder, args[3], args[4], [], gradient)
        return context.get_dummy_value()

    return signature, codegen
