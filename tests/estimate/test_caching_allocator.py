"""The allocator's rules, on cases small enough for a sheet of paper."""

import random
from itertools import pairwise

from tapeless.estimate.caching_allocator import LARGE_SEGMENT, MIB, SMALL_SEGMENT, Block, Pool


def test_sizes_of_segments():
    """Small requests share 2 MiB, those below 10 MiB share 20, and larger ones have their own, in steps of 2 MiB."""
    for size, segment in ((1, SMALL_SEGMENT), (MIB, SMALL_SEGMENT), (MIB + 1, LARGE_SEGMENT), (21 * MIB, 22 * MIB)):
        pool = Pool()
        pool.allocate(size)
        assert pool.reserved == segment


def test_blocks_are_cut_and_joined():
    pool = Pool()
    blocks = [pool.allocate(512 * 1024) for _ in range(4)]  # one segment
    assert pool.reserved == SMALL_SEGMENT
    for i in (1, 2, 0, 3):  # joined with the one behind, before, and both
        pool.release(blocks[i])
    assert pool.allocate(MIB).size == MIB
    assert pool.allocate(MIB).size == MIB
    assert pool.reserved == SMALL_SEGMENT


def test_a_gap_that_is_too_small_stays():
    pool = Pool()
    large, small = pool.allocate(30 * MIB), pool.allocate(12 * MIB)
    pool.release(large)
    pool.release(small)
    assert pool.allocate(12 * MIB).size == 12 * MIB  # the smallest that is large enough
    assert pool.allocate(29 * MIB + 512 * 1024).size == 30 * MIB  # half a MiB is not cut off
    assert pool.allocate(2 * MIB).size == 2 * MIB
    assert pool.reserved == 42 * MIB + LARGE_SEGMENT


def test_random_requests_never_overlap_and_all_join_again():
    chosen, pool, held = random.Random(0), Pool(), list[Block]()
    for _ in range(3000):
        if held and chosen.random() < 0.5:
            pool.release(held.pop(chosen.randrange(len(held))))
        else:
            held.append(pool.allocate(chosen.choice([700, 40_000, 900_000, 3 * MIB, 11 * MIB, 33 * MIB])))
    spans = sorted((block.address, block.address + block.size) for block in held)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert pool.reserved >= sum(block.size for block in held)
    for block in held:
        pool.release(block)
    assert sum(block.size for blocks in pool._free.values() for block in blocks) == pool.reserved
    pool.empty()  # every segment is one block again
    assert pool.reserved == 0


def test_a_segment_in_use_is_not_given_back():
    pool = Pool()
    held, freed = pool.allocate(2 * MIB), pool.allocate(12 * MIB)
    pool.release(freed)
    pool.empty()
    assert pool.reserved == LARGE_SEGMENT
    assert held.size == 2 * MIB
