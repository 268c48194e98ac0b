"""From the fused q, k, v projection to the heads that attention reads: split, QK-norm, rotation.

    [q | k | v] = qkv                 H, G and G heads of width D, each laid out (B, heads, T, D)
    q = rope(rms_norm(q, wq_norm))    k = rope(rms_norm(k, wk_norm))      v = v
The norm is over each head's D features; there is none if its weight is None, and no rotation if theta is None.
Backward: the same steps in reverse, with the three gradients adjacent in one buffer, as the projection reads them.
Saved: with QK-norm qkv and one number per head and row, otherwise nothing. q, k and v never share memory with qkv, so that
qkv can be freed.
Tested by: tests/ops/test_qkv_rope.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.ops.op import Op
from tapeless.ops.rms_norm import RMSNormSaved, rms_norm_backward, rms_norm_forward
from tapeless.ops.rope import rope_backward, rope_forward


class QKVRopeSaved(NamedTuple):
    """With QK-norm; without it nothing is saved."""

    qkv: Tensor  # (B, T, (H+2G)*D)
    rq: Tensor  # (B, H, T, 1)  accumulation dtype
    rk: Tensor  # (B, G, T, 1)  accumulation dtype


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, ...]:  # views (B, heads, T, D)
    B, T, width = qkv.shape
    heads = qkv.view(B, T, -1, width // (num_heads + 2 * num_kv_heads)).transpose(1, 2)
    return heads.split([num_heads, num_kv_heads, num_kv_heads], 1)


def _own(x: Tensor, qkv: Tensor) -> Tensor:  # (B, heads, T, D), contiguous
    if x.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr():
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous()


def qkv_rope_forward(
    qkv: Tensor,  # (B, T, (H+2G)*D)
    wq_norm: Tensor | None,  # (D,)
    wk_norm: Tensor | None,  # (D,)
    *,
    num_heads: int,
    num_kv_heads: int,
    theta: float | None,
    eps: float,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, QKVRopeSaved | None]:  # q (B, H, T, D), k (B, G, T, D), v (B, G, T, D)
    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    saved = None
    if wq_norm is not None and wk_norm is not None:
        q, (_, rq) = rms_norm_forward(q, wq_norm, eps=eps)
        k, (_, rk) = rms_norm_forward(k, wk_norm, eps=eps)
        saved = QKVRopeSaved(qkv, rq, rk)
    if theta is not None:
        q, _ = rope_forward(q, theta=theta, offset=offset)
        k, _ = rope_forward(k, theta=theta, offset=offset)
    return _own(q, qkv), _own(k, qkv), _own(v, qkv), saved


def qkv_rope_backward(
    dq: Tensor,  # (B, H, T, D)
    dk: Tensor,  # (B, G, T, D)
    dv: Tensor,  # (B, G, T, D)
    saved: QKVRopeSaved | None,
    wq_norm: Tensor | None,  # (D,)
    wk_norm: Tensor | None,  # (D,)
    dwq_norm: Tensor | None,  # (D,)  accumulated into
    dwk_norm: Tensor | None,  # (D,)  accumulated into
    *,
    theta: float | None,
    offset: int = 0,
) -> Tensor:  # dqkv (B, T, (H+2G)*D)
    if theta is not None:
        dq = rope_backward(dq, None, theta=theta, offset=offset)
        dk = rope_backward(dk, None, theta=theta, offset=offset)
    if saved is not None and wq_norm is not None and wk_norm is not None:
        q, k, _ = split_heads(saved.qkv, dq.shape[1], dk.shape[1])
        dq = rms_norm_backward(dq, RMSNormSaved(q, saved.rq), wq_norm, dwq_norm)
        dk = rms_norm_backward(dk, RMSNormSaved(k, saved.rk), wk_norm, dwk_norm)
    return torch.cat([dq, dk, dv], 1).transpose(1, 2).flatten(2)


QKV_ROPE = Op(qkv_rope_forward, qkv_rope_backward, outputs=("q", "k", "v"), grads=("dqkv",))
