"""The feed-forward sublayer, gated or not, with its backward.

    gate_up = x [w_gate; w_up]' + b      y = activation(gate_up) w_down' + b_down
Tested by: tests/model/test_transformer_grads.py, tests/model/test_recompute.py."""

from typing import NamedTuple

from torch import Tensor

from tapeless.model.linear import LinearParams, LinearSaved, linear_backward, linear_forward
from tapeless.model.params import ParamSpec
from tapeless.model.sublayer import Context, Sublayer, Views, biases, matrices, output_matrix, register_sublayer
from tapeless.ops.ffn_gate import GATED


class FeedForwardParams(NamedTuple):
    up: LinearParams  # w (2F, C) gate above up, or (F, C), b
    down: LinearParams  # w (C, F), b


class FeedForwardSaved(NamedTuple):
    up_linear: LinearSaved | None
    down: LinearSaved


@register_sublayer
class FeedForward(Sublayer):
    kind = "ffn"
    overridable = ("intermediate_dim", "ffn", "ffn_bias")

    def specs(self) -> list[ParamSpec]:
        c = self.config
        up = {name: c.intermediate_dim for name in (("gate", "up") if c.ffn in GATED else ("up",))}
        specs = matrices({f"w_{name}": rows for name, rows in up.items()}, c.hidden_dim)
        if c.ffn_bias:
            specs += biases({f"b_{name}": rows for name, rows in up.items()})
        return specs + output_matrix("w_down", c.hidden_dim, c.intermediate_dim, "b_down" if c.ffn_bias else None)

    def views(self, get: Views) -> FeedForwardParams:
        return FeedForwardParams(up=get.linear(["w_gate", "w_up"], ["b_gate", "b_up"]), down=get.linear(["w_down"], ["b_down"]))

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        p: FeedForwardParams,
        ctx: Context,
    ) -> tuple[Tensor, FeedForwardSaved]:  # y (B, T, C)
        gate_up, up_linear = linear_forward(ctx.ops.linear, x, p.up, ctx)
        y, down = linear_forward(ctx.ops.ffn_down[self.config.ffn], gate_up, p.down, ctx)
        return y, FeedForwardSaved(up_linear, down)

    def backward(
        self,
        dy: Tensor,  # (B, T, C)
        saved: FeedForwardSaved,
        p: FeedForwardParams,
        g: FeedForwardParams,  # accumulated into
        ctx: Context,
    ) -> Tensor:  # dx (B, T, C)
        assert saved.up_linear is not None
        dgate_up = linear_backward(ctx.ops.ffn_down[self.config.ffn], dy, saved.down, p.down, g.down, ctx)
        return linear_backward(ctx.ops.linear, dgate_up, saved.up_linear, p.up, g.up, ctx)

    def drop_recomputable(self, saved: FeedForwardSaved, policy: str) -> FeedForwardSaved:
        if policy == "none":
            return saved
        if policy == "full":
            return FeedForwardSaved(None, saved.down.drop("gate_up"))
        assert saved.up_linear is not None
        return saved._replace(up_linear=saved.up_linear.drop("x"))

    def recompute(self, saved: FeedForwardSaved, x: Tensor, p: FeedForwardParams, ctx: Context) -> FeedForwardSaved:
        """Neither policy needs the last matmul again."""
        if saved.up_linear is not None:
            return saved._replace(up_linear=saved.up_linear.restore(x=x))
        gate_up, up_linear = linear_forward(ctx.ops.linear, x, p.up, ctx)
        return FeedForwardSaved(up_linear, saved.down.restore(gate_up=gate_up))
