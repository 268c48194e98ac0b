"""Learning-rate schedules: pure functions of the step, so that a resumed run needs nothing but the step.

    lr(step), step = 0 … total - 1.  Warm-up is linear: lr (step + 1) / warmup.
After it, with x = fraction of the remaining steps done, from 0 at the first to 1 at the last, lr(step) = s lr + (1 - s) min:
    constant     s = 1                                       linear       s = 1 - x
    cosine       s = (1 + cos(pi x)) / 2                     polynomial   s = (1 - x)^2
    wsd          1, then linear to 0 over the last fifth     step         s = 0.1^k, k = floor(x / 0.3)
    restarts     three cosines, each twice as long as the last
warmup-cosine is cosine with a default warm-up (training/plan.py).
Tested by: tests/optim/test_schedule.py."""

import math
from collections.abc import Callable

DECAY_SHARE = 0.2  # wsd: the fraction of the run that decays
DROP_EVERY, DROP = 0.3, 0.1  # step: multiply by DROP each time this fraction of the run is done
POWER = 2.0  # polynomial
CYCLES = 3  # restarts


def _cosine(x: float) -> float:
    return (1 + math.cos(math.pi * x)) / 2


def _restarts(x: float) -> float:
    """In units of the first cycle, cycle k has length 2^k and starts at 2^k - 1; the run has length 2^CYCLES - 1."""
    place = x * (2**CYCLES - 1) + 1  # cycle k is from 2^k to 2^(k+1)
    k = min(int(math.log2(place)), CYCLES - 1)
    return _cosine(place / 2**k - 1)


# fraction of the run -> s
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
