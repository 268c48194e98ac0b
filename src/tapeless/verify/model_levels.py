"""Checks of whole models: every float64 oracle (L2), and runs that must not change a gradient (L5)."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import (
    FIRST_SAMPLE,
    ModelCase,
    build,
    data_of,
    gradients,
    loss_with_gradients,
    move_off_init,
    zero_by_identity,
)
from tapeless.verify.model_judges import (
    by_autograd,
    by_complex_step,
    by_differences,
    by_slope,
    compared,
    largest_gap,
    rounding_floor,
)
from tapeless.verify.tolerances import ACCUMULATION


def check_model(case: ModelCase) -> Iterator[Finding]:
    """Every float64 oracle on one architecture."""
    data = data_of(case)
    grads = gradients(build(case), data)
    bad = [name for name, g in grads.items() if not torch.isfinite(g).all()]
    if bad:  # no direction can be taken along it
        yield Finding("L2", f"model[{case.name}]", "finite", bad[0], math.inf, 0.0)
        return
    for judge in (by_autograd, by_complex_step, by_differences, by_slope):
        yield from judge(case, data, grads)


def by_recompute(case: ModelCase, dtype: str) -> Iterator[Finding]:
    """Recomputed activations give equal gradients bit for bit, and so does a second run after zeroing the gradients."""
    data, model = data_of(case), build(case, dtype, "none")
    kept = gradients(model, data)
    runs: dict[str, Callable[[], dict[str, Tensor]]] = {
        "repetition": lambda: gradients(model, data),
        "recompute cheap": lambda: gradients(build(case, dtype, "cheap"), data),
        "recompute full": lambda: gradients(build(case, dtype, "full"), data),
    }
    for oracle, run in runs.items():
        yield largest_gap("L5", f"model[{case.name}, {dtype}]", oracle, run(), kept)


def by_interruption(case: ModelCase, dtype: str) -> Iterator[Finding]:
    """Between a forward and its backward another model runs, with other data: state that a kernel keeps between calls would be
    overwritten."""
    data, model, other = data_of(case), build(case, dtype), build(case, dtype)
    expected = gradients(model, data)
    move_off_init(other, seed=2)
    model.zero_grads()
    loss_with_gradients(model, *data, backward=False)
    gradients(other, data.samples(1, 0))
    model.backward()
    yield largest_gap("L5", f"model[{case.name}, {dtype}]", "other work in between", dict(model.grads), expected)


def by_accumulation(case: ModelCase, dtype: str) -> Iterator[Finding]:
    """Unequal micro-batches, each divided by the targets of all, add up to the batch; dropout differs between samples."""
    data, model = data_of(case), build(case, dtype)
    whole = gradients(model, data)
    model.zero_grads()
    count = int((data.targets != -100).sum())
    for index in ((0,), (1, 2)):
        loss_with_gradients(model, *data.samples(*index), num_targets=count, first_sample=FIRST_SAMPLE + index[0])
    zeros, floor = zero_by_identity(case.config, data.tokens.shape[1]), rounding_floor(dtype)
    check = f"model[{case.name}, {dtype}]"
    yield from compared("L5", check, "one batch", model.grads, whole, ACCUMULATION[dtype], zeros=zeros, floor=floor)
