"""One transformer block, pre-norm or post-norm, and its backward.

pre:     s = x + delta      n1 = norm(s)      a = attention(n1)
         s1 = s + a         n2 = norm(s1)     f = ffn(n2)           out: s1 and the pending f
post:    a = attention(x)   n1 = norm(x + a)  f = ffn(n1)           out: norm(n1 + f), nothing pending

A pre-norm block leaves its last sum to the norm that reads it (the next block's first, or the final one), so that every
sum is fused with a norm. Going back, the sum hands the same gradient to the stream and to the pending term: one tensor,
dy, stands for both.
Tested by: tests/model/test_transformer_grads.py, tests/model/test_recompute.py."""

from typing import Any, NamedTuple

from torch import Tensor

from tapeless.model.sublayers import (
    BlockParams,
    Call,
    FeedForwardSaved,
    SelfAttentionSaved,
    feed_forward_backward,
    feed_forward_forward,
    feed_forward_kept,
    feed_forward_rebuilt,
    self_attention_backward,
    self_attention_forward,
    self_attention_kept,
    self_attention_rebuilt,
)


class BlockSaved(NamedTuple):
    x: Tensor  # (B, T, C)  what the block starts from: s (pre) or x (post)
    attn_norm: Any
    attn: SelfAttentionSaved
    s1: Tensor | None  # (B, T, C)  the sum that the second norm (pre) or the first (post) reads
    ffn_norm: Any
    ffn: FeedForwardSaved


def block_forward(
    x: Tensor,  # (B, T, C)
    delta: Tensor | None,  # (B, T, C)  pending term of the residual sum
    p: BlockParams,
    call: Call,
    layer: int,
) -> tuple[Tensor, Tensor | None, BlockSaved]:  # x (B, T, C), delta (B, T, C)
    if call.config.norm_placement == "pre":
        return pre_norm_forward(x, delta, p, call, layer)
    return post_norm_forward(x, p, call, layer)


def block_backward(
    dy: Tensor,  # (B, T, C)  of x and delta alike
    saved: BlockSaved,
    p: BlockParams,
    g: BlockParams,  # accumulated into
    call: Call,
    layer: int,
) -> Tensor:  # dx (B, T, C), which is ddelta too
    backward = pre_norm_backward if call.config.norm_placement == "pre" else post_norm_backward
    return backward(dy, saved, p, g, call, layer)


def pre_norm_forward(
    x: Tensor, delta: Tensor | None, p: BlockParams, call: Call, layer: int
) -> tuple[Tensor, Tensor, BlockSaved]:
    c, add_norm = call.config, call.ops.add_norm[call.config.norm]
    s, n1, attn_norm = add_norm.forward(x, delta, *p.attn_norm, eps=c.norm_eps)
    a, attn = self_attention_forward(n1, p, call, layer)
    s1, n2, ffn_norm = add_norm.forward(s, a, *p.ffn_norm, eps=c.norm_eps)
    f, ffn = feed_forward_forward(n2, p, call, layer)
    return s1, f, kept(BlockSaved(s, attn_norm, attn, s1, ffn_norm, ffn), call.recompute)


def pre_norm_backward(dy: Tensor, saved: BlockSaved, p: BlockParams, g: BlockParams, call: Call, layer: int) -> Tensor:
    add_norm = call.ops.add_norm[call.config.norm]
    saved = pre_norm_rebuilt(saved, p, call, layer)
    dn2 = feed_forward_backward(dy, saved.ffn, p, g, call, layer)  # mutant: ffn-backward
    ds1 = add_norm.backward(dy, dn2, saved.ffn_norm, *p.ffn_norm, *g.ffn_norm)  # mutant: ffn-residual
    dn1 = self_attention_backward(ds1, saved.attn, p, g, call, layer)
    return add_norm.backward(ds1, dn1, saved.attn_norm, *p.attn_norm, *g.attn_norm)  # mutant: attn-residual


def post_norm_forward(x: Tensor, p: BlockParams, call: Call, layer: int) -> tuple[Tensor, None, BlockSaved]:
    c, add_norm = call.config, call.ops.add_norm[call.config.norm]
    a, attn = self_attention_forward(x, p, call, layer)
    s1, n1, attn_norm = add_norm.forward(x, a, *p.attn_norm, eps=c.norm_eps)
    f, ffn = feed_forward_forward(n1, p, call, layer)
    _, y, ffn_norm = add_norm.forward(n1, f, *p.ffn_norm, eps=c.norm_eps)
    return y, None, kept(BlockSaved(x, attn_norm, attn, s1, ffn_norm, ffn), call.recompute)


def post_norm_backward(dy: Tensor, saved: BlockSaved, p: BlockParams, g: BlockParams, call: Call, layer: int) -> Tensor:
    add_norm = call.ops.add_norm[call.config.norm]
    saved = post_norm_rebuilt(saved, p, call, layer)
    ds2 = add_norm.backward(None, dy, saved.ffn_norm, *p.ffn_norm, *g.ffn_norm)
    dn1 = ds2 + feed_forward_backward(ds2, saved.ffn, p, g, call, layer)  # mutant: post-ffn-residual
    ds1 = add_norm.backward(None, dn1, saved.attn_norm, *p.attn_norm, *g.attn_norm)
    return ds1 + self_attention_backward(ds1, saved.attn, p, g, call, layer)  # mutant: post-attn-residual


def kept(saved: BlockSaved, policy: str) -> BlockSaved:
    """What stays in memory until backward, by the recompute policy."""
    attn, ffn = self_attention_kept(saved.attn, policy), feed_forward_kept(saved.ffn, policy)
    if policy == "full":
        return BlockSaved(saved.x, None, attn, None, None, ffn)
    return saved._replace(attn=attn, s1=saved.s1 if policy == "cheap" else None, ffn=ffn)


def pre_norm_rebuilt(saved: BlockSaved, p: BlockParams, call: Call, layer: int) -> BlockSaved:
    """What `kept` let go, by the same ops in the same order."""
    c, norm, add_norm = call.config, call.ops.norm[call.config.norm], call.ops.add_norm[call.config.norm]
    if call.recompute == "cheap":
        n1, _ = norm.forward(saved.x, *p.attn_norm, eps=c.norm_eps)
        n2, _ = norm.forward(saved.s1, *p.ffn_norm, eps=c.norm_eps)  # mutant: recompute-ffn-norm
        attn = self_attention_rebuilt(saved.attn, n1, p, call)
        return saved._replace(attn=attn, ffn=feed_forward_rebuilt(saved.ffn, n2, p, call))
    if call.recompute == "full":
        s, n1, attn_norm = add_norm.forward(saved.x, None, *p.attn_norm, eps=c.norm_eps)  # mutant: recompute-full
        a, attn = self_attention_forward(n1, p, call, layer)
        s1, n2, ffn_norm = add_norm.forward(s, a, *p.ffn_norm, eps=c.norm_eps)
        return BlockSaved(s, attn_norm, attn, s1, ffn_norm, feed_forward_rebuilt(saved.ffn, n2, p, call))
    return saved


def post_norm_rebuilt(saved: BlockSaved, p: BlockParams, call: Call, layer: int) -> BlockSaved:
    """What `kept` let go, by the same ops in the same order."""
    if call.recompute == "cheap":
        n1, _ = call.ops.norm[call.config.norm].forward(saved.s1, *p.attn_norm, eps=call.config.norm_eps)
        attn = self_attention_rebuilt(saved.attn, saved.x, p, call)
        return saved._replace(attn=attn, ffn=feed_forward_rebuilt(saved.ffn, n1, p, call))  # mutant: recompute-post-ffn
    if call.recompute == "full":
        return post_norm_forward(saved.x, p, call._replace(recompute="none"), layer)[2]
    return saved
