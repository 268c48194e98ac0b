"""A training step as one CUDA graph: captured once, then replayed without Python and without gaps between kernels.

    tokens, targets, the optimizer's step scalars, the loss limit  ->  buffers that the graph reads
    zero, forward, backward of every micro-batch, norm, clipping, update, bfloat16 copy
    loss, norm, whether the ids are valid, whether the update was skipped  ->  numbers that the host reads back
The first step of a shape runs eagerly, which compiles the kernels; the second is captured. Decisions are made on the device: a
loss above its limit, a non-finite loss or norm, or an id outside the vocabulary sets the scale of the update to NaN, and the
update then changes nothing. The host raises afterwards, as train_step does.
Tested by: tests/train/test_graph.py."""

import logging
import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.config import TrainConfig
from tapeless.errors import InputError, NonFiniteError
from tapeless.model.build import AnyModel
from tapeless.model.check import check_shapes
from tapeless.model.transformer import Transformer
from tapeless.ops.cross_entropy import IGNORED
from tapeless.optim.flat import FlatOptimizer
from tapeless.training.step import StepResult, micro_batches

log = logging.getLogger("tapeless")
SHAPES = 2  # most shapes to capture, since each graph has its own activations; steps of other shapes run eagerly


def graphed_step(model: AnyModel, optimizer: FlatOptimizer, config: TrainConfig) -> "GraphedStep | None":
    """The captured step; None if it cannot be captured, with the reason in the log."""
    if model.device.type != "cuda":
        return None
    reason = _no_graph_reason(model, optimizer, config)
    if reason is not None:
        log.warning("CUDA graph disabled: %s; running eagerly", reason)
        return None
    assert isinstance(model, Transformer)
    return GraphedStep(model, optimizer, grad_clip=config.grad_clip, grad_accum=config.grad_accum)


def _no_graph_reason(model: AnyModel, optimizer: FlatOptimizer, config: TrainConfig) -> str | None:
    if not isinstance(model, Transformer) or not model.ops.capturable or model.ops.grad_norm is None:
        return f"ops {model.ops.name!r} synchronize within a step"
    if not optimizer.capturable:
        return f"a step of {type(optimizer).__name__} cannot be captured"
    if model.config.dropout:
        return "dropout masks depend on the step number, which a graph cannot change"
    if config.document_attention:
        return "document masking is not captured"
    return None


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # (k*B, T) int64
    targets: Tensor  # (k*B, T) int64
    report: Tensor  # (4,) float64: loss, norm, whether the ids are valid, whether the loss is above its limit


class GraphedStep:
    def __init__(self, model: Transformer, optimizer: FlatOptimizer, *, grad_clip: float, grad_accum: int):
        self.model, self.optimizer, self.grad_clip, self.grad_accum = model, optimizer, grad_clip, grad_accum
        scalars = optimizer.step_scalars(1)
        self._inputs = torch.zeros(len(scalars) + 1, dtype=torch.float32, device=model.device)
        self.step_scalars, self.loss_limit = self._inputs[:-1], self._inputs[-1]  # (k,); ()
        self._seen: set[torch.Size] = set()
        self._captured: dict[torch.Size, Captured] = {}

    def __call__(
        self,
        tokens: Tensor,  # (k*B, T) int64
        targets: Tensor,  # (k*B, T) int64
        *,
        lr: float,
        step: int,
        loss_limit: float = math.inf,
    ) -> StepResult:
        check_shapes(tokens, targets)
        self.optimizer.lr = lr
        # A graph is captured on the current device, which may not be the model's.
        with torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext():
            scalars = self.optimizer.step_scalars(self.optimizer.t + 1)
            self._inputs.copy_(torch.cat([scalars, torch.tensor([loss_limit])]))
            self.model.store.refresh()
            report = self._run(tokens.to(self.model.device), targets.to(self.model.device))
            loss, norm, good_ids, skipped = report.tolist()
        self._judge(loss, norm, good_ids, step)
        self.optimizer.t += not skipped
        return StepResult(loss, norm, bool(skipped))

    def _run(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (4,) float64
        shape = tokens.shape
        full = len(self._captured) >= SHAPES
        if shape not in self._captured and (shape not in self._seen or full):
            if shape not in self._seen and full:
                log.info("%d shapes are captured already: a step of %d x %d runs eagerly", SHAPES, *shape)
            self._seen.add(shape)
            return self._step(tokens, targets)
        if shape not in self._captured:
            self._captured[shape] = self._capture(tokens, targets)
        captured = self._captured[shape]
        captured.tokens.copy_(tokens)
        captured.targets.copy_(targets)
        captured.graph.replay()
        self.model.store.flat[:0].zero_()  # raises torch's version counter of the parameters, which a replay does not
        self.model.store.mark_copied()
        return captured.report

    def _capture(self, tokens: Tensor, targets: Tensor) -> Captured:
        torch.cuda.empty_cache()  # the graph has its own pool; free what the step before left cached
        graph, own_tokens, own_targets = torch.cuda.CUDAGraph(), tokens.clone(), targets.clone()
        with torch.cuda.graph(graph):
            report = self._step(own_tokens, own_targets)
        log.info("captured a CUDA graph of a step of %d x %d tokens", *tokens.shape)
        return Captured(graph, own_tokens, own_targets, report)

    def _step(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (4,) float64
        """The whole step without a synchronization: what a graph can hold."""
        model, V = self.model, self.model.config.vocab_size
        ignored = targets == IGNORED
        good = ((tokens >= 0) & (tokens < V) & (ignored | ((targets >= 0) & (targets < V)))).all()
        count = (~ignored).sum().clamp_min(1).float()
        losses: list[Tensor] = []
        for x, y in micro_batches(self.grad_accum, tokens, targets):
            losses.append(model.forward_backward(x, y, num_targets=count, accumulate=bool(losses), check=False))
        loss = sum(losses[1:], losses[0])
        assert model.ops.grad_norm is not None
        norm = model.ops.grad_norm(model.store.flat_grads)
        scale = torch.ones_like(norm)
        if self.grad_clip > 0:
            scale = torch.where(norm > self.grad_clip, self.grad_clip / norm, scale)
        skipped = loss > self.loss_limit
        scale = torch.where(good & loss.isfinite() & norm.isfinite() & ~skipped, scale, math.nan)
        self.optimizer.update_on_device(self.step_scalars, scale.float(), model.store.copy)
        model.store.mark_copied()
        return torch.stack([loss.double(), norm, good.double(), skipped.double()])

    def _judge(self, loss: float, norm: float, good_ids: float, step: int) -> None:
        if not good_ids:
            V = self.model.config.vocab_size
            raise InputError(f"step {step + 1}: an id is outside the vocabulary of {V}; nothing was updated")
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.model.store.raise_if_non_finite()
            raise NonFiniteError(f"step {step + 1}: loss {loss}, gradient norm {norm}; nothing was updated: try a smaller lr")
