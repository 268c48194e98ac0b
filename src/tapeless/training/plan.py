"""Defaults that depend on the model and the data: the window length, the number of steps, the warm-up.
Tested by: tests/train/test_trainer.py, tests/train/test_resume.py."""

from typing import Any

from tapeless.config import AnyModelConfig, ModelConfig, TrainConfig
from tapeless.errors import SEQ_LEN_TOO_LONG, WARMUP_TOO_LONG
from tapeless.optim.schedule import learning_rate

DEFAULT_STEPS = 1000
WARMUP_SHARE, WARMUP_MOST = 0.05, 100


def default_seq_len(config: AnyModelConfig) -> int:
    """max_seq_len of a transformer; a SimpleLM sees one token at a time anyway."""
    return config.max_seq_len if isinstance(config, ModelConfig) else 32


def resolve_seq_len(config: AnyModelConfig, train: TrainConfig) -> int:
    """The window length of a run; longer windows than the model is for are an error."""
    if isinstance(config, ModelConfig) and (train.seq_len or 0) > config.max_seq_len:
        raise SEQ_LEN_TOO_LONG(seq_len=train.seq_len, longest=config.max_seq_len)
    return train.seq_len or default_seq_len(config)


def total_steps(c: TrainConfig, num_windows: int, *, steps: int = 0, samples: int = 0) -> int:
    """Steps of a run that has taken `steps` and seen `samples` so far; num_windows: per epoch."""
    limits = [] if c.max_steps is None else [c.max_steps]
    if c.epochs is not None:
        left = c.epochs * num_windows - samples
        limits.append(max(1, steps + left // (c.batch_size * c.grad_accum)))
    return min(limits, default=DEFAULT_STEPS)


def planned_rate(c: TrainConfig, step: int, num_windows: int, samples: int) -> float:
    """The learning rate of a step as a configuration plans it, for a run that has seen `samples` after it."""
    total = total_steps(c, num_windows, steps=step + 1, samples=samples)
    return scheduled_rate(c, step, total, warmup_steps(c, total))


def scheduled_rate(c: TrainConfig, step: int, total: int, warmup: int) -> float:
    rates: dict[str, Any] = {"schedule": c.lr_schedule, "lr": c.lr, "min_lr": c.lr / 10 if c.min_lr is None else c.min_lr}
    return learning_rate(step, **rates, total_steps=total, warmup_steps=warmup)


def warmup_steps(c: TrainConfig, total: int) -> int:
    if c.warmup_steps is None:
        return min(WARMUP_MOST, int(WARMUP_SHARE * total)) if c.lr_schedule == "warmup-cosine" else 0
    if c.warmup_steps > total:
        raise WARMUP_TOO_LONG(warmup=c.warmup_steps, total=f"the {total} steps of the run", most=total)
    return c.warmup_steps
