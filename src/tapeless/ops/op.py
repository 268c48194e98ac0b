"""The contract of an op: a forward, its backward, and the record that one saves for the other.

    y…, saved = forward(activations…, params…, *, scalars)
    dx…       = backward(dy…, saved, params…, dparams…, *, scalars)

- Activation gradients are returned (dy itself where the derivative is 1, so callers must not write into them); parameter
  gradients are accumulated (`+=`) into the buffers passed in, and None there means frozen. Backward writes neither `dy` nor
  `saved`.
- `backward` with every dparam None computes the activation gradients alone, and `backward_dw`, if the op has one, the
  parameter gradients alone and returns None: it is `backward` with want_dx=False. Together they give the bits of the joint
  backward.
- A set may have a non-accumulating variant (`OpSet.non_accumulating`): its linear, ffn_down and linear_cross_entropy overwrite
  dw, and dw alone; gradients of biases and norms are still accumulated. The head's backward runs before the embedding's, so a
  tied matrix is first overwritten, then accumulated into.
- `saved` is a NamedTuple private to the implementation (None if it saves nothing): no parameters, no settings of the model.
- A field of `saved` that has the name of an input activation, or of an output, *is* that tensor. A recompute policy can
  therefore drop it by name and restore an equal one, whatever else the implementation saves.
- Ops are holomorphic where they are smooth (no abs, no conjugation; branches look at the real part), so that they can be
  checked by the complex step.
Tested by: tests/ops/test_op.py, tests/kernels/test_backward_dw.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Saved = TypeVar("Saved")


class Op(NamedTuple):
    """The unit of replacement: forward and backward share `saved`, so neither is replaced alone. A kernel set starts from the
    reference op (`LINEAR._replace(forward=…, backward=…)`), which states the names of outputs and gradients."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    both: Callable[..., Any] | None = None  # of a loss: (x, targets, w, dw, *, scalars) -> loss, dx, with dloss = 1
    backward_dw: Callable[..., Any] | None = None  # parameter gradients alone; None: only the joint backward exists
    outputs: tuple[str, ...] = ("y",)  # what forward returns before `saved`
    grads: tuple[str, ...] = ("dx",)  # what backward returns; (): nothing


class CapturedCalls(NamedTuple):
    """The calls of one pass, to be replayed in their order."""

    calls: list[Callable[[], Any]]
    nbytes: int  # of the memory that it owns


@dataclass(frozen=True)
class OpSet:
    """One implementation of everything a transformer is made of. A backend replaces fields; the model only calls them."""

    name: str
    embed: Op
    norm: Mapping[str, Op]  # by ModelConfig.norm
    add_norm: Mapping[str, Op]  # by ModelConfig.norm; its n must equal norm(s) bit for bit
    qkv_rope: Op
    attention: Op
    linear: Op
    ffn_down: Mapping[str, Op]  # by ModelConfig.ffn: the activation or gate, and the linear map after it
    linear_cross_entropy: Op
    dropout: Op  # saves nothing: backward hashes the mask again from its key
    begin: Callable[[], None] | None = None  # called at the beginning of every pass through a model
    # (config, spans, flat) -> (tokens (R,), slots (R,), positions (R,), kv_cache) -> logits (R, V), or None for models that it
    # cannot run: one more token of each of R sequences through the whole model. A token's keys and values are written to row
    # `slot` of the cache at its position, and it attends to the positions up to its own. A row of logits depends on its own
    # sequence alone, bit for bit: not on the other rows, nor on its slot.
    decoder: Callable[..., Callable[..., Tensor] | None] | None = None
    # The optimizer's two passes over the flat buffers; None: optim/adam.py and optim/clip.py.
    adam_update: Callable[..., None] | None = None  # (p, g, m, v, copy, pieces, step_scalars, scale), see AdamW.fused_update
    grad_norm: Callable[[Tensor], Tensor] | None = None  # (n,) -> () float64
    non_accumulating: "OpSet | None" = None  # this set with matmuls that overwrite dw instead of accumulating into it
    # (run) -> what run() returns, and its captured calls, or the reason why they cannot be replayed; None: no capture. In a set
    # that has it no op reads a value: the loss also takes num_targets as a tensor () float32 on the device, and adam_update
    # changes nothing where the scale is NaN. Set to None when replacing an op by one that reads values or computes in numpy.
    capture: "Callable[[Callable[[], Any]], tuple[Any, CapturedCalls | str]] | None" = None

    def map(self, change: Callable[[str, Op], Op]) -> "OpSet":
        """The set with every op changed: change(field, op)."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            member = getattr(self, field.name)
            if isinstance(member, Op):
                changed[field.name] = change(field.name, member)
            elif isinstance(member, Mapping):
                changed[field.name] = {kind: change(field.name, op) for kind, op in member.items()}
        return replace(self, **changed)


def loss_with_gradient(
    op: Op,
    x: Tensor,  # (..., C)
    targets: Tensor,  # (...) int64
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into
    **options: Any,
) -> tuple[Tensor, Tensor]:  # loss (), dx (..., C)
    """A loss and its gradient. An op with `both` computes its logits once for the two."""
    if op.both is not None:
        return op.both(x, targets, w, dw, **options)
    loss, saved = op.forward(x, targets, w, **options)
    return loss, op.backward(1.0, saved, w, dw, **options)


def drop(saved: Saved, *names: str) -> Saved:
    """`saved` with the named activations set to None, which frees their memory."""
    if saved is None:
        return saved
    return saved._replace(**{name: None for name in names if name in saved._fields})  # type: ignore[attr-defined]


def restore(saved: Saved, **activations: Any) -> Saved:
    """`saved` with recomputed activations in the places that `drop` had emptied."""
    if saved is None:
        return saved
    return saved._replace(**{name: x for name, x in activations.items() if name in saved._fields})  # type: ignore[attr-defined]
