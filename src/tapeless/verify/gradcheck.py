"""`tapeless gradcheck`: the user's own architecture before the judges.

At fixture sizes, with every choice and every layer kept, each tensor is held against each oracle. At real sizes three
directions go through the whole model, and one step downhill must lower the loss."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tapeless.config import AnyModelConfig, ModelConfig
from tapeless.model.build import build_model
from tapeless.model.params import transformer_specs
from tapeless.verify.finding import Finding
from tapeless.verify.fixtures import ModelCase, shrunk
from tapeless.verify.full_size import Step, feasible, full_size_findings
from tapeless.verify.model_levels import by_precision, by_recompute, check_model

Progress = Callable[[str], None]


class TensorRow(NamedTuple):
    """One parameter tensor and the check that came nearest to its bound."""

    tensor: str
    shape: tuple[int, ...]  # at full size
    oracles: int  # how many judged it
    worst: Finding

    @property
    def ok(self) -> bool:
        return self.worst.ok


class Report(NamedTuple):
    name: str
    parameters: int
    tensors: list[TensorRow]
    findings: list[Finding]
    scope: str  # what was checked at real widths
    step: Step

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.ok]

    @property
    def ok(self) -> bool:
        return not self.failures and self.step.after < self.step.before

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.ok,
            "parameters": self.parameters,
            "scope": self.scope,
            "tensors": [{"tensor": row.tensor, "shape": row.shape, "oracles": row.oracles, "ok": row.ok} for row in self.tensors],
            "findings": [{**finding._asdict(), "ok": finding.ok} for finding in self.findings],
            "sgd": self.step._asdict(),
        }


def closeness(finding: Finding) -> float:
    """How near a finding is to its bound: above 1 it is a failure."""
    if finding.bound == 0:
        return 0.0 if finding.error == 0 else float("inf")
    return finding.error / finding.bound if finding.error == finding.error else float("inf")


def gradcheck(name: str, config: AnyModelConfig, *, seed: int = 0, progress: Progress = lambda text: None) -> Report:
    shapes = parameter_shapes(config)
    progress(f"{name}: {len(shapes)} tensors at fixture sizes, float64")
    findings = list(fixture_findings(name, config))
    cut, scope = feasible(config)
    progress(f"{name} {scope}: three directions and one step")
    step = Step(float("nan"), float("nan"), float("nan"))
    for result in full_size_findings(cut, seed):
        if isinstance(result, Step):
            step = result
        else:
            findings.append(result)
    rows = []
    for tensor, shape in shapes.items():
        judged = [finding for finding in findings if finding.tensor == tensor and finding.oracle != "underpowered"]
        rows.append(TensorRow(tensor, shape, len({f.oracle for f in judged}), max(judged, key=closeness)))
    return Report(name, sum(math.prod(shape) for shape in shapes.values()), rows, findings, scope, step)


def fixture_findings(name: str, config: AnyModelConfig) -> Iterator[Finding]:
    case = ModelCase(name, shrunk(config))
    yield from check_model(case)
    yield from by_precision(case)
    if isinstance(config, ModelConfig):
        yield from by_recompute(case, "float32")


def parameter_shapes(config: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    if isinstance(config, ModelConfig):
        return {spec.name: spec.shape for spec in transformer_specs(config)}
    return {name: tuple(w.shape) for name, w in build_model(config).params.items()}
