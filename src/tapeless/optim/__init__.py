"""Optimizers on flat buffers: one pass over all parameters, not one per tensor. One file each, listed in config/registry.py.

    opt = tapeless.optim.AdamW(model.params, model.grads, lr=1e-3)
    opt.step()            # by model.grads, at the rate given
    opt.step(lr=5e-4)     # at another, which the steps after it keep
Names of the arguments are those of the settings (docs/settings.md)."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from tapeless.config import OPTIMIZERS, TrainConfig
from tapeless.optim.adam import Adam
from tapeless.optim.adamw import AdamW
from tapeless.optim.flat import FlatOptimizer
from tapeless.optim.muon import Muon
from tapeless.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Muon", "make_optimizer"]


def make_optimizer(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    config: TrainConfig,
    decay: Collection[str],
    ops: object = None,
) -> FlatOptimizer:
    """The optimizer that config describes, for params and grads, those of one model. decay: the parameters that weight decay
    applies to; ops: the model's OpSet, whose fused update the optimizer uses if it has one."""
    optimizer: type[FlatOptimizer] = OPTIMIZERS[config.optimizer]
    fused: dict[str, Any] = {} if optimizer.kernel is None else {"fused": getattr(ops, optimizer.kernel, None)}
    return optimizer(params, grads, decay=decay, **optimizer.config_options(config), **fused)
