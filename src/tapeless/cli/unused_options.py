"""Options that were given but would have no effect.

Tested by: tests/cli/test_unused_options.py."""

from dataclasses import fields

from tapeless.config import OPTIMIZERS, TrainConfig
from tapeless.errors import ConfigError


def refuse_unused(c: TrainConfig) -> None:
    """Refuse options that would have no effect. Not part of the configuration's own checks, so that a run of an earlier version
    with such an option in its config.toml can still be read."""
    usual = TrainConfig()
    if not c.lora_rank and (c.lora_alpha is not None or c.lora_targets != usual.lora_targets):
        raise ConfigError(
            "lora_alpha and lora_targets are of adapters, and there are none: give lora_rank too, or leave them out"
        )
    marked = [(f.name, f.default, getattr(c, f.name)) for f in fields(c) if f.metadata["by_optimizer"]]
    given = [name for name, default, value in marked if value != default and value is not False]
    for name in given and sorted(set(given) - set(OPTIMIZERS[c.optimizer].options)):  # torch is loaded only if one was given
        users = [optimizer for optimizer in OPTIMIZERS if name in OPTIMIZERS[optimizer].options]
        raise ConfigError(f"{name} is an option of {', '.join(users)}; {c.optimizer} does not use it: leave it out")
    if c.dataset_path is not None and c.corpus != usual.corpus:
        raise ConfigError(
            f"corpus {c.corpus} is what to train on without a path, and dataset_path is given: leave one of them out"
        )
    if c.patience and not c.eval_every:
        raise ConfigError(
            "patience counts evaluations, and eval_every = 0 has one at the end alone: give eval_every, or leave it out"
        )
    if c.freeze and not c.freeze.strip(" ,"):
        raise ConfigError(f"freeze = {c.freeze!r} names no parameter: leave it out")
