"""Optimizers on flat buffers: one pass over all parameters, not one per tensor."""

from collections.abc import Collection, Mapping

from torch import Tensor

from tapeless.config import TrainConfig
from tapeless.optim.adam import Adam as Adam
from tapeless.optim.adam import AdamW as AdamW
from tapeless.optim.flat import FlatOptimizer
from tapeless.optim.sgd import SGD as SGD


def make_optimizer(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], config: TrainConfig, decay: Collection[str]
) -> FlatOptimizer:
    """The optimizer that a configuration describes; `decay` names the parameters that weight decay applies to."""
    c = config
    if c.optimizer == "sgd":
        return SGD(params, grads, lr=c.lr, momentum=c.momentum, nesterov=c.nesterov, weight_decay=c.weight_decay, decay=decay)
    kind = AdamW if c.optimizer == "adamw" else Adam
    return kind(params, grads, lr=c.lr, beta1=c.beta1, beta2=c.beta2, eps=c.eps, weight_decay=c.weight_decay, decay=decay)
