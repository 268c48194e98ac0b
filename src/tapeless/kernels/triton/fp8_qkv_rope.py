"""Backward from the heads' gradients to that of the fused q, k, v projection, written as fp8 in both layouts.

A program rotates one head of some rows, so that its tile can be written by columns too. Heads with QK-norm use qkv_rope.py, and
the linear map before them converts the result to fp8.
Formulas: ops/qkv_rope.py. Tested by: tests/kernels/triton/test_fp8.py."""

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.fp8_cast import ROWS, Gradient, empty_gradient, gradient_scale, store_gradient
from tapeless.kernels.triton.launch import launch, on_device, unit_stride, warps
from tapeless.kernels.triton.qkv_rope import Tables, angles, one_of, qkv_rope_backward, qkv_rope_forward
from tapeless.ops.op import Op
from tapeless.ops.qkv_rope import QKV_ROPE, QKVRopeSaved


@triton.jit
def _fp8_heads_backward_kernel(
    dq, dk, dv, qb, qh, qt, kb, kh, kt, vb, vh, vt, cos, sin, rows, columns, N, T, H, G, D, half, offset, scale,
    ROPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # dq (B, H, T, D), dk, dv (B, G, T, D); rows (N, (H+2G) D), columns its transpose  # fmt: skip
    n, c, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.program_id(1)
    which = tl.where(head < H, 0, tl.where(head < H + G, 1, 2))
    upstream, own_head = one_of(which, dq, dk, dv), head - one_of(which, 0, H, H + G)
    of_b, of_h, of_t = one_of(which, qb, kb, vb), one_of(which, qh, kh, vh), one_of(which, qt, kt, vt)
    source = upstream + ((n // T).to(tl.int64) * of_b + (n % T) * of_t + own_head * of_h)[:, None] + c[None, :]
    in_lo, in_hi = (n < N)[:, None] & (c < half)[None, :], (n < N)[:, None] & (half + c < D)[None, :]
    lo = tl.load(source, mask=in_lo, other=0.0).to(tl.float32)
    hi = tl.load(source + half, mask=in_hi, other=0.0).to(tl.float32)
    if ROPE:
        turns = in_lo & (which < 2)  # elsewhere cos = 1 and sin = 0
        cosine, sine = angles(cos, sin, offset + n % T, c, half, turns)
        cosine = tl.where(turns, cosine, 1.0)
        lo, hi = lo * cosine + hi * sine, hi * cosine - lo * sine
    width = (H + 2 * G) * D
    store_gradient(lo * scale, n, head * D + c, in_lo, N, width, rows, columns)
    store_gradient(hi * scale, n, head * D + half + c, in_hi, N, width, rows, columns)


@on_device
def fp8_qkv_rope_backward(
    dq: Tensor,  # (B, H, T, D)
    dk: Tensor,  # (B, G, T, D)
    dv: Tensor,  # (B, G, T, D)
    saved: QKVRopeSaved | None,
    *norms: Tensor | None,  # wq_norm, wk_norm, dwq_norm, dwk_norm (D,)
    theta: float | None,
    offset: int = 0,
    tables: Tables,
) -> Tensor | Gradient:  # dqkv (B, T, (H+2G)*D)
    if saved is not None:
        return qkv_rope_backward(dq, dk, dv, saved, *norms, theta=theta, offset=offset, tables=tables)
    (B, H, T, D), G, half = dq.shape, dk.shape[1], (dq.shape[3] + 1) // 2
    dq, dk, dv = unit_stride(dq), unit_stride(dk), unit_stride(dv)
    made, width = empty_gradient(B * T, (H + 2 * G) * D, dq.device), triton.next_power_of_2(half)
    cos, sin = (dq, dq) if theta is None else tables(D, theta, offset + T, dq.device)
    strides = [stride for x in (dq, dk, dv) for stride in x.stride()[:3]]
    launch(
        _fp8_heads_backward_kernel, (triton.cdiv(B * T, ROWS), H + 2 * G),
        dq, dk, dv, *strides, cos, sin, made.rows, made.columns, B * T, T, H, G, D, half, offset, gradient_scale(B * T),
        ROPE=theta is not None, ROWS=ROWS, WIDTH=width, num_warps=warps(ROWS * 2 * width),
    )  # fmt: skip
    return made


def fp8_qkv_rope() -> Op:
    tables = Tables()
    forward, backward = partial(qkv_rope_forward, tables=tables), partial(fp8_qkv_rope_backward, tables=tables)
    return QKV_ROPE._replace(forward=forward, backward=backward)
