"""What was asked for and would do nothing.

Tested by: tests/cli/test_unused_options.py."""

from tapeless.config import TrainConfig
from tapeless.errors import ConfigError


def refuse_idle(c: TrainConfig) -> None:
    """Refuse what was asked for and would do nothing. Not a part of the configuration's own checks: a run of an earlier version
    that has such a thing in its config.toml can still be read."""
    usual = TrainConfig()
    if not c.lora_rank and (c.lora_alpha is not None or c.lora_targets != usual.lora_targets):
        raise ConfigError(
            "lora_alpha and lora_targets are of adapters, and there are none: give lora_rank too, or leave them out"
        )
    if c.nesterov and c.optimizer in ("adamw", "adam"):
        raise ConfigError(f"nesterov is for sgd and muon; {c.optimizer} has no such momentum: leave it out")
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
