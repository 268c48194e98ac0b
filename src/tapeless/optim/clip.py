"""Global-norm clipping.

    norm = |g|        g = g min(1, limit / norm)
The norm returned is the true one, before clipping; a norm that is not finite leaves the gradients as they are, for the guard
to see. Judged by: tests/optim/test_clip.py."""

import torch
from torch import Tensor


def grad_norm(
    grads: Tensor,  # flat
) -> Tensor:  # ()
    return torch.linalg.vector_norm(grads)


def clip_grads(
    grads: Tensor,  # flat; scaled in place
    limit: float,  # 0: no clipping
) -> Tensor:  # () the norm before
    norm = grad_norm(grads)
    if limit and torch.isfinite(norm) and norm > limit:
        grads *= limit / norm
    return norm
