"""The levels by name, from linear pieces to whole runs of training: the entry point for running them."""

from collections.abc import Callable, Iterator

from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import LAW, Setting
from tapeless.verify.hf_levels import level_3
from tapeless.verify.kernel_levels import kernel_levels
from tapeless.verify.metamorphic import level_6
from tapeless.verify.model_levels import level_2, level_5
from tapeless.verify.op_levels import level_0, level_1
from tapeless.verify.training import level_4

Level = Callable[[], Iterator[Finding]]

LEVELS: dict[str, Level] = {
    "L0": level_0,
    "L1": level_1,
    "L2": level_2,
    "L3": level_3,
    "L4": level_4,
    "L5": level_5,
    "L6": level_6,
}


def levels_of(on: Setting) -> dict[str, Level]:
    """The levels for a set of ops: under the same names, what each can ask of it."""
    return LEVELS if on == LAW else kernel_levels(on)


def first_failure(name: str, on: Setting = LAW) -> Finding | None:
    """The first finding of a level that is out of bounds. The level stops there: one is enough to convict."""
    return next((finding for finding in levels_of(on)[name]() if not finding.ok), None)
