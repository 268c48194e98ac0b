"""embed: the contract, and which rows of the table a gradient may touch."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.ops.embed import embed_backward, embed_forward
from tapeless.verify.cases import OpCase


@each_case("embed")
def test_contract(case: OpCase):
    check_op(case)


def test_repeated_tokens_add_up_and_unused_rows_stay_zero():
    tokens = torch.tensor([[3, 1, 3], [3, 0, 1]])
    w, dy = torch.randn(5, 2), torch.randn(2, 3, 2)
    dw = torch.zeros_like(w)
    _, saved = embed_forward(tokens, w)
    embed_backward(dy, saved, w, dw)
    assert torch.equal(dw[0], dy[1, 1])
    assert torch.equal(dw[1], dy[0, 1] + dy[1, 2])
    assert torch.equal(dw[3], dy[0, 0] + dy[0, 2] + dy[1, 0])
    assert torch.equal(dw[[2, 4]], torch.zeros(2, 2))


def test_token_outside_the_table_is_an_error():
    with pytest.raises(IndexError):
        embed_forward(torch.tensor([5]), torch.randn(5, 2))
