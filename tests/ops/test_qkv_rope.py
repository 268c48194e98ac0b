"""qkv_rope: the contract, the layout of the heads, and that its results own their memory."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.qkv_rope import qkv_rope_backward, qkv_rope_forward, split_heads
from tapeless.verify.cases import OpCase

HEADS = {"num_heads": 4, "num_kv_heads": 2, "eps": 1e-6}


@each_case("qkv_rope")
def test_contract(case: OpCase):
    check_op(case)


def test_split_and_merge_put_every_feature_back():
    qkv = torch.arange(2 * 3 * 48, dtype=torch.float32).view(2, 3, 48)
    q, k, v, saved = qkv_rope_forward(qkv, None, None, theta=None, **HEADS)
    assert (q.shape, k.shape, v.shape) == ((2, 4, 3, 6), (2, 2, 3, 6), (2, 2, 3, 6))
    assert torch.equal(q[1, 2, 0], qkv[1, 0, 12:18])
    assert torch.equal(k[1, 1, 2], qkv[1, 2, 30:36])
    assert torch.equal(v[0, 0, 1], qkv[0, 1, 36:42])
    assert torch.equal(qkv_rope_backward(q, k, v, saved, None, None, None, None, theta=None), qkv)


@pytest.mark.parametrize("theta", [None, 1e4])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_results_own_their_memory_and_are_contiguous(theta: float | None, qk_norm: bool):
    """qkv can go as soon as attention has q, k and v, even with one position, where a view would be contiguous too."""
    for T in (3, 1):
        qkv = torch.randn(2, T, 48)
        w = torch.ones(6) if qk_norm else None
        *heads, saved = qkv_rope_forward(qkv, w, w, theta=theta, **HEADS)
        for x in heads:
            assert x.is_contiguous()
            assert x.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()
        assert saved.qkv is qkv if qk_norm else saved is None


def test_split_heads_are_views():
    qkv = torch.randn(2, 3, 48)
    assert all(x.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for x in split_heads(qkv, 4, 2))
