"""`tapeless gradcheck`: checks the gradients of the user's own architecture.

At fixture sizes, with all of its layers, each tensor is compared with each oracle. At real sizes the gradient is checked along
three directions through all parameters, and one step of gradient descent must lower the loss."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tapeless.config import AnyModelConfig, ModelConfig
from tapeless.model.build import build_model
from tapeless.model.transformer import transformer_specs
from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import ON_REFERENCE, ModelCase, Setting, shrunk
from tapeless.verify.full_size import Step, feasible, full_size_findings
from tapeless.verify.model_judges import by_precision
from tapeless.verify.model_levels import by_recompute, check_model

Progress = Callable[[str], None]
PER_TENSOR = ("complex step", "autograd reference")
ROUNDING_LAYERS = 2


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
