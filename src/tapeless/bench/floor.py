"""The floor: the work that no training step can avoid, and nothing else.

    matmuls     y = x w',  dx = dy w,  dw = dy' x   with every linear weight of the model: 6 FLOPs per weight and token
    optimizer   AdamW reads p, g, m, v and writes p, m, v; in bfloat16 also the copy that matmuls read
The matmuls run as in the training step, into preallocated buffers; each layer has its own weights and gradients, so that they
come from memory. The optimizer's bytes are moved in place, half read and half written: a copy would first read what it
overwrites, and take longer than the optimizer.
Tested by: tests/bench/test_floor.py."""

import re
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.bench.task import Contender, Task
from tapeless.config import AnyModelConfig
from tapeless.model.build import num_params, param_specs
from tapeless.training.fastest import clock

LARGEST = 2**26  # elements moved at a time, 256 MiB: larger than any cache


class Matmul(NamedTuple):
    name: str
    inputs: int  # columns of w
    outputs: int  # rows of w
    layers: int  # that have one

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.layers


def matmuls(config: AnyModelConfig) -> list[Matmul]:
    """Every matmul of a forward with a weight matrix; adjacent matrices are one, and layers of equal shape are counted."""
    found: list[tuple[str, int, int]] = []
    for spec in param_specs(config):
        if spec.is_linear and spec.joined:
            name, inputs, outputs = found[-1]
            found[-1] = name, inputs, outputs + spec.shape[0]
        elif spec.is_linear:
            found.append((re.sub(r"^blocks\.\d+\.", "", spec.name), spec.shape[1], spec.shape[0]))
    return [Matmul(*matmul, layers) for matmul, layers in Counter(found).items()]


def flops(config: AnyModelConfig, tokens: int) -> int:
    """Of a step's matmuls: 2 forward, 4 backward for each weight and token."""
    return 6 * tokens * sum(matmul.weights for matmul in matmuls(config))


def optimizer_bytes(c: AnyModelConfig, dtype: str) -> int:
    return num_params(c) * (7 * 4 + (0 if dtype == "float32" else 2))


class Buffers(NamedTuple):
    x: Tensor  # (N, inputs)
    dy: Tensor  # (N, outputs)
    w: Tensor  # (layers, outputs, inputs)
    dw: Tensor  # (layers, outputs, inputs)
    dx: Tensor  # (N, inputs)
    y: Tensor  # (N, outputs)


def _matmul(device: str) -> Callable[[Tensor, Tensor, Tensor], None]:  # (M, K), (K, N), (M, N) which is written
    if torch.device(device).type == "cpu" and find_spec("numba"):
        from tapeless.kernels.cpu.matmul import matmul

        return matmul
    return lambda a, b, out: torch.mm(a, b, out=out)  # type: ignore[return-value]


class Floor(Contender):
    def __init__(self, task: Task):
        self.task, self.matmul = task, _matmul(task.train.device)
        N, options = task.tokens, dict[str, Any](dtype=task.compute, device=task.train.device)
        self.buffers = []
        for _, inputs, outputs, layers in matmuls(task.model):
            x, dy = torch.randn(N, inputs, **options), torch.randn(N, outputs, **options)
            w = torch.randn(layers, outputs, inputs, **options)
            self.buffers.append(Buffers(x, dy, w, torch.empty_like(w), torch.empty_like(x), torch.empty_like(dy)))
        self.bytes = optimizer_bytes(task.model, task.train.dtype)
        self.moved = torch.ones(min(self.bytes // 8, LARGEST), dtype=torch.float32, device=task.train.device)
        self.seconds: list[tuple[float, float]] = []  # of the matmuls and of the optimizer's bytes, step by step

    def step(self) -> None:
        device = self.task.train.device
        self.seconds.append((clock(self.multiply, device), clock(self.move, device)))

    def multiply(self) -> None:
        for x, dy, w, dw, dx, y in self.buffers:
            for layer in range(len(w)):
                self.matmul(x, w[layer].t(), y)
                self.matmul(dy, w[layer], dx)
                torch.mm(dy.t(), x, out=dw[layer])

    def move(self) -> None:
        left = self.bytes // 8  # elements, of four bytes, read and written
        while left:
            n = min(left, len(self.moved))
            self.moved[:n].neg_()
            left -= n

    def facts(self) -> dict[str, Any]:
        products_s, optimizer_s = map(median, zip(*self.seconds, strict=True))
        return {
            "flops": flops(self.task.model, self.task.tokens),
            "products_s": products_s,
            "optimizer_bytes": self.bytes,
            "optimizer_s": optimizer_s,
        }
