"""Optimizers on flat buffers: one pass over all parameters, not one per tensor."""

from tapeless.optim.adam import Adam, AdamW
from tapeless.optim.sgd import SGD

OPTIMIZERS = {"adamw": AdamW, "adam": Adam, "sgd": SGD}
