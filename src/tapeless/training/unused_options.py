"""Options that were given but have no effect.

Tested by: tests/cli/test_unused_options.py."""

from dataclasses import fields

from tapeless.config import OPTIMIZERS, TrainConfig
from tapeless.errors import ConfigError


def refuse_unused(c: TrainConfig) -> None:
    """Raise for an option that would have no effect. Not part of TrainConfig's own checks, so that the config.toml of an older
    run can still be read."""
    defaults = TrainConfig()
    if not c.lora_rank and (c.lora_alpha is not None or c.lora_targets != defaults.lora_targets):
        raise ConfigError("lora_alpha and lora_targets need adapters: set lora_rank too, or leave them out")
    marked = [(f.name, f.default, getattr(c, f.name)) for f in fields(c) if f.metadata["by_optimizer"]]
    given = [name for name, default, value in marked if value != default and value is not False]
    for name in given and sorted(set(given) - set(OPTIMIZERS[c.optimizer].options)):  # torch is loaded only if one was given
        users = [optimizer for optimizer in OPTIMIZERS if name in OPTIMIZERS[optimizer].options]
        raise ConfigError(f"{name} is an option of {', '.join(users)}; {c.optimizer} does not use it: leave it out")
    if c.dataset_path is not None and c.corpus != defaults.corpus:
        raise ConfigError(f"corpus {c.corpus} is used only without a dataset_path, and both are given: leave one of them out")
    if c.patience and not c.eval_every:
        raise ConfigError(
            "patience counts evaluations, but eval_every = 0 evaluates only at the end: set one, or leave out both"
        )
    if c.freeze and not c.freeze.strip(" ,"):
        raise ConfigError(f"freeze = {c.freeze!r} names no parameter: leave it out")
