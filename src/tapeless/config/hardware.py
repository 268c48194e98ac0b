"""The one table of GPUs by name, and sizes of memory in words.

Peaks are of dense matmuls that add in float32, by the makers' figures; memory is what the driver reports, which is less than
the name of the card says. A GPU that is not listed has no peak rather than a wrong one.
Tested by: tests/estimate/test_target.py, tests/bench/test_mfu.py."""

import re
from itertools import pairwise
from typing import NamedTuple

from tapeless.errors import ConfigError

GIB = 2**30
CONTEXT = 544 * 2**20  # bytes that the driver and torch's libraries take before the first tensor: 529 MiB on an H200
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
OTHERS = {
    "pcie",
    "nvl",
    "mig",
    "laptop",
    "d",
    "ti",
}  # words in the names of boards and slices with other peaks than their namesake


class Gpu(NamedTuple):
    gib: float  # memory
    bandwidth: float  # bytes/s
    bf16: float  # FLOP/s
    fp8: float | None  # FLOP/s; None: it has no such matmuls

    @property
    def free(self) -> int:
        """Bytes for tensors, with nothing else on it."""
        return int(self.gib * GIB) - CONTEXT


GPUS = {
    "a100": Gpu(79.1, 2.04e12, 312e12, None),
    "a100-40gb": Gpu(39.4, 1.56e12, 312e12, None),
    "h100": Gpu(79.1, 3.35e12, 989e12, 1979e12),
    "h200": Gpu(139.8, 4.8e12, 989e12, 1979e12),
    "gh200": Gpu(94.5, 4.0e12, 989e12, 1979e12),
    "b200": Gpu(178.3, 8.0e12, 2250e12, 4500e12),
    "l4": Gpu(22.0, 0.30e12, 121e12, 242e12),
    "l40s": Gpu(44.4, 0.86e12, 362e12, 733e12),
    "rtx3090": Gpu(23.6, 0.94e12, 71e12, None),
    "rtx4090": Gpu(23.5, 1.01e12, 165e12, 330e12),
    "rtx5090": Gpu(31.4, 1.79e12, 209e12, 419e12),
}


def bf16_peak(device_name: str) -> float | None:
    """FLOP/s of the GPU that CUDA calls so, such as NVIDIA H100 80GB HBM3 or NVIDIA GeForce RTX 4090."""
    words = device_name.lower().replace("-", " ").split()
    names = {*words, *("".join(pair) for pair in pairwise(words))}
    return None if names & OTHERS else next((gpu.bf16 for name, gpu in GPUS.items() if name in names), None)


def parse_memory(text: str) -> int:
    """`24GB` or `22.5GiB` in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT]i?B)", text)
    if found is None or not float(found[1]):
        raise ConfigError(f"memory is {text!r}; expected a number above 0 and one of {', '.join(UNITS)}, such as 24GB")
    return int(float(found[1]) * UNITS[found[2]])
