"""The activation or gate of the feed-forward layer in one pass, and the linear map after it.

Formulas: ops/ffn_down.py, ops/ffn_gate.py and ops/pointwise.py. Backward computes f and f' together, from one exponential; the
same pass overwrites dh by h, from which dw is computed.
Tested by: tests/kernels/triton/test_triton.py."""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapeless.kernels.triton.launch import contiguous, launch, on_device, tanh
from tapeless.kernels.triton.linear import linear_backward, linear_forward
from tapeless.ops.ffn_down import FFN_DOWN, FFNDownSaved
from tapeless.ops.ffn_gate import GATED
from tapeless.ops.linear import LinearSaved
from tapeless.ops.numerics import rows
from tapeless.ops.op import Op
from tapeless.ops.pointwise import GELU_C, GELU_K

SILU, GELU, TANH, RELU, RELU2 = (tl.constexpr(i) for i in range(5))
KINDS = {"swiglu": SILU, "geglu": GELU, "gelu": GELU, "tanh": TANH, "relu": RELU, "relu2": RELU2}
K, KC = tl.constexpr(GELU_K), tl.constexpr(GELU_K * GELU_C)
BLOCK, WARPS = 2048, 4  # columns of a program


@triton.jit
def f_df(x, KIND: tl.constexpr):
    if KIND == SILU:
        s = 1.0 / (1.0 + tl.exp(-x))
        f, df = x * s, s * (1.0 + x * (1.0 - s))
    elif KIND == GELU:
        t = tanh(K * x + KC * x * x * x)
        f = 0.5 * x * (1.0 + t)
        df = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (K + 3.0 * KC * x * x)
    elif KIND == TANH:
        f = tanh(x)
        df = 1.0 - f * f
    else:
        r = tl.where(x <= 0.0, 0.0, x)  # propagates NaN
        if KIND == RELU:
            f, df = r, tl.where(x <= 0.0, 0.0, 1.0)
        else:
            f, df = r * r, 2.0 * r
    return f, df


@triton.jit
def _gate_forward_kernel(
    gate_up, h, F, KIND: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr
):  # (N, 2F) or (N, F); (N, F)
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = gate_up + n * (2 * F if IS_GATED else F) + c
    f, _ = f_df(tl.load(gate, mask=c < F, other=0.0).to(tl.float32), KIND)
    if IS_GATED:
        f *= tl.load(gate + F, mask=c < F, other=0.0).to(tl.float32)
    tl.store(h + n * F + c, f.to(h.dtype.element_ty), mask=c < F)


@triton.jit
def _gate_backward_kernel(dh, gate_up, dgate_up, F, KIND: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr):
    # dh (N, F), h on return; gate_up, dgate_up (N, 2F) or (N, F)
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = n * (2 * F if IS_GATED else F) + c
    d = tl.load(dh + n * F + c, mask=c < F, other=0.0).to(tl.float32)
    f, df = f_df(tl.load(gate_up + at, mask=c < F, other=0.0).to(tl.float32), KIND)
    if IS_GATED:
        up = tl.load(gate_up + at + F, mask=c < F, other=0.0).to(tl.float32)
        tl.store(dgate_up + at + F, (d * f).to(dh.dtype.element_ty), mask=c < F)
        f, df = f * up, df * up
    tl.store(dgate_up + at, (d * df).to(dh.dtype.element_ty), mask=c < F)
    tl.store(dh + n * F + c, f.to(dh.dtype.element_ty), mask=c < F)


def _launch(kernel: Any, name: str, N: int, F: int, *tensors: Tensor, inplace: tuple[Tensor, ...] = ()) -> None:
    """A program for each row and BLOCK columns of h."""
    options = {"KIND": KINDS[name], "IS_GATED": name in GATED, "BLOCK": BLOCK, "num_warps": WARPS}
    launch(kernel, (N, triton.cdiv(F, BLOCK)), *tensors, F, inplace=inplace, **options)


@on_device
def ffn_down_forward(
    gate_up: Tensor,  # (..., 2F), or (..., F) of the ungated kinds
    w: Tensor,  # (C, F)
    b: Tensor | None,  # (C,)
    *,
    name: str,
) -> tuple[Tensor, FFNDownSaved]:  # y (..., C)
    F = w.shape[1]
    h = torch.empty(*gate_up.shape[:-1], F, dtype=gate_up.dtype, device=gate_up.device)
    _launch(_gate_forward_kernel, name, h.numel() // F, F, contiguous(gate_up), h)
    return linear_forward(h, w, b)[0], FFNDownSaved(gate_up)


@on_device
def ffn_down_backward(
    dy: Tensor,  # (..., C)
    saved: FFNDownSaved,
    w: Tensor,  # (C, F)
    b: Tensor | None,  # (C,)
    dw: Tensor | None,  # (C, F)  accumulated into, or overwritten
    db: Tensor | None,  # (C,)  accumulated into
    *,
    name: str,
    overwrite: bool,
    want_dx: bool = True,
) -> Tensor | None:  # dgate_up, as gate_up
    flat, gate_up = rows(dy), contiguous(saved.gate_up)
    dh = flat @ w if want_dx else flat.new_empty(len(flat), w.shape[1])  # (N, F)
    dgate_up = torch.empty_like(gate_up)
    _launch(_gate_backward_kernel, name, *dh.shape, dh, gate_up, dgate_up, inplace=(dh,))
    h = dh  # overwritten by the kernel; h does not depend on dh
    linear_backward(dy, LinearSaved(h), w, b, dw, db, overwrite=overwrite, want_dx=False)
    return dgate_up if want_dx else None


def ffn_down(*, overwrite: bool = False) -> dict[str, Op]:
    def op(name: str) -> Op:
        forward, backward = partial(ffn_down_forward, name=name), partial(ffn_down_backward, name=name, overwrite=overwrite)
        return FFN_DOWN[name]._replace(forward=forward, backward=backward, backward_dw=partial(backward, want_dx=False))

    return {name: op(name) for name in KINDS}
