"""Learned positions: each position has its own vector.

    y[b, t] = x[b, t] + w[offset + t]
Backward. dx = dy;  all sequences of the batch share a position, hence
    dw[offset + t] += sum_b dy[b, t]
Saved: nothing. `offset` is the number of tokens already decoded.
Tested by: tests/ops/test_positions.py."""

from torch import Tensor

from tapeless.errors import InputError
from tapeless.ops.numerics import accumulation_dtype
from tapeless.ops.op import Op


def positions_forward(
    x: Tensor,  # (B, T, C)
    w: Tensor,  # (Tmax, C)
    *,
    offset: int = 0,
) -> tuple[Tensor, None]:  # y (B, T, C)
    end = offset + x.shape[1]
    if end > w.shape[0]:
        raise InputError(f"sequence of {end} tokens, but max_seq_len is {w.shape[0]} and learned positions end there")
    return x + w[offset:end], None


def positions_backward(
    dy: Tensor,  # (B, T, C)
    saved: None,
    w: Tensor,  # (Tmax, C)
    dw: Tensor | None,  # (Tmax, C)  accumulated into
    *,
    offset: int = 0,
) -> Tensor:  # dx (B, T, C)
    if dw is not None:
        dw[offset : offset + dy.shape[1]] += dy.sum(0, dtype=accumulation_dtype(dy))
    return dy


POSITIONS = Op(positions_forward, positions_backward)
