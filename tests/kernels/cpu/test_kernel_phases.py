"""Phases of a parallel loop: every piece is done once, and after all pieces of the phase before, by any number of threads."""

import numba
import numpy as np
import pytest

pytest.importorskip("numba")

from tapeless.kernels.cpu.phases import claim, finish, new_turns, wait


@numba.njit(parallel=True)
def prefix_sums(rows, workers):  # rows (phases, pieces): each row but the first becomes the running sums of the one before
    phases, pieces = rows.shape
    turns = new_turns(phases)
    for _ in numba.prange(workers):
        for phase in range(phases):
            piece = claim(turns, phase)
            while piece < pieces:
                if phase > 0:
                    for i in range(piece + 1):
                        rows[phase, piece] += rows[phase - 1, i]
                finish(turns, phase)
                piece = claim(turns, phase)
            wait(turns, phase, pieces)


@pytest.mark.parametrize("threads", [1, numba.config.NUMBA_NUM_THREADS])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_phases_are_one_after_the_other(threads: int, workers: int):
    """More workers than threads end, too: those who come late find nothing left to do."""
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        for _ in range(20):
            rows = np.zeros((12, 37), np.int64)
            rows[0] = 1
            prefix_sums(rows, workers)
            expected = np.ones(37, np.int64)
            for row in rows:
                np.testing.assert_array_equal(row, expected)
                expected = expected.cumsum()
    finally:
        numba.set_num_threads(before)
