"""`tapeless gradcheck --ops NAME`: checks a set of ops, and the user's own architecture with it.

The levels of kernel_levels.py on the architectures of fixtures.py; then the user's at fixture sizes, each tensor in each dtype
compared with the reference ops, and again at real widths, where a kernel takes other branches."""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from tapeless.config import AnyModelConfig, ModelConfig, SimpleLMConfig
from tapeless.errors import NonFiniteError, UsageError
from tapeless.verify.finding import Finding, distance
from tapeless.verify.fixtures import (
    ON_REFERENCE,
    Batch,
    ModelCase,
    Setting,
    batch,
    blank_model,
    gradients,
    move_off_init,
    shrunk,
    zero_by_identity,
)
from tapeless.verify.full_size import feasible
from tapeless.verify.gradcheck import ROUNDING_LAYERS, Progress, Report, cut_to, one_thread, rows_of
from tapeless.verify.kernel_levels import by_reference, errors_of, kernel_levels, narrow_dtypes, oracle_of
from tapeless.verify.metamorphic import check_metamorphic
from tapeless.verify.model_judges import by_precision
from tapeless.verify.model_levels import by_interruption, by_recompute
from tapeless.verify.tolerances import kernel_bound

TOKENS = (2, 33)  # B, T at real widths: one more than most blocks of rows


def gradcheck_ops(
    name: str, config: AnyModelConfig, on: Setting, *, seed: int = 0, progress: Progress = lambda text: None
) -> Report:
    if isinstance(config, SimpleLMConfig):
        raise UsageError(f"{name} is a SimpleLM, which always runs on the reference ops; --ops has no meaning")
    dtypes, findings = narrow_dtypes(on), list[Finding]()
    with one_thread():
        for level, run in kernel_levels(on).items():
            progress(f"{on}: {level}, {' and '.join(dtypes)}")
            findings += finite(level, on, run())
        progress(f"{name} at fixture sizes")
        own = list(finite("L2", on, at_fixture_sizes(name, config, on, dtypes)))
    cut, scope = feasible(config)
    progress(f"{name} {scope}")
    own += finite("L2", on, at_real_widths(cut, on, dtypes, seed))
    rows = rows_of(config, own)
    parameters = sum(math.prod(row.shape) for row in rows)
    return Report(name, on, parameters, rows, findings + own, scope, None, tuple(map(oracle_of, dtypes)))


def finite(level: str, on: Setting, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a level. A model raises at a NaN or an infinity; that is the level's last finding."""
    try:
        yield from findings
    except NonFiniteError as error:
        yield Finding(level, str(on), "finite", str(error), math.inf, 0.0)


def at_fixture_sizes(name: str, config: ModelConfig, on: Setting, dtypes: Sequence[str]) -> Iterator[Finding]:
    case = ModelCase(name, cut_to(shrunk(config), ROUNDING_LAYERS), on=on)
    yield from by_precision(case, dtypes)
    for dtype in dtypes:
        for judge in (by_reference, by_recompute, by_interruption):
            yield from judge(case, dtype)
    yield from check_metamorphic(case, "float32")


def at_real_widths(config: AnyModelConfig, on: Setting, dtypes: Sequence[str], seed: int) -> Iterator[Finding]:
    """Each tensor against the reference ops in float64; the bound is relative to their error in the same dtype."""
    assert isinstance(config, ModelConfig)
    B, T = TOKENS[0], min(TOKENS[1], config.max_seq_len)
    data = Batch(*batch(config.vocab_size, B, T, seed))

    def run(setting: Setting, dtype: str) -> dict[str, Tensor]:
        model = blank_model(config, dtype, setting, seed=seed)
        move_off_init(model, seed)
        return gradients(model, data.to(setting.device))

    truth, zeros = run(ON_REFERENCE, "float64"), zero_by_identity(config, T)
    for dtype in dtypes:
        errors, claimed = errors_of(run(ON_REFERENCE, dtype), truth), run(on, dtype)
        for name in claimed.keys() - zeros:
            gap = distance(claimed[name], truth[name])
            bound = kernel_bound(errors[name], dtype)
            yield Finding("L2", f"full size, {dtype}", oracle_of(dtype), name, gap.l2, bound, gap.where)
