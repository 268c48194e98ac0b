"""attention: the contract, and what no query may see, bit for bit, in both passes."""

import pytest
import torch
from torch import Tensor

from contract import check_op, each_case
from tapeless.ops.attention import attention_backward, attention_forward
from tapeless.verify.cases import OpCase
from tapeless.verify.finding import distance
from tapeless.verify.tolerances import METAMORPHIC

B, H, G, T, D = 2, 4, 2, 7, 6


def heads(*counts: int, length: int = T) -> list[Tensor]:
    return [torch.randn(B, n, length, D, dtype=torch.float64) for n in counts]


@each_case("attention")
def test_contract(case: OpCase):
    check_op(case)


def test_the_past_does_not_see_the_future():
    q, k, v = heads(H, G, G)
    o, _ = attention_forward(q, k, v)
    for x in (q, k, v):
        x[:, :, 4:] = torch.randn(B, x.shape[1], T - 4, D, dtype=torch.float64)
    assert torch.equal(attention_forward(q, k, v)[0][:, :4], o[:, :4])


def test_gradients_do_not_flow_from_the_past_to_the_future():
    q, k, v = heads(H, G, G)
    _, saved = attention_forward(q, k, v)
    do = torch.randn(B, T, H * D, dtype=torch.float64)
    do[:, 4:] = 0
    for dx in attention_backward(do, saved):
        assert torch.equal(dx[:, :, 4:], torch.zeros_like(dx[:, :, 4:]))
        assert (dx[:, :, 1:4] != 0).any()


def test_documents_are_sealed_off_bit_for_bit():
    q, k, v = heads(H, G, G)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]])
    _, saved = attention_forward(q, k, v, documents)
    do = torch.randn(B, T, H * D, dtype=torch.float64)
    do[0, :3] = 0  # only the second document has an upstream gradient
    for dx in attention_backward(do, saved):
        assert torch.equal(dx[0, :, :3], torch.zeros_like(dx[0, :, :3]))
        assert (dx[0, :, 3:] != 0).any()


def test_a_document_is_a_sequence_of_its_own():
    q, k, v = heads(H, G, G)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(B, T)
    o, _ = attention_forward(q, k, v, documents)
    alone, _ = attention_forward(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:])
    assert distance(o[:, 3:], alone).largest <= METAMORPHIC["float64"]


def test_cached_keys_equal_the_tail_of_the_full_pass():
    q, k, v = heads(H, G, G)
    o, _ = attention_forward(q, k, v)
    tail, _ = attention_forward(q[:, :, 5:], k, v)
    assert distance(tail, o[:, 5:]).largest <= METAMORPHIC["float64"]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sharing_heads_equals_repeating_them(kv_heads: int):
    q, k, v = heads(H, kv_heads, kv_heads)
    do = torch.randn(B, T, H * D, dtype=torch.float64)
    o, saved = attention_forward(q, k, v)
    o_each, saved_each = attention_forward(q, *(x.repeat_interleave(H // kv_heads, 1) for x in (k, v)))
    assert distance(o, o_each).largest <= METAMORPHIC["float64"]
    _, dk, dv = attention_backward(do, saved)
    _, dk_each, dv_each = attention_backward(do, saved_each)
    for dx, dx_each in ((dk, dk_each), (dv, dv_each)):
        assert distance(dx, dx_each.unflatten(1, (kv_heads, -1)).sum(2)).largest <= METAMORPHIC["float64"]


def test_the_first_query_copies_its_value():
    q, k, v = heads(H, H, H)
    o, _ = attention_forward(q, k, v)
    assert torch.equal(o[:, 0].view(B, H, D), v[:, :, 0])


def test_scores_of_ten_thousand_do_not_overflow():
    q, k, v = (x.float() for x in heads(H, G, G))
    o, saved = attention_forward(1e3 * q, 1e2 * k, v)
    assert o.isfinite().all()
    assert all(dx.isfinite().all() for dx in attention_backward(torch.randn_like(o), saved))
