"""The library's attention: torch's forward and backward functions, called directly, without autograd.

cuDNN if it supports the shape, else flash; both need bfloat16, as many keys as queries, no documents. Each shape is tried once,
and the choice is logged. With torch.use_deterministic_algorithms it is flash, whose backward then has a fixed order. Everything
else, and every shape that neither supports, uses attention.py.
Tested by: tests/kernels/triton/test_cuda.py."""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from tapeless.kernels.triton.attention import own_backward, own_forward
from tapeless.ops.attention import ATTENTION, AttentionSaved
from tapeless.ops.op import Op

log = logging.getLogger("tapeless")


class LibrarySaved(NamedTuple):
    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, T, D)
    v: Tensor  # (B, G, T, D)
    o: Tensor  # (B, T, H*D)
    lse: Tensor  # in the library's layout
    library: str
    rest: tuple[Any, ...]  # further arguments of its backward; without dropout, empty tensors and lengths


def _heads(x: Tensor, H: int) -> Tensor:  # (B, T, H*D) -> (B, H, T, D)
    return x.unflatten(2, (H, -1)).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:  # (B, H, T, D) -> (B, T, H*D)
    return x.transpose(1, 2).flatten(2)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> LibrarySaved:
    o, lse, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    return LibrarySaved(q, k, v, _flat(o), lse, "cudnn", tuple(rest))


def cudnn_backward(do: Tensor, saved: LibrarySaved) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, lse, _, (cum_q, cum_k, max_q, max_k, seed, offset, _) = saved
    H = q.shape[1]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _heads(do, H), q, k, v, _heads(o, H), lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
    )


def flash_forward(q: Tensor, k: Tensor, v: Tensor) -> LibrarySaved:
    o, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
    return LibrarySaved(q, k, v, _flat(o), lse, "flash", tuple(rest))


def flash_backward(do: Tensor, saved: LibrarySaved) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, lse, _, (cum_q, cum_k, max_q, max_k, seed, offset, _) = saved
    H = q.shape[1]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        _heads(do, H), q, k, v, _heads(o, H), lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
    )


def meta_forward(q: Tensor, k: Tensor, v: Tensor) -> LibrarySaved:
    """What the libraries allocate, on the meta device (kernels/dry.py)."""
    B, H, T, D = q.shape
    o = torch.empty(B, T, H * D, dtype=q.dtype, device=q.device)
    return LibrarySaved(q, k, v, o, torch.empty(B, H, T, 1, dtype=torch.float32, device=q.device), "meta", ())


def meta_backward(do: Tensor, saved: LibrarySaved) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = saved[:3]
    _dq_sums = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))  # type: ignore[return-value]


CAN = {"cudnn": can_use_cudnn_attention, "flash": can_use_flash_attention}  # checked first: some shapes would end the process
LIBRARIES = {
    "cudnn": (cudnn_forward, cudnn_backward),
    "flash": (flash_forward, flash_backward),
    "meta": (meta_forward, meta_backward),
}


class Chosen:
    """Which library computes which shape: tried once, and logged."""

    def __init__(self) -> None:
        self._of: dict[Any, str | None] = {}

    def library(self, q: Tensor, k: Tensor, documents: Tensor | None) -> str | None:
        if q.dtype != torch.bfloat16 or documents is not None or q.shape[2] != k.shape[2] or q.device.type == "cpu":
            return None
        if q.is_meta:
            return "meta"
        repeatable = torch.are_deterministic_algorithms_enabled()
        key = q.shape[1:], k.shape[1], repeatable, q.device
        if key not in self._of:
            self._of[key] = self._tried(q, k, ("flash",) if repeatable else ("cudnn", "flash"))
        return self._of[key]

    @staticmethod
    def _tried(q: Tensor, k: Tensor, names: tuple[str, ...]) -> str | None:
        for name in names:
            forward, backward = LIBRARIES[name]
            if not CAN[name](SDPAParams(q, k, k, None, 0.0, True, q.shape[1] != k.shape[1])):
                continue
            try:
                one, other = torch.zeros_like(q[:1]), torch.zeros_like(k[:1])
                saved = forward(one, other, other)
                dq, dk, _ = backward(torch.zeros_like(saved.o), saved)
                if saved.o.shape[2] == q.shape[1] * q.shape[3] and dq.shape == one.shape and dk.shape == other.shape:
                    log.info("attention: %s for %d heads of %d over %d", name, q.shape[1], q.shape[3], q.shape[2])
                    return name
            except (AttributeError, RuntimeError) as error:  # the first: this torch lacks the function
                log.debug("attention: %s cannot: %s", name, error)
        log.info("attention: own kernel for %d heads of %d over %d", q.shape[1], q.shape[3], q.shape[2])
        return None


def attention() -> Op:
    chosen = Chosen()

    def forward(
        q: Tensor,  # (B, H, T, D)
        k: Tensor,  # (B, G, S, D)
        v: Tensor,  # (B, G, S, D)
        documents: Tensor | None = None,  # (B, T) int64
    ) -> tuple[Tensor, AttentionSaved | LibrarySaved]:  # o (B, T, H*D)
        library = chosen.library(q, k, documents)
        if library is None:
            return own_forward(q, k, v, documents)
        saved = LIBRARIES[library][0](q, k, v)
        return saved.o, saved

    def backward(
        do: Tensor,  # (B, T, H*D)
        saved: AttentionSaved | LibrarySaved,
    ) -> tuple[Tensor, Tensor, Tensor]:  # dq (B, H, T, D), dk (B, G, S, D), dv (B, G, S, D)
        if isinstance(saved, AttentionSaved):
            return own_backward(do, saved)
        return LIBRARIES[saved.library][1](do, saved)

    return ATTENTION._replace(forward=forward, backward=backward)
