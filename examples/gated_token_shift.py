"""A sublayer of one's own: a gated token-shift mixer, as a plugin.

    tapeless train new --plugin examples/gated_token_shift.py --blocks shift+ffn/attn+ffn

    h = x + m (x_prev - x)      x_prev is x one position earlier, 0 at the start of a document; m (C,)
    r, k = h wr', h wk'         one linear layer, (B, T, 2F)
    y = (sigmoid(r) k) wo'
Backward. da = dy wo; with s = sigmoid(r): dr = da k s (1 - s), dk = da s, dh = [dr, dk] [wr; wk];
    dx_t = dh_t (1 - m) + (dh m)_{t+1}      dm += sum (x_prev - x) dh"""

import torch
from torch import Tensor

from tapeless.model.linear import linear_backward, linear_forward
from tapeless.model.params import ParamSpec
from tapeless.model.sublayer import Context, Sublayer, Views, matrices, output_matrix, register_sublayer


@register_sublayer
class GatedTokenShift(Sublayer):
    kind = "shift"
    options = {"width": 64}  # noqa: RUF012  # F, set by shift(width=128)

    def specs(self) -> list[ParamSpec]:
        C, F = self.config.hidden_dim, self.options["width"]
        return [
            ParamSpec("m", (C,), "zeros", decay=False, shard_axis=None),
            *matrices({"wr": F, "wk": F}, C),
            *output_matrix("wo", C, F, None),
        ]

    def views(self, get: Views) -> tuple:
        return get["m"], get.linear(["wr", "wk"]), get.linear(["wo"])

    def previous(self, x: Tensor, ctx: Context) -> Tensor:  # (B, T, C)
        cache, prev = ctx.cache(self), torch.zeros_like(x)
        prev[:, 1:] = x[:, :-1]
        if ctx.documents is not None:
            prev[:, 1:] *= (ctx.documents[:, 1:] == ctx.documents[:, :-1])[..., None]
        if cache is not None:
            if ctx.offset:
                prev[:, 0] = cache["last"]
            cache["last"].copy_(x[:, -1])
        return prev

    def forward(self, x: Tensor, p: tuple, ctx: Context):
        m, up, out = p
        shifted = self.previous(x, ctx) - x
        rk, up_saved = linear_forward(ctx.ops.linear, x + m * shifted, up, ctx)
        r, k = rk.chunk(2, -1)
        s = 1 / (1 + torch.exp(-r))
        y, out_saved = linear_forward(ctx.ops.linear, s * k, out, ctx)
        return y, (shifted, up_saved, s, k, out_saved)

    def backward(self, dy: Tensor, saved: tuple, p: tuple, g: tuple, ctx: Context) -> Tensor:
        (m, up, out), (dm, dup, dout), (shifted, up_saved, s, k, out_saved) = p, g, saved
        da = linear_backward(ctx.ops.linear, dy, out_saved, out, dout, ctx)
        drk = torch.cat([da * k * s * (1 - s), da * s], -1)
        dh = linear_backward(ctx.ops.linear, drk, up_saved, up, dup, ctx)
        if dm is not None:
            dm += (shifted * dh).sum((0, 1))
        dprev = (dh * m)[:, 1:]
        if ctx.documents is not None:
            dprev = dprev * (ctx.documents[:, 1:] == ctx.documents[:, :-1])[..., None]
        dx = dh - dh * m
        dx[:, :-1] += dprev
        return dx

    def reference(self, x: Tensor, p: dict, documents: Tensor | None) -> Tensor:
        """The same in other words, for the gradient check: autograd differentiates it."""
        prev = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        if documents is not None:
            prev = prev.where((documents == documents.roll(1, 1))[..., None], 0.0)
        h = torch.lerp(x, prev, p["m"])
        return (torch.sigmoid(h @ p["wr"].mT) * (h @ p["wk"].mT)) @ p["wo"].mT

    def cache_shapes(self, batch_size: int, capacity: int) -> dict:
        return {"last": (batch_size, self.config.hidden_dim)}
