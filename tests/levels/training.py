"""L4: whole steps of training beside a loop that a PyTorch user would write, on the same weights and batches.

The other side is the autograd reference on the whole batch at once, torch.optim with two parameter groups, and the schedule as
a formula; this side is the Trainer, with micro-batches. The difference of the final weights is divided by how far they moved:
compared with the weights themselves even a step in the wrong direction is small.
Two parts of L5 live here as well: a step does not feel how its batch is cut, nor a run that it was stopped and resumed.
Tested by: tests/verify/test_training.py."""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from levels.muon_reference import TheirMuon, is_hidden
from tapeless.config import ModelConfig, TrainConfig
from tapeless.model.build import AnyModel
from tapeless.training.step import accumulate_gradients
from tapeless.verify.autograd_reference import dropout_masks, reference_loss
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import (
    FIRST_SAMPLE,
    MODEL_CASES,
    ON_REFERENCE,
    PARTLY_TRAINED_CASES,
    SEED,
    STEP,
    ModelCase,
    Setting,
    T,
    V,
    build,
    values,
    zero_by_identity,
)
from tapeless.verify.model_judges import compared, largest_gap, rounding_floor
from tapeless.verify.oracles import Point, norm
from tapeless.verify.tolerances import ACCUMULATION, TRAINING, TRAINING_LOSS

if TYPE_CHECKING:  # at run time where it is used: a trainer needs safetensors, the other levels do not
    from tapeless.training.trainer import Trainer

ROWS, CUT = 4, 2  # of a batch, and into how many micro-batches it is cut
CASES = {case.name: case for case in (*MODEL_CASES, *PARTLY_TRAINED_CASES)}
_LLAMA = CASES["llama"].config
assert isinstance(_LLAMA, ModelConfig)
CASES["one block"] = ModelCase("one block", replace(_LLAMA, num_layers=1))  # for the long run


class Recipe(NamedTuple):
    """One training run as L4 judges it."""

    case: str
    options: dict[str, Any]  # of TrainConfig
    steps: int = 12
    dtype: str = "float64"
    resume_at: int | None = None  # stopped here, and resumed from its checkpoint
    on: Setting = ON_REFERENCE

    @property
    def config(self) -> TrainConfig:
        common = {"batch_size": ROWS // CUT, "grad_accum": CUT, "seq_len": T, "max_steps": self.steps, "dtype": self.dtype}
        return TrainConfig(**{**common, **self.options})


# eps is so large that its place in the formula matters; grad_clip lies among the norms, so that it cuts some steps and not all.
_ADAM: dict[str, Any] = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1, "grad_clip": 1.5, "warmup_steps": 3}
_SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.01, "momentum": 0.9, "grad_clip": 4.0}
_MUON: dict[str, Any] = {**_ADAM, "optimizer": "muon", "momentum": 0.8}
# Those that resume come first: many mutants fail there, and a level ends at its first failure.
RECIPES = (
    Recipe("one block", {**_MUON, "nesterov": False, "ema_decay": 0.4}, steps=14, resume_at=5),
    Recipe("lora", {**_ADAM, "ema_decay": 0.4}, resume_at=5),
    Recipe("simplelm", {**_ADAM, "lr_schedule": "linear", "grad_clip": 0.5}),
    Recipe("penalties", {**_ADAM, "rank_invariant": False}),  # micro-batches are added in place
    Recipe("mqa", {**_ADAM, "optimizer": "adam", "lr_schedule": "linear"}),
    Recipe("gpt2", {**_SGD, "nesterov": True, "lr_schedule": "linear"}),
    Recipe("cllm", {**_SGD, "lr_schedule": "constant"}),
    Recipe("penalties", {**_MUON, "ema_decay": 0.4}),
    Recipe("mqa", {**_MUON, "lr_schedule": "linear"}, steps=20, dtype="float32"),
    Recipe("lora-all", {**_ADAM, "grad_clip": 2.0}, steps=20, dtype="float32"),
    Recipe("frozen", _MUON),
    Recipe("frozen-tied", {**_SGD, "lr_schedule": "constant", "grad_clip": 3.0}),
    Recipe("llama", _ADAM, steps=20, dtype="float32"),
    Recipe("gpt2", {**_SGD, "lr_schedule": "constant"}, steps=20, dtype="float32"),
    Recipe("llama", {**_ADAM, "rank_invariant": False}, steps=20, dtype="bfloat16"),
    Recipe("one block", {**_ADAM, "warmup_steps": 10}, steps=100, resume_at=50),
)


class Course(NamedTuple):
    """Where a run went."""

    weights: dict[str, Tensor]  # at its end
    losses: list[float]  # of every step
    norms: list[float]  # of the gradient at every step, before clipping
    average: dict[str, Tensor] | None = None  # of the weights, where one is kept


def batch_at(step: int) -> tuple[Tensor, Tensor]:  # tokens, targets (ROWS, T) int64
    """Another one for every step, the micro-batches with unequal counts of valid targets, at times with none."""
    text = torch.randint(V, (ROWS, T + 1), generator=torch.Generator().manual_seed(step))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    targets[0, : step % T] = -100
    targets[1, step % 3 :: 2] = -100
    if step % 4 == 0:
        targets[ROWS // CUT :] = -100
    return tokens, targets


def level_4() -> Iterator[Finding]:
    for recipe in RECIPES:
        yield from by_torch(recipe, our_course(recipe))


def by_torch(recipe: Recipe, ours: Course) -> Iterator[Finding]:
    """Loss and gradient norm of every step, and every tensor at the end. In bfloat16 the losses alone, and that is what Muon
    multiplies in on a GPU."""
    case, dtype = CASES[recipe.case], recipe.dtype
    if recipe.config.optimizer == "muon" and recipe.on.device.startswith("cuda"):
        dtype = "bfloat16"
    start, theirs = values(build(case)), their_course(recipe)
    check = f"training[{recipe.config.optimizer}, {recipe.case}, {dtype}]"
    clipped = sum(size > recipe.config.grad_clip for size in theirs.norms)
    yield Finding("L4", check, "underpowered", "clipping of some steps", float(clipped in (0, recipe.steps)), 0.0)
    yield _series(check, "loss", ours.losses, theirs.losses, TRAINING_LOSS[dtype])
    if dtype not in TRAINING:
        return
    yield _series(check, "gradient norm", ours.norms, theirs.norms, TRAINING[dtype])
    movement = {name: w - start[name] for name, w in theirs.weights.items()}
    zeros = zero_by_identity(case.config, T)
    trained = build(case).grads
    for name, w in ours.weights.items():
        if name not in trained:
            yield Finding("L4", check, "frozen", name, norm({name: w - start[name]}), 0.0)
            continue
        size = norm(movement if name in zeros else {name: movement[name]})
        away = norm({name: w - theirs.weights[name]})
        yield Finding("L4", check, "torch.optim", name, away / size if size else math.inf, TRAINING[dtype])
        if theirs.average is not None:
            away = math.inf if ours.average is None else norm({name: ours.average[name] - theirs.average[name]})
            yield Finding("L4", check, "average of all weights", name, away / size if size else math.inf, TRAINING[dtype])


def _series(check: str, what: str, ours: list[float], theirs: list[float], bound: float) -> Finding:
    gap = distance(torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64))
    return Finding("L4", check, "autograd reference", what, gap.largest, bound, gap.where)


COURSES: dict[str, Course] = {}  # of their_course: it is the same for every dtype and every set of ops


def their_course(recipe: Recipe) -> Course:
    key = repr((recipe.case, recipe.options, recipe.steps))
    if key not in COURSES:
        COURSES[key] = _their_course(recipe)
    return COURSES[key]


def _their_course(recipe: Recipe) -> Course:
    """Autograd and torch.optim in float64, on the batch as a whole; Muon, which torch does not have, is muon_reference.py."""
    case, c = CASES[recipe.case], recipe.config
    model = build(case)
    weights = {name: w.requires_grad_(name in model.grads) for name, w in values(model).items()}
    trained = {name: w for name, w in weights.items() if w.requires_grad}
    hidden = [w for name, w in trained.items() if c.optimizer == "muon" and is_hidden(name)]
    others = [w for name, w in trained.items() if c.optimizer != "muon" or not is_hidden(name)]
    groups = [
        {"params": [w for w in others if w.dim() >= 2], "weight_decay": c.weight_decay},
        {"params": [w for w in others if w.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if c.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, c.lr, momentum=c.momentum, nesterov=bool(c.nesterov))
    else:
        kind = torch.optim.Adam if c.optimizer == "adam" else torch.optim.AdamW
        optimizer = kind(groups, c.lr, betas=(c.beta1, c.beta2), eps=c.eps)
    muon = TheirMuon(hidden, c.momentum, c.nesterov is not False, c.weight_decay)
    losses, norms, history = [], [], list[dict[str, Tensor]]()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = their_rate(step, recipe)
        for w in weights.values():
            w.grad = None
        with torch.enable_grad():
            loss = their_loss(case, weights, step)
        loss.backward()
        gradients = [w.grad for w in weights.values() if w.grad is not None]
        size = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for g in gradients if size > c.grad_clip > 0 else ():  # torch's own clip_grad_norm_ divides by norm + 1e-6
            g.mul_(c.grad_clip / size)
        optimizer.step()
        muon.step(their_rate(step, recipe))
        losses.append(float(loss.detach()))
        norms.append(size)
        history.append({name: w.detach().clone() for name, w in weights.items()})
    return Course(history[-1], losses, norms, their_average(history, c.ema_decay) if c.ema_decay else None)


def their_average(history: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    """Every step's weights by the share that is left of them at the end."""
    total = {name: torch.zeros_like(w) for name, w in history[0].items()}
    left = 1.0
    for t in range(len(history), 0, -1):
        kept = decay if decay < (t - 1) / (t + 8) else (t - 1) / (t + 8)
        for name, w in history[t - 1].items():
            total[name] += left * (1 - kept) * w
        left *= kept
    return total


def their_loss(case: ModelCase, weights: Point, step: int) -> Tensor:  # ()
    tokens, targets = batch_at(step)
    masks = None
    if isinstance(case.config, ModelConfig) and case.config.dropout:
        masks = dropout_masks(case.config, tokens, seed=SEED, step=step, first_sample=step * ROWS)
    return reference_loss(case.config, weights, tokens, targets, masks=masks, lora=case.lora)


def their_rate(step: int, recipe: Recipe) -> float:
    c = recipe.config
    top, bottom, warmup = c.lr, c.lr / 10, c.warmup_steps or 0
    if step < warmup:
        return top * (step + 1) / warmup
    gone = (step - warmup) / (recipe.steps - 1 - warmup)
    falls: dict[str, Callable[[], float]] = {
        "constant": lambda: 0.0,
        "linear": lambda: gone,
        "warmup-cosine": lambda: math.sin(math.pi * gone / 2) ** 2,
    }
    return top - (top - bottom) * falls[c.lr_schedule]()


def our_course(recipe: Recipe) -> Course:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(recipe, Path(folder))
        done = []
        for step in range(recipe.steps):
            if step == recipe.resume_at:
                trainer = resumed(trainer, recipe)
            done.append(trainer.step(*(x.to(recipe.on.device) for x in batch_at(step))))
        average = None if trainer.ema is None else {name: w.cpu().double() for name, w in trainer.ema.named().items()}
        losses, norms = [metrics.loss for metrics in done], [metrics.grad_norm for metrics in done]
        return Course(values(trainer.model), losses, norms, average)


def make_trainer(recipe: Recipe, folder: Path) -> "Trainer":
    """A trainer of the recipe's model, which writes to `folder`; its data are a few tokens that nobody trains on."""
    from tapeless.data.prepare import Dataset
    from tapeless.data.tokenizer import make_tokenizer
    from tapeless.training.run_dir import RunDir
    from tapeless.training.trainer import Trainer

    tokens = np.arange(10 * T) ** 2 % V
    data = Dataset(tokens, tokens, make_tokenizer("bytes", "", None), "", 1.0, "fixture", 1)
    model = build(CASES[recipe.case]._replace(on=recipe.on), recipe.dtype)
    return Trainer(model, recipe.config, data, run=RunDir(folder))


def resumed(trainer: "Trainer", recipe: Recipe) -> "Trainer":
    """Another trainer of another model, brought to where this one stands through a checkpoint on the disk."""
    from tapeless.training.checkpoint import read_checkpoint

    path = trainer.save()
    assert path is not None
    fresh = make_trainer(recipe, path.parents[1])
    fresh.resume(read_checkpoint(path))
    return fresh


def by_cutting(case: ModelCase, dtypes: Iterable[str] = tuple(ACCUMULATION)) -> Iterator[Finding]:
    """L5: the gradients of a step do not feel how its batch is cut into micro-batches, nor what was in them before."""
    for dtype in dtypes:
        model, bound = build(case, dtype), ACCUMULATION[dtype]
        loss, whole = _accumulated(model, 1)
        zeros = zero_by_identity(case.config, T)
        check = f"step[{case.name}, {dtype}]"
        cut_loss, cut = _accumulated(model, CUT)
        yield from compared("L5", check, "one batch", cut, whole, bound, zeros=zeros, floor=rounding_floor(dtype))
        yield Finding("L5", check, "one batch", "loss", abs(cut_loss / loss - 1), bound)
        yield largest_gap("L5", check, "repetition", _accumulated(model, CUT)[1], cut)


def _accumulated(model: AnyModel, k: int) -> tuple[float, dict[str, Tensor]]:
    tokens, targets = (x.to(model.device) for x in batch_at(1))
    loss = accumulate_gradients(model, tokens, targets, grad_accum=k, step=STEP, first_sample=FIRST_SAMPLE)
    return loss, {name: g.clone() for name, g in model.grads.items()}


def by_resume(dtype: str, on: Setting = ON_REFERENCE) -> Iterator[Finding]:
    """L5: a run that was stopped after half of its steps and resumed ends bit for bit where the unbroken one does."""
    for options in (_ADAM, {**_MUON, "ema_decay": 0.9}):
        yield from _by_resume(Recipe("penalties", {**options, "warmup_steps": 1}, steps=6, dtype=dtype, on=on))


def _by_resume(recipe: Recipe) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        unbroken, broken = (make_trainer(recipe, Path(folder) / name) for name in ("unbroken", "broken"))
        for step in range(recipe.steps):
            if step == recipe.steps // 2:
                broken = resumed(broken, recipe)
            unbroken.step(*unbroken.next_batch())
            broken.step(*broken.next_batch())
    check = f"resume[{recipe.config.optimizer}, {recipe.case}, {recipe.dtype}]"
    yield largest_gap("L5", check, "unbroken run", broken.model.params, unbroken.model.params)
    for kind, moments in unbroken.optimizer.named_state().items():
        yield largest_gap("L5", f"{check} {kind}", "unbroken run", broken.optimizer.named_state()[kind], moments)
    if unbroken.ema is not None and broken.ema is not None:
        yield largest_gap("L5", f"{check} average", "unbroken run", broken.ema.named(), unbroken.ema.named())
