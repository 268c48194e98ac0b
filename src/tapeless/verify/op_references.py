"""The same functions a second time, written another way: torch's own functionals, einsum, complex numbers, integers.

Only autograd differentiates these. They share no line with ops/, so an error would have to be made twice to go unseen."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(tokens: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("btv,vc->btc", F.one_hot(tokens, w.shape[0]).to(w.dtype), w)


def positions(x: Tensor, w: Tensor, offset: int = 0) -> Tensor:
    return x + F.embedding(torch.arange(x.shape[1]) + offset, w)


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b)


def lora(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return F.linear(x, scale * torch.einsum("or,ri->oi", b, a))


def lora_swiglu(gate_up: Tensor, a: Tensor, b: Tensor, scale: float, linear: Any) -> Tensor:
    return lora(GATES["swiglu"](gate_up), a, b, scale)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("...mk,...kn->...mn", a, b)


def add(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(a, b)).sum(0)


def mul(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(a, b)).prod(0)


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return F.log_softmax(x, -1)


# By keyword, as every formula: x, or gate_up with the gate in its first half.
POINTWISE: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: F.silu(x),
    "tanh": lambda x: 1 - 2 / (1 + torch.exp(2 * x)),
    "relu": lambda x: F.relu(x),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}


def _gate(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.tensor_split(2, -1)
    return POINTWISE[activation](gate) * up


GATES = {"swiglu": partial(_gate, activation="silu"), "geglu": partial(_gate, activation="gelu")}


def ffn_down(kind: str, gate_up: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear((GATES | POINTWISE)[kind](gate_up), w, b)


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, w.shape, w, eps)


def layer_norm(x: Tensor, w: Tensor, eps: float, b: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, w.shape, w, b, eps)


def add_norm(norm: Callable[..., Tensor], x: Tensor, delta: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    s = x if delta is None else x + delta
    return s, norm(s, **options)


def rope(x: Tensor, theta: float, offset: int = 0) -> Tensor:
    """Features i and i + D/2 are the parts of one complex number, and a rotation is a product with e^(i angle)."""
    T, D = x.shape[-2:]
    frequency = torch.tensor([theta ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    angle = torch.outer(torch.arange(T, dtype=torch.float64) + offset, frequency)  # (T, D/2)
    turned = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def qkv_rope(
    qkv: Tensor,  # (B, T, (H+2G)*D)
    num_heads: int,
    num_kv_heads: int,
    theta: float | None,
    eps: float,
    wq_norm: Tensor | None = None,
    wk_norm: Tensor | None = None,
    offset: int = 0,
) -> list[Tensor]:
    D = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    parts = []
    for first, count, w in ((0, num_heads, wq_norm), (num_heads, num_kv_heads, wk_norm), (-num_kv_heads, num_kv_heads, None)):
        features = qkv[..., first * D : (first + count) * D or None]
        heads = torch.stack(features.split(D, -1), 1)  # (B, heads, T, D)
        heads = heads if w is None else rms_norm(heads, w, eps)
        parts.append(rope(heads, theta, offset) if theta is not None and first >= 0 else heads)
    return parts


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    B, H, T, D = q.shape
    S = k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))  # (B, H, S, D)
    seen = torch.arange(S)[None, None, None] <= (torch.arange(T) + S - T)[None, None, :, None]  # (1, 1, T, S)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * D**-0.5
    shares = F.softmax(torch.where(seen, scores, -torch.inf), -1)
    return torch.einsum("bhts,bhsd->bthd", shares, v).reshape(B, T, H * D)


def dropout_keep(i: int, p: float, key: int) -> bool:
    """The hash of element i in Python's own integers."""

    def mix(h: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = (h ^ h >> shift) * factor % 2**32
        return h ^ h >> 16

    return mix(mix(i % 2**32 ^ key % 2**32) ^ mix(i // 2**32 ^ key // 2**32)) >= math.floor(p * 2**32)


def dropout(x: Tensor, p: float, key: int, first_sample: int = 0) -> Tensor:
    first = first_sample * (x.numel() // x.shape[0])
    keep = torch.tensor([dropout_keep(first + i, p, key) for i in range(x.numel())]).view(x.shape)
    return torch.where(keep, x, 0.0) / (1 - p)


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * (2 * torch.sigmoid(2 * x / cap) - 1)


def cross_entropy(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) int64
    num_targets: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    z = (capped(logits, softcap) if softcap else logits).flatten(0, -2)  # (N, V)
    labels = targets.flatten()
    total = F.cross_entropy(z, labels, ignore_index=-100, label_smoothing=label_smoothing, reduction="sum")
    total = total + z_loss * torch.logsumexp(z[labels >= 0], -1).square().sum()
    return total / (num_targets if num_targets is not None else (labels >= 0).sum())


def linear_cross_entropy(x: Tensor, targets: Tensor, w: Tensor, **options: Any) -> Tensor:
    return cross_entropy(F.linear(x, w), targets, **options)
