"""One training step: micro-batches forward and backward, the true gradient norm, clipping, the schedule, the update.

    loss = sum of token losses / valid targets of all micro-batches together
Each micro-batch is divided by the number of targets of all of them, so that the gradient does not depend on how a batch is
split: the mean over tokens, not the mean of means. On several ranks every rank is given the whole batch and computes some of
its micro-batches; then all have the same gradients, and do the same update.
Tested by: tests/train/test_step.py and level L4 (tests/levels/training.py)."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from tapeless.config import TrainConfig
from tapeless.dist.gradient_sum import GradientSum, InPlace
from tapeless.dist.world import ALONE
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
    skipped: bool = False  # the loss was above the limit: no update


class StepMetrics(NamedTuple):
    step: int  # steps taken, this one included
    epoch: int
    tokens: int  # seen so far
    loss: float
    lr: float
    grad_norm: float
    step_seconds: float  # of the step itself
    tokens_per_second: float  # since the end of the last step: with batch loading, without evaluations, saves and samples


def optimizer_of(model: AnyModel, config: TrainConfig) -> FlatOptimizer:
    """The optimizer that a configuration describes, with the model's fused kernel if its ops have one."""
    decay = {spec.name for spec in model.store.layout.specs.values() if spec.decay}
    return make_optimizer(model.params, model.grads, config, decay, model.ops)


def ema_of(model: AnyModel, config: TrainConfig) -> Ema | None:
    """The moving average of the trained weights, if ema_decay is set."""
    return Ema({name: model.params[name] for name in model.grads}, config.ema_decay) if config.ema_decay else None


def accumulate_gradients(
    model: AnyModel,
    tokens: Tensor,  # (k*B, T) int64
    targets: Tensor,  # (k*B, T) int64
    documents: Tensor | None = None,  # (k*B, T) int64
    *,
    grad_accum: int = 1,
    step: int,
    first_sample: int,
    check: bool = True,
    reduction: GradientSum | None = None,
) -> float:
    """Overwrites the gradients with those of all micro-batches together; returns the loss of all of them.
    check: False continues after a non-finite value (transformers only). reduction: which micro-batches this rank computes, and
    how they are added; by default all `grad_accum` of them, in place."""
    reduction = reduction or InPlace(ALONE, grad_accum, model.store.flat_grads)
    num_targets = valid_targets(targets)
    parts = micro_batches(reduction.num_micro_batches, tokens, targets, *([] if documents is None else [documents]))
    losses: list[Tensor] = []
    for i in reduction.mine:
        x, y, *document_ids = parts[i]
        options: dict[str, Any] = {"documents": document_ids[0]} if document_ids else {}
        options |= {} if check else {"check": False}
        options |= {"num_targets": num_targets, "step": step, "first_sample": first_sample + i * len(x)}
        options |= {"accumulate": bool(losses) and reduction.accumulates}
        losses.append(model.forward_backward(x, y, **options))
        reduction.add(len(losses) - 1)
    if len(losses) < reduction.rounds:
        reduction.add(len(losses))
    reduction.finish()
    return float(sum(reduction.in_order(losses)))


def micro_batches(
    k: int,
    *batch: Tensor,  # (k*B, T): tokens, targets, and document ids if masked
) -> list[tuple[Tensor, ...]]:  # k times (B, T) of each
    count = len(batch[0])
    if count % k:
        raise InputError(f"a batch of {count} rows cannot be split into {k} equal micro-batches")
    return list(zip(*(x.split(count // k) for x in batch), strict=True))


def train_step(
    model: AnyModel,
    optimizer: FlatOptimizer,
    tokens: Tensor,  # (k*B, T) int64
    targets: Tensor,  # (k*B, T) int64
    documents: Tensor | None = None,  # (k*B, T) int64
    *,
    lr: float,
    grad_clip: float,
    grad_accum: int = 1,
    step: int,
    first_sample: int,
    loss_limit: float = math.inf,
    reduction: GradientSum | None = None,
) -> StepResult:
    """loss_limit: above it, nothing is updated (guard.py). grad_accum, reduction: see accumulate_gradients."""
    options: dict[str, Any] = {"grad_accum": grad_accum, "reduction": reduction, "step": step, "first_sample": first_sample}
    loss = accumulate_gradients(model, tokens, targets, documents, **options)
    norm = float((model.ops.grad_norm or grad_norm)(model.store.flat_grads))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFiniteError(f"step {step + 1}: loss {loss}, gradient norm {norm}; nothing was updated: try a smaller lr")
    if loss > loss_limit:
        return StepResult(loss, norm, skipped=True)
    if optimizer.step(lr, scale=clip_scale(norm, grad_clip), copy=model.store.copy):
        model.store.mark_copied()
    return StepResult(loss, norm)
