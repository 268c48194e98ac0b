"""One training step: micro-batches forward and backward, the true gradient norm, clipping, the schedule, the update.

    loss = sum of token losses / valid targets of all micro-batches together
Each micro-batch is divided by the count of all of them, so that however a batch is cut, the gradient is the same: the mean
over tokens, not the mean of means.
Tested by: tests/train/test_step.py and level L4 (verify/training.py)."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tapeless.config import TrainConfig
from tapeless.errors import InputError, NonFiniteError
from tapeless.model.build import AnyModel
from tapeless.ops.cross_entropy import valid_targets
from tapeless.optim import make_optimizer
from tapeless.optim.clip import clip_scale, grad_norm
from tapeless.optim.ema import Ema
from tapeless.optim.flat import FlatOptimizer


class StepResult(NamedTuple):
    loss: float
    grad_norm: float  # before clipping
    skipped: bool = False  # the loss was above its limit: nothing was updated


class StepMetrics(NamedTuple):
    step: int  # steps taken, this one included
    epoch: int
    tokens: int  # seen so far
    loss: float
    lr: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float


def optimizer_of(model: AnyModel, config: TrainConfig) -> FlatOptimizer:
    """The optimizer that a configuration describes, with the model's own kernels where its ops have them."""
    decay = {spec.name for spec in model.store.layout.specs.values() if spec.decay}
    return make_optimizer(model.params, model.grads, config, decay, fused=model.ops.adam_update)


def ema_of(model: AnyModel, config: TrainConfig) -> Ema | None:
    """The moving average that a configuration asks for, of what trains."""
    return Ema({name: model.params[name] for name in model.grads}, config.ema_decay) if config.ema_decay else None


def accumulate_gradients(
    model: AnyModel,
    tokens: Tensor,  # (k*B, T) int64
    targets: Tensor,  # (k*B, T) int64
    documents: Tensor | None = None,  # (k*B, T) int64
    *,
    grad_accum: int,
    step: int,
    first_sample: int,
    check: bool = True,
) -> float:
    """The gradients of `grad_accum` micro-batches together, whatever they held before; returned is the loss of all of them.
    check: False goes on behind a bad number; of transformers alone."""
    num_targets = valid_targets(targets)
    losses: list[Tensor] = []
    for x, y, *document_ids in micro_batches(grad_accum, tokens, targets, *([] if documents is None else [documents])):
        options: dict[str, Any] = {"documents": document_ids[0]} if document_ids else {}
        options |= {} if check else {"check": False}
        options |= {"num_targets": num_targets, "step": step, "first_sample": first_sample, "fresh": not losses}
        losses.append(model.forward_backward(x, y, **options))
        first_sample += len(x)
    return float(sum(losses))


def micro_batches(
    k: int,
    *batch: Tensor,  # (k*B, T): tokens, targets, and documents where there are any
) -> Iterator[tuple[Tensor, ...]]:  # k times (B, T) of each
    count = len(batch[0])
    if count % k:
        raise InputError(f"a batch of {count} rows cannot be cut into grad_accum = {k} equal micro-batches")
    return zip(*(x.split(count // k) for x in batch), strict=True)


def train_step(
    model: AnyModel,
    optimizer: FlatOptimizer,
    tokens: Tensor,  # (k*B, T) int64
    targets: Tensor,  # (k*B, T) int64
    documents: Tensor | None = None,  # (k*B, T) int64
    *,
    lr: float,
    grad_clip: float,
    grad_accum: int,
    step: int,
    first_sample: int,
    loss_limit: float = math.inf,
) -> StepResult:
    """loss_limit: above it, nothing is updated (guard.py)."""
    loss = accumulate_gradients(model, tokens, targets, documents, grad_accum=grad_accum, step=step, first_sample=first_sample)
    norm = float((model.ops.grad_norm or grad_norm)(model.store.flat_grads))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFiniteError(f"step {step + 1}: loss {loss}, gradient norm {norm}; nothing was updated: try a smaller lr")
    if loss > loss_limit:
        return StepResult(loss, norm, skipped=True)
    optimizer.lr = lr
    if optimizer.step(scale=clip_scale(norm, grad_clip), copy=model.store.copy):
        model.store.copied()
    return StepResult(loss, norm)
