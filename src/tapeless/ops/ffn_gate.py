"""The middle of the feed-forward layer: what is between its two linear maps.

    gated    h = f(gate) up        gate_up = [gate | up], one matmul with 2F columns
    plain    h = f(up)             the activations of pointwise.py
Backward of the gated kind:
    dgate = dh up f'(gate)         dup = dh f(gate)
swiglu has f = silu, geglu has f = gelu (tanh).
Saved: gate_up; f and f' are recomputed.
Tested by: tests/ops/test_ffn_gate.py."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.ops.numerics import accumulation_dtype
from tapeless.ops.op import Op
from tapeless.ops.pointwise import GELU, RELU, RELU2, TANH, dgelu, dsilu, gelu, silu


class GatedSaved(NamedTuple):
    gate_up: Tensor  # (..., 2F)


def _gated(f: Callable[[Tensor], Tensor], df: Callable[[Tensor], Tensor]) -> Op:
    def forward(
        gate_up: Tensor,  # (..., 2F)
    ) -> tuple[Tensor, GatedSaved]:  # h (..., F)
        gate, up = gate_up.to(accumulation_dtype(gate_up)).chunk(2, -1)
        return (f(gate) * up).to(gate_up.dtype), GatedSaved(gate_up)

    def backward(
        dh: Tensor,  # (..., F)
        saved: GatedSaved,
    ) -> Tensor:  # dgate_up (..., 2F)
        gate, up = saved.gate_up.to(accumulation_dtype(saved.gate_up)).chunk(2, -1)
        dgate = dh * up * df(gate)
        dup = dh * f(gate)
        return torch.cat([dgate, dup], -1).to(dh.dtype)

    return Op(forward, backward, outputs=("h",), grads=("dgate_up",))


SWIGLU = _gated(silu, dsilu)
GEGLU = _gated(gelu, dgelu)
FFN_GATES = {"swiglu": SWIGLU, "geglu": GEGLU, "gelu": GELU, "tanh": TANH, "relu": RELU, "relu2": RELU2}
GATED = frozenset({"swiglu", "geglu"})  # the kinds whose first matmul has 2F columns
