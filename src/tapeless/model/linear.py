"""A linear layer of a sublayer: its matrix, trained or frozen, and the LoRA adapters added to it (ops/lora.py).

    y = op(x; w, b)    and for each adapter    y[its columns] += s (x a') b'
Matrices that one matmul reads together (q, k and v; gate and up) have an adapter each, which adds to its own columns of y.
`op` is the linear op of the kernel set, or one that ends in a matmul (ffn_down).
Tested by: tests/model/test_adapters.py and levels L2 and L5 (PARTLY_TRAINED_CASES of verify/fixtures.py)."""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tapeless.ops.lora import LORA, LoraSaved
from tapeless.ops.op import Op, drop, restore

if TYPE_CHECKING:
    from tapeless.model.sublayer import Context


class Adapter(NamedTuple):
    """One adapter, or its gradients."""

    a: Tensor  # (r, I)
    b: Tensor  # (O, r)
    first: int  # the first of its O columns of y


class LinearParams(NamedTuple):
    """The parameters of a linear layer, or their gradients; None: absent or frozen."""

    w: Tensor | None  # (O, I)
    b: Tensor | None  # (O,)
    adapters: tuple[Adapter, ...] = ()


class LinearSaved(NamedTuple):
    op: Any  # what the op saved
    adapters: tuple[LoraSaved, ...]

    def drop(self, name: str) -> "LinearSaved":
        """Without the activation of that name, so that its memory can be freed."""
        return LinearSaved(drop(self.op, name), tuple(s._replace(linear=drop(s.linear, name)) for s in self.adapters))

    def restore(self, **x: Tensor) -> "LinearSaved":
        """With the activation that `drop` removed."""
        return LinearSaved(restore(self.op, **x), tuple(s._replace(linear=restore(s.linear, **x)) for s in self.adapters))


def linear_forward(op: Op, x: Tensor, p: LinearParams, ctx: "Context") -> tuple[Tensor, LinearSaved]:  # y (..., O)
    y, saved = op.forward(x, p.w, p.b)
    adapters = []
    for a, b, first in p.adapters:
        term, of_adapter = LORA.forward(x, a, b, scale=ctx.lora_scale, linear=op)
        y[..., first : first + len(b)] += term  # y was allocated by the op, and nothing has read it yet
        adapters.append(of_adapter)
    return y, LinearSaved(saved, tuple(adapters))


def linear_backward(
    op: Op, dy: Tensor, saved: LinearSaved, p: LinearParams, g: LinearParams, ctx: "Context"
) -> Tensor:  # dx (..., I)
    """With ctx.deferred, only dx is computed; the calls that compute the parameter gradients are appended there."""
    if ctx.deferred is None or op.backward_dw is None:
        dx = op.backward(dy, saved.op, p.w, p.b, g.w, g.b)
    else:
        dx = op.backward(dy, saved.op, p.w, p.b, None, None)
        ctx.deferred.append(partial(op.backward_dw, dy, saved.op, p.w, p.b, g.w, g.b))
    for (a, b, first), of_adapter, (da, db, _) in zip(p.adapters, saved.adapters, g.adapters, strict=True):
        columns = dy[..., first : first + len(b)]  # mutant: lora-columns
        # dx was allocated by the op
        dx += LORA.backward(columns, of_adapter, a, b, da, db, scale=ctx.lora_scale, linear=op)  # mutant: lora-dx
    return dx
