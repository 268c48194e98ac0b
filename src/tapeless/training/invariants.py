"""Identities that hold for every correct model, whatever its weights: checked during training (`--check-invariants-every N`).

    linear + cross-entropy   a column of dlogits sums to 0 over V, hence sum_v dw = 0; ignored targets have dx = 0 exactly
    RMSNorm, LayerNorm       <x, dx> = 0 but for eps; LayerNorm also sum dx = 0
    rotation                 preserves the length of every q and k, and leaves v unchanged, bit for bit
    embedding                rows that no token used have a gradient of 0 exactly
    causality                logits do not depend on later tokens, nor on other masked documents, bit for bit
They need no reference, only one extra pass over a few rows of the batch before the step: the trained weights are the same bit
for bit. A wrong kernel, a broken build or faulty memory violates them.
Tested by: tests/train/test_invariants.py."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.errors import InvariantError
from tapeless.model.build import AnyModel
from tapeless.model.observe import HEAD, OpCall, observe_ops
from tapeless.model.transformer import Transformer
from tapeless.ops.cross_entropy import IGNORED

ROWS = 2  # of the batch
# Where not exact, relative to the size of the terms; a healthy model's worst was 7e-8 in float32 and 2.4e-3 in
# bfloat16. None of them involves an fp8 matmul.
IDENTITY = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2**-6, "fp8": 2**-6}


def wide(x: Tensor) -> Tensor:
    """float64 on the CPU; not every device has it."""
    return x.to("cpu", torch.float64)


class Checked(NamedTuple):
    """One identity at one layer."""

    identity: str
    layer: str
    error: float
    bound: float


def check_invariants(
    model: AnyModel,
    tokens: Tensor,  # (B, T) int64
    targets: Tensor,  # (B, T) int64
    documents: Tensor | None = None,  # (B, T) int64: attention stays inside each
    *,
    step: int,
    first_sample: int,
) -> None:
    """Raise if one does not hold. Overwrites the gradients."""
    checked = identities(model, tokens, targets, documents, step=step, first_sample=first_sample)
    bad = next((v for v in checked if not v.error <= v.bound), None)
    if bad is not None:
        raise InvariantError(
            f"step {step + 1}: {bad.identity} does not hold in {bad.layer}: error {bad.error:.1e}, bound {bad.bound:.0e}; "
            "nothing was updated; run tapeless gradcheck on the model, or try --ops reference"
        )


def identities(
    model: AnyModel, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, *, step: int, first_sample: int
) -> Iterator[Checked]:
    tokens, targets, documents = tokens[:ROWS], targets[:ROWS], None if documents is None else documents[:ROWS]
    found: list[Checked] = []
    model.zero_grads()
    if isinstance(model, Transformer):
        observer = _Observer(model, targets, found)
        with observe_ops(model, observer):
            model.forward_backward(tokens, targets, step=step, first_sample=first_sample, documents=documents)
        yield from found
        yield from _causality(model, tokens[:1], None if documents is None else documents[:1])
    else:
        model.forward_backward(tokens, targets)
    yield from _unused_rows(model, tokens)


class _Observer:
    """Checks each observed call of an op."""

    def __init__(self, model: Transformer, targets: Tensor, found: list[Checked]):
        self.model, self.config, self.targets, self.found = model, model.config, targets, found
        self.bound = IDENTITY[model.dtype]
        self.sums: dict[int, tuple[Any, Tensor]] = {}  # by id of what a norm saved: that, and its input s

    def __call__(self, seen: OpCall) -> None:
        if seen.op == HEAD and seen.direction != "forward":
            self._head(seen)
        elif seen.op == "qkv_rope" and seen.direction == "forward":
            self._rotation(seen)
        elif seen.op == "add_norm" and seen.direction == "forward":
            self.sums[id(seen.saved)] = seen.saved, wide(seen.outputs["s"])
        elif seen.op == "add_norm":
            self._norm(seen)

    def _add(self, identity: str, layer: str, error: Tensor, bound: float) -> None:
        self.found.append(Checked(identity, layer, float(error.max()) if error.numel() else 0.0, bound))

    def _head(self, seen: OpCall) -> None:
        c, dx = self.config, seen.outputs["dx"]
        ignored = dx.reshape(-1, dx.shape[-1])[self.targets.flatten() == IGNORED]  # (n, C)
        self._add("dx = 0 of ignored targets", seen.layer, ignored.abs(), 0.0)
        if seen.grads and not c.z_loss and not c.logit_softcap:  # not if the head is frozen
            (dw,) = map(wide, seen.grads)  # (V, C); in a tied model only the head's share so far
            self._add("sum of dw over V = 0", seen.layer, dw.sum(0).norm() / dw.norm(dim=1).sum().clamp_min(1e-300), self.bound)

    def _rotation(self, seen: OpCall) -> None:
        c, qkv = self.model.sublayer(seen.layer).config, wide(seen.inputs[0])  # (B, T, (H+2G)*D)
        width, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q, k, v = qkv.split([width, keys, keys], -1)
        if not c.qk_norm:
            for name, before in (("q", q), ("k", k)):
                length = before.square().sum(-1)  # (B, T)
                after = wide(seen.outputs[name]).square().sum((1, 3))  # of (B, heads, T, D)
                error = (after - length).abs() / length.clamp_min(1e-300)
                self._add(f"the rotation preserves the length of {name}", seen.layer, error, self.bound)
        own = wide(seen.outputs["v"]).transpose(1, 2).flatten(2)  # (B, T, G*D)
        self._add("v is the output of the projection", seen.layer, (own - v).abs(), 0.0)

    def _norm(self, seen: OpCall) -> None:
        ds, dn, saved, w, *_ = seen.inputs
        _, s = self.sums.pop(id(saved))  # (B, T, C)
        d, terms = wide(seen.outputs["dx"]), 0.0
        if ds is not None:  # the residual gradient bypasses the norm
            d, terms = d - wide(ds), wide(ds).norm(dim=-1)
        centred = s - s.mean(-1, keepdim=True) if self.config.norm == "layer" else s
        power = centred.square().mean(-1) + self.config.norm_eps  # (B, T)
        terms = terms + (wide(dn) * wide(w)).norm(dim=-1) / power.sqrt() + 1e-300
        slack = self.config.norm_eps / power  # the part of the input's scale that eps does not remove
        error = (centred * d).sum(-1).abs() / (centred.norm(dim=-1) * terms + 1e-300) - slack
        self._add("<x, dx> = 0 of a norm", seen.layer, error, self.bound)
        if self.config.norm == "layer":
            error = d.sum(-1).abs() / (d.shape[-1] ** 0.5 * terms)
            self._add("sum of dx = 0 of LayerNorm", seen.layer, error, self.bound)


def _causality(model: Transformer, tokens: Tensor, documents: Tensor | None) -> Iterator[Checked]:  # (1, T) both
    whole, half = model.logits(tokens, documents=documents), tokens.shape[1] // 2

    def changed(where: Tensor) -> Tensor:  # (T,) bool -> (T,) bool: whose logits change with these tokens
        other = torch.where(where, (tokens + 1) % model.config.vocab_size, tokens)
        return (model.logits(other, documents=documents) != whole).any(-1)[0]

    if half:
        later = torch.arange(tokens.shape[1], device=tokens.device) >= half  # (T,)
        yield Checked("logits do not depend on later tokens", "the model", float((changed(later) & ~later).sum()), 0.0)
    if documents is not None:
        first = documents[0] == documents[0, 0]  # (T,)
        yield Checked("logits do not depend on other documents", "the model", float((changed(first) & ~first).sum()), 0.0)


def _unused_rows(model: AnyModel, tokens: Tensor) -> Iterator[Checked]:
    tied = getattr(model.config, "tie_embeddings", False)  # such a row also has the head's gradient
    if not tied and "embed.w" in model.grads:
        unused = torch.ones(model.config.vocab_size, dtype=torch.bool, device=tokens.device)
        unused[tokens.flatten()] = False
        rows = model.grads["embed.w"][unused]
        yield Checked("unused rows have zero gradient", "embed", float(rows.abs().max()) if len(rows) else 0.0, 0.0)
