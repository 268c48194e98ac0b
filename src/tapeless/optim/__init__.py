"""Optimizers on flat buffers: one pass over all parameters, not one per tensor."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from tapeless.config import TrainConfig
from tapeless.optim.adam import Adam as Adam
from tapeless.optim.adam import AdamW as AdamW
from tapeless.optim.flat import FlatOptimizer
from tapeless.optim.muon import Muon as Muon
from tapeless.optim.sgd import SGD as SGD


def make_optimizer(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    config: TrainConfig,
    decay: Collection[str],
    fused: Callable[..., None] | None = None,
) -> FlatOptimizer:
    """The optimizer that a configuration describes; `decay` names the parameters that weight decay applies to, `fused` is
    AdamW's step as one kernel, where the model's ops have one."""
    c = config
    if c.optimizer == "sgd":
        return SGD(
            params, grads, lr=c.lr, momentum=c.momentum, nesterov=c.with_nesterov, weight_decay=c.weight_decay, decay=decay
        )
    options: Any = {
        "lr": c.lr,
        "beta1": c.beta1,
        "beta2": c.beta2,
        "eps": c.eps,
        "weight_decay": c.weight_decay,
        "decay": decay,
    }
    if c.optimizer == "muon":
        return Muon(params, grads, fused=fused, momentum=c.momentum, nesterov=c.with_nesterov, **options)
    return AdamW(params, grads, fused=fused, **options) if c.optimizer == "adamw" else Adam(params, grads, **options)
