"""Counter-based random numbers, the same bytes on every machine: no generator state, no float, no library's algorithm.

    splitmix64(key + i * GOLDEN), i = 0, 1, 2 …        (Steele, Lea, Flood 2014)
The finaliser is a bijection of 64 bits, so different counters never collide: sorting by it is a permutation without ties.
Tested by: tests/data/test_rng.py."""

import hashlib

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15


def key(*parts: object) -> int:
    """64 bits that identify a stream of draws: the seed and its purpose."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little")


def draws(stream: int, first: int, count: int) -> np.ndarray:  # (count,) uint64
    """Numbers first … first + count - 1 of a stream; each needs only its own counter."""
    x = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(stream)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(stream: int, count: int) -> np.ndarray:  # (count,) int64
    return np.argsort(draws(stream, 0, count), kind="stable")
