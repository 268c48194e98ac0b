"""Memory of a run before it starts: the real model, optimizer and step on torch's meta device, where a tensor has no memory.

Every allocation and every release is counted, so the peak is that of the code that will run: no formula has to know how many
moments an optimizer has or when a block frees its activations. Kernels of the built-in sets are not launched (kernels/dry.py).
For a GPU every allocation and release is that of a block in torch's caching allocator (caching_allocator.py), whose segments
are what counts: a captured step has its own.
Tested by: tests/estimate/test_dry_run.py."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tapeless.config import AnyModelConfig, ModelConfig, TrainConfig
from tapeless.dist.gradient_sum import gradient_sum
from tapeless.estimate.caching_allocator import Pool
from tapeless.kernels.dispatch import DispatchObserver, writes
from tapeless.kernels.dry import META, count_kernel_bytes, dry_ops, environment_restored
from tapeless.kernels.private_api import storage_id, tree_leaves
from tapeless.model.build import AnyModel, build_model
from tapeless.model.memory import saved_bytes
from tapeless.model.params import DTYPES
from tapeless.model.trained import checkpointed
from tapeless.model.transformer import Transformer
from tapeless.ops.linear_cross_entropy import CHUNK, chunk_rows
from tapeless.ops.reference import REFERENCE
from tapeless.optim.clip import grad_norm
from tapeless.training.captured_step import not_capturable
from tapeless.training.evaluate import rows_at_once
from tapeless.training.step import ema_of, optimizer_of

aten = torch.ops.aten


def _concatenated(parts: Sequence[Tensor], dim: int = 0) -> list[int]:
    shape = list(parts[0].shape)
    shape[dim] = sum(x.shape[dim] for x in parts)
    return shape


def _summed(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> list[int]:
    gone = [dim % x.dim() for dim in dims]
    return [1 if i in gone else size for i, size in enumerate(x.shape) if keepdim or i not in gone]


# The launchers of the built-in kernels call these of torch. On the meta device it finds their results by Python code that loads
# its compiler and sympy: seconds and 100 MB at every start. Ours are contiguous.
ALIKE = (aten.empty_like.default, aten.zeros_like.default)
ELEMENTWISE = (aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor)
SHAPES: dict[Any, Callable[..., Sequence[int]]] = {  # of tensors of one floating-point dtype, which the result has too
    aten.add_.Tensor: lambda a, b: a.shape,
    aten.addmm_.default: lambda c, a, b, **scales: c.shape,
    aten.addmm.default: lambda c, a, b: (a.shape[0], b.shape[1]),
    aten.cat.default: _concatenated,
    aten.mm.default: lambda a, b: (a.shape[0], b.shape[1]),
    aten.reciprocal.default: lambda a: a.shape,
    aten.sqrt.default: lambda a: a.shape,
    aten.sum.dim_IntList: _summed,
}


def _known_result(func: Any, args: Any, options: Any) -> Any:
    """Of a call on the meta device, if torch need not be asked."""
    if "out" in options:
        return options["out"]
    if func is aten.sort.stable and args[0].device == META:
        return tuple(torch.empty(args[0].shape, dtype=dtype, device=META) for dtype in (args[0].dtype, torch.int64))
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    if func in ALIKE:
        return torch.empty(args[0].shape, dtype=options.get("dtype") or args[0].dtype, device=META)
    if func in ELEMENTWISE:
        shape: Sequence[int] = np.broadcast_shapes(*(x.shape for x in tensors))
        dtype = torch.result_type(*args[:2])
    elif func in SHAPES and len({x.dtype for x in tensors}) == 1:
        shape, dtype = SHAPES[func](*args), options.get("dtype") or tensors[0].dtype
    else:
        return None
    if not tensors[0].is_floating_point() or any(x.device != META for x in tensors):
        return None
    return args[0] if writes(func) else torch.empty(shape, dtype=dtype, device=META)


class LiveBytes(DispatchObserver):
    """Counts the bytes of all live tensors that were allocated under it."""

    def __init__(self, idle: Callable[[], int] = lambda: 0, *, gpu: bool = False):
        """idle: bytes that a workspace holds in addition. gpu: count the segments of torch's allocator instead of tensors."""
        super().__init__()
        self.idle, self.live, self.peak = idle, 0, 0
        self.pools = [Pool()] if gpu else []  # new tensors are in the last
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = _known_result(func, args, options)
        if result is None:
            result = func(*args, **options)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device == META:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key not in self._seen:
            size = storage.nbytes()
            pool = self.pools[-1] if self.pools and size else None
            block = pool and pool.allocate(size)

            def freed(_: Any) -> None:
                self.live -= size
                del self._seen[key]
                if pool and block:
                    pool.release(block)

            self._seen[key] = weakref.ref(storage, freed)
            self.live += size
        self.peak = max(self.peak, self.held)

    @property
    def held(self) -> int:
        return (sum(pool.reserved for pool in self.pools) if self.pools else self.live) + self.idle()

    def peak_of(self, work: Callable[[], object]) -> int:
        """The most bytes at a time during `work()`."""
        self.peak = self.held
        work()
        return self.peak


class DryRun(NamedTuple):
    """Bytes, all on the device that trains."""

    parts: dict[str, int]  # what the step needs by name: parameters, gradients, …
    step: int  # the peak of a training step, with all of the above
    evaluation: int  # the peak of an evaluation after it
    captured_evaluation: int  # what the captured evaluation owns from then on
    graph: bool  # whether the step is a CUDA graph
    checkpoint: int  # the tensors in one


@environment_restored()
def dry_run(config: AnyModelConfig, train: TrainConfig, ops: str) -> DryRun:
    """ops: the name of the set that will be used; train: with a seq_len and a dtype."""
    dry = dry_ops(ops) if isinstance(config, ModelConfig) else None
    workspace, gpu = dry.workspace if dry else None, torch.device(train.device).type == "cuda"
    with LiveBytes(lambda: workspace.idle if workspace else 0, gpu=gpu) as memory:
        model = _model(config, train, dry.ops if dry else None)
        store, gradients = model.store, model.store.flat_grads.nbytes
        before = memory.live
        optimizer = optimizer_of(model, train)
        state = memory.live - before
        ema = ema_of(model, train)
        average = memory.live - before - state
        total = gradient_sum(store.flat_grads, train.grad_accum, rank_invariant=train.sums_in_order)
        summed = memory.live - before - state - average
        T = train.seq_len or 1
        tokens = torch.empty(train.batch_size * train.grad_accum, T, dtype=torch.int64, device=META)
        targets = torch.empty_like(tokens)
        graph = gpu and dry is not None and isinstance(model, Transformer) and not_capturable(model, optimizer) is None
        if graph:
            memory.pools.append(Pool())
        step = memory.peak_of(lambda: _step(model, optimizer, tokens, targets, train))
        memory.pools.reverse()  # the evaluation is outside of the graph, which keeps its memory
        for pool in memory.pools[-1:]:
            pool.empty()
        rows = max(rows_at_once(T), min(train.batch_size, train.eval_windows or train.batch_size) if gpu else 0)
        windows = torch.empty(rows, T, dtype=torch.int64, device=META)
        captured = workspace.captured if workspace else 0
        evaluation = memory.peak_of(lambda: _evaluation(model, windows))
        captured = workspace.captured - captured if workspace else 0
        written = [checkpointed(model.params), *optimizer.named_state().values(), *([] if ema is None else [ema.named()])]
    N, V, itemsize = train.batch_size * T, config.vocab_size, store.compute_flat.element_size()
    height = dry.logits_rows(N, V) if dry else min(N, chunk_rows(V, CHUNK))
    saved = saved_of(config, train, ops, first_block=model.first_trainable_block if isinstance(model, Transformer) else 0)
    parts = {
        "parameters": store.flat.nbytes,
        "gradients": gradients,
        "sum of micro-batches": summed,
        "optimizer state": state,
        "moving average": average,
        "bfloat16 copy": 0 if store.compute_flat is store.flat else store.compute_flat.nbytes,
        "saved activations": saved,
        "logits": (height if isinstance(config, ModelConfig) else N) * V * itemsize,  # of as many rows as exist at a time
    }
    del total
    checkpoint = sum(x.nbytes for views in written for x in views.values())
    return DryRun(parts, step, evaluation, captured, graph, checkpoint)


@environment_restored()
def kernel_bytes(config: ModelConfig, train: TrainConfig) -> dict[str, int]:
    """Kernel of kernels/triton -> bytes that it moves in a step: each tensor that a launch reads or writes."""
    dry = dry_ops("triton-fp8" if train.dtype == "fp8" else "triton")
    model = _model(config, train, dry.ops if dry else None)
    tokens = torch.empty(train.batch_size * train.grad_accum, train.seq_len or 1, dtype=torch.int64, device=META)
    with count_kernel_bytes() as moved:
        _step(model, optimizer_of(model, train), tokens, tokens, train)
    return dict(moved)


def _model(config: AnyModelConfig, train: TrainConfig, ops: Any) -> AnyModel:
    options: dict[str, Any] = {"device": META, "dtype": train.dtype, "initialized": False}
    if isinstance(config, ModelConfig):
        options |= {"ops": "reference", "recompute": train.recompute, "freeze": train.freeze, "lora": train.lora}
        options["dtype"] = "bfloat16" if train.dtype == "fp8" else train.dtype  # fp8 stores the same tensors
    model = build_model(config, **options)
    if ops is not None:
        model.ops = ops
    return model


def _step(model: AnyModel, optimizer: Any, tokens: Tensor, targets: Tensor, train: TrainConfig) -> None:
    """training/step.py without reading values. One micro-batch of each kind, since later ones reuse its blocks; twice, since
    the second pass is captured if the set can do that."""
    rows = train.batch_size
    for accumulate in (False, True) if train.grad_accum > 1 else (False,):
        for _ in range(2 if model.ops.capture else 1):
            model.forward_backward(tokens[:rows], targets[:rows], num_targets=1, step=0, accumulate=accumulate, check=False)
    (model.ops.grad_norm or grad_norm)(model.store.flat_grads)
    optimizer.step(scale=0.5, copy=model.store.copy)


def _evaluation(model: AnyModel, windows: Tensor) -> None:
    """Two batches, of which the second is captured if the set can do that."""
    for _ in range(2):
        model.loss(windows, windows, num_targets=1, check=False)


def saved_of(config: AnyModelConfig, train: TrainConfig, ops: str, *, first_block: int) -> int:
    """ops: the name of the set that will be used. first_block: the first block that saves activations."""
    assert train.seq_len is not None
    if isinstance(config, ModelConfig):
        dry, size = dry_ops(ops), (train.batch_size, train.seq_len)
        with LiveBytes():
            found = saved_bytes(config, *size, train.recompute, train.dtype, ops=dry.ops if dry else REFERENCE)
        unsaved = tuple(f"blocks.{i}." for i in range(first_block))
        return sum(size for name, size in found.items() if not name.startswith(unsaved))
    # SimpleLM: the embedding, the hidden layer before and after its activation
    itemsize = DTYPES[train.dtype][1].itemsize
    return train.batch_size * train.seq_len * (2 * config.hidden_dim + 2 * config.intermediate_dim) * itemsize
