"""Checks of whole models: every float64 oracle, one function for each (L2), and runs that must not change a gradient (L5).

An oracle takes the claimed gradients as an argument: tests pass wrong ones, which it must reject."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.model.build import AnyModel
from tapeless.verify import tolerances
from tapeless.verify.autograd_reference import dropout_masks, reference_loss
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import (
    FIRST_SAMPLE,
    SEED,
    STEP,
    Batch,
    ModelCase,
    T,
    build,
    data_of,
    gradients,
    loss_with_gradients,
    move_off_init,
    values,
    zero_by_identity,
)
from tapeless.verify.oracles import (
    Function,
    Point,
    autograd_gradient,
    central_difference,
    complex_step,
    directional_error,
    directions,
    inner,
    norm,
    taylor_slope,
)

CENTRAL_H = 1e-5  # small: a step along all weights at once must not carry a relu over its kink


def rounding_floor(dtype: str) -> float:
    """ROUNDING_FLOOR is of float64; coarser numbers leave coarser zeros."""
    return tolerances.ROUNDING_FLOOR * torch.finfo(getattr(torch, dtype)).eps / torch.finfo(torch.float64).eps


def compared(
    level: str,
    check: str,
    oracle: str,
    claimed: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    bound: float,
    *,
    zeros: set[str],
    floor: float = tolerances.ROUNDING_FLOOR,
) -> Iterator[Finding]:
    """Tensor by tensor in L2 norm. Those that are zero by identity are compared with the norm of all gradients instead, and the
    smallest of the others must be large enough to prove something."""
    whole = norm(truth)
    if not 0 < whole < math.inf:
        yield Finding(level, check, "underpowered", "all gradients", tolerances.UNDERPOWERED, 0.0)
        return
    shares = {name: norm({name: g}) / whole for name, g in truth.items() if name not in zeros}
    weakest = min(shares, key=shares.__getitem__)
    yield Finding(level, check, "underpowered", weakest, tolerances.UNDERPOWERED, shares[weakest])
    for name, g in claimed.items():
        if name in zeros:
            yield Finding(level, check, "identity", name, norm({name: g}) / whole, floor)
        else:
            _, error, where = distance(g, truth[name])
            yield Finding(level, check, oracle, name, error, bound, where)


def largest_gap(level: str, check: str, oracle: str, a: Point, b: Point, bound: float = 0.0) -> Finding:
    """The worst tensor alone; by default equality is claimed bit for bit."""
    gaps = {name: distance(a[name], b[name]) for name in b}
    worst = max(gaps, key=lambda name: gaps[name].largest)
    return Finding(level, check, oracle, worst, gaps[worst].largest, bound, gaps[worst].where)


def by_autograd(case: ModelCase, data: Batch, claimed: Point) -> Iterator[Finding]:
    masks, point = None, values(build(case))
    if isinstance(case.config, ModelConfig) and case.config.dropout:
        masks = dropout_masks(case.config, data.tokens, seed=SEED, step=STEP, first_sample=FIRST_SAMPLE)

    def loss(params: Point) -> Tensor:
        return reference_loss(case.config, params, *data, masks=masks, lora=case.lora)

    truth = {name: g for name, g in autograd_gradient(loss, point).items() if name in claimed}
    zeros = zero_by_identity(case.config, data.tokens.shape[1])
    yield from compared(
        "L2", f"model[{case.name}]", "autograd reference", claimed, truth, tolerances.MODEL_AUTOGRAD, zeros=zeros
    )


def loss_function(model: AnyModel, data: Batch) -> Function:
    """The loss as a function of some parameters; the others, and afterwards these too, stay as they are in the model."""

    def write(point: Point) -> None:
        for name, w in point.items():
            model.params[name].copy_(w)

    def f(point: Point) -> Tensor:
        before = {name: model.params[name].clone() for name in point}
        write(point)
        loss = loss_with_gradients(model, *data, backward=False)
        write(before)
        return loss

    return f


def by_complex_step(case: ModelCase, data: Batch, claimed: Point) -> Iterator[Finding]:
    """Three directions for each tensor alone; the worst of them is reported."""
    f, point, generator = loss_function(build(case, "complex128"), data), values(build(case)), torch.Generator().manual_seed(0)
    zeros, whole = zero_by_identity(case.config, data.tokens.shape[1]), norm(claimed)
    for name, g in claimed.items():
        errors = []
        for _, v in directions({name: g}, generator):
            derivative = complex_step(f, {name: point[name]}, v)
            size = abs(derivative) / whole if whole else math.inf
            errors.append(size if name in zeros else directional_error(claimed, v, derivative))
        worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        bound = tolerances.ROUNDING_FLOOR if name in zeros else tolerances.COMPLEX_STEP
        yield Finding("L2", f"model[{case.name}]", "complex step", name, worst, bound)


def by_differences(case: ModelCase, data: Batch, claimed: Point) -> Iterator[Finding]:
    """Central differences along all parameters at once."""
    model = build(case)
    f, point = loss_function(model, data), values(model)
    for kind, v in directions(claimed, torch.Generator().manual_seed(0)):
        found = central_difference(f, point, v, CENTRAL_H)
        error = directional_error(claimed, v, found.value) if found.trusted else math.inf
        yield Finding("L2", f"model[{case.name}]", "central difference", f"along {kind}", error, tolerances.DIRECTION)


def by_slope(case: ModelCase, data: Batch, claimed: Point) -> Iterator[Finding]:
    """The order of the Taylor remainder along a Gaussian direction of all parameters at once."""
    model = build(case)
    v = dict(directions(claimed, torch.Generator().manual_seed(0)))["gaussian"]
    slope = taylor_slope(loss_function(model, data), values(model), v, inner(claimed, v))
    middle, width = sum(tolerances.SLOPE) / 2, (tolerances.SLOPE[1] - tolerances.SLOPE[0]) / 2
    yield Finding("L2", f"model[{case.name}]", "Taylor slope", "along gaussian", abs(slope - middle), width)


def by_precision(case: ModelCase, dtypes: Iterable[str] = ("float32", "bfloat16")) -> Iterator[Finding]:
    """The same weights in float32, tensor by tensor, and in bfloat16: all tensors as one, since a single small one may be off
    by ten times the rounding (not with relu, where 8 bits carry some units over the kink, and gradients jump), and each
    roughly, so that none is missing, doubled or another's."""
    truth, zeros = gradients(build(case.on_reference), data_of(case.on_reference)), zero_by_identity(case.config, T)
    for dtype in dtypes:
        claimed, check = gradients(build(case, dtype), data_of(case)), f"model[{case.name}, {dtype}]"
        if dtype == "float32":
            floor = rounding_floor(dtype)
            yield from compared("L2", check, "own float64", claimed, truth, tolerances.MODEL_FLOAT32, zeros=zeros, floor=floor)
        else:
            yield from _in_bfloat16(case, check, claimed, truth, zeros)


def _in_bfloat16(case: ModelCase, check: str, claimed: Point, truth: Point, zeros: set[str]) -> Iterator[Finding]:
    for name in claimed.keys() - zeros:
        yield Finding("L2", check, "is there", name, distance(claimed[name], truth[name]).l2, tolerances.MODEL_BFLOAT16_TENSOR)
    if isinstance(case.config, ModelConfig) and case.config.ffn == "relu":
        return
    rough, fine = _joined(claimed), _joined(truth)
    yield Finding("L2", check, "own float64", "all gradients", distance(rough, fine).l2, tolerances.MODEL_BFLOAT16)
    apart = 1 - float(F.cosine_similarity(rough, fine, dim=0))
    yield Finding("L2", check, "cosine", "all gradients", apart, 1 - tolerances.MODEL_BFLOAT16_COSINE)


def _joined(grads: Point) -> Tensor:  # (P,)
    return torch.cat([g.to("cpu", torch.float64).flatten() for g in grads.values()])


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
    yield from compared("L5", check, "one batch", model.grads, whole, tolerances.ACCUMULATION[dtype], zeros=zeros, floor=floor)
