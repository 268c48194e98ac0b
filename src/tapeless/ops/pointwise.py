"""The activations: y = f(x) and dx = dy f'(x), element by element.

    sigmoid  f = 1 / (1 + e^-x)                    f' = f (1 - f)
    silu     f = x s,  s = sigmoid(x)              f' = s (1 + x (1 - s))
    tanh     f = tanh x                            f' = 1 - f^2
    gelu     f = x (1 + t) / 2,  t = tanh(u)       f' = (1 + t) / 2 + x (1 - t^2) u' / 2
             u = k (x + c x^3), k = (2/pi)^(1/2)   u' = k (1 + 3 c x^2)
    relu     f = x where x > 0, else 0             f' = 1 where x > 0, else 0
    relu2    f = relu(x)^2                         f' = 2 relu(x)
Each f and f' is a separate function, because the feed-forward gates (ffn_gate.py) use them too.
relu propagates NaN, which is not <= 0.
Saved: x.
Tested by: tests/ops/test_pointwise.py."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.ops.numerics import accumulation_dtype, real_part
from tapeless.ops.op import Op

GELU_K = math.sqrt(2 / math.pi)
GELU_C = 0.044715


def dsigmoid(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def dsilu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def dtanh(x: Tensor) -> Tensor:
    t = torch.tanh(x)
    return 1 - t * t


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(GELU_K * (x + GELU_C * x * x * x)))


def dgelu(x: Tensor) -> Tensor:
    t = torch.tanh(GELU_K * (x + GELU_C * x * x * x))
    du = GELU_K * (1 + 3 * GELU_C * x * x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du


def relu(x: Tensor) -> Tensor:
    return x.masked_fill(real_part(x) <= 0, 0.0)


def drelu(x: Tensor) -> Tensor:
    return torch.ones_like(x).masked_fill(real_part(x) <= 0, 0.0)


def relu2(x: Tensor) -> Tensor:
    r = relu(x)
    return r * r


def drelu2(x: Tensor) -> Tensor:
    return 2 * relu(x)


class PointwiseSaved(NamedTuple):
    x: Tensor  # any shape


def _pointwise(f: Callable[[Tensor], Tensor], df: Callable[[Tensor], Tensor]) -> Op:
    def forward(x: Tensor) -> tuple[Tensor, PointwiseSaved]:
        return f(x.to(accumulation_dtype(x))).to(x.dtype), PointwiseSaved(x)

    def backward(dy: Tensor, saved: PointwiseSaved) -> Tensor:
        x = saved.x.to(accumulation_dtype(saved.x))
        return (dy * df(x)).to(dy.dtype)

    return Op(forward, backward)


SIGMOID = _pointwise(torch.sigmoid, dsigmoid)
SILU = _pointwise(silu, dsilu)
TANH = _pointwise(torch.tanh, dtanh)
GELU = _pointwise(gelu, dgelu)
RELU = _pointwise(relu, drelu)
RELU2 = _pointwise(relu2, drelu2)
