"""The two halves of a block: self-attention and feed-forward, each with its backward.

What a half keeps is decided by the recompute policy:
    none    everything its ops saved
    cheap   what cannot be had again without a product; norms, and heads that were normed, are computed again
    full    nothing to speak of; the block runs again from its own input (block.py)
`kept` lets go of the rest, `rebuilt` computes it again by the same ops, so the gradients are equal bit for bit.
Tested by: tests/model/test_transformer_grads.py, tests/model/test_recompute.py."""

from typing import Any, NamedTuple

from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.model.decode import KVCache
from tapeless.model.product import Product, ProductSaved, product_backward, product_forward
from tapeless.ops.dropout import dropout_key
from tapeless.ops.op import OpSet, handed_back, without

RECOMPUTE = ("none", "cheap", "full")

Params = tuple[Tensor | None, ...]  # what one op takes: its weight, then its bias if it can have one


class BlockParams(NamedTuple):
    """One block's parameters, or its gradients, None of what is frozen; matrices that are read together are one view."""

    attn_norm: Params  # w (C,), with LayerNorm also b (C,)
    qkv: Product  # w ((H+2G)*D, C), b
    qk_norm: Params  # wq_norm (D,), wk_norm (D,)
    wo: Product  # w (C, H*D), b
    ffn_norm: Params  # as attn_norm
    up: Product  # w (2F, C) gate over up, or (F, C), b
    down: Product  # w (C, F), b


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
    lora_scale: float = 1.0

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


def heads_forward(
    qkv: Tensor,  # (B, T, (H+2G)*D)
    p: BlockParams,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor, Any]:  # q (B, H, T, D), k (B, G, T, D), v (B, G, T, D)
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


def heads_backward(
    dq: Tensor,  # (B, H, T, D)
    dk: Tensor,  # (B, G, T, D)
    dv: Tensor,  # (B, G, T, D)
    saved: Any,
    p: BlockParams,
    g: BlockParams,  # accumulated into
    call: Call,
) -> Tensor:  # dqkv (B, T, (H+2G)*D)
    return call.ops.qkv_rope.backward(dq, dk, dv, saved, *p.qk_norm, *g.qk_norm, theta=call.theta, offset=call.offset)


class SelfAttentionSaved(NamedTuple):
    qkv: Tensor | None  # (B, T, (H+2G)*D)  what `cheap` makes normed heads from again
    qkv_linear: ProductSaved | None
    heads: Any
    attention: Any
    out_linear: ProductSaved | None


def self_attention_forward(
    x: Tensor,  # (B, T, C)
    p: BlockParams,
    call: Call,
    layer: int,
) -> tuple[Tensor, SelfAttentionSaved]:  # a (B, T, C)
    ops = call.ops
    qkv, qkv_linear = product_forward(ops.linear, x, p.qkv, call.lora_scale)
    q, k, v, heads = heads_forward(qkv, p, call)
    if call.kv_cache is not None:
        k, v = call.kv_cache.append(layer, k, v)
    o, attention = ops.attention.forward(q, k, v, call.documents)
    a, out_linear = product_forward(ops.linear, o, p.wo, call.lora_scale)
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
    assert saved.qkv_linear is not None
    assert saved.out_linear is not None
    do = product_backward(ops.linear, da, saved.out_linear, p.wo, g.wo, call.lora_scale)  # mutant: attn-out-backward
    dq, dk, dv = ops.attention.backward(do, saved.attention)
    dqkv = heads_backward(dq, dk, dv, saved.heads, p, g, call)
    return product_backward(ops.linear, dqkv, saved.qkv_linear, p.qkv, g.qkv, call.lora_scale)


def self_attention_kept(saved: SelfAttentionSaved, policy: str) -> SelfAttentionSaved:
    if policy == "none":
        return saved._replace(qkv=None)
    if policy == "full":
        return SelfAttentionSaved(None, None, None, None, None)
    assert saved.qkv_linear is not None
    saved = saved._replace(qkv_linear=saved.qkv_linear.without("x"))
    if saved.heads is None:  # q, k and v are as large as qkv: either would do, and these need not be made again
        return saved._replace(qkv=None)
    return saved._replace(heads=None, attention=without(saved.attention, "q", "k", "v"))


def self_attention_rebuilt(saved: SelfAttentionSaved, x: Tensor, p: BlockParams, call: Call) -> SelfAttentionSaved:
    """What `cheap` let go: the input x (B, T, C), itself computed again, and normed heads, from the kept qkv."""
    assert saved.qkv_linear is not None
    saved = saved._replace(qkv_linear=saved.qkv_linear.handed_back(x=x))
    if saved.qkv is None:
        return saved
    q, k, v, heads = heads_forward(saved.qkv, p, call)
    return saved._replace(heads=heads, attention=handed_back(saved.attention, q=q, k=k, v=v))


class FeedForwardSaved(NamedTuple):
    up_linear: ProductSaved | None
    down: ProductSaved


def feed_forward_forward(
    x: Tensor,  # (B, T, C)
    p: BlockParams,
    call: Call,
    layer: int,
) -> tuple[Tensor, FeedForwardSaved]:  # f (B, T, C)
    ops = call.ops
    gate_up, up_linear = product_forward(ops.linear, x, p.up, call.lora_scale)
    f, down = product_forward(ops.ffn_down[call.config.ffn], gate_up, p.down, call.lora_scale)
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
    assert saved.up_linear is not None
    dgate_up = product_backward(ops.ffn_down[call.config.ffn], df, saved.down, p.down, g.down, call.lora_scale)
    return product_backward(ops.linear, dgate_up, saved.up_linear, p.up, g.up, call.lora_scale)


def feed_forward_kept(saved: FeedForwardSaved, policy: str) -> FeedForwardSaved:
    if policy == "none":
        return saved
    if policy == "full":
        return FeedForwardSaved(None, saved.down.without("gate_up"))
    assert saved.up_linear is not None
    return saved._replace(up_linear=saved.up_linear.without("x"))


def feed_forward_rebuilt(saved: FeedForwardSaved, x: Tensor, p: BlockParams, call: Call) -> FeedForwardSaved:
    """What `cheap` or `full` let go; the last product is not needed again under either."""
    if call.recompute == "cheap":
        assert saved.up_linear is not None
        return saved._replace(up_linear=saved.up_linear.handed_back(x=x))
    gate_up, up_linear = product_forward(call.ops.linear, x, p.up, call.lora_scale)
    return FeedForwardSaved(up_linear, saved.down.handed_back(gate_up=gate_up))
