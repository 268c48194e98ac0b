"""Learning-rate schedules: pure functions of the step, so that a resumed run needs nothing but the step.

    lr(step), step = 0 … total - 1.  Warm-up, where there is one, rises linearly: lr (step + 1) / warmup.
Behind it, with x = share of the remaining steps gone by, from 0 at its first to 1 at its last, the rate is s lr + (1 - s) min:
    constant     s = 1                                       linear       s = 1 - x
    cosine       s = (1 + cos(pi x)) / 2                     polynomial   s = (1 - x)^2
    wsd          1, then linear to 0 over the last fifth     step         s = 0.1^k, k = times that 30 % have gone by
    restarts     three cosines, each twice as long as the one before
warmup-cosine is cosine; the name asks for a warm-up where none is given (training/plan.py).
Tested by: tests/optim/test_schedule.py."""

import math
from collections.abc import Callable

DECAY_SHARE = 0.2  # wsd: the part of the run in which the rate falls
DROP_EVERY, DROP = 0.3, 0.1  # step: multiply by DROP each time this share of the run has gone by
POWER = 2.0  # polynomial
CYCLES = 3  # restarts


def _cosine(x: float) -> float:
    return (1 + math.cos(math.pi * x)) / 2


def _restarts(x: float) -> float:
    """With the first cycle as the unit, cycle k is 2^k long and begins at 2^k - 1; the run is 2^CYCLES - 1 long."""
    place = x * (2**CYCLES - 1) + 1  # cycle k begins at 2^k and ends at 2^(k+1)
    k = min(int(math.log2(place)), CYCLES - 1)
    return _cosine(place / 2**k - 1)


# share of the run -> share of lr, the rest being min_lr
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
    s = SHAPES[schedule](x)
    return s * lr + (1 - s) * min_lr
