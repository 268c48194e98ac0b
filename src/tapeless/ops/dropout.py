"""Dropout with counter-based masks: a pure function of (key, sample, position), without a random generator.

    keep[i] = hash(key, i) >= p        i counts elements from the first sample of the run's batch
    y = x keep / (1 - p)               dx = dy keep / (1 - p)
Backward hashes the mask again, so nothing is saved. The mask is the same for any number of micro-batches or ranks, in
recomputation, and after a resume.
Tested by: tests/ops/test_dropout.py."""

import hashlib

import torch
from torch import Tensor

from tapeless.ops.op import Op

LOW32 = 0xFFFFFFFF


def dropout_key(seed: int, step: int, purpose: str) -> int:
    """64 bits that identify one mask: the run's seed, the step, and the position in the model."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()[:8], "little")


def _mix(h: Tensor) -> Tensor:  # 32-bit values held in int64
    """Scramble 32 bits (the finaliser of MurmurHash3): every input bit flips every output bit half of the time."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & LOW32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & LOW32
    return h ^ (h >> 16)


def dropout_scale(x: Tensor, p: float, key: int, first_sample: int) -> Tensor:  # keep / (1 - p), the shape of x
    per_sample = x[0].numel()
    i = torch.arange(first_sample * per_sample, first_sample * per_sample + x.numel(), device=x.device)
    bits = _mix(_mix((i & LOW32) ^ (key & LOW32)) ^ _mix((i >> 32) ^ (key >> 32)))
    keep = (bits >= int(p * 2**32)).view(x.shape)
    return keep.to(x.dtype) / (1 - p)


def dropout_forward(
    x: Tensor,  # (B, ...)
    *,
    p: float,
    key: int,
    first_sample: int = 0,  # the global index of x[0]
) -> tuple[Tensor, None]:  # y (B, ...)
    return x * dropout_scale(x, p, key, first_sample), None


def dropout_backward(
    dy: Tensor,  # (B, ...)
    saved: None,
    *,
    p: float,
    key: int,
    first_sample: int = 0,
) -> Tensor:  # dx (B, ...)
    return dy * dropout_scale(dy, p, key, first_sample)


DROPOUT = Op(dropout_forward, dropout_backward)
