"""Causal self-attention, with its backward.

    qkv = x [wq; wk; wv]' + b      q, k, v = heads of qkv, normed and rotated      o = attention(q, k, v)      y = o wo' + bo
Tested by: tests/model/test_transformer_grads.py, tests/model/test_recompute.py, tests/model/test_decode.py."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.errors import ConfigError
from tapeless.model.linear import LinearParams, LinearSaved, linear_backward, linear_forward
from tapeless.model.params import ParamSpec
from tapeless.model.sublayer import Context, Sublayer, Views, biases, matrices, output_matrix, register_sublayer
from tapeless.ops.op import drop, restore


class AttentionParams(NamedTuple):
    qkv: LinearParams  # w ((H+2G)*D, C), b
    qk_norm: tuple[Tensor | None, Tensor | None]  # wq_norm, wk_norm (D,)
    out: LinearParams  # w (C, H*D), b


class SelfAttentionSaved(NamedTuple):
    qkv: Tensor | None  # (B, T, (H+2G)*D)  from which `cheap` recomputes normed heads
    qkv_linear: LinearSaved
    heads: Any
    attention: Any
    out_linear: LinearSaved


@register_sublayer
class SelfAttention(Sublayer):
    kind = "attn"
    overridable = ("num_heads", "num_kv_heads", "head_dim", "position", "rope_theta", "attn_bias", "qk_norm")

    def __init__(self, config: ModelConfig, name: str, settings: Mapping[str, Any]):
        if settings.get("position") == "learned":
            raise ConfigError("blocks: learned positions belong to the embedding of the whole model; expected rope or none")
        if "num_heads" in settings and config.num_kv_heads == config.num_heads:  # stays without groups
            settings = {"num_kv_heads": settings["num_heads"], **settings}
        super().__init__(config, name, settings)

    def specs(self) -> list[ParamSpec]:
        c = self.config
        HD, GD = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        specs = matrices({"wq": HD, "wk": GD, "wv": GD}, c.hidden_dim)
        if c.attn_bias:
            specs += biases({"bq": HD, "bk": GD, "bv": GD})
        if c.qk_norm:
            specs += [ParamSpec(f"{x}_norm.w", (c.head_dim,), "ones", False, None) for x in "qk"]
        return specs + output_matrix("wo", c.hidden_dim, HD, "bo" if c.attn_bias else None)

    def views(self, get: Views) -> AttentionParams:
        return AttentionParams(
            qkv=get.linear(["wq", "wk", "wv"], ["bq", "bk", "bv"]),
            qk_norm=(get["q_norm.w"], get["k_norm.w"]),
            out=get.linear(["wo"], ["bo"]),
        )

    @property
    def theta(self) -> float | None:
        return self.config.rope_theta if self.config.position == "rope" else None

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        p: AttentionParams,
        ctx: Context,
    ) -> tuple[Tensor, SelfAttentionSaved]:  # y (B, T, C)
        qkv, qkv_linear = linear_forward(ctx.ops.linear, x, p.qkv, ctx)
        q, k, v, heads = self._heads(qkv, p, ctx)
        cache = ctx.cache(self)
        if cache is not None:
            end = ctx.offset + k.shape[2]
            cache["keys"][:, :, ctx.offset : end] = k
            cache["values"][:, :, ctx.offset : end] = v
            k, v = cache["keys"][:, :, :end], cache["values"][:, :, :end]  # mutant: kv-cache
        o, attention = ctx.ops.attention.forward(q, k, v, ctx.documents)
        y, out_linear = linear_forward(ctx.ops.linear, o, p.out, ctx)
        return y, SelfAttentionSaved(qkv, qkv_linear, heads, attention, out_linear)

    def backward(
        self,
        dy: Tensor,  # (B, T, C)
        saved: SelfAttentionSaved,
        p: AttentionParams,
        g: AttentionParams,  # accumulated into
        ctx: Context,
    ) -> Tensor:  # dx (B, T, C)
        do = linear_backward(ctx.ops.linear, dy, saved.out_linear, p.out, g.out, ctx)  # mutant: attn-out-backward
        dq, dk, dv = ctx.ops.attention.backward(do, saved.attention)
        dqkv = ctx.ops.qkv_rope.backward(dq, dk, dv, saved.heads, *p.qk_norm, *g.qk_norm, theta=self.theta, offset=ctx.offset)
        return linear_backward(ctx.ops.linear, dqkv, saved.qkv_linear, p.qkv, g.qkv, ctx)

    def _heads(
        self,
        qkv: Tensor,  # (B, T, (H+2G)*D)
        p: AttentionParams,
        ctx: Context,
    ) -> tuple[Tensor, Tensor, Tensor, Any]:  # q (B, H, T, D), k (B, G, T, D), v (B, G, T, D)
        c = self.config
        return ctx.ops.qkv_rope.forward(
            qkv,
            *p.qk_norm,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            theta=self.theta,
            eps=c.norm_eps,
            offset=ctx.offset,
        )

    def drop_recomputable(self, saved: SelfAttentionSaved, policy: str) -> SelfAttentionSaved | None:
        if policy == "none":
            return saved._replace(qkv=None)
        if policy == "full":
            return None
        saved = saved._replace(qkv_linear=saved.qkv_linear.drop("x"))
        if saved.heads is None:  # q, k and v are as large as qkv, and keeping them saves computing them again
            return saved._replace(qkv=None)
        return saved._replace(heads=None, attention=drop(saved.attention, "q", "k", "v"))

    def recompute(self, saved: SelfAttentionSaved | None, x: Tensor, p: AttentionParams, ctx: Context) -> SelfAttentionSaved:
        if saved is None:
            return self.forward(x, p, ctx)[1]
        saved = saved._replace(qkv_linear=saved.qkv_linear.restore(x=x))
        if saved.qkv is None:
            return saved
        q, k, v, heads = self._heads(saved.qkv, p, ctx)
        return saved._replace(heads=heads, attention=restore(saved.attention, q=q, k=k, v=v))

    def cache_shapes(self, batch_size: int, capacity: int) -> dict[str, tuple[int, ...]]:
        shape = (batch_size, self.config.num_kv_heads, capacity, self.config.head_dim)
        return {"keys": shape, "values": shape}

    def extra_flops(self, seq_len: int) -> int:
        """Scores and weighted values over the causal half of T keys."""
        return 2 * seq_len * self.config.num_heads * self.config.head_dim
