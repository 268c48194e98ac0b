"""The second half of the feed-forward layer: its activation or gate, and the linear map after it, as one op.

    h = gate(gate_up)     by ffn_gate.py          y = h w' + b
Backward:
    dh = dy w             dw += dy' h             db += sum_rows(dy)             dgate_up: the gate's backward of dh
Saved: gate_up alone. h would add another third and costs one pass, so it is recomputed; kernels compute it in the pass that
computes dgate_up.
Tested by: tests/ops/test_ffn_down.py."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from tapeless.ops.ffn_gate import FFN_GATES
from tapeless.ops.linear import LinearSaved, linear_backward, linear_forward
from tapeless.ops.op import Op


class FFNDownSaved(NamedTuple):
    gate_up: Tensor  # (..., 2F), or (..., F) for kinds without a gate


def _ffn_down(gate: Op) -> Op:
    def forward(
        gate_up: Tensor,  # (..., 2F) or (..., F)
        w: Tensor,  # (C, F)
        b: Tensor | None,  # (C,)
    ) -> tuple[Tensor, FFNDownSaved]:  # y (..., C)
        h, _ = gate.forward(gate_up)
        y, _ = linear_forward(h, w, b)
        return y, FFNDownSaved(gate_up)

    def backward(
        dy: Tensor,  # (..., C)
        saved: FFNDownSaved,
        w: Tensor,  # (C, F)
        b: Tensor | None,  # (C,)
        dw: Tensor | None,  # (C, F)  accumulated into
        db: Tensor | None,  # (C,)  accumulated into
        *,
        want_dx: bool = True,
    ) -> Tensor | None:  # dgate_up (..., 2F) or (..., F)
        h, gate_saved = gate.forward(saved.gate_up)
        dh = linear_backward(dy, LinearSaved(h), w, b, dw, db, want_dx=want_dx)
        return gate.backward(dh, gate_saved) if want_dx else None

    return Op(forward, backward, backward_dw=partial(backward, want_dx=False), grads=("dgate_up",))


FFN_DOWN = {kind: _ffn_down(gate) for kind, gate in FFN_GATES.items()}
