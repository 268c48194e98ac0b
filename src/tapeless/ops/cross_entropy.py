"""Softmax cross-entropy over the valid targets, with soft-cap, label smoothing and z-loss.

    z = cap tanh(logits / cap)                        or z = logits without a cap
    lse = log sum_V exp(z)
    loss = 1/n sum over valid rows of  lse - (1-a) z[target] - a mean_V(z) + c lse^2
a is label_smoothing, c is z_loss, n is num_targets: the valid targets of the whole batch, over all micro-batches and ranks;
without it, of this call. A row whose target is -100 is not valid: no loss, no gradient, not counted.
Backward, with y = exp(z - lse):
    dz = dloss/n ((1 + 2 c lse) y - (1-a) onehot(target) - a/V)           dlogits: through the cap (softcap.py)
Saved: logits, targets, and lse, one number per row.
Tested by: tests/ops/test_cross_entropy.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.ops.numerics import accumulation_dtype, logsumexp
from tapeless.ops.op import Op
from tapeless.ops.softcap import SoftcapSaved, softcap_backward, softcap_forward

IGNORED = -100


class CrossEntropySaved(NamedTuple):
    logits: Tensor  # (..., V)
    targets: Tensor  # (...) int64
    lse: Tensor  # (..., 1)  accumulation dtype


def valid_targets(targets: Tensor) -> int:
    """Number of valid targets; at least 1, so that a batch without any has loss 0 and not 0/0."""
    return max(int((targets != IGNORED).sum()), 1)


def _capped(logits: Tensor, softcap: float) -> Tensor:  # z (..., V) accumulation dtype
    z = logits.to(accumulation_dtype(logits))
    return softcap_forward(z, cap=softcap)[0] if softcap else z


def cross_entropy_forward(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) int64; -100 is ignored
    *,
    num_targets: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> tuple[Tensor, CrossEntropySaved]:  # loss ()
    z = _capped(logits, softcap)
    lse = logsumexp(z)
    valid = (targets != IGNORED).unsqueeze(-1)
    target_z = z.gather(-1, targets.unsqueeze(-1).clamp_min(0))
    row_loss = lse - (1 - label_smoothing) * target_z
    if label_smoothing:
        row_loss = row_loss - label_smoothing * z.mean(-1, keepdim=True)
    if z_loss:
        row_loss = row_loss + z_loss * lse * lse
    loss = row_loss.masked_fill(~valid, 0.0).sum() / (num_targets or valid_targets(targets))
    return loss, CrossEntropySaved(logits, targets, lse)


def cross_entropy_backward(
    dloss: Tensor | float,  # ()
    saved: CrossEntropySaved,
    *,
    num_targets: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:  # dlogits (..., V)
    logits, targets, lse = saved
    z = _capped(logits, softcap)
    dz = (z - lse).exp_()
    if z_loss:
        dz *= 1 + 2 * z_loss * lse
    target = targets.unsqueeze(-1).clamp_min(0)
    dz.scatter_add_(-1, target, torch.full_like(lse, label_smoothing - 1))
    if label_smoothing:
        dz -= label_smoothing / z.shape[-1]
    if softcap:
        dz = softcap_backward(dz, SoftcapSaved(z), cap=softcap)
    dz *= dloss / (num_targets or valid_targets(targets))
    return dz.masked_fill_((targets == IGNORED).unsqueeze(-1), 0.0).to(logits.dtype)


CROSS_ENTROPY = Op(cross_entropy_forward, cross_entropy_backward, outputs=("loss",), grads=("dlogits",))
