"""The two halves of a block: self-attention and feed-forward, each with its backward.

What a half keeps is decided by the recompute policy:
    none    everything its ops saved
    cheap   the outputs of its products; norms and rotation are computed again
    full    nothing to speak of; the half runs again from its input
`kept` lets go of the rest, `rebuilt` computes it again by the same ops, so the gradients are equal bit for bit."""

from typing import Any, NamedTuple

from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.model.decode import KVCache
from tapeless.ops.dropout import dropout_key
from tapeless.ops.op import OpSet, handed_back, without

RECOMPUTE = ("none", "cheap", "full")

Params = tuple[Tensor | None, ...]  # what one op takes: its weight, then its bias if it can have one


class BlockParams(NamedTuple):
    """One block's parameters, or its gradients; matrices that are read together are one view."""

    attn_norm: Params  # w (C,), with LayerNorm also b (C,)
    qkv: Params  # w ((H+2G)*D, C), b
    qk_norm: Params  # wq_norm (D,), wk_norm (D,)
    wo: Params  # w (C, H*D), b
    ffn_norm: Params  # as attn_norm
    up: Params  # w (2F, C) gate over up, or (F, C), b
    down: Params  # w (C, F), b


class Dropout(NamedTuple):
    """What a mask is a function of, beside its place in the model."""

    p: float
    seed: int
    step: int
    first_sample: int  # global index of the batch's first row


class Call(NamedTuple):
    """What all layers of one pass through the model share."""

    config: ModelConfig
    ops: OpSet
    recompute: str  # none | cheap | full
    documents: Tensor | None = None  # (B, T) int64
    dropout: Dropout | None = None
    kv_cache: KVCache | None = None

    @property
    def offset(self) -> int:  # tokens that came before this pass
        return self.kv_cache.length if self.kv_cache else 0

    @property
    def theta(self) -> float | None:
        return self.config.rope_theta if self.config.position == "rope" else None


def drop_forward(x: Tensor, call: Call, purpose: str) -> Tensor:  # (B, T, C)
    if call.dropout is None:
        return x
    p, seed, step, first_sample = call.dropout
    return call.ops.dropout.forward(x, p=p, key=dropout_key(seed, step, purpose), first_sample=first_sample)[0]


def drop_backward(dy: Tensor, call: Call, purpose: str) -> Tensor:  # (B, T, C)
    if call.dropout is None:
        return dy
    p, seed, step, first_sample = call.dropout
    return call.ops.dropout.backward(dy, None, p=p, key=dropout_key(seed, step, purpose), first_sample=first_sample)


class SelfAttentionSaved(NamedTuple):
    qkv: Tensor | None  # (B, T, (H+2G)*D)  what `cheap` makes the heads from again
    qkv_linear: Any
    heads: Any
    attention: Any
    out_linear: Any


def self_attention_forward(
    x: Tensor,  # (B, T, C)
    p: BlockParams,
    call: Call,
    layer: int,
) -> tuple[Tensor, SelfAttentionSaved]:  # a (B, T, C)
    ops = call.ops
    qkv, qkv_linear = ops.linear.forward(x, *p.qkv)
    q, k, v, heads = heads_forward(qkv, p, call)
    if call.kv_cache is not None:
        k, v = call.kv_cache.append(layer, k, v)
    o, attention = ops.attention.forward(q, k, v, call.documents)
    a, out_linear = ops.linear.forward(o, *p.wo)
    a = drop_forward(a, call, f"blocks.{layer}.attn")
    return a, SelfAttentionSaved(qkv, qkv_linear, heads, attention, out_linear)


def self_attention_backward(
    da: Tensor,  # (B, T, C)
    saved: SelfAttentionSaved,
    p: BlockParams,
    g: BlockParams,  # accumulated into
    call: Call,
    layer: int,
) -> Tensor:  # dx (B, T, C)
    ops = call.ops
    da = drop_backward(da, call, f"blocks.{layer}.attn")
    do = ops.linear.backward(da, saved.out_linear, *p.wo, *g.wo)
    dq, dk, dv = ops.attention.backward(do, saved.attention)
    dqkv = ops.qkv_rope.backward(dq, dk, dv, saved.heads, *p.qk_norm, *g.qk_norm, theta=call.theta, offset=call.offset)
    return ops.linear.backward(dqkv, saved.qkv_linear, *p.qkv, *g.qkv)


def heads_forward(qkv: Tensor, p: BlockParams, call: Call) -> tuple[Tensor, Tensor, Tensor, Any]:
    c = call.config
    return call.ops.qkv_rope.forward(
        qkv,
        *p.qk_norm,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        theta=call.theta,
        eps=c.norm_eps,
        offset=call.offset,
    )


def self_attention_kept(saved: SelfAttentionSaved, policy: str) -> SelfAttentionSaved:
    if policy == "none":
        return saved._replace(qkv=None)
    if policy == "cheap":
        attention = without(saved.attention, "q", "k", "v")
        return saved._replace(qkv_linear=without(saved.qkv_linear, "x"), heads=None, attention=attention)
    return SelfAttentionSaved(None, None, None, None, None)


def self_attention_rebuilt(saved: SelfAttentionSaved, x: Tensor, p: BlockParams, call: Call) -> SelfAttentionSaved:
    """What `cheap` let go, from the kept qkv and the input x (B, T, C), itself computed again."""
    assert saved.qkv is not None
    q, k, v, heads = heads_forward(saved.qkv, p, call)
    attention = handed_back(saved.attention, q=q, k=k, v=v)
    return saved._replace(qkv_linear=handed_back(saved.qkv_linear, x=x), heads=heads, attention=attention)


class FeedForwardSaved(NamedTuple):
    up_linear: Any
    down: Any


def feed_forward_forward(
    x: Tensor,  # (B, T, C)
    p: BlockParams,
    call: Call,
    layer: int,
) -> tuple[Tensor, FeedForwardSaved]:  # f (B, T, C)
    ops = call.ops
    gate_up, up_linear = ops.linear.forward(x, *p.up)
    f, down = ops.ffn_down[call.config.ffn].forward(gate_up, *p.down)
    f = drop_forward(f, call, f"blocks.{layer}.ffn")
    return f, FeedForwardSaved(up_linear, down)


def feed_forward_backward(
    df: Tensor,  # (B, T, C)
    saved: FeedForwardSaved,
    p: BlockParams,
    g: BlockParams,  # accumulated into
    call: Call,
    layer: int,
) -> Tensor:  # dx (B, T, C)
    ops = call.ops
    df = drop_backward(df, call, f"blocks.{layer}.ffn")
    dgate_up = ops.ffn_down[call.config.ffn].backward(df, saved.down, *p.down, *g.down)
    return ops.linear.backward(dgate_up, saved.up_linear, *p.up, *g.up)


def feed_forward_kept(saved: FeedForwardSaved, policy: str) -> FeedForwardSaved:
    if policy == "none":
        return saved
    if policy == "cheap":
        return saved._replace(up_linear=without(saved.up_linear, "x"))
    return FeedForwardSaved(None, without(saved.down, "gate_up"))


def feed_forward_rebuilt(saved: FeedForwardSaved, x: Tensor, p: BlockParams, call: Call) -> FeedForwardSaved:
    """What `cheap` or `full` let go; the last product is not needed again under either."""
    if call.recompute == "cheap":
        return saved._replace(up_linear=handed_back(saved.up_linear, x=x))
    gate_up, up_linear = call.ops.linear.forward(x, *p.up)
    return FeedForwardSaved(up_linear, handed_back(saved.down, gate_up=gate_up))
