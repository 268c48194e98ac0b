"""Global-norm clipping.

    norm = |g|        g = g min(1, limit / norm)
The norm returned is the one before clipping; a non-finite norm leaves the gradients unchanged, for the guard to see. It is a
norm of norms: one float32 sum over 20 million squares would be off by 1e-3, this is by 2e-7.
Tested by: tests/optim/test_clip.py."""

import math

import torch
from torch import Tensor

CHUNK = 2**16  # elements summed at once


def grad_norm(
    grads: Tensor,  # (n,) flat
) -> Tensor:  # ()
    even = len(grads) // CHUNK * CHUNK
    parts = torch.linalg.vector_norm(grads[:even].view(-1, CHUNK), dim=1)
    rest = torch.linalg.vector_norm(grads[even:])
    return torch.linalg.vector_norm(torch.cat([parts, rest.view(1)]))


def clip_grads(
    grads: Tensor,  # (n,) flat; scaled in place
    limit: float,  # 0: no clipping
) -> float:  # the norm before
    norm = float(grad_norm(grads))
    if clip_scale(norm, limit) != 1:
        grads *= clip_scale(norm, limit)
    return norm


def clip_scale(norm: float, limit: float) -> float:
    """The factor of the gradients."""
    return limit / norm if 0 < limit < norm < math.inf else 1.0
