"""A run without numbers: the real model, optimizer and step on torch's meta device, where a tensor has a shape and no bytes.

Whatever is allocated is counted when it comes and when it goes, so that the peak is that of the code which will run: no formula
has to know how many moments an optimizer keeps or when a block lets go of its activations. Built-in kernels are stood in for
by doubles that only allocate (kernels/dry.py).
Tested by: tests/estimate/test_dry_run.py."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tapeless.config import AnyModelConfig, ModelConfig, TrainConfig
from tapeless.kernels.dispatch import DispatchObserver
from tapeless.kernels.dry import META, dry_ops
from tapeless.model.build import AnyModel, build_model
from tapeless.model.memory import saved_bytes
from tapeless.model.params import DTYPES
from tapeless.model.trained import checkpointed
from tapeless.model.transformer import Transformer
from tapeless.ops.linear_cross_entropy import CHUNK, chunk_rows
from tapeless.optim.clip import grad_norm
from tapeless.training.evaluate import rows_at_once
from tapeless.training.step import ema_of, optimizer_of

# torch loads sympy to find the strides of these, half a second and 40 MB; ours are contiguous.
ALIKE = (torch.ops.aten.empty_like.default, torch.ops.aten.zeros_like.default)


class Watch(DispatchObserver):
    """Counts the bytes of all tensors that are made under it and still there."""

    def __init__(self, idle: Callable[[], int] = lambda: 0):
        """idle: bytes that are held beside them, by a workspace."""
        super().__init__()
        self.idle, self.live, self.peak = idle, 0, 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in ALIKE:
            result = torch.empty(args[0].shape, dtype=options.get("dtype") or args[0].dtype, device=META)
        else:
            result = func(*args, **options)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device == META:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._seen:
            size = storage.nbytes()

            def gone(_: Any) -> None:
                self.live -= size
                del self._seen[key]

            self._seen[key] = weakref.ref(storage, gone)
            self.live += size
        self.peak = max(self.peak, self.live + self.idle())

    def peak_of(self, work: Callable[[], object]) -> int:
        """The highest that the bytes stand while `work` is done."""
        self.peak = self.live + self.idle()
        work()
        return self.peak


class DryRun(NamedTuple):
    """Bytes, all on the device that trains."""

    parameters: int
    copy: int  # of the parameters, in the dtype of the products where that is another
    gradients: int
    state: int  # the optimizer's, and whatever else it keeps
    average: int  # of the parameters, where one is kept
    saved: int  # activations, kept for backward
    logits: int  # of as many rows as are there at a time
    step: int  # the peak of a training step, with all of the above
    evaluation: int  # the peak of an evaluation behind it
    checkpoint: int  # the tensors that one holds


def dry_run(config: AnyModelConfig, train: TrainConfig, ops: str) -> DryRun:
    """ops: the name of the set that will be used; train: with a seq_len and a dtype."""
    double = dry_ops(ops) if isinstance(config, ModelConfig) else None
    workspace = double.workspace if double else None
    with Watch(lambda: workspace.idle if workspace else 0) as watch:
        model = _model(config, train, double.ops if double else None)
        store, gradients = model.store, model.store.flat_grads.nbytes
        before = watch.live
        optimizer = optimizer_of(model, train)
        state = watch.live - before
        ema = ema_of(model, train)
        average = watch.live - before - state
        T = train.seq_len or 1
        tokens = torch.empty(train.batch_size * train.grad_accum, T, dtype=torch.int64, device=META)
        windows = torch.empty(rows_at_once(T), T, dtype=torch.int64, device=META)
        targets = torch.empty_like(tokens)
        step = watch.peak_of(lambda: _step(model, optimizer, tokens, targets, train))
        evaluation = watch.peak_of(lambda: model.loss(windows, windows, num_targets=1, check=False))
        kept = [checkpointed(model.params), *optimizer.named_state().values(), *([] if ema is None else [ema.named()])]
    N, V, itemsize = train.batch_size * T, config.vocab_size, store.compute_flat.element_size()
    rows = double.logits_rows(N, V) if double else min(N, chunk_rows(V, CHUNK))
    saved = saved_of(config, train, lowest=model.lowest if isinstance(model, Transformer) else 0)
    return DryRun(
        parameters=store.flat.nbytes,
        copy=0 if store.compute_flat is store.flat else store.compute_flat.nbytes,
        gradients=gradients,
        state=state,
        average=average,
        saved=saved,
        logits=(rows if isinstance(config, ModelConfig) else N) * V * itemsize,
        step=step,
        evaluation=evaluation,
        checkpoint=sum(x.nbytes for views in kept for x in views.values()),
    )


def _model(config: AnyModelConfig, train: TrainConfig, ops: Any) -> AnyModel:
    options: dict[str, Any] = {"device": META, "dtype": train.dtype, "initialized": False}
    if isinstance(config, ModelConfig):
        options |= {"ops": "reference", "recompute": train.recompute, "freeze": train.freeze, "lora": train.lora}
        options["dtype"] = "bfloat16" if train.dtype == "fp8" else train.dtype  # whose tensors are the same
    model = build_model(config, **options)
    if ops is not None:
        model.ops = ops
    return model


def _step(model: AnyModel, optimizer: Any, tokens: Tensor, targets: Tensor, train: TrainConfig) -> None:
    """training/step.py without its looks at values. One micro-batch of a kind: those behind it take the same blocks again. And
    twice, since the second time is recorded where that can be."""
    rows = train.batch_size
    for fresh in (True, False) if train.grad_accum > 1 else (True,):
        for _ in range(2 if model.ops.record else 1):
            model.forward_backward(tokens[:rows], targets[:rows], num_targets=1, step=0, fresh=fresh, check=False)
    (model.ops.grad_norm or grad_norm)(model.store.flat_grads)
    optimizer.step(scale=0.5, copy=model.store.copy)


def saved_of(config: AnyModelConfig, train: TrainConfig, *, lowest: int) -> int:
    """lowest: the first block that keeps anything."""
    assert train.seq_len is not None
    if isinstance(config, ModelConfig):
        found = saved_bytes(config, train.batch_size, train.seq_len, train.recompute, train.dtype)
        unkept = tuple(f"blocks.{i}." for i in range(lowest))
        return sum(size for name, size in found.items() if not name.startswith(unkept))
    # SimpleLM: the embedding, the hidden layer before and behind its activation
    itemsize = DTYPES[train.dtype][1].itemsize
    return train.batch_size * train.seq_len * (2 * config.hidden_dim + 2 * config.intermediate_dim) * itemsize
