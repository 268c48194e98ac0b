"""The levels for a kernel set: what can be checked of ops that compute in float32 and bfloat16 only.

    L0, L1   each of its ops, and the optimizer's kernels            kernel_ops.py, kernel_update.py
    L2       whole models against the reference ops in float64, with bounds relative to their error in the same dtype
    L5       every recompute policy, repetition, other work in between, micro-batches
    L6       causality, documents, kv_cache, order of the batch, padding, identities, in float32
L3, L4 and the rest of L5 need a checkout of the repository: tests/levels/kernels.py.
Tested by: tests/verify/test_kernel_levels.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product

import torch
from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.errors import MissingError
from tapeless.kernels.choose import choose
from tapeless.ops.op import OpSet
from tapeless.verify.cases import cases_of
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import (
    PARTLY_TRAINED_CASES,
    TRANSFORMER_CASES,
    ModelCase,
    Setting,
    T,
    build,
    data_of,
    gradients,
    move_off_init,
    zero_by_identity,
)
from tapeless.verify.kernel_ops import kernel_level_0, kernel_level_1
from tapeless.verify.kernel_update import update_findings
from tapeless.verify.metamorphic import check_metamorphic, sums_are_wide
from tapeless.verify.model_judges import by_accumulation, by_interruption, by_precision, by_recompute
from tapeless.verify.oracles import Point
from tapeless.verify.tolerances import kernel_bound

NARROW = ("float32", "bfloat16")
Judge = Callable[[ModelCase, str], Iterator[Finding]]
SEEDS = range(1, 4)  # of the weights: for one seed the reference's error may be small by chance


def op_set(on: Setting, dtype: str = "float32") -> OpSet:
    return choose(on.ops, torch.device(on.device), dtype).ops


def narrow_dtypes(on: Setting) -> tuple[str, ...]:
    """The dtypes a set is checked in: float32, and bfloat16 if it supports it."""
    op_set(on)
    try:
        op_set(on, "bfloat16")
    except MissingError:
        return NARROW[:1]
    return NARROW


def kernel_levels(on: Setting) -> dict[str, Callable[[], Iterator[Finding]]]:
    dtypes, cases = narrow_dtypes(on), list(cases_of(op_set(on), on.device))
    whole, partly = ([case._replace(on=on) for case in some] for some in (TRANSFORMER_CASES, PARTLY_TRAINED_CASES))
    return {
        "L0": lambda: kernel_level_0(cases),
        "L1": lambda: chain(kernel_level_1(cases, dtypes), update_findings(op_set(on), on.device)),
        "L2": lambda: kernel_level_2([*whole, *partly], dtypes),
        "L5": lambda: in_each_dtype([*whole, *partly], dtypes, (by_recompute, by_interruption, by_accumulation)),
        "L6": lambda: kernel_level_6(whole, on, dtypes),
    }


def ops_findings(on: Setting, only: str | None = None) -> Iterator[Finding]:
    """L0 and L1: the ops of a set alone, or one of them."""
    cases = list(cases_of(op_set(on), on.device, only))
    yield from kernel_level_0(cases)
    yield from kernel_level_1(cases, narrow_dtypes(on))
    if only is None:
        yield from update_findings(op_set(on), on.device)


def kernel_level_2(models: Sequence[ModelCase], dtypes: Sequence[str]) -> Iterator[Finding]:
    for case in models:
        yield from by_precision(case, dtypes)
    yield from in_each_dtype(models, dtypes, [by_reference])


def in_each_dtype(models: Sequence[ModelCase], dtypes: Sequence[str], judges: Sequence[Judge]) -> Iterator[Finding]:
    for case, dtype, judge in product(models, dtypes, judges):
        yield from judge(case, dtype)


def kernel_level_6(models: Sequence[ModelCase], on: Setting, dtypes: Sequence[str]) -> Iterator[Finding]:
    if "bfloat16" in dtypes:
        yield from sums_are_wide(op_set(on, "bfloat16"), on.device)
    for case in models:
        yield from check_metamorphic(case, "float32")


def oracle_of(dtype: str) -> str:
    return f"reference in {dtype}"


def by_reference(case: ModelCase, dtype: str) -> Iterator[Finding]:
    """Each tensor's error compared with the reference's worst in the same dtype. Not with relu in bfloat16: rounding decides
    which units cross the kink."""
    if dtype == "bfloat16" and isinstance(case.config, ModelConfig) and case.config.ffn == "relu":
        return
    check, zeros = f"model[{case.name}, {dtype}]", zero_by_identity(case.config, T)
    truths = {seed: _gradients(case.on_reference, "float64", seed) for seed in SEEDS}
    by_seed = [errors_of(_gradients(case.on_reference, dtype, seed), truth) for seed, truth in truths.items()]
    worst = {name: max(errors[name] for errors in by_seed) for name in by_seed[0]}
    for seed, truth in truths.items():
        yield from against_reference(check, dtype, _gradients(case, dtype, seed), truth, worst, zeros)


def against_reference(
    check: str, dtype: str, claimed: Point, truth: Point, errors: Mapping[str, float], zeros: set[str]
) -> Iterator[Finding]:
    """Tensor by tensor in L2 norm; errors: those of the reference ops in the same dtype."""
    for name in claimed.keys() - zeros:
        gap, bound = distance(claimed[name], truth[name]), kernel_bound(errors[name], dtype)
        yield Finding("L2", check, oracle_of(dtype), name, gap.l2, bound, gap.where)


def _gradients(case: ModelCase, dtype: str, seed: int) -> dict[str, Tensor]:
    model = build(case, dtype)
    move_off_init(model, seed)
    return gradients(model, data_of(case))


def errors_of(claimed: Point, truth: Point) -> dict[str, float]:
    return {name: distance(g, truth[name]).l2 for name, g in claimed.items()}
