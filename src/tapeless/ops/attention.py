"""Causal attention; H query heads share G heads of keys and values (G = H: MHA, 1 < G < H: GQA, G = 1: MQA).

    z = q k' / D^(1/2)      query t attends to key s if s <= t + S - T (the last query to all), and if both are in the same
                            document, where documents are given; elsewhere z = -inf
    lse = log sum_s exp(z)      p = exp(z - lse)      o = p v
Backward, p recomputed from lse:
    dv = p' do      dp = do v'      dz = p (dp - sum_s(dp p))      sum_s(dp p) = sum_D(do o)
    dq = dz k / D^(1/2)             dk = dz' q / D^(1/2)           dk, dv summed over the H/G heads that share them
Saved: q, k, v, o and lse, one number per row; never anything T x S.
Tested by: tests/ops/test_attention.py."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.errors import InputError
from tapeless.ops.numerics import accumulation_dtype, logsumexp
from tapeless.ops.op import Op


class AttentionSaved(NamedTuple):
    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    v: Tensor  # (B, G, S, D)
    o: Tensor  # (B, T, H*D)
    lse: Tensor  # (B, G, H/G, T, 1)  accumulation dtype
    documents: Tensor | None  # (B, T) int64


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the accumulation dtype, query heads by group: q (B, G, H/G, T, D), k and v (B, G, 1, S, D)."""
    dtype = accumulation_dtype(q)
    return q.to(dtype).unflatten(1, (k.shape[1], -1)), k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)


def _scores(q: Tensor, k: Tensor, documents: Tensor | None) -> Tensor:  # z (B, G, H/G, T, S)
    T, S, D = q.shape[-2], k.shape[-2], q.shape[-1]
    hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
    if documents is not None:
        hidden = hidden | (documents[:, None, None, :, None] != documents[:, None, None, None, :])
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(hidden, -torch.inf)


def require_matching_documents(documents: Tensor | None, q: Tensor, k: Tensor) -> None:
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    if documents is not None and (S != T or documents.shape != (B, T)):
        raise InputError(f"documents {tuple(documents.shape)} must have the shape {(B, T)} of the queries, with as many keys")


def attention_forward(
    q: Tensor,  # (B, H, T, D)
    k: Tensor,  # (B, G, S, D)  S >= T; S > T when earlier keys come from a kv_cache
    v: Tensor,  # (B, G, S, D)
    documents: Tensor | None = None,  # (B, T) int64: which document each position belongs to; needs S = T
) -> tuple[Tensor, AttentionSaved]:  # o (B, T, H*D)
    require_matching_documents(documents, q, k)
    qg, kg, vg = _grouped(q, k, v)
    z = _scores(qg, kg, documents)
    lse = logsumexp(z)
    o = ((z - lse).exp() @ vg).flatten(1, 2).transpose(1, 2).flatten(2).to(q.dtype)
    return o, AttentionSaved(q, k, v, o, lse, documents)


def attention_backward(
    do: Tensor,  # (B, T, H*D)
    saved: AttentionSaved,
) -> tuple[Tensor, Tensor, Tensor]:  # dq (B, H, T, D), dk (B, G, S, D), dv (B, G, S, D)
    q, k, v = _grouped(saved.q, saved.k, saved.v)
    B, G, R, T, D = q.shape
    do, o = (x.to(q.dtype).view(B, T, G, R, D).permute(0, 2, 3, 1, 4) for x in (do, saved.o))  # (B, G, H/G, T, D)
    p = (_scores(q, k, saved.documents) - saved.lse).exp()  # (B, G, H/G, T, S)
    dv = (p.transpose(-1, -2) @ do).sum(2)
    dp = do @ v.transpose(-1, -2)
    dz = p * (dp - (do * o).sum(-1, keepdim=True)) / math.sqrt(D)
    dq = dz @ k
    dk = (dz.transpose(-1, -2) @ q).sum(2)
    dtype = saved.q.dtype
    return dq.flatten(1, 2).to(dtype), dk.to(dtype), dv.to(dtype)


ATTENTION = Op(attention_forward, attention_backward, outputs=("o",), grads=("dq", "dk", "dv"))
