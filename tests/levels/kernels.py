"""All levels for a set of kernels: those of the package (tapeless/verify/kernel_levels.py), and what needs a trainer or
Hugging Face.

    L3   Hugging Face in float32
    L4   training in float32 and bfloat16 against autograd and torch.optim in float64
    L5   also a step cut into micro-batches, and a resumed run
Tested by: tests/verify/test_kernel_levels.py."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from levels.training import CASES, RECIPES, by_cutting, by_resume, by_torch, our_course
from tapeless.config import ModelConfig
from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import PARTLY_TRAINED_CASES, TRANSFORMER_CASES, Setting
from tapeless.verify.hf_levels import check_family, family_cases, missing
from tapeless.verify.kernel_levels import kernel_levels as shipped_levels
from tapeless.verify.kernel_levels import narrow_dtypes

SHORT = 20  # steps of a run


def kernel_levels(on: Setting) -> dict[str, Callable[[], Iterator[Finding]]]:
    dtypes, shipped = narrow_dtypes(on), shipped_levels(on)
    levels = {
        **shipped,
        "L3": lambda: kernel_level_3(on),
        "L4": lambda: kernel_level_4(on, dtypes),
        "L5": lambda: chain(shipped["L5"](), steps_and_resume(on, dtypes)),
    }
    return dict(sorted(levels.items()))


def kernel_level_3(on: Setting) -> Iterator[Finding]:
    if missing() is None:
        for case in family_cases():
            yield from check_family(case._replace(on=on), "float32")


def kernel_level_4(on: Setting, dtypes: Sequence[str]) -> Iterator[Finding]:
    """Every short recipe of a transformer, those of float64 in float32."""
    for recipe in RECIPES:
        dtype = "float32" if recipe.dtype == "float64" else recipe.dtype
        if isinstance(CASES[recipe.case].config, ModelConfig) and recipe.steps <= SHORT and dtype in dtypes:
            recipe = recipe._replace(dtype=dtype, on=on)
            yield from by_torch(recipe, our_course(recipe))


def steps_and_resume(on: Setting, dtypes: Sequence[str]) -> Iterator[Finding]:
    for case in (*TRANSFORMER_CASES, *PARTLY_TRAINED_CASES):
        yield from by_cutting(case._replace(on=on), dtypes)
    for dtype in dtypes:
        yield from by_resume(dtype, on)
