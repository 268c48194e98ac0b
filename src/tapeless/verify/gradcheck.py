"""`tapeless gradcheck`: checks the gradients of the user's own architecture.

At fixture sizes, with all of its layers, each tensor is compared with each oracle. At real sizes the gradient is checked along
three directions through all parameters, and one step of gradient descent must lower the loss.

With `--ops NAME` a set of ops is checked, and the architecture with it: the levels of kernel_levels.py on the architectures of
fixtures.py; then the user's at fixture sizes, each tensor in each dtype compared with the reference ops, and again at real
widths, where a kernel takes other branches."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import AnyModelConfig, ModelConfig, SimpleLMConfig
from tapeless.errors import NonFiniteError, UsageError
from tapeless.model.build import build_model
from tapeless.model.transformer import transformer_specs
from tapeless.verify.finding import Finding
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
from tapeless.verify.full_size import Step, feasible, full_size_findings
from tapeless.verify.kernel_levels import (
    against_reference,
    by_reference,
    errors_of,
    in_each_dtype,
    kernel_levels,
    narrow_dtypes,
    oracle_of,
)
from tapeless.verify.metamorphic import check_metamorphic
from tapeless.verify.model_judges import by_interruption, by_precision, by_recompute, check_model

Progress = Callable[[str], None]
PER_TENSOR = ("complex step", "autograd reference")
ROUNDING_LAYERS = 2
TOKENS = (2, 33)  # B, T at real widths with other ops: one more than most blocks of rows


class TensorRow(NamedTuple):
    """One parameter tensor, and the results of the oracles that give a number per tensor."""

    tensor: str
    shape: tuple[int, ...]  # at full size
    checked_as: tuple[int, ...]  # at fixture sizes, where each tensor was checked
    judged: list[Finding]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.judged)

    def by(self, oracle: str) -> Finding | None:
        """The worst result of an oracle for this tensor, if it has one."""
        return max((f for f in self.judged if f.oracle == oracle), key=closeness, default=None)


class Report(NamedTuple):
    name: str
    on: Setting
    parameters: int
    tensors: list[TensorRow]
    findings: list[Finding]
    scope: str  # what was checked at real widths
    step: Step | None  # None under kernels, whose gradients are compared instead
    per_tensor: tuple[str, ...] = PER_TENSOR  # the oracles that check each tensor alone

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.ok]

    @property
    def ok(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.on._asdict(),
            "ok": self.ok,
            "parameters": self.parameters,
            "scope": self.scope,
            "tensors": [
                {"tensor": row.tensor, "shape": row.shape, "checks": len(row.judged), "ok": row.ok} for row in self.tensors
            ],
            "findings": [{**finding._asdict(), "ok": finding.ok} for finding in self.findings],
            "sgd": self.step and self.step._asdict(),
        }


def closeness(finding: Finding) -> float:
    """How near a finding is to its bound: above 1 it is a failure."""
    if finding.bound == 0:
        return 0.0 if finding.error == 0 else float("inf")
    return finding.error / finding.bound if finding.error == finding.error else float("inf")


def gradcheck(name: str, config: AnyModelConfig, *, seed: int = 0, progress: Progress = lambda text: None) -> Report:
    progress(f"{name}: {len(parameter_shapes(config))} tensors at fixture sizes, float64")
    with one_thread():
        findings = list(fixture_findings(name, config))
    cut, scope = feasible(config)
    progress(f"{name} {scope}: three directions and one step")
    at_full_size, step = full_size_findings(cut, seed)
    findings += at_full_size
    rows = rows_of(config, findings)
    return Report(name, ON_REFERENCE, sum(math.prod(row.shape) for row in rows), rows, findings, scope, step)


def rows_of(config: AnyModelConfig, findings: Sequence[Finding]) -> list[TensorRow]:
    checked_as = parameter_shapes(shrunk(config))
    return [
        TensorRow(tensor, shape, checked_as[tensor], [f for f in findings if f.tensor == tensor])
        for tensor, shape in parameter_shapes(config).items()
    ]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Fixtures are a few hundred numbers: a second thread costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fixture_findings(name: str, config: AnyModelConfig) -> Iterator[Finding]:
    """float64 at the model's own depth. Rounding accumulates with every layer, so float32 and bfloat16 are checked at the depth
    that their bounds were set for."""
    small = shrunk(config)
    yield from check_model(ModelCase(name, small))
    if isinstance(small, ModelConfig):
        yield from by_recompute(ModelCase(name, small), "float32")
        small = cut_to(small, ROUNDING_LAYERS)
    yield from by_precision(ModelCase(name, small))


def cut_to(config: Any, num_layers: int) -> Any:
    return replace(config, num_layers=min(config.num_layers, num_layers))


def parameter_shapes(config: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    if isinstance(config, ModelConfig):
        return {spec.name: spec.shape for spec in transformer_specs(config)}
    return {name: tuple(w.shape) for name, w in build_model(config).params.items()}


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
    yield from in_each_dtype([case], dtypes, (by_reference, by_recompute, by_interruption))
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
        errors = errors_of(run(ON_REFERENCE, dtype), truth)
        yield from against_reference(f"full size, {dtype}", dtype, run(on, dtype), truth, errors, zeros)
