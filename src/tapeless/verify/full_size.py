"""The user's own model at its own size: three directions through all of its parameters, and one step of gradient descent.

Fixture sizes check every element of every tensor; real sizes check that nothing depends on the size. The complex step needs
one forward per direction and no step size. Above FULL_SIZE parameters the widths are kept; depth and vocabulary are cut."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.config import AnyModelConfig, ModelConfig, SimpleLMConfig
from tapeless.model.build import AnyModel
from tapeless.model.params import count_params
from tapeless.model.transformer import transformer_specs
from tapeless.verify.finding import Finding
from tapeless.verify.first_batch import along_directions
from tapeless.verify.fixtures import batch, blank_model, loss_with_gradients, move_off_init
from tapeless.verify.tolerances import DOWNHILL, UNDERPOWERED

FULL_SIZE = 150_000_000
CUT_LAYERS, CUT_VOCABULARY = 2, 1024
TOKENS = (2, 16)  # B, T: enough for attention to have a past; the parameters are what is large
DECREASE = 1e-4  # the share of the loss that the step should take away: so short that the loss is nearly a plane


class Step(NamedTuple):
    """One step of plain gradient descent."""

    before: float
    predicted: float  # by the gradient alone
    after: float

    def finding(self) -> Finding:
        """A right gradient delivers nearly all of the decrease it predicts; the bound is half."""
        error = (self.after - self.predicted) / (self.before - self.predicted)
        return Finding("L2", "full size", "one step downhill", "loss", error, DOWNHILL)


def feasible(config: AnyModelConfig) -> tuple[AnyModelConfig, str]:
    """What is checked at real widths, and a sentence that says so."""
    if isinstance(config, SimpleLMConfig):
        return config, "at its full size"
    count = count_params(transformer_specs(config))
    if count <= FULL_SIZE:
        return config, f"at its full size, {count:,} parameters"
    layers = max(CUT_LAYERS, len(config.block_pattern))
    cut = replace(config, num_layers=min(config.num_layers, layers), vocab_size=min(config.vocab_size, CUT_VOCABULARY))
    return cut, (
        f"at its real widths, but with {cut.num_layers} layers and a vocabulary of {cut.vocab_size}: "
        f"all of it has {count:,} parameters, the limit is {FULL_SIZE:,}"
    )


def full_size_findings(config: AnyModelConfig, seed: int = 0) -> tuple[list[Finding], Step]:
    B, T = TOKENS
    T = min(T, config.max_seq_len) if isinstance(config, ModelConfig) else T
    tokens, targets = batch(config.vocab_size, B, T, seed)
    model = blank_model(config, "float64", seed=seed)
    move_off_init(model, seed)
    before = float(loss_with_gradients(model, tokens, targets))
    bad = [name for name, g in model.grads.items() if not torch.isfinite(g).all()]
    if bad or not model.store.flat_grads.any():  # there is no direction to take
        oracle, tensor, error = ("finite", bad[0], math.inf) if bad else ("underpowered", "all gradients", UNDERPOWERED)
        return [Finding("L2", "full size", oracle, tensor, error, 0.0)], Step(before, before, before)
    findings = list(along_directions(model, tokens, targets, "full size", seed))
    step = _downhill(model, before, tokens, targets)
    return [*findings, step.finding()], step


def _downhill(model: AnyModel, before: float, tokens: Tensor, targets: Tensor) -> Step:
    grads = model.store.flat_grads
    square = float(grads @ grads)
    rate = DECREASE * before / square
    model.store.flat.add_(grads, alpha=-rate)
    after = loss_with_gradients(model, tokens, targets, backward=False)
    return Step(before, before - rate * square, float(after))
