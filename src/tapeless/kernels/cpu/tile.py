"""Small matmuls for operands that are already in the cache: the inner loops of attention.

    c (M, N) = a (M, K) b (K, N)      or c += a b      c in float32
A tile of c, ROWS x 2 vectors, stays in registers during the loop over k; it is written as LLVM vectors, because LLVM does not
find this shape by itself. a is read element by element, so it may be transposed; b and c are read along rows. M must be a
multiple of ROWS and N of WIDTH: the callers' buffers are padded.
a and b are float32, or words of two bfloat16 that are adjacent along k: some processors multiply such pairs in one instruction,
twice as fast. K then counts words.
Tested by: tests/kernels/cpu/test_tile.py."""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tapeless.kernels.cpu.jit import BITS, FLOAT, inlined

llvm.initialize_native_asmparser()  # for the one instruction below that LLVM's own vectors cannot express
FEATURES = llvm.get_host_cpu_features()
AVX512, HAS_PAIRS = FEATURES.get("avx512f", False), FEATURES.get("avx512bf16", False)
WIDTH, ROWS = (16, 8) if AVX512 else (8, 4)  # floats per vector; rows of a tile, as many as fit into the registers
INDEX = ir.IntType(64)
VECTOR, INTEGERS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(BITS, WIDTH)


def spread(builder: ir.IRBuilder, number: Any, vector: ir.VectorType) -> Any:
    """A scalar in every lane of a vector."""
    undefined = ir.Constant(vector, ir.Undefined)
    lane = builder.insert_element(undefined, number, BITS(0))
    return builder.shuffle_vector(lane, undefined, ir.Constant(ir.VectorType(BITS, vector.count), [0] * vector.count))


def times_plus(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """a b + c in each lane; for words, the sum of both products."""
    if a.type == VECTOR:  # one intrinsic, since a multiplication and an addition are only sometimes fused: other last bits
        name, function = f"llvm.fmuladd.v{WIDTH}f32", ir.FunctionType(VECTOR, [VECTOR] * 3)
        return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, function, name), [a, b, c])
    dot = ir.FunctionType(VECTOR, [INTEGERS, INTEGERS, VECTOR])
    return builder.asm(dot, "vdpbf16ps $2, $1, $0", "=v,v,v,0", [a, b, c], side_effect=False)


def _make_tile(vectors: int) -> Any:
    """tile(c, c0, c_row, a, a0, a_row, a_col, b, b0, b_row, K, add): flat arrays, the offset of each operand, and the
    strides of its rows (and of a's columns); add: c += instead of =."""

    def tile(typingctx, c, c0, c_row, a, a0, a_row, a_col, b, b0, b_row, K, add):
        signature = types.void(c, *[types.intp] * 2, a, *[types.intp] * 3, b, *[types.intp] * 3, types.boolean)
        operand = VECTOR if a.dtype == types.float32 else INTEGERS

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            def start(which: int, offset: Any) -> Any:
                data = context.make_array(signature.args[which])(context, builder, args[which]).data
                return builder.gep(data, [offset])

            def vector_at(pointer: Any, offset: Any, vector: ir.VectorType) -> Any:
                return builder.bitcast(builder.gep(pointer, [offset]), vector.as_pointer())

            def place(row: int, vector: int) -> Any:
                return vector_at(c_, builder.add(builder.mul(INDEX(row), c_row_), INDEX(vector * WIDTH)), VECTOR)

            c_, a_, b_ = start(0, args[1]), start(3, args[4]), start(7, args[8])
            c_row_, a_row_, a_col_, b_row_, K_, add_ = args[2], args[5], args[6], args[9], args[10], args[11]
            cells = [(row, vector) for row in range(ROWS) for vector in range(vectors)]
            with builder.if_else(add_) as (then, otherwise):
                with then:
                    held = [builder.load(place(*cell), align=4) for cell in cells]
                    then_block = builder.block
                with otherwise:
                    otherwise_block = builder.block

            def either(value: Any, other: Any, block: Any, other_block: Any) -> Any:
                phi = builder.phi(VECTOR)
                phi.add_incoming(value, block)
                phi.add_incoming(other, other_block)
                return phi

            zero = ir.Constant(VECTOR, [0.0] * WIDTH)
            first = [either(value, zero, then_block, otherwise_block) for value in held]
            before = builder.block
            loop, done = builder.append_basic_block("tile"), builder.append_basic_block("tile_done")
            builder.cbranch(builder.icmp_signed(">", K_, INDEX(0)), loop, done)
            builder.position_at_end(loop)
            k = builder.phi(INDEX)
            sums = [builder.phi(VECTOR) for _ in cells]
            row_b, column_a = builder.mul(k, b_row_), builder.mul(k, a_col_)
            b_vectors = [
                builder.load(vector_at(b_, builder.add(row_b, INDEX(v * WIDTH)), operand), align=4) for v in range(vectors)
            ]
            updated = []
            for row in range(ROWS):
                number = builder.load(builder.gep(a_, [builder.add(column_a, builder.mul(INDEX(row), a_row_))]), align=4)
                lanes = spread(builder, number, operand)
                updated += [times_plus(builder, lanes, b_vectors[v], sums[row * vectors + v]) for v in range(vectors)]
            after = builder.add(k, INDEX(1))
            for phi, begin, step in zip([k, *sums], [INDEX(0), *first], [after, *updated], strict=True):
                phi.add_incoming(begin, before)
                phi.add_incoming(step, loop)
            builder.cbranch(builder.icmp_signed("<", after, K_), loop, done)
            builder.position_at_end(done)
            results = [either(begin, step, before, loop) for begin, step in zip(first, updated, strict=True)]
            for cell, result in zip(cells, results, strict=True):
                builder.store(result, place(*cell), align=4)
            return context.get_dummy_value()

        return signature, codegen

    return intrinsic(tile)


_wide_tile, _narrow_tile = _make_tile(2), _make_tile(1)


@inlined
def tile_matmul(c, c0, c_row, a, a0, a_row, a_col, b, b0, b_row, M, N, K, add):
    """c (M, N) = or += a (M, K) b (K, N), each a part of a flat array."""
    for j in range(0, N, 2 * WIDTH):
        for i in range(0, M, ROWS):
            if j + 2 * WIDTH <= N:
                _wide_tile(c, c0 + i * c_row + j, c_row, a, a0 + i * a_row, a_row, a_col, b, b0 + j, b_row, K, add)
            else:
                _narrow_tile(c, c0 + i * c_row + j, c_row, a, a0 + i * a_row, a_row, a_col, b, b0 + j, b_row, K, add)
