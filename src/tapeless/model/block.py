"""A block: residual wiring around its sublayers, pre-norm or post-norm, with its backward.

pre:     s = x + delta      n = norm(s)       delta = sublayer(n)       x = s        for each sublayer in turn
post:    y = sublayer(x)    s = x + y         x = norm(s)

A pre-norm block leaves its last sum pending (x and delta): the norm that reads it, the next block's first or the final one,
computes it, so that every sum is fused with a norm. In backward both terms of a sum have the same gradient: one tensor, dy.
Dropout applies to each sublayer's output.
Tested by: tests/model/test_transformer_grads.py, tests/model/test_recompute.py."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

import tapeless.model.attention
import tapeless.model.feed_forward  # noqa: F401  # both register their kind of sublayer
from tapeless.config import ModelConfig
from tapeless.model.params import FlatLayout, ParamSpec
from tapeless.model.sublayer import Context, Sublayer, Views, sublayer_class
from tapeless.ops.dropout import dropout_key

Params = tuple[Tensor | None, ...]  # what one norm takes: its weight, and with LayerNorm its bias


class BranchParams(NamedTuple):
    """The parameters of one sublayer and its norm, or their gradients."""

    norm: Params
    sublayer: Any


class BranchSaved(NamedTuple):
    s: Tensor | None  # (B, T, C)  the residual sum that the norm reads
    norm: Any
    sublayer: Any


class BlockSaved(NamedTuple):
    x: Tensor  # (B, T, C)  where the block starts: the first sum (pre) or the input (post)
    branches: tuple[BranchSaved, ...]


class Block:
    def __init__(self, config: ModelConfig, sublayers: list[Sublayer]):
        self.config, self.sublayers = config, sublayers
        self.is_pre_norm = config.norm_placement == "pre"

    def specs(self) -> Iterator[ParamSpec]:
        """Full names, each sublayer after its norm."""
        for sublayer in self.sublayers:
            yield from norm_specs(self.config, f"{sublayer.name}_norm")
            yield from (spec._replace(name=f"{sublayer.name}.{spec.name}") for spec in sublayer.specs())

    def views(self, layout: FlatLayout, flat: Tensor) -> list[BranchParams]:
        return [
            BranchParams(norm_views(self.config, layout, flat, f"{s.name}_norm"), s.views(Views(layout, flat, s)))
            for s in self.sublayers
        ]

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        delta: Tensor | None,  # (B, T, C)  pending term of the residual sum
        p: list[BranchParams],
        ctx: Context,
    ) -> tuple[Tensor, Tensor | None, BlockSaved]:  # x (B, T, C), delta (B, T, C)
        x, delta, saved = (self._pre_norm_forward if self.is_pre_norm else self._post_norm_forward)(x, delta, p, ctx)
        return x, delta, self.drop_recomputable(saved, ctx.recompute)

    def backward(
        self,
        dy: Tensor,  # (B, T, C)  of x and delta alike
        saved: BlockSaved,
        p: list[BranchParams],
        g: list[BranchParams],  # accumulated into
        ctx: Context,
    ) -> Tensor:  # dx (B, T, C), which is ddelta too
        if ctx.recompute == "full":
            saved = self._forward_again(saved, p, ctx)
        add_norm = ctx.ops.add_norm[self.config.norm]
        for i in reversed(range(len(self.sublayers))):
            branch = self._recompute_cheap(i, saved, p, ctx) if ctx.recompute == "cheap" else saved.branches[i]
            sublayer, (w, p_sub), (dw, g_sub) = self.sublayers[i], p[i], g[i]
            if self.is_pre_norm:
                dsub = drop_backward(dy, ctx, sublayer.name)
                dn = sublayer.backward(dsub, branch.sublayer, p_sub, g_sub, ctx)  # mutant: sublayer-backward
                dy = add_norm.backward(dy, dn, branch.norm, *w, *dw)  # mutant: pre-norm-residual
            else:
                ds = add_norm.backward(None, dy, branch.norm, *w, *dw)
                dsub = drop_backward(ds, ctx, sublayer.name)
                dy = ds + sublayer.backward(dsub, branch.sublayer, p_sub, g_sub, ctx)  # mutant: post-norm-residual
        return dy

    def _pre_norm_forward(
        self, x: Tensor, delta: Tensor | None, p: list[BranchParams], ctx: Context
    ) -> tuple[Tensor, Tensor | None, BlockSaved]:
        add_norm, start, branches = ctx.ops.add_norm[self.config.norm], None, []
        for sublayer, (w, p_sub) in zip(self.sublayers, p, strict=True):
            x, n, norm = add_norm.forward(x, delta, *w, eps=self.config.norm_eps)
            y, saved = sublayer.forward(n, p_sub, ctx)
            delta = drop_forward(y, ctx, sublayer.name)
            start = x if start is None else start
            branches.append(BranchSaved(x, norm, saved))
        assert start is not None
        return x, delta, BlockSaved(start, tuple(branches))

    def _post_norm_forward(
        self, x: Tensor, delta: Tensor | None, p: list[BranchParams], ctx: Context
    ) -> tuple[Tensor, None, BlockSaved]:
        add_norm, start, branches = ctx.ops.add_norm[self.config.norm], x, []
        for sublayer, (w, p_sub) in zip(self.sublayers, p, strict=True):
            y, saved = sublayer.forward(x, p_sub, ctx)
            s, x, norm = add_norm.forward(x, drop_forward(y, ctx, sublayer.name), *w, eps=self.config.norm_eps)
            branches.append(BranchSaved(s, norm, saved))
        return x, None, BlockSaved(start, tuple(branches))

    def drop_recomputable(self, saved: BlockSaved, policy: str) -> BlockSaved:
        """What stays in memory until backward, by the recompute policy."""
        branches = []
        for sublayer, branch in zip(self.sublayers, saved.branches, strict=True):
            s, norm = (branch.s if policy == "cheap" else None), (None if policy == "full" else branch.norm)
            branches.append(BranchSaved(s, norm, sublayer.drop_recomputable(branch.sublayer, policy)))
        return BlockSaved(saved.x, tuple(branches))

    def _recompute_cheap(self, i: int, saved: BlockSaved, p: list[BranchParams], ctx: Context) -> BranchSaved:
        """Branch i with its sublayer's input recomputed by the norm before it."""
        branch, before = saved.branches[i], i if self.is_pre_norm else i - 1
        x = saved.x
        if before >= 0:
            norm, s = ctx.ops.norm[self.config.norm], saved.branches[before].s  # mutant: recompute-cheap-norm
            x, _ = norm.forward(s, *p[before].norm, eps=self.config.norm_eps)
        again = self.sublayers[i].recompute(branch.sublayer, x, p[i].sublayer, ctx)  # mutant: recompute-cheap-input
        return branch._replace(sublayer=again)

    def _forward_again(self, saved: BlockSaved, p: list[BranchParams], ctx: Context) -> BlockSaved:
        """The forward from the block's start; a pre-norm block does not need its last sublayer's output again."""
        if not self.is_pre_norm:
            return self._post_norm_forward(saved.x, None, p, ctx)[2]
        x, delta, branches = saved.x, None, []  # mutant: recompute-full
        for sublayer, (w, p_sub), dropped in zip(self.sublayers, p, saved.branches, strict=True):
            x, n, norm = ctx.ops.add_norm[self.config.norm].forward(x, delta, *w, eps=self.config.norm_eps)
            if sublayer is self.sublayers[-1]:
                of_sublayer = sublayer.recompute(dropped.sublayer, n, p_sub, ctx)
            else:
                y, of_sublayer = sublayer.forward(n, p_sub, ctx)
                delta = drop_forward(y, ctx, sublayer.name)
            branches.append(BranchSaved(x, norm, of_sublayer))
        return BlockSaved(saved.x, tuple(branches))


def build_blocks(config: ModelConfig) -> list[Block]:
    """The blocks of ModelConfig.blocks; the pattern repeats over the layers."""
    pattern = config.block_pattern
    return [build_block(config, i, pattern[i % len(pattern)]) for i in range(config.num_layers)]


def build_block(config: ModelConfig, layer: int, sublayers: list[tuple[str, dict[str, Any]]]) -> Block:
    built: list[Sublayer] = []
    for kind, settings in sublayers:
        cls = sublayer_class(kind)
        number = sum(type(sublayer) is cls for sublayer in built) + 1  # a second one of a kind is named attn2
        name = f"blocks.{layer}.{kind}{number if number > 1 else ''}"
        built.append(cls(config, name, settings))
    return Block(config, built)


def norm_specs(config: ModelConfig, name: str) -> list[ParamSpec]:
    specs = [ParamSpec(f"{name}.w", (config.hidden_dim,), "ones", False, None)]  # mutant: norm-specs
    return [*specs, ParamSpec(f"{name}.b", (config.hidden_dim,), "zeros", False, None)] if config.norm_bias else specs


def norm_views(config: ModelConfig, layout: FlatLayout, flat: Tensor, name: str) -> Params:
    w = layout.view(flat, f"{name}.w")
    return (w,) if config.norm == "rms" else (w, layout.view(flat, f"{name}.b"))


def drop_forward(x: Tensor, ctx: Context, place: str) -> Tensor:  # (B, T, C)
    if ctx.dropout is None:
        return x
    p, seed, step, first_sample = ctx.dropout
    return ctx.ops.dropout.forward(x, p=p, key=dropout_key(seed, step, place), first_sample=first_sample)[0]


def drop_backward(dy: Tensor, ctx: Context, place: str) -> Tensor:  # (B, T, C)
    if ctx.dropout is None:
        return dy
    p, seed, step, first_sample = ctx.dropout
    return ctx.ops.dropout.backward(dy, None, p=p, key=dropout_key(seed, step, place), first_sample=first_sample)
