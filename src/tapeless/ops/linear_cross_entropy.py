"""The output matmul and its loss as one op, in chunks of rows: the N x V logits are never in memory at once.

    logits = x w'         loss = cross_entropy(logits, targets)
Backward, for each chunk of rows, with its logits recomputed:
    dlogits = cross_entropy backward       dx = dlogits w       dw += dlogits' x
Saved: x, targets and lse. A chunk has as many rows as give `chunk` logits, whatever V is.
Tested by: tests/ops/test_linear_cross_entropy.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.ops.cross_entropy import CrossEntropySaved, cross_entropy_backward, cross_entropy_forward, valid_targets
from tapeless.ops.numerics import accumulate_matmul, accumulation_dtype, rows
from tapeless.ops.op import Op

CHUNK = 2**20  # logits in memory at a time


class LinearCrossEntropySaved(NamedTuple):
    x: Tensor  # (..., C)
    targets: Tensor  # (...) int64
    lse: Tensor  # (N, 1)  accumulation dtype


def chunk_rows(V: int, chunk: int) -> int:
    return max(1, chunk // V)


def linear_cross_entropy_forward(
    x: Tensor,  # (..., C)
    targets: Tensor,  # (...) int64; -100 is ignored
    w: Tensor,  # (V, C)
    *,
    num_targets: int | None = None,
    chunk: int = CHUNK,
    **options: float,  # label_smoothing, z_loss, softcap
) -> tuple[Tensor, LinearCrossEntropySaved]:  # loss ()
    count = num_targets or valid_targets(targets)
    loss = torch.zeros((), dtype=accumulation_dtype(x), device=x.device)
    lse = []
    n = chunk_rows(w.shape[0], chunk)
    for xc, tc in zip(rows(x).split(n), targets.reshape(-1).split(n), strict=True):
        loss_c, saved_c = cross_entropy_forward(xc @ w.t(), tc, num_targets=count, **options)
        loss += loss_c
        lse.append(saved_c.lse)
    return loss, LinearCrossEntropySaved(x, targets, torch.cat(lse))


def linear_cross_entropy_backward(
    dloss: Tensor | float,  # ()
    saved: LinearCrossEntropySaved,
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into
    *,
    num_targets: int | None = None,
    chunk: int = CHUNK,
    **options: float,  # label_smoothing, z_loss, softcap
) -> Tensor:  # dx (..., C)
    x, targets, lse = saved
    count = num_targets or valid_targets(targets)
    dx = torch.empty_like(rows(x))
    n = chunk_rows(w.shape[0], chunk)
    chunks = zip(rows(x).split(n), targets.reshape(-1).split(n), lse.split(n), dx.split(n), strict=True)
    for xc, tc, lse_c, dx_c in chunks:
        dlogits = cross_entropy_backward(dloss, CrossEntropySaved(xc @ w.t(), tc, lse_c), num_targets=count, **options)
        torch.mm(dlogits, w, out=dx_c)
        if dw is not None:
            accumulate_matmul(dw, dlogits.t(), xc)
    return dx.view(x.shape)


LINEAR_CROSS_ENTROPY = Op(linear_cross_entropy_forward, linear_cross_entropy_backward, outputs=("loss",))
