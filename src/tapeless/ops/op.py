"""What an op is: a forward with its backward, and the record of what passes between them.

    y…, saved = forward(activations…, params…, *, scalars)
    dx…       = backward(dy…, saved, params…, dparams…, *, scalars)

- Activation gradients are returned (dy itself where the derivative is 1, so nobody writes into them); parameter gradients
  are accumulated (`+=`) into the buffers handed in, and None there means frozen. Backward writes neither `dy` nor `saved`.
- A set may have a twin whose products overwrite (`OpSet.non_accumulating`): its linear, ffn_down and linear_cross_entropy
  replace what dw holds, and dw alone; biases and norms are still added to. The head's backward comes before the embedding's, so that a
  tied matrix is first written, then added to.
- `saved` is a NamedTuple private to the implementation (None where nothing is kept): no parameters, no settings of the model.
- A field of `saved` that bears the name of an activation of the forward, or of its output, *is* that tensor. A recompute
  policy can therefore drop it by name and hand an equal one back, whatever else the implementation keeps.
- Ops are holomorphic where they are smooth (no abs, no conjugation; branches look at the real part), so that the complex
  step can judge them.
Tested by: tests/ops/test_op.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Saved = TypeVar("Saved")


class Op(NamedTuple):
    """The unit of replacement: the two halves share `saved`, so neither is replaced alone."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    both: Callable[..., Any] | None = None  # of a loss: (x, targets, w, dw, *, scalars) -> loss, dx, as if dloss were 1
    backward_dw: Callable[..., None] | None = None


class Recording(NamedTuple):
    """The calls of one pass, to be made again in their order."""

    calls: list[Callable[[], Any]]
    nbytes: int  # of the memory that it has for itself


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
    ffn_down: Mapping[str, Op]  # by ModelConfig.ffn: the activation or gate, and the product behind it
    linear_cross_entropy: Op
    dropout: Op  # saves nothing: a mask is hashed again from its key
    begin: Callable[[], None] | None = None  # called at the beginning of every pass through a model
    decoder: Callable[..., Callable[..., Tensor] | None] | None = (
        None  # one token through the whole model; None: by the ops above
    )
    # The optimizer's two passes over the flat buffers; None: optim/adam.py and optim/clip.py.
    adam_update: Callable[..., None] | None = None  # (p, g, m, v, copy, pieces, numbers, scale), as AdamW.fused_update calls it
    grad_norm: Callable[[Tensor], Tensor] | None = None  # (n,) -> () float64
    non_accumulating: "OpSet | None" = (
        None  # this set, but whose products replace dw instead of adding to it; None: it has none
    )
    # Whether nothing in it waits for the device, so that a step can be captured in a graph: its loss then takes num_targets
    # as a number on the device too, and its adam_update leaves everything as it was where the scale is NaN.
    capturable: bool = False
    # (run) -> what run() returns, and its calls, or why they cannot be repeated; None: it cannot record. Who replaces an op
    # by one that computes in numpy sets it to None.
    capture: "Callable[[Callable[[], Any]], tuple[Any, Recording | str]] | None" = None


def loss_with_gradient(
    op: Op,
    x: Tensor,  # (..., C)
    targets: Tensor,  # (...) int64
    w: Tensor,  # (V, C)
    dw: Tensor | None,  # (V, C)  accumulated into
    **options: Any,
) -> tuple[Tensor, Tensor]:  # loss (), dx (..., C)
    """A loss and its gradient, in one go where the op can: it then has no need to make its logits twice."""
    if op.both is not None:
        return op.both(x, targets, w, dw, **options)
    loss, saved = op.forward(x, targets, w, **options)
    return loss, op.backward(1.0, saved, w, dw, **options)


def drop(saved: Saved, *names: str) -> Saved:
    """`saved` with the named activations dropped, so that their memory can go."""
    if saved is None:
        return saved
    return saved._replace(**{name: None for name in names if name in saved._fields})  # type: ignore[attr-defined]


def restore(saved: Saved, **activations: Any) -> Saved:
    """`saved` with activations put back that `drop` had dropped."""
    if saved is None:
        return saved
    return saved._replace(**{name: x for name, x in activations.items() if name in saved._fields})  # type: ignore[attr-defined]
