"""The smallest example: one linear layer, its three gradients beside the same numbers worked out by hand, one step.

    y = x w' + b          loss = sum((y - target)^2) / 2          dloss/dy = y - target
One row, two inputs, two outputs, numbers small enough for paper:
    x = [1, 2]    w = [[1, -1], [3, 0.5]]    b = [0.5, -1]    target = [0, 1]
    y = [1·1 - 1·2 + 0.5, 3·1 + 0.5·2 - 1] = [-0.5, 3]        dy = [-0.5, 2]        loss = (0.25 + 4) / 2 = 2.125
    dw = dy' x   = [[-0.5·1, -0.5·2], [2·1, 2·2]]
    db = dy      = [-0.5, 2]
    dx = dy w    = [-0.5·1 + 2·3, -0.5·(-1) + 2·0.5]

    python examples/one_linear_layer.py"""

import torch
from torch import Tensor

from tapeless import Chain, layer
from tapeless.ops.linear import LINEAR

LR = 0.1
BY_HAND = {
    "y": [[-0.5, 3.0]],
    "loss": 2.125,
    "dw": [[-0.5, -1.0], [2.0, 4.0]],
    "db": [-0.5, 2.0],
    "dx": [[5.5, 1.5]],
}


def half_squared_error(y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # loss (), dy (N, O)
    error = y - target
    return (error * error).sum() / 2, error


def main() -> int:
    chain = Chain(layer("linear", LINEAR, w=(2, 2), b=(2,)), dtype="float64")
    chain.params["linear.w"].copy_(torch.tensor([[1.0, -1.0], [3.0, 0.5]]))
    chain.params["linear.b"].copy_(torch.tensor([0.5, -1.0]))
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)  # (N, I)
    target = torch.tensor([[0.0, 1.0]], dtype=torch.float64)  # (N, O)

    y = chain.forward(x)
    loss, dy = half_squared_error(y, target)
    dx = chain.backward(dy)
    computed = {"y": y, "loss": loss, "dw": chain.grads["linear.w"], "db": chain.grads["linear.b"], "dx": dx}

    wrong = 0
    print(f"{'':6}{'computed':32}by hand")
    for name, by_hand in BY_HAND.items():
        print(f"{name:6}{computed[name].tolist()!s:32}{by_hand}")
        wrong += computed[name].tolist() != by_hand  # these numbers are exact in binary, so nothing is rounded

    chain.store.flat -= LR * chain.store.flat_grads
    after, _ = half_squared_error(chain.forward(x, keep=False), target)
    print(f"\none step of {LR}: loss {loss.item():.4f} -> {after.item():.4f}")
    return 1 if wrong or not after < loss else 0


if __name__ == "__main__":
    raise SystemExit(main())
