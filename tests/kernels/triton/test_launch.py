"""Launches on the meta device: nothing runs, and the bytes that kernels would move are counted from their arguments."""

import pytest
import torch

pytest.importorskip("triton")

from tapeless.config import ModelConfig, TrainConfig
from tapeless.kernels.dry import META, dry_ops
from tapeless.kernels.triton.launch import _add_parts_kernel, count_kernel_bytes, launch
from tapeless.model.transformer import Transformer
from tapeless.training.step import optimizer_of

MODEL = ModelConfig(
    vocab_size=512, hidden_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_dim=128, max_seq_len=128
)
B, T = 4, 128
N, L, C, F, V = B * T, 3, 64, 128, 512
HEADS = (4 + 2 * 2) * 32


def counted(ops: str) -> dict[str, int]:
    """Of a training step in bfloat16."""
    dry_set = dry_ops(ops)
    assert dry_set is not None
    model = Transformer(MODEL, device=META, ops="reference", dtype="bfloat16", initialized=False)
    model.ops = dry_set.ops
    optimizer = optimizer_of(model, TrainConfig(dtype="bfloat16"))
    tokens = torch.empty(B, T, dtype=torch.int64, device=META)
    with count_kernel_bytes() as moved:
        model.forward_backward(tokens, tokens, num_targets=1, accumulate=False, check=False)
        assert model.ops.grad_norm is not None
        model.ops.grad_norm(model.store.flat_grads)
        optimizer.step(scale=0.5, copy=model.store.copy)
    return moved


def test_bytes_of_a_step_by_hand():
    """Small arguments (statistics, tables of angles, weights of norms, partial sums) are less than a tenth."""
    moved, params = counted("triton"), Transformer(MODEL, device=META, ops="reference", initialized=False).store.flat.numel()
    expected = {
        "_norm_forward_kernel": 2 * N * C * (2 + 4 * 2 * L),  # x, delta, s, n; the first has no delta
        "_norm_backward_kernel": 2 * N * C * (3 + 4 * 2 * L),  # ds, dn, x, dx; the last norm has no ds
        "_heads_forward_kernel": 2 * N * HEADS * 2 * L,
        "_heads_backward_kernel": 2 * N * HEADS * 2 * L,
        "_gate_forward_kernel": 2 * N * (2 * F + F) * L,
        "_gate_backward_kernel": 2 * N * (2 * 2 * F + 2 * F) * L,  # gate_up, dh, and as many written
        "_loss_kernel": 2 * N * V * 2,
        "_gather_kernel": 2 * N * C * 2,
        "_adam_kernel": params * (7 * 4 + 2),
        "_sums_of_squares_kernel": params * 4,
    }
    for name, nbytes in expected.items():
        assert nbytes <= moved[name] <= 1.1 * nbytes + 2 * V * C * 4 * (name == "_norm_backward_kernel"), name
    assert set(moved) == {*expected, "_add_parts_kernel", "_scatter_kernel"}


def test_fp8_kernels_are_counted_too():
    moved = counted("triton-fp8")
    assert moved["_fp8_gate_backward_kernel"] == pytest.approx(N * (2 * 2 * F + 2 * F + 2 * 2 * F + F) * L, rel=0.01)
    assert "_gate_backward_kernel" not in moved


def test_each_tensor_counts_once_and_twice_in_place():
    x, y = torch.empty(2, 10, 10, device=META).unbind()
    with count_kernel_bytes() as moved:
        launch(_add_parts_kernel, (1,), x, x.view(10, 10), 7, x[1:], y, inplace=(y,))
    assert moved == {"_add_parts_kernel": 400 + 360 + 2 * 400}


def test_nothing_is_launched_on_the_meta_device():
    launch(None, (1,), torch.empty(3, device=META), 3)


def test_dropped_counts_are_not_counted_into():
    with count_kernel_bytes() as moved:
        pass
    dry_set = dry_ops("triton")
    assert dry_set is not None
    dry_set.ops.linear_cross_entropy.forward(
        torch.empty(4, 8, device=META),
        torch.empty(4, dtype=torch.int64, device=META),
        torch.empty(16, 8, device=META),
        num_targets=4,
    )
    assert not moved
