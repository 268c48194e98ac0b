"""Observe a transformer while it computes: every call of an op, with its layer, its inputs and its results.

For diagnosis only, outside the training step: which tensor was the first to become non-finite (training/nonfinite.py), and
whether the identities hold that every correct gradient obeys (training/invariants.py). The model's own ops are wrapped; what
they compute does not change.
Tested by: tests/model/test_observe.py."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from tapeless.kernels.private_api import distinct_bytes, tree_leaves
from tapeless.model.transformer import Transformer
from tapeless.ops.op import Op
from tapeless.ops.reference import REFERENCE

HEAD = "linear_cross_entropy"  # in a tied model its matrix is the embedding's, but its layer is the head
IN_ATTENTION = ("qkv_rope", "attention")  # when they are recomputed, both norms of the block may run just before


REFERENCE_OPS: dict[str, Op] = {}  # by field of OpSet: their names of outputs and gradients hold for every set
REFERENCE.map(lambda field, op: REFERENCE_OPS.setdefault(field, op))


class OpCall(NamedTuple):
    """One call of an op."""

    layer: str  # of its parameters; without any, that of the op before it: blocks.0.attn
    op: str  # field of OpSet
    direction: str  # forward | backward | both (a loss with its gradient)
    inputs: tuple[Any, ...]  # in the order of the op
    outputs: Mapping[str, Tensor]
    saved: Any  # of a forward
    grads: tuple[Tensor, ...]  # those among the inputs that the call accumulates into

    @property
    def bytes_moved(self) -> int:
        """Of each distinct tensor among inputs, outputs and saved: the least that the call can read and write."""
        return distinct_bytes(tree_leaves((self.inputs, dict(self.outputs), self.saved)))


Listener = Callable[[OpCall], None]


@contextmanager
def observe_ops(model: Transformer, listener: Listener) -> Iterator[None]:
    """Call the listener after every call of one of the model's ops. Shortcuts around the ops are switched off meanwhile."""
    own = model.ops
    observer = _Observer(model, listener)
    model.ops = replace(own.map(observer.wrapped), non_accumulating=None, decoder=None, sampler=None, capture=None)
    try:
        yield
    finally:
        model.ops = own


class _Observer:
    def __init__(self, model: Transformer, listener: Listener):
        store = model.store
        self.listener, self.layer = listener, ""
        compute = store.layout.views(store.compute_flat)
        self.owners = {view.data_ptr(): name.partition(".lora_")[0].rpartition(".")[0] for name, view in compute.items()}
        first = store.flat_grads.data_ptr()
        self.grads = range(first, first + store.flat_grads.nbytes)

    def wrapped(self, name: str, op: Op) -> Op:
        names = REFERENCE_OPS[name]

        def forward(*inputs: Any, **options: Any) -> Any:
            *outputs, saved = op.forward(*inputs, **options)
            self._emit(name, "forward", inputs, zip(names.outputs, outputs, strict=True), saved)
            return *outputs, saved

        def backward(*inputs: Any, **options: Any) -> Any:
            results = op.backward(*inputs, **options)
            grads = results if len(names.grads) > 1 else (results,)
            self._emit(name, "backward", inputs, zip(names.grads, grads, strict=False))
            return results

        def backward_dw(*inputs: Any, **options: Any) -> None:
            assert op.backward_dw is not None
            op.backward_dw(*inputs, **options)
            self._emit(name, "backward", inputs, ())

        def both(*inputs: Any, **options: Any) -> Any:
            assert op.both is not None
            results = op.both(*inputs, **options)
            self._emit(name, "both", inputs, zip((*names.outputs, *names.grads), results, strict=True))
            return results

        both_, backward_dw_ = op.both and both, op.backward_dw and backward_dw
        return op._replace(forward=forward, backward=backward, both=both_, backward_dw=backward_dw_)

    def _emit(
        self, op: str, direction: str, inputs: tuple[Any, ...], outputs: Iterable[tuple[str, Any]], saved: Any = None
    ) -> None:
        addresses = [x.data_ptr() for x in inputs if isinstance(x, Tensor)]
        owner = next((self.owners[address] for address in addresses if address in self.owners), self.layer)
        if op in IN_ATTENTION:
            _, layer, sublayer, *_ = owner.split(".")
            owner = f"blocks.{layer}.{sublayer.removesuffix('_norm') if sublayer.startswith('attn') else 'attn'}"
        self.layer = "head" if op == HEAD else owner
        grads = tuple(x for x in inputs if isinstance(x, Tensor) and x.data_ptr() in self.grads)
        self.listener(OpCall(self.layer, op, direction, inputs, dict(outputs), saved, grads))
