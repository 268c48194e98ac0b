"""Before a run's first step, in a few seconds: the gradients of this very model on its first batch are checked.

Its weights are copied to float64 on the CPU, and the gradients along three directions through all of them compared with the
complex step. Then every gradient in the run's own dtype, on its own device and with its own ops, is compared with the float64
one. Rounding accumulates with depth, so for ops other than the reference the bound is a few times the error that the reference
ops make in the same dtype. A model above CHECKED parameters is checked by its architecture instead, in the same way at fixture
sizes. Every training run imports this module, so it imports little of this package.
Tested by: tests/verify/test_first_batch.py."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tapeless.model.build import AnyModel, build_model
from tapeless.model.simple_lm import SimpleLM
from tapeless.ops.cross_entropy import IGNORED
from tapeless.ops.reference import REFERENCE
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import (
    FIRST_SAMPLE,
    STEP,
    Batch,
    batch,
    blank_model,
    loss_with_gradients,
    move_off_init,
    shrunk,
    trains_of,
    zero_by_identity,
)
from tapeless.verify.oracles import COMPLEX_H, directional_error, directions
from tapeless.verify.tolerances import COMPLEX_STEP, FIRST_BATCH, kernel_bound

CHECKED = 30_000_000
ROWS, LENGTH = 2, 32  # of the batch: enough for every op to have something to do


def first_batch_findings(
    model: AnyModel,
    tokens: Tensor,  # (B, T) int64
    targets: Tensor,  # (B, T) int64
    documents: Tensor | None = None,  # (B, T) int64: attention stays inside each
) -> Iterator[Finding]:
    check = "first batch"
    if model.num_params > CHECKED:
        model, check = _rebuilt(model, small=True), "architecture"
        move_off_init(model, seed=1)
        tokens, targets = (x.to(model.device) for x in batch())
        documents = (
            None if documents is None else (torch.arange(tokens.shape[1], device=model.device) >= 3).expand_as(tokens).long()
        )
    part = _part(tokens, targets, documents)
    judge = _rebuilt(model, dtype="float64", device="cpu", ops="reference")
    _run(judge, part)
    on_host = part.to("cpu")
    yield from along_directions(judge, on_host.tokens, on_host.targets, check, documents=on_host.documents)
    bounds = dict.fromkeys(model.grads, FIRST_BATCH[model.dtype])
    if not isinstance(model, SimpleLM) and model.ops is not REFERENCE and model.dtype != "fp8":  # which only its own set has
        plain = _rebuilt(model, device="cpu", ops="reference")
        _run(plain, part)
        errors = {name: distance(g, judge.grads[name]).l2 for name, g in plain.grads.items()}
        bounds = {name: kernel_bound(error, model.dtype) for name, error in errors.items()}
    _run(model, part)
    zeros = zero_by_identity(model.config, _longest(part))
    for name, g in model.grads.items():
        if name not in zeros:
            gap = distance(g, judge.grads[name])
            yield Finding("L2", f"{check}, {model.dtype}", "own float64", name, gap.l2, bounds[name], gap.where)
    model.zero_grads()


def along_directions(
    model: AnyModel,  # in float64, with the gradients of this batch
    tokens: Tensor,  # (B, T) int64
    targets: Tensor,  # (B, T) int64
    check: str,
    seed: int = 0,
    *,
    documents: Tensor | None = None,  # (B, T) int64
) -> Iterator[Finding]:
    """Its gradients along three directions through all parameters, against the complex step."""
    lifted = blank_model(model.config, "complex128", seed=model.seed, **trains_of(model))
    lifted.store.flat.copy_(model.store.flat)
    for kind, direction in directions(model.grads, torch.Generator().manual_seed(seed)):
        for name, v in direction.items():  # p + ih v, in place: the parameters may fill half of the memory
            torch.view_as_real(lifted.params[name])[..., 1] = COMPLEX_H * v
        loss = loss_with_gradients(lifted, tokens, targets, documents, backward=False)
        error = directional_error(model.grads, direction, float(loss.imag) / COMPLEX_H)
        yield Finding("L2", check, "complex step", f"along {kind}", error, COMPLEX_STEP)


def _rebuilt(model: AnyModel, small: bool = False, **changes: Any) -> AnyModel:
    """Another model of the same settings but for `changes`: with the same weights, or at fixture sizes."""
    options: dict[str, Any] = {"seed": model.seed, "dtype": model.dtype, "device": model.device}
    if not isinstance(model, SimpleLM):
        options |= {"ops": model.ops.name, "recompute": model.recompute, **trains_of(model)}
    options |= {key: value for key, value in changes.items() if key in options}
    if small:
        return build_model(shrunk(model.config), **options)
    other = build_model(model.config, **options, initialized=False)
    other.store.flat.copy_(model.store.flat)
    return other


def _part(tokens: Tensor, targets: Tensor, documents: Tensor | None) -> Batch:  # (B, T) int64 each
    """Some rows and columns with targets among them: behind a long prompt nothing counts for a while, and what does not count
    proves nothing."""
    counts = (targets[:ROWS] != IGNORED).any(0)  # (T,)
    first = int(counts.int().argmax())
    start = max(0, min(first - LENGTH // 2, tokens.shape[1] - LENGTH))
    some = (slice(ROWS), slice(start, start + LENGTH))
    return Batch(tokens[some], targets[some], None if documents is None else documents[some])


def _longest(part: Batch) -> int:
    """Positions of the longest document: where all have one, nothing is attended to but itself."""
    if part.documents is None:
        return part.tokens.shape[1]
    return max(int(torch.unique_consecutive(row, return_counts=True)[1].max()) for row in part.documents)


def _run(model: AnyModel, part: Batch) -> None:
    """One step as in training, which is forward and backward in one call."""
    model.zero_grads()
    tokens, targets, documents = part.to(model.device)
    options: dict[str, Any] = {"step": STEP, "first_sample": FIRST_SAMPLE, "documents": documents}
    model.forward_backward(tokens, targets, **({} if isinstance(model, SimpleLM) else options))
