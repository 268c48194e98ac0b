"""The levels by name, from linear pieces to whole training runs. `tapeless gradcheck` runs parts of them on a user's model;
tests and mutants run all, on the fixtures of the package. What only they need is in this folder, outside the wheel.

Needed beside the package: torch, numpy, safetensors (L4 and L5 save checkpoints), and transformers for L3, which is skipped
where it is missing. Nothing here needs pytest.
Tested by: tests/verify/test_mutants.py, tests/verify/test_kernel_levels.py."""

from collections.abc import Callable, Iterator

from levels.kernels import kernel_levels
from levels.training import by_cutting, by_resume, level_4
from levels.update_identities import update_identities
from tapeless.config import ModelConfig
from tapeless.ops.reference import REFERENCE
from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import MODEL_CASES, ON_REFERENCE, PARTLY_TRAINED_CASES, TRANSFORMER_CASES, Setting
from tapeless.verify.hf_levels import level_3
from tapeless.verify.metamorphic import check_metamorphic, op_identities, sums_are_wide
from tapeless.verify.model_judges import by_accumulation, by_interruption, by_precision, by_recompute, check_model
from tapeless.verify.op_levels import level_0, level_1
from tapeless.verify.tolerances import ACCUMULATION

Level = Callable[[], Iterator[Finding]]


def level_2() -> Iterator[Finding]:
    for case in (*MODEL_CASES, *PARTLY_TRAINED_CASES):
        yield from check_model(case)
        yield from by_precision(case)


def level_5() -> Iterator[Finding]:
    for dtype in ("float32", "bfloat16"):
        yield from by_resume(dtype)
    for case in (*MODEL_CASES, *PARTLY_TRAINED_CASES):
        if isinstance(case.config, ModelConfig):
            for dtype in ("float32", "bfloat16"):
                yield from by_recompute(case, dtype)
                yield from by_interruption(case, dtype)
        for dtype in ACCUMULATION:
            yield from by_accumulation(case, dtype)
        yield from by_cutting(case)


def level_6() -> Iterator[Finding]:
    yield from op_identities()
    yield from sums_are_wide(REFERENCE)
    for case in TRANSFORMER_CASES:
        yield from check_metamorphic(case)
    yield from update_identities()


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
    """The levels for a set of ops: under the same names, what each can check of it."""
    return LEVELS if on == ON_REFERENCE else kernel_levels(on)


def first_failure(name: str, on: Setting = ON_REFERENCE) -> Finding | None:
    """The first finding of a level that is out of bounds. The level stops there: one is enough."""
    return next((finding for finding in levels_of(on)[name]() if not finding.ok), None)
