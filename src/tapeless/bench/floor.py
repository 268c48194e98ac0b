"""The floor: what a training step cannot do without, and nothing else.

    products    y = x w',  dx = dy w,  dw = dy' x   of qkv, out, up, down (each layer) and head: 6 flops a weight and token
    optimizer   AdamW reads p, g, m, v and writes p, m, v; in bfloat16 also the copy that products read
The products run as in our step, into buffers that are there already; weights and their gradients are each layer's own, so that
they come from memory. The optimizer's bytes are moved in place, half read and half written: a copy would first read what it
overwrites, and take longer than the optimizer.
Tested by: tests/bench/test_floor.py."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.bench.device import synchronize
from tapeless.bench.task import Task, num_params
from tapeless.config import AnyModelConfig, SimpleLMConfig
from tapeless.ops.ffn_gate import GATED

LARGEST = 2**26  # elements moved at a time, 256 MiB: larger than any cache


class Product(NamedTuple):
    name: str
    inputs: int  # columns of w
    outputs: int  # rows of w
    layers: int  # that have one

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.layers


def products(c: AnyModelConfig) -> list[Product]:
    """Every product of a step with a matrix of weights."""
    if isinstance(c, SimpleLMConfig):
        C, F, V = c.hidden_dim, c.intermediate_dim, c.vocab_size
        return [Product("hidden", C, F, 1), Product("head", F, V, 1)]
    C, D, L = c.hidden_dim, c.head_dim, c.num_layers
    up = c.intermediate_dim * (2 if c.ffn in GATED else 1)
    return [
        Product("qkv", C, (c.num_heads + 2 * c.num_kv_heads) * D, L),
        Product("out", c.num_heads * D, C, L),
        Product("up", C, up, L),
        Product("down", c.intermediate_dim, C, L),
        Product("head", C, c.vocab_size, 1),
    ]


def flops(c: AnyModelConfig, tokens: int) -> int:
    """Of a step's products: 2 forward, 4 backward for each weight and token."""
    return 6 * tokens * sum(product.weights for product in products(c))


def optimizer_bytes(c: AnyModelConfig, dtype: str) -> int:
    return num_params(c) * (7 * 4 + (0 if dtype == "float32" else 2))


class Buffers(NamedTuple):
    x: Tensor  # (N, inputs)
    dy: Tensor  # (N, outputs)
    w: Tensor  # (layers, outputs, inputs)
    dw: Tensor  # (layers, outputs, inputs)
    dx: Tensor  # (N, inputs)
    y: Tensor  # (N, outputs)


def _product(device: str) -> Callable[[Tensor, Tensor, Tensor], None]:  # (M, K), (K, N), (M, N) which is written
    if torch.device(device).type == "cpu" and find_spec("numba"):
        from tapeless.kernels.cpu.matmul import matmul

        return matmul
    return lambda a, b, out: torch.mm(a, b, out=out)  # type: ignore[return-value]


class Floor:
    def __init__(self, task: Task):
        self.task, self.product = task, _product(task.train.device)
        N, options = task.tokens, dict[str, Any](dtype=task.compute, device=task.train.device)
        self.buffers = []
        for _, inputs, outputs, layers in products(task.model):
            x, dy = torch.randn(N, inputs, **options), torch.randn(N, outputs, **options)
            w = torch.randn(layers, outputs, inputs, **options)
            self.buffers.append(Buffers(x, dy, w, torch.empty_like(w), torch.empty_like(x), torch.empty_like(dy)))
        self.bytes = optimizer_bytes(task.model, task.train.dtype)
        self.moved = torch.ones(min(self.bytes // 8, LARGEST), dtype=torch.float32, device=task.train.device)
        self.seconds: list[tuple[float, float]] = []  # of the products and of the optimizer's bytes, step by step

    def prepare(self, step: int) -> None:
        """Every step is the same."""

    def step(self) -> None:
        start = time.perf_counter()
        self.multiply()
        synchronize(self.task.train.device)
        middle = time.perf_counter()
        self.move()
        synchronize(self.task.train.device)
        self.seconds.append((middle - start, time.perf_counter() - middle))

    def multiply(self) -> None:
        for x, dy, w, dw, dx, y in self.buffers:
            for layer in range(len(w)):
                self.product(x, w[layer].t(), y)
                self.product(dy, w[layer], dx)
                torch.mm(dy.t(), x, out=dw[layer])

    def move(self) -> None:
        left = self.bytes // 8  # elements, of four bytes, read and written
        while left:
            n = min(left, len(self.moved))
            self.moved[:n].neg_()
            left -= n

    def parts(self) -> dict[str, int]:
        return {}

    def facts(self) -> dict[str, Any]:
        products_s, optimizer_s = map(median, zip(*self.seconds, strict=True))
        return {
            "flops": flops(self.task.model, self.task.tokens),
            "products_s": products_s,
            "optimizer_bytes": self.bytes,
            "optimizer_s": optimizer_s,
        }
