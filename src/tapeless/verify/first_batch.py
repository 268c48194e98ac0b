"""A few seconds before a run's first step: the gradients of this very model, on its first batch, before the judges.

Its weights are copied in float64 on the CPU, and three directions through all of them held against the complex step; then the
gradient in the run's own dtype, on its own device and with its own ops, is held against the one in float64. A model above
CHECKED parameters has its architecture checked at fixture sizes instead of the first half."""

from collections.abc import Iterator

from torch import Tensor

from tapeless.model.build import AnyModel, build_model
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import ModelCase, loss_with_gradients, shrunk
from tapeless.verify.full_size import along_directions
from tapeless.verify.model_levels import check_model
from tapeless.verify.tolerances import MODEL_BFLOAT16, MODEL_FLOAT32, MODEL_TWIN

CHECKED = 30_000_000
ROWS, LENGTH = 2, 32  # of the batch: enough for every op to have something to do
BOUNDS = {"float64": MODEL_TWIN, "float32": MODEL_FLOAT32, "bfloat16": MODEL_BFLOAT16}


def first_batch_findings(
    model: AnyModel,
    tokens: Tensor,  # (B, T) int64
    targets: Tensor,  # (B, T) int64
) -> Iterator[Finding]:
    if model.num_params > CHECKED:
        yield from check_model(ModelCase("architecture", shrunk(model.config)))
        return
    tokens, targets = tokens[:ROWS, :LENGTH], targets[:ROWS, :LENGTH]
    judge = build_model(model.config, seed=model.seed, dtype="float64")
    judge.store.flat.copy_(model.store.flat)
    loss_with_gradients(judge, tokens.cpu(), targets.cpu())
    yield from along_directions(judge, tokens.cpu(), targets.cpu(), "first batch")
    model.zero_grads()
    loss_with_gradients(model, tokens, targets)
    _, error, _ = distance(model.store.flat_grads, judge.store.flat_grads)
    yield Finding("L2", "first batch", "own float64", f"all gradients, {model.dtype}", error, BOUNDS[model.dtype])
    model.zero_grads()
