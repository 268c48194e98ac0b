"""rope: the contract, odd widths, norms, relative positions, and precision far from the start."""

import pytest
import torch

from contract import check_op, each_case
from tapeless.errors import ConfigError
from tapeless.ops.rope import rope_backward, rope_forward
from tapeless.verify.cases import OpCase
from tapeless.verify.finding import distance
from tapeless.verify.tolerances import METAMORPHIC, OP_FLOAT32


@each_case("rope")
def test_contract(case: OpCase):
    check_op(case)


def test_odd_width_is_an_error():
    with pytest.raises(ConfigError, match="head_dim is 5"):
        rope_forward(torch.randn(1, 2, 3, 5), theta=1e4)


def test_keeps_norms_and_backward_is_the_inverse():
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    y, _ = rope_forward(x, theta=1e4, offset=3)
    assert distance(y.norm(dim=-1), x.norm(dim=-1)).largest <= METAMORPHIC["float64"]
    assert distance(rope_backward(y, None, theta=1e4, offset=3), x).largest <= METAMORPHIC["float64"]


def test_position_zero_is_left_alone():
    x = torch.randn(1, 1, 1, 6)
    assert torch.equal(rope_forward(x, theta=1e4)[0], x)


def test_dot_products_depend_on_the_distance_alone():
    q, k = (torch.randn(1, 1, 1, 6, dtype=torch.float64) for _ in range(2))

    def dot(t: int, s: int) -> torch.Tensor:
        return (rope_forward(q, theta=1e4, offset=t)[0] * rope_forward(k, theta=1e4, offset=s)[0]).sum()

    assert distance(dot(1009, 1002), dot(9, 2)).largest <= METAMORPHIC["float64"]


def test_offset_equals_the_tail_of_a_longer_sequence():
    x = torch.randn(1, 2, 7, 6)
    whole, _ = rope_forward(x, theta=1e4)
    tail, _ = rope_forward(x[:, :, 4:], theta=1e4, offset=4)
    assert torch.equal(tail, whole[:, :, 4:])


def test_float32_is_exact_far_from_the_start():
    """Angles are float64 inside: at 10^6 a float32 angle would be off by 0.06."""
    x = torch.randn(1, 1, 3, 6)
    y, _ = rope_forward(x, theta=1e4, offset=10**6)
    expected, _ = rope_forward(x.double(), theta=1e4, offset=10**6)
    assert distance(y, expected).largest <= OP_FLOAT32
