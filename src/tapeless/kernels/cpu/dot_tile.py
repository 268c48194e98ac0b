"""Few rows times a weight matrix, each element as a dot product whose additions have one fixed order: the inner loop of decoding.

    y (R, O) = x (R, I) w (O, I)'      x and y in float32, w in float32 or bfloat16
A tile holds WIDTH elements of y in as many vector registers, R rows by WIDTH / R outputs, so that a vector of w is widened once
for R rows. Each element has its own vector of sums over I, and all WIDTH vectors are added up together, by halves. The order of
additions does not depend on the shape of the tile: an element has the same bits, whatever other rows are computed with it.
Tested by: tests/kernels/cpu/test_dot_tile.py."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tapeless.kernels.cpu.jit import BITS, FLOAT, HALF, inlined
from tapeless.kernels.cpu.tile import INDEX, INTEGERS, VECTOR, WIDTH, spread

LANES = list(range(WIDTH))
MASK = ir.VectorType(ir.IntType(1), WIDTH)


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


def _make_tile(rows: int) -> Any:
    """tile(y, y0, y_row, w, w0, w_step, x, x0, x_row, I): flat arrays, the offset of each operand, the strides of the rows of y
    and x, and the distance of one output's weights from the next one's."""
    outputs = WIDTH // rows

    def tile(typingctx, y, y0, y_row, w, w0, w_step, x, x0, x_row, I):
        signature = types.void(y, *[types.intp] * 2, w, *[types.intp] * 2, x, *[types.intp] * 3)
        is_wide = w.dtype == types.float32
        element = FLOAT if is_wide else HALF
        loaded = ir.VectorType(element, WIDTH)

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            def start(which: int, offset: Any) -> Any:
                data = context.make_array(signature.args[which])(context, builder, args[which]).data
                return builder.gep(data, [offset])

            y_row_, w_step_, x_row_, I_ = args[2], args[5], args[8], args[9]
            y_, w_, x_ = start(0, args[1]), start(3, args[4]), start(6, args[7])
            w_starts = [builder.gep(w_, [builder.mul(INDEX(o), w_step_)]) for o in range(outputs)]
            x_starts = [builder.gep(x_, [builder.mul(INDEX(r), x_row_)]) for r in range(rows)]
            cells = [(r, o) for r in range(rows) for o in range(outputs)]
            zero = ir.Constant(VECTOR, [0.0] * WIDTH)

            def step(load: Any, sums: list[Any]) -> list[Any]:
                w_vectors = [load(at, loaded) for at in w_starts]
                if not is_wide:
                    shift = ir.Constant(INTEGERS, [16] * WIDTH)
                    w_vectors = [builder.bitcast(builder.shl(builder.zext(v, INTEGERS), shift), VECTOR) for v in w_vectors]
                x_vectors = [load(at, VECTOR) for at in x_starts]
                return [
                    builder.fadd(builder.fmul(w_vectors[o], x_vectors[r], flags=["contract"]), total, flags=["contract"])
                    for (r, o), total in zip(cells, sums, strict=True)
                ]

            whole = builder.and_(I_, INDEX(-WIDTH))
            before = builder.block
            loop, done = builder.append_basic_block("tile"), builder.append_basic_block("tile_done")
            tail, end = builder.append_basic_block("tile_tail"), builder.append_basic_block("tile_end")
            builder.cbranch(builder.icmp_signed(">", whole, INDEX(0)), loop, done)

            builder.position_at_end(loop)
            i = builder.phi(INDEX)
            sums = [builder.phi(VECTOR) for _ in cells]

            def plain(at: Any, vector: Any) -> Any:
                return builder.load(builder.bitcast(builder.gep(at, [i]), vector.as_pointer()), align=4 if is_wide else 2)

            updated = step(plain, sums)
            after = builder.add(i, INDEX(WIDTH))
            for phi, begin, next_ in zip([i, *sums], [INDEX(0), *[zero] * WIDTH], [after, *updated], strict=True):
                phi.add_incoming(begin, before)
                phi.add_incoming(next_, loop)
            builder.cbranch(builder.icmp_signed("<", after, whole), loop, done)

            builder.position_at_end(done)
            found = [builder.phi(VECTOR) for _ in cells]
            for phi, value in zip(found, updated, strict=True):
                phi.add_incoming(zero, before)
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", whole, I_), tail, end)

            builder.position_at_end(tail)
            rest = spread(builder, builder.trunc(builder.sub(I_, whole), BITS), INTEGERS)
            seen = builder.icmp_signed("<", ir.Constant(INTEGERS, LANES), rest)

            def masked(at: Any, vector: Any) -> Any:
                name = f"llvm.masked.load.v{WIDTH}{'f32' if vector.element == FLOAT else 'i16'}.p0"
                place = builder.bitcast(builder.gep(at, [whole]), vector.as_pointer())
                function = ir.FunctionType(vector, [place.type, BITS, MASK, vector])
                load = builder.module.globals.get(name) or ir.Function(builder.module, function, name)
                return builder.call(load, [place, BITS(2), seen, ir.Constant(vector, None)])

            added = step(masked, found)
            tail = builder.block
            builder.branch(end)

            builder.position_at_end(end)
            results = [builder.phi(VECTOR) for _ in cells]
            for phi, value, more in zip(results, found, added, strict=True):
                phi.add_incoming(value, done)
                phi.add_incoming(more, tail)
            total = _sums(builder, results)
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


@inlined
def _rows_times(y, y0, y_row, w, w0, w_step, x, x0, x_row, R, I):
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
    if r < R:
        _one_row(y, y0 + r * y_row, y_row, w, w0, w_step, x, x0 + r * x_row, x_row, I)


@inlined
def rows_times(y, y0, y_row, w, w0, x, x0, x_row, R, O, I):
    """y (R, O) = x (R, I) w (O, I)', each a part of a flat array; a row of y has room for WIDTH more."""
    o = 0
    while o < O:
        if o + WIDTH <= O:
            _rows_times(y, y0 + o, y_row, w, w0 + o * I, I, x, x0, x_row, R, I)
            o += WIDTH
        elif O >= WIDTH:
            o = O - WIDTH  # the last tile overlaps the one before
        else:
            _rows_times(y, y0 + o, y_row, w, w0 + o * I, 0, x, x0, x_row, R, I)  # one output; what is after it is overwritten
            o += 1
