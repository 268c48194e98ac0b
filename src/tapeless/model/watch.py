"""Look on while a transformer computes: every call of an op, with its layer, its inputs and its results.

For diagnosis alone, beside the step: which tensor was the first to go bad (training/nonfinite.py), and whether the identities hold
that every right gradient obeys (training/invariants.py). The ops are the model's own, each wrapped; nothing they compute changes.
Tested by: tests/model/test_watch.py."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from tapeless.model.transformer import Transformer
from tapeless.ops.op import Op, OpSet

# What an op hands on, in order; behind it comes `saved` in a forward, nothing in a backward.
FORWARD = {
    "embed": ("x",),
    "norm": ("n",),
    "add_norm": ("s", "n"),
    "qkv_rope": ("q", "k", "v"),
    "attention": ("o",),
    "linear": ("y",),
    "ffn_down": ("f",),
    "linear_cross_entropy": ("loss",),
    "dropout": ("y",),
}
BACKWARD = {
    "embed": (),
    "norm": ("dx",),
    "add_norm": ("dx",),
    "qkv_rope": ("dqkv",),
    "attention": ("dq", "dk", "dv"),
    "linear": ("dx",),
    "ffn_down": ("dgate_up",),
    "linear_cross_entropy": ("dx",),
    "dropout": ("dx",),
}
HEAD = "linear_cross_entropy"  # of a tied model its matrix is the embedding's, but its place is the head

OF_ATTENTION = ("qkv_rope", "attention")  # where they are computed again, both norms of the block may come just before


class Seen(NamedTuple):
    """One call of an op."""

    layer: str  # whose parameters it takes, or where it takes none, those of the op before it: blocks.0.attn
    op: str  # field of OpSet
    direction: str  # forward | backward | both (a loss with its gradient)
    inputs: tuple[Any, ...]  # in the order of the op
    outputs: Mapping[str, Tensor]
    saved: Any  # of a forward
    grads: tuple[Tensor, ...]  # those among the inputs that the call accumulates into


Listener = Callable[[Seen], None]


@contextmanager
def watched(model: Transformer, listener: Listener) -> Iterator[None]:
    """While this lasts, the listener is told every call of the model's ops."""
    healthy = model.ops
    watch = _Watch(model, listener)
    model.ops = watch.wrapped(healthy)
    try:
        yield
    finally:
        model.ops = healthy


class _Watch:
    def __init__(self, model: Transformer, listener: Listener):
        store = model.store
        self.listener, self.layer = listener, ""
        compute = store.layout.views(store.compute_flat)
        self.owners = {view.data_ptr(): name.partition(".lora_")[0].rpartition(".")[0] for name, view in compute.items()}
        first = store.flat_grads.data_ptr()
        self.grads = range(first, first + store.flat_grads.nbytes)

    def wrapped(self, ops: OpSet) -> OpSet:
        """The set with every op wrapped, and without its shortcuts, which would go around them."""
        fields: dict[str, Any] = {}
        for name in FORWARD:
            member = getattr(ops, name)
            if isinstance(member, Op):
                fields[name] = self._op(name, member)
            else:
                fields[name] = {kind: self._op(name, op) for kind, op in member.items()}
        return replace(ops, **fields, non_accumulating=None, decoder=None, record=None)

    def _op(self, name: str, op: Op) -> Op:
        def forward(*inputs: Any, **options: Any) -> Any:
            results = op.forward(*inputs, **options)
            self._emit(name, "forward", inputs, FORWARD[name], results[:-1], results[-1])
            return results

        def backward(*inputs: Any, **options: Any) -> Any:
            results = op.backward(*inputs, **options)
            self._emit(name, "backward", inputs, BACKWARD[name], results if len(BACKWARD[name]) > 1 else (results,))
            return results

        def both(*inputs: Any, **options: Any) -> Any:
            assert op.both is not None
            results = op.both(*inputs, **options)
            self._emit(name, "both", inputs, (*FORWARD[name], *BACKWARD[name]), results)
            return results

        return Op(forward, backward, both if op.both is not None else None)

    def _emit(
        self,
        op: str,
        direction: str,
        inputs: tuple[Any, ...],
        names: tuple[str, ...],
        results: tuple[Any, ...],
        saved: Any = None,
    ) -> None:
        places = [x.data_ptr() for x in inputs if isinstance(x, Tensor)]
        owner = next((self.owners[place] for place in places if place in self.owners), self.layer)
        if op in OF_ATTENTION:
            owner = ".".join([*owner.split(".")[:2], "attn"])
        self.layer = "head" if op == HEAD else owner
        outputs = dict(zip(names, results, strict=False))
        grads = tuple(x for x in inputs if isinstance(x, Tensor) and x.data_ptr() in self.grads)
        self.listener(Seen(self.layer, op, direction, inputs, outputs, saved, grads))
