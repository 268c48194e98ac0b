"""Learning-rate schedules: pure functions of the step, so that a resumed run needs nothing but the step.

    lr(step), step = 0 … total - 1.  Warm-up, where there is one, rises linearly: lr (step + 1) / warmup.
Behind it, with x = share of the remaining steps gone by, from 0 at its first to 1 at its last:
    constant   lr                              linear       lr + (min - lr) x
    cosine     min + (lr - min) (1 + cos(pi x)) / 2          polynomial   min + (lr - min) (1 - x)^2
    wsd        lr, then linear to min over the last fifth    step         lr 0.1^k, k steps of 30 % gone by
    restarts   cosine again and again, each cycle twice as long as the one before
Judged by: tests/optim/test_schedule.py."""

import math
from collections.abc import Callable

DECAY_SHARE = 0.2  # wsd: the part of the run in which the rate falls
DROP_EVERY, DROP = 0.3, 0.1  # step: multiply by DROP each time this share of the run has gone by
POWER = 2.0  # polynomial
FIRST_CYCLE = 1 / 7  # restarts: 1/7 + 2/7 + 4/7 = 1, three cycles


def _cosine(x: float) -> float:
    return (1 + math.cos(math.pi * x)) / 2


def _restarts(x: float) -> float:
    start, length = 0.0, FIRST_CYCLE
    while x >= start + length and start + length < 1 - 1e-9:
        start, length = start + length, 2 * length
    return _cosine((x - start) / length)


# share of the run -> share of the way from min_lr up to lr
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1 - x,
    "cosine": _cosine,
    "warmup-cosine": _cosine,
    "wsd": lambda x: min(1.0, (1 - x) / DECAY_SHARE),
    "step": lambda x: DROP ** int(x / DROP_EVERY),
    "polynomial": lambda x: (1 - x) ** POWER,
    "restarts": _restarts,
}


def learning_rate(step: int, *, schedule: str, total_steps: int, lr: float, min_lr: float, warmup_steps: int) -> float:
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    last = total_steps - 1 - warmup_steps
    x = min((step - warmup_steps) / last, 1.0) if last > 0 else 0.0
    return min_lr + (lr - min_lr) * SHAPES[schedule](x)
