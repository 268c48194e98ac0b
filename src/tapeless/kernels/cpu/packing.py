"""Operands of attention's matmuls in the layout of tile.py: float32, or words of two bfloat16 that are adjacent along k.

x is (n, D) elements, or for even D (n, D/2) words of int32, which selects the form; buffers are flat, float32 or int32
accordingly, padded with zeros. With words
    left, right_transposed      k runs along a row of x, where adjacent elements share a word: words are copied
    right                       k runs down the rows of x: two rows are interleaved
    scores_left                 k runs along a row of the scores: they are rounded to bfloat16
    scores_transposed           k runs down the rows of the scores: they are rounded, and two rows interleaved
Tested by: tests/kernels/test_cpu.py."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from tapeless.kernels.cpu.jit import inlined, narrow, wide

LOW, HIGH, SHIFT = np.uint32(0xFFFF), np.uint32(0xFFFF0000), np.uint32(16)


def _by_kind(plain: Any, words: Any) -> Any:
    """A function for kernels in two forms, for elements and for words; its first argument selects."""

    def chosen_by_numba(x, *args):
        raise TypeError("packing is compiled into kernels; Python cannot call it")

    @overload(chosen_by_numba)
    def choose(x, *args):
        form = words if x.dtype == types.int32 else plain

        def call(x, *args):
            return form(x, *args)

        return call

    return chosen_by_numba


@inlined
def _copy(x, first, count, packed, row):
    n, D = x.shape
    for i in range(count):
        out = packed[i * row : (i + 1) * row]
        out[:] = 0
        if first + i < n:
            source = x[first + i]
            for d in range(D):  # not out[:D] = source, which takes Numba two seconds more to compile
                out[d] = wide(source[d])


@inlined
def _transpose(x, packed, row):
    n, D = x.shape
    packed[: D * row] = 0
    for i in range(n):
        source = x[i]
        for d in range(D):
            packed[d * row + i] = wide(source[d])


@inlined
def _interleave_words(x, first, count, packed, row):
    """Rows 2i and 2i + 1 of the elements become row i of pairs: low halves with low halves, high with high."""
    n, D = x.shape
    for i in range((count + 1) // 2):
        out = packed[i * row : (i + 1) * row]
        out[:] = 0
        at = first + 2 * i
        if at < n:
            low = x[at]
            for d in range(D):
                word = np.uint32(low[d])
                out[2 * d] = np.int32(word & LOW)
                out[2 * d + 1] = np.int32(word >> SHIFT)
            if at + 1 < n and 2 * i + 1 < count:
                high = x[at + 1]
                for d in range(D):
                    word = np.uint32(high[d])
                    out[2 * d] |= np.int32(np.uint32(word << SHIFT))
                    out[2 * d + 1] |= np.int32(word & HIGH)


@inlined
def _same(x, n):
    return n


@inlined
def _half(x, n):
    return (n + 1) // 2


@inlined
def _scores(words, p, count, n, row):
    return p


@inlined
def _rounded_scores(words, p, count, n, row):
    halves = words.view(np.uint16)
    for i in range(count):
        source, out = p[i * row : i * row + n], halves[i * row : i * row + n]
        for s in range(n):
            out[s] = narrow(source[s])
    return words


@inlined
def _interleaved_scores(words, p, count, n, row):
    for i in range((count + 1) // 2):
        at = 2 * i * row
        low, high, out = p[at : at + n], p[at + row : at + row + n], words[i * row : i * row + n]
        for s in range(n):
            out[s] = np.int32(np.uint32(narrow(low[s])) | np.uint32(np.uint32(narrow(high[s])) << SHIFT))
    return words


left = _copy  # (x, first, count, packed, row): rows first … of x
right = _by_kind(_copy, _interleave_words)  # (x, first, count, packed, row)
right_transposed = _transpose  # (x, packed, row): all of x
scores_left = _by_kind(_scores, _rounded_scores)  # (buffer, p, count, n, row) -> p as an operand, in the buffer or p itself
scores_transposed = _by_kind(_scores, _interleaved_scores)  # (buffer, p, count, n, row) -> likewise
steps = _by_kind(_same, _half)  # (buffer, n): the number of k for n elements, and the stride of rows of n elements
