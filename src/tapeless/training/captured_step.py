"""A training step that is captured once and then replayed: a CUDA graph on a GPU, a list of calls on a CPU.

    tokens, targets, documents, the optimizer's step scalars, the loss limit  ->  buffers that the captured step reads
    zero, forward, backward of every micro-batch, norm, clipping, update, bfloat16 copy
    loss, norm, whether the ids are valid  ->  numbers that the host reads back
The first step of a shape runs, which compiles the kernels; the second is captured (model/replay.py). Decisions are made on the
device: a loss above its limit, a non-finite loss or norm, or an id outside the vocabulary sets the scale of the update to NaN,
and the update then changes nothing. The host raises afterwards, as train_step does.
Tested by: tests/train/test_captured_step.py."""

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from tapeless.config import TrainConfig
from tapeless.dist.gradient_sum import GradientSum, InPlace
from tapeless.dist.world import ALONE
from tapeless.errors import InputError, NonFiniteError
from tapeless.model.build import AnyModel
from tapeless.model.check import check_documents, check_shapes, check_targets, check_tokens
from tapeless.model.replay import CapturedPasses
from tapeless.model.transformer import Transformer
from tapeless.ops.cross_entropy import IGNORED
from tapeless.ops.numerics import HostCopy
from tapeless.optim.flat import CapturableOptimizer, FlatOptimizer
from tapeless.training.step import StepResult, micro_batches

log = logging.getLogger("tapeless")
SHAPES = 2  # most shapes to capture, since each has its own activations; steps of other shapes run


def captured_step(
    model: AnyModel, optimizer: FlatOptimizer, config: TrainConfig, reduction: GradientSum | None = None
) -> "CapturedStep | None":
    """The captured step; None if it cannot be captured, for a GPU with the reason in the log. reduction: as for train_step, by
    default grad_accum micro-batches in place."""
    reduction = reduction or InPlace(ALONE, config.grad_accum, model.store.flat_grads)
    reason = _obstacle(model, optimizer, reduction)
    if reason is not None:
        if model.device.type == "cuda":
            log.warning("CUDA graph disabled: %s; running eagerly", reason)
        return None
    assert isinstance(model, Transformer)
    assert isinstance(optimizer, CapturableOptimizer)
    if model.device.type == "cpu" and not optimizer.one_kernel:
        return None  # train_step is faster, and its passes are captured
    return CapturedStep(model, optimizer, reduction, grad_clip=config.grad_clip)


def _obstacle(model: AnyModel, optimizer: FlatOptimizer, reduction: GradientSum) -> str | None:
    if reduction.world.size > 1:
        return "ranks exchange gradients within a step"
    if not isinstance(model, Transformer) or model.ops.capture is None or model.ops.grad_norm is None:
        return f"ops {model.ops.name!r} synchronize within a step"
    return not_capturable(model, optimizer)


def not_capturable(model: Transformer, optimizer: FlatOptimizer) -> str | None:
    """Why no ops could capture its step; None if those of a GPU can."""
    if not isinstance(optimizer, CapturableOptimizer):
        return f"a step of {type(optimizer).__name__} cannot be captured"
    if model.config.dropout:
        return "dropout masks depend on the step number, which a graph cannot change"
    return None


class CapturedStep:
    def __init__(self, model: Transformer, optimizer: CapturableOptimizer, reduction: GradientSum, *, grad_clip: float):
        self.model, self.optimizer, self.reduction, self.grad_clip = model, optimizer, reduction, grad_clip
        # Where reading waits for nothing, bad ids are found before the step, which names their position.
        self.checks_first = model.device.type == "cpu"
        self.step_scalars = optimizer.step_scalars(1).to(model.device)  # (k,)
        self.loss_limit = torch.zeros((), dtype=torch.float64, device=model.device)
        self._captured = CapturedPasses(SHAPES)

    def __call__(
        self,
        tokens: Tensor,  # (k*B, T) int64
        targets: Tensor,  # (k*B, T) int64
        documents: Tensor | None = None,  # (k*B, T) int64
        *,
        lr: float,
        step: int,
        loss_limit: float = math.inf,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> StepResult:
        """loss_limit: above it, nothing is updated (guard.py). meanwhile: called while a GPU computes."""
        batch = self._checked(tokens, targets, documents)
        self.optimizer.lr = lr
        # A graph is captured on the current device, which may not be the model's.
        with torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext():
            self.step_scalars.copy_(self.optimizer.step_scalars(self.optimizer.t + 1))
            self.loss_limit.fill_(loss_limit)
            report = HostCopy(self._run(batch))
        meanwhile()
        loss, norm, good_ids = report.read()
        self._judge(loss, norm, good_ids, step)
        skipped = loss > loss_limit
        self.optimizer.t += not skipped
        return StepResult(loss, norm, skipped)

    def _checked(self, tokens: Tensor, targets: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
        if self.checks_first:
            check_tokens(tokens, self.model.config.vocab_size, self.model.device)
            check_targets(targets, tokens, self.model.config.vocab_size)
        else:
            check_shapes(tokens, targets)
        if documents is not None:
            check_documents(documents, tokens)
        return tuple(x.to(self.model.device) for x in (tokens, targets, documents) if x is not None)

    def _run(self, batch: tuple[Tensor, ...]) -> Tensor:  # (3,) float64
        model, store = self.model, self.model.store
        if model.ops.begin is not None:
            model.ops.begin()
        self._copy = store.copy  # asked for at every step, so that the store knows which version of the parameters it holds
        (report,) = self._captured.run(model.ops, store.refresh, self._step, batch, model.recompute)
        store.flat[:0].zero_()  # raises torch's version counter of the parameters, which the replay of a graph does not
        store.mark_copied()
        return report

    def _step(self, *batch: Tensor) -> tuple[Tensor]:  # (k*B, T) int64: tokens, targets, documents -> (3,) float64
        """The whole step without reading a value: what can be captured."""
        model, (tokens, targets) = self.model, batch[:2]
        count = (targets != IGNORED).sum().clamp_min(1).float()
        losses: list[Tensor] = []
        for i, (x, y, *document_ids) in enumerate(micro_batches(self.reduction.num_micro_batches, *batch)):
            documents = document_ids[0] if document_ids else None
            accumulate = i > 0 and self.reduction.accumulates
            losses.append(
                model.forward_backward(x, y, num_targets=count, documents=documents, accumulate=accumulate, check=False)
            )
            self.reduction.add(i)
        self.reduction.finish()
        assert model.ops.grad_norm is not None
        loss, norm = sum(losses[1:], losses[0]).double(), model.ops.grad_norm(model.store.flat_grads)
        scale = (self.grad_clip / norm).clamp_max(1.0) if self.grad_clip > 0 else torch.ones_like(norm)
        good_ids = self._good_ids(tokens, targets)
        usable = good_ids & (loss + norm).isfinite() & (loss <= self.loss_limit)
        self.optimizer.update_on_device(self.step_scalars, torch.where(usable, scale, math.nan).float(), self._copy)
        return (torch.stack([loss, norm, good_ids.double()]),)

    def _good_ids(self, tokens: Tensor, targets: Tensor) -> Tensor:  # () bool
        if self.checks_first:
            return torch.ones((), dtype=torch.bool)
        V = self.model.config.vocab_size
        good_targets = (targets == IGNORED) | ((targets >= 0) & (targets < V))
        return ((tokens >= 0) & (tokens < V) & good_targets).all()

    def _judge(self, loss: float, norm: float, good_ids: float, step: int) -> None:
        if not good_ids:
            V = self.model.config.vocab_size
            raise InputError(f"step {step + 1}: an id is outside the vocabulary of {V}; nothing was updated")
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.model.store.raise_if_non_finite()
            raise NonFiniteError(f"step {step + 1}: loss {loss}, gradient norm {norm}; nothing was updated: try a smaller lr")
