"""Few rows times a weight matrix, each element a dot product whose additions have one fixed order: the inner loop of decoding.

    y (R, O) = x (R, I) w (O, I)'      x and w in float32 or bfloat16, y in float32
Where both are bfloat16 and the processor can multiply pairs of them, one instruction adds two products to a lane.
A tile holds WIDTH elements of y in as many vector registers, R rows by WIDTH / R outputs, so that a vector of w is widened once
for R rows. Each element has its own vector of sums over I, and all WIDTH vectors are added up together, by halves. The order of
additions does not depend on the shape of the tile: an element has the same bits, whatever other rows are computed with it.
Tested by: tests/kernels/cpu/test_dot_tile.py."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tapeless.kernels.cpu.jit import BITS, FLOAT, inlined
from tapeless.kernels.cpu.tile import HAS_PAIRS, INDEX, INTEGERS, VECTOR, WIDTH, spread, times_plus

LANES = list(range(WIDTH))
TOGETHER = 4  # rows of w that a tile of several rows of x reads at a time
LINE = 64  # bytes of the cache
AHEAD = 2**13  # bytes: how far before its use one row of x asks for w, which it reads from start to end


def _shuffled(builder: ir.IRBuilder, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(INTEGERS, lanes))


def _sums(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """The vector whose lane i is the sum of the lanes of vectors[i]: the halves of each are added, then theirs, and so on. Two
    vectors are halved into one, which then holds a segment of each."""
    held = [(vector, [(i, lane) for lane in LANES]) for i, vector in enumerate(vectors)]  # each lane: of which vector, which
    half = WIDTH // 2
    while half:
        halved = []
        for (a, lanes_a), (b, lanes_b) in zip(held[::2], held[1::2], strict=True):
            lanes = lanes_a + lanes_b
            if half >= 4:
                lower = [at for at, (_, lane) in enumerate(lanes) if lane < half]
            else:  # within a group of four lanes, which processors shuffle fastest
                groups = [[*range(at, at + 4), *range(at + WIDTH, at + WIDTH + 4)] for at in range(0, WIDTH, 4)]
                lower = [at for group in groups for at in group if lanes[at][1] < half]
            where = {content: at for at, content in enumerate(lanes)}
            upper = [where[lanes[at][0], lanes[at][1] + half] for at in lower]
            total = builder.fadd(_shuffled(builder, a, b, lower), _shuffled(builder, a, b, upper))
            halved.append((total, [lanes[at] for at in lower]))
        held, half = halved, half // 2
    ((total, lanes),) = held
    order = [lanes.index((i, 0)) for i in LANES]
    return _shuffled(builder, total, total, order)


def _vector(builder: ir.IRBuilder, pointer: Any, count: Any = None, pairs: bool = False) -> Any:
    """WIDTH elements as float32, or with pairs 2 WIDTH bfloat16 as WIDTH words; count: the first ones alone, the others are
    zero and not read."""
    element, lanes = pointer.type.pointee, 2 * WIDTH if pairs else WIDTH
    vector = ir.VectorType(element, lanes)
    place = builder.bitcast(pointer, vector.as_pointer())
    if count is None:
        loaded = builder.load(place, align=4 if element == FLOAT else 2)
    else:
        name, seen = f"llvm.masked.load.v{lanes}{'f32' if element == FLOAT else 'i16'}.p0", _before(builder, count, lanes)
        function = ir.FunctionType(vector, [place.type, BITS, seen.type, vector])
        load = builder.module.globals.get(name) or ir.Function(builder.module, function, name)
        loaded = builder.call(load, [place, BITS(2), seen, ir.Constant(vector, None)])
    if pairs:
        return builder.bitcast(loaded, INTEGERS)
    if element == FLOAT:
        return loaded
    return builder.bitcast(builder.shl(builder.zext(loaded, INTEGERS), ir.Constant(INTEGERS, [16] * WIDTH)), VECTOR)


def _prefetch(builder: ir.IRBuilder, pointer: Any) -> None:
    place, name = builder.bitcast(pointer, ir.IntType(8).as_pointer()), "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(ir.VoidType(), [place.type, BITS, BITS, BITS]), name
    )
    builder.call(function, [place, BITS(0), BITS(3), BITS(1)])  # to read, into the nearest cache, data


def _before(builder: ir.IRBuilder, count: Any, lanes: int) -> Any:
    """The lanes below a number, which is an INDEX."""
    vector = ir.VectorType(BITS, lanes)
    return builder.icmp_signed(
        "<", ir.Constant(vector, list(range(lanes))), spread(builder, builder.trunc(count, BITS), vector)
    )


def _zeros(builder: ir.IRBuilder, count: int) -> list[Any]:
    """Variables, which LLVM keeps in registers."""
    places = [cgutils.alloca_once(builder, VECTOR) for _ in range(count)]
    for place in places:
        builder.store(ir.Constant(VECTOR, [0.0] * WIDTH), place)
    return places


def _add_product(builder: ir.IRBuilder, total: Any, a: Any, b: Any) -> None:
    builder.store(times_plus(builder, a, b, builder.load(total)), total)


def _start(context: Any, builder: ir.IRBuilder, array: Any, value: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(array)(context, builder, value).data, [offset])


def _make_tile(rows: int, *, near: bool = False) -> Any:
    """tile(y, y0, y_row, w, w0, w_step, x, x0, x_row, I): flat arrays, the offset of each operand, the strides of the rows of y
    and x, and the distance of one output's weights from the next one's. near: see rows_times."""
    outputs = WIDTH // rows

    def tile(typingctx, y, y0, y_row, w, w0, w_step, x, x0, x_row, I):
        signature = types.void(y, *[types.intp] * 2, w, *[types.intp] * 2, x, *[types.intp] * 3)
        pairs = HAS_PAIRS and w.dtype == x.dtype == types.uint16
        step = 2 * WIDTH if pairs else WIDTH
        together = min(outputs, TOGETHER) if rows > 1 or near else 1  # one row waits for memory, which is fastest in one stream

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            y_row_, w_step_, x_row_, I_ = args[2], args[5], args[8], args[9]
            y_, w_, x_ = (_start(context, builder, signature.args[k], args[k], args[k + 1]) for k in (0, 3, 6))
            w_starts = [builder.gep(w_, [builder.mul(INDEX(o), w_step_)]) for o in range(outputs)]
            x_starts = [builder.gep(x_, [builder.mul(INDEX(r), x_row_)]) for r in range(rows)]
            sums = _zeros(builder, WIDTH)
            # With several rows arithmetic hides the memory's latency if what is read two tiles later is asked for now.
            ahead = builder.mul(w_step_, INDEX(2 * WIDTH)) if rows > 1 else INDEX(AHEAD // (w.dtype.bitwidth // 8))

            def add(first: int, at: Any, count: Any = None) -> None:
                starts = w_starts[first : first + together]
                w_vectors = [_vector(builder, builder.gep(start, [at]), count, pairs) for start in starts]
                x_vectors = [_vector(builder, builder.gep(start, [at]), count, pairs) for start in x_starts]
                for start in starts if not near else ():
                    _prefetch(builder, builder.gep(start, [builder.add(at, ahead)]))
                for r in range(rows):
                    for o, w_vector in enumerate(w_vectors, first):
                        _add_product(builder, sums[r * outputs + o], w_vector, x_vectors[r])

            whole = builder.and_(I_, INDEX(-step))
            for first in range(0, outputs, together):
                with cgutils.for_range(builder, builder.sdiv(I_, INDEX(step))) as loop:
                    add(first, builder.mul(loop.index, INDEX(step)))
                with builder.if_then(builder.icmp_signed("<", whole, I_)):
                    add(first, whole, builder.sub(I_, whole))
            total = _sums(builder, [builder.load(total) for total in sums])
            for r in range(rows):
                part = builder.shuffle_vector(
                    total, total, ir.Constant(ir.VectorType(BITS, outputs), LANES[r * outputs : (r + 1) * outputs])
                )
                place = builder.gep(y_, [builder.mul(INDEX(r), y_row_)])
                builder.store(part, builder.bitcast(place, part.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return signature, codegen

    return intrinsic(tile)


_one_row, _two_rows, _four_rows = _make_tile(1), _make_tile(2), _make_tile(4)
_one_row_near = _make_tile(1, near=True)


@inlined
def _rows_times(y, y0, y_row, w, w0, w_step, x, x0, x_row, R, I, near):
    """R rows by WIDTH outputs."""
    r = 0
    while r + 4 <= R:
        for o in range(0, WIDTH, WIDTH // 4):
            _four_rows(y, y0 + r * y_row + o, y_row, w, w0 + o * w_step, w_step, x, x0 + r * x_row, x_row, I)
        r += 4
    if r + 2 <= R:
        for o in range(0, WIDTH, WIDTH // 2):
            _two_rows(y, y0 + r * y_row + o, y_row, w, w0 + o * w_step, w_step, x, x0 + r * x_row, x_row, I)
        r += 2
    if r < R and near:
        _one_row_near(y, y0 + r * y_row, y_row, w, w0, w_step, x, x0 + r * x_row, x_row, I)
    elif r < R:
        _one_row(y, y0 + r * y_row, y_row, w, w0, w_step, x, x0 + r * x_row, x_row, I)


@inlined
def rows_times(y, y0, y_row, w, w0, x, x0, x_row, R, O, I, near):
    """y (R, O) = x (R, I) w (O, I)', each a part of a flat array; a row of y has room for WIDTH more. near: w is short, and
    the caller prefetches it; what follows it in memory is not asked for."""
    o = 0
    while o < O:
        if o + WIDTH <= O:
            _rows_times(y, y0 + o, y_row, w, w0 + o * I, I, x, x0, x_row, R, I, near)
            o += WIDTH
        elif O >= WIDTH:
            o = O - WIDTH  # the last tile overlaps the one before
        else:
            # one output; what is after it is overwritten
            _rows_times(y, y0 + o, y_row, w, w0 + o * I, 0, x, x0, x_row, R, I, near)
            o += 1


@intrinsic
def prefetch(typingctx, array, first, count):
    """Ask for elements that are read soon."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        start, line = _start(context, builder, signature.args[0], *args[:2]), INDEX(LINE // (array.dtype.bitwidth // 8))
        with cgutils.for_range_slice(builder, INDEX(0), args[2], line) as (offset, _):
            _prefetch(builder, builder.gep(start, [offset]))
        return context.get_dummy_value()

    return types.void(array, *[types.intp] * 2), codegen


@intrinsic
def weighted_sum(typingctx, y, a, v, v0, v_row, S, count):
    """y[:WIDTH] = a (S,) v (S, count), v a part of a flat array, count at most WIDTH: of each lane four sums of every fourth
    term, then those."""
    signature = types.void(y, a, v, *[types.intp] * 4)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        v_row_, S_, count_ = args[4:]
        starts = zip((0, 1, 2), (INDEX(0), INDEX(0), args[3]), strict=True)
        y_, a_, v_ = (_start(context, builder, signature.args[k], args[k], offset) for k, offset in starts)
        sums, fours = _zeros(builder, 4), builder.and_(S_, INDEX(-4))

        def add(total: Any, s: Any, count: Any) -> None:
            weight = spread(builder, builder.load(builder.gep(a_, [s])), VECTOR)
            _add_product(builder, total, weight, _vector(builder, builder.gep(v_, [builder.mul(s, v_row_)]), count))

        def add_all(count: Any = None) -> None:
            with cgutils.for_range(builder, builder.sdiv(S_, INDEX(4))) as loop:
                first = builder.mul(loop.index, INDEX(4))
                for k, total in enumerate(sums):
                    add(total, builder.add(first, INDEX(k)), count)
            with cgutils.for_range(builder, builder.sub(S_, fours)) as loop:
                add(sums[0], builder.add(fours, loop.index), count)

        with builder.if_else(builder.icmp_signed("<", count_, INDEX(WIDTH))) as (few, all_):
            with few:
                add_all(count_)
            with all_:
                add_all()
        first, second, third, fourth = (builder.load(total) for total in sums)
        total = builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth))
        builder.store(total, builder.bitcast(y_, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, codegen
