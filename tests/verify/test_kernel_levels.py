"""A kernel set before the judges: one that computes otherwise and is right passes every level, and each wrong one is found by
the levels that should."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from contract import check_kernel
from levels.kernels import kernel_levels
from tapeless.kernels import choose
from tapeless.kernels.choose import register_ops
from tapeless.ops.numerics import rows
from tapeless.ops.op import Op, OpSet
from tapeless.ops.reference import REFERENCE
from tapeless.verify.cases import CASES, OpCase, cases_of
from tapeless.verify.fixtures import TRANSFORMER_CASES, Setting
from tapeless.verify.hf_levels import missing
from tapeless.verify.kernel_levels import narrow_dtypes
from tapeless.verify.kernel_ops import MANY_ROWS, SHAPES, at_odd_shapes

BLOCK = 4  # keys at a time
ATTENTION, LINEAR, EMBED = REFERENCE.attention, REFERENCE.linear, REFERENCE.embed


class OnlineSaved(NamedTuple):
    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    v: Tensor  # (B, G, S, D)
    lse: Tensor  # (B, H, T)  float32
    documents: Tensor | None  # (B, T) int64


def shared(x: Tensor, H: int) -> Tensor:  # (B, H, S, D) float32
    return x.float().repeat_interleave(H // x.shape[1], 1)


def block_scores(q: Tensor, k: Tensor, documents: Tensor | None, first: int) -> Tensor:  # (B, H, T, BLOCK)
    T, S = q.shape[2], k.shape[2]
    z = q.float() @ shared(k, q.shape[1])[:, :, first : first + BLOCK].transpose(-1, -2) * q.shape[-1] ** -0.5
    s = torch.arange(first, min(first + BLOCK, S))
    hidden = s[None, None] > torch.arange(T)[None, :, None] + S - T  # (1, T, BLOCK)
    if documents is not None:
        hidden = hidden | (documents[:, :, None] != documents[:, None, first : first + BLOCK])
    return z.masked_fill(hidden[:, None], -math.inf)


def online_forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> tuple[Tensor, OnlineSaved]:
    """A running maximum over blocks of keys, as kernels do it."""
    B, H, T, D = q.shape
    top, total, o = torch.full((B, H, T, 1), -1e30), torch.zeros(B, H, T, 1), torch.zeros(B, H, T, D)
    for first in range(0, k.shape[2], BLOCK):
        z = block_scores(q, k, documents, first)
        higher = torch.maximum(top, z.amax(-1, keepdim=True))
        p, shrink = (z - higher).exp(), (top - higher).exp()
        total, top = total * shrink + p.sum(-1, keepdim=True), higher
        o = o * shrink + p @ shared(v, H)[:, :, first : first + BLOCK]
    lse = (top + total.log()).squeeze(-1)
    return (o / total).transpose(1, 2).flatten(2).to(q.dtype), OnlineSaved(q, k, v, lse, documents)


def online_backward(do: Tensor, saved: OnlineSaved) -> tuple[Tensor, Tensor, Tensor]:
    """All probabilities again, side by side; the row sum from dp p."""
    q, k, v, lse, documents = saved
    (B, G, S, D), H = k.shape, q.shape[1]
    do = do.float().unflatten(-1, (H, D)).transpose(1, 2)
    z = torch.cat([block_scores(q, k, documents, first) for first in range(0, S, BLOCK)], -1)
    p = (z - lse.unsqueeze(-1)).exp()
    dp = do @ shared(v, H).transpose(-1, -2)
    dz = p * (dp - (dp * p).sum(-1, keepdim=True)) * D**-0.5
    dq, dk, dv = dz @ shared(k, H), dz.transpose(-1, -2) @ q.float(), p.transpose(-1, -2) @ do
    dk, dv = (x.view(B, G, H // G, S, D).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def transposed_forward(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
    y = (w @ rows(x).t()).t().view(*x.shape[:-1], -1)
    return (y if b is None else y + b), LINEAR.forward(x, w, b)[1]


RIGHT = replace(REFERENCE, attention=Op(online_forward, online_backward), linear=Op(transposed_forward, LINEAR.backward))


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_BACKENDS", dict(choose._BACKENDS))


def registered(ops: OpSet) -> Setting:
    register_ops("kernels", ops, devices=["cpu"], dtypes=["float32", "bfloat16"])
    return Setting("kernels")


@pytest.mark.parametrize("level", ["L0", "L1", "L2", "L3", "L4", "L5", "L6"])
def test_a_right_set_that_computes_otherwise_passes(level: str) -> None:
    if level == "L3":
        pytest.importorskip("transformers")
    findings = list(kernel_levels(registered(RIGHT))[level]())
    assert findings
    assert [str(finding) for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("case", list(cases_of(RIGHT)), ids=attrgetter("name"))
def test_a_right_set_keeps_the_contract(case: OpCase) -> None:
    check_kernel(case)


def swollen_dv(do: Tensor, saved: Any) -> Any:
    dq, dk, dv = ATTENTION.backward(do, saved)
    return dq, dk, 1.01 * dv


def future_seen(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Any:
    """Each query of a whole sequence sees one key too many."""
    o, saved = ATTENTION.forward(q, k, v, documents)
    if documents is None and k.shape[2] == q.shape[2] > 1:
        late, _ = ATTENTION.forward(q[:, :, :-1], k, v)
        o = torch.cat([late, o[:, -1:]], 1)
    return o, saved


def wrong_past_64(do: Tensor, saved: Any) -> Any:
    dq, dk, dv = ATTENTION.backward(do, saved)
    dk[:, :, 64:] = 0
    return dq, dk, dv


SCRATCH: dict[str, Any] = {}


def into_scratch(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Any:
    o, SCRATCH["saved"] = ATTENTION.forward(q, k, v, documents)
    return o, None


def from_scratch(do: Tensor, saved: None) -> Any:
    return ATTENTION.backward(do, SCRATCH["saved"])


def narrow_bias(dy: Tensor, saved: Any, w: Tensor, b: Tensor | None, dw: Tensor | None, db: Tensor | None) -> Tensor:
    if db is not None:
        db += rows(dy.clone()).cumsum(0)[-1].to(db.dtype) if dy.dtype == torch.bfloat16 else rows(dy).sum(0)
    return LINEAR.backward(dy, saved, w, b, dw, None)


def non_accumulating(dx: Tensor, saved: Any, w: Tensor, dw: Tensor | None) -> None:
    if dw is not None:
        dw.zero_()
    EMBED.backward(dx, saved, w, dw)


def rounded_otherwise(x: Tensor, delta: Tensor | None, w: Tensor, *, eps: float) -> Any:
    """Right to the last bits, but not the bits of norm(s)."""
    s, n, saved = REFERENCE.add_norm["rms"].forward(x, delta, w, eps=eps)
    return s, n * (1 + 3 * torch.finfo(n.dtype).eps), saved


def coarse(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
    y, saved = LINEAR.forward(x, w, b)
    return y.bfloat16().to(y.dtype), saved


def untidy(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
    """Fine in float32; in bfloat16 the products are rounded to four bits fewer."""
    y, saved = LINEAR.forward(x, w, b)
    return (y + 16 * y - 16 * y if y.dtype == torch.bfloat16 else y), saved


WRONG: dict[str, tuple[Callable[[], OpSet], set[str]]] = {
    "dv one percent too large": (
        lambda: replace(REFERENCE, attention=Op(ATTENTION.forward, swollen_dv)),
        {"L0", "L1", "L2", "L3", "L4"},
    ),
    "the future is seen": (
        lambda: replace(REFERENCE, attention=Op(future_seen, ATTENTION.backward)),
        {"L0", "L1", "L2", "L3", "L4", "L6"},
    ),
    "wrong from the second block on": (
        lambda: replace(REFERENCE, attention=Op(ATTENTION.forward, wrong_past_64)),
        {"L1"},
    ),
    "one scratch for all calls": (
        lambda: replace(REFERENCE, attention=Op(into_scratch, from_scratch)),
        {"L1", "L2", "L5"},
    ),
    "bias gradient summed in bfloat16": (
        lambda: replace(REFERENCE, linear=Op(LINEAR.forward, narrow_bias)),
        {"L1", "L6"},
    ),
    "embedding gradient overwritten": (
        lambda: replace(REFERENCE, embed=Op(EMBED.forward, non_accumulating)),
        {"L1", "L2", "L4", "L5"},
    ),
    "add_norm rounds unlike norm": (
        lambda: replace(
            REFERENCE,
            add_norm={**REFERENCE.add_norm, "rms": Op(rounded_otherwise, REFERENCE.add_norm["rms"].backward)},
        ),
        {"L5"},
    ),
    "float32 through bfloat16": (
        lambda: replace(REFERENCE, linear=Op(coarse, LINEAR.backward)),
        {"L1", "L2", "L3", "L4"},
    ),
    "bfloat16 with bits lost": (lambda: replace(REFERENCE, linear=Op(untidy, LINEAR.backward)), {"L1"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_set_is_found_by_the_levels_that_should(wrong: str) -> None:
    make, expected = WRONG[wrong]
    levels = kernel_levels(registered(make()))
    for level in expected - ({"L3"} if missing() else set()):
        assert any(not finding.ok for finding in levels[level]()), f"{level} passes: {wrong}"


def ops_of(ops: OpSet) -> Iterator[Op]:
    for field in fields(ops):
        value = getattr(ops, field.name)
        if isinstance(value, Op):
            yield value
        elif isinstance(value, Mapping):
            yield from value.values()


def test_every_op_of_a_set_has_a_case() -> None:
    judged = {id(case.op) for case in cases_of(RIGHT)}
    assert {id(op) for op in ops_of(RIGHT)} <= judged


def test_a_set_without_bfloat16_is_judged_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapeless.verify.kernel_levels.TRANSFORMER_CASES", TRANSFORMER_CASES[:2])
    monkeypatch.setattr("tapeless.verify.kernel_levels.cases_of", lambda *asked: list(cases_of(*asked))[:12])
    register_ops("float32-only", REFERENCE, dtypes=["float32"])
    on = Setting("float32-only")
    assert narrow_dtypes(on) == ("float32",)
    levels = kernel_levels(on)
    assert not any("bfloat16" in str(finding) for level in ("L1", "L2") for finding in levels[level]())


def test_odd_shapes_reach_what_they_should() -> None:
    def sizes(letter: str) -> set[int]:
        return {getattr(shape, letter) for shape in SHAPES}

    assert sizes("T") >= {1, 2, 7, 33, 65, 130}
    assert sizes("D") == {8, 20, 32, 64, 128}
    assert sizes("C") == {24, 100, 256}
    assert (sizes("B"), sizes("V")) == ({1, 3}, {17, 1000})
    assert {shape.H // shape.G for shape in SHAPES} == {1, 2, 4}
    assert MANY_ROWS.B * MANY_ROWS.T * MANY_ROWS.V > 2**20
    for case in CASES:
        for other in at_odd_shapes(case):
            assert all(x.numel() for x in other.inputs().values())
