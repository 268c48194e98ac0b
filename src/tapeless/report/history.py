"""What the report of a run shows, folded from its events.

    RunHistory(run)        configuration and environment, from the run's directory
    history.add(event)     every event of metrics.jsonl, once, in order
    history.data()         what the page draws, as plain lists
Its size is bounded, however long the run.
Tested by: tests/report/test_history.py."""

import logging
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tapeless.data.files import reason
from tapeless.regular import read_json
from tapeless.report.buckets import Buckets, rounded
from tapeless.report.metrics import curves
from tapeless.training.metrics_log import as_written, read_metrics
from tapeless.training.run_config import read_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.run_time import RunTime

SAMPLES, SAMPLE_LENGTH = 12, 2000  # on the page, and characters of each
NOTES = 40  # warnings, resumes and ends
LAYER_POINTS = 128  # columns of the layer maps
CLIP_POINTS, CLIP_STEPS = 64, 10  # most points of the clip rate, and least steps in each
log = logging.getLogger("tapeless")


def _environment(run: RunDir) -> dict[str, Any]:
    """Empty, with a warning, if the file is missing or damaged: nothing else of the report depends on it."""
    try:
        found = read_json(run.env)
        if isinstance(found, dict):
            return found
        why = f"expected a JSON object, got {type(found).__name__}"
    except OSError as error:
        why = reason(error)
    except ValueError:
        why = "not JSON"
    log.warning("%s cannot be read: %s; the report leaves out the environment", run.env, why)
    return {}


class RunHistory:
    def __init__(self, run: RunDir):
        self.run, self.config = run, read_run_config(run.config)
        self.environment = _environment(run)
        self.start: Mapping[str, Any] = {}
        self.steps, self.evals, self.memory = Buckets(), Buckets(), Buckets()
        self.layers = Buckets(LAYER_POINTS)
        self.groups: list[str] = []
        self.last: Mapping[str, Any] = {}  # the last step
        self.last_eval: Mapping[str, Any] = {}
        self.best_eval: Mapping[str, Any] = {}
        self.seconds = 0.0  # spent in steps
        self.best_ema: Mapping[str, Any] = {}  # the evaluation with the lowest loss of the averaged weights
        self.peak_memory, self.on_device = 0, False
        self.samples: list[tuple[int, str]] = []
        self.notes: list[tuple[int, str]] = []
        self.resumes: list[dict[str, Any]] = []  # where, and what was changed
        self.changes: list[tuple[int, str, Any, Any]] = []  # by resumes: step, field of TrainConfig, old and new value
        self.ending: str | None = None
        self.times = RunTime()
        self._samples_seen, self._sample_stride = 0, 1

    @classmethod
    def read(cls, run: RunDir) -> "RunHistory":
        """All events of a run so far."""
        history = cls(run)
        if run.metrics.exists():
            with as_written(run.metrics):
                for event in read_metrics(run.metrics):
                    history.add(event)
        return history

    def add(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        self.ending = None
        self.times.add(event)
        if kind == "step":
            self._step(event)
        elif kind == "eval":
            self._eval(event)
        elif kind == "layer_stats":
            self._layer_stats(event)
        elif kind == "sample":
            self._sample(event)
        elif kind in ("start", "resume"):
            self.start = event
            if kind == "resume":
                self._resume(event)
        elif kind == "guard":
            self.ending = "diverged" if "error" in event else None
            self._note(event, event.get("error") or event.get("warning") or "")
        elif kind == "end":
            self.ending = event["reason"]

    def _resume(self, event: Mapping[str, Any]) -> None:
        changes = [(event["step"], name, old, new) for name, (old, new) in event["changes"].items()]
        self.changes = [*self.changes, *changes][-NOTES:]
        text = "resumed" + "".join(f", {name} {plain(old)} -> {plain(new)}" for _, name, old, new in changes)
        self.resumes = [*self.resumes[-NOTES + 1 :], {"step": event["step"], "text": text} | self._elapsed()]
        self._note(event, text)

    def _step(self, event: Mapping[str, Any]) -> None:
        self.last = event
        self.seconds += event["step_seconds"]
        norm, clip = float(event["grad_norm"]), self.config.train.grad_clip
        values = {
            "tokens": event["tokens"],
            "seconds": self.seconds,
            "clipped": float(0 < clip < norm),
            "steps": 1,
        }
        self.steps.add(event["step"], values | _numbers(event))

    def _eval(self, event: Mapping[str, Any]) -> None:
        self.last_eval = event
        self.best_eval = _lower("val_loss", event, self.best_eval)
        self.best_ema = _lower("ema_val_loss", event, self.best_ema)
        self.evals.add(event["step"], _numbers(event) | self._elapsed())

    def _layer_stats(self, event: Mapping[str, Any]) -> None:
        self.groups = list(event["grad_norm"])
        self.on_device = event["device_memory_bytes"] is not None
        memory = event["device_memory_bytes"] if self.on_device else event["memory_bytes"]
        if memory is not None:
            self.peak_memory = max(self.peak_memory, memory)
            self.memory.add(event["step"], {"memory": memory} | self._elapsed())
        rows = {f"grad {name}": float(value) for name, value in event["grad_norm"].items()}
        rows |= {f"ratio {name}": float(value) for name, value in event["update_ratio"].items()}
        self.layers.add(event["step"], rows | self._elapsed())

    def _sample(self, event: Mapping[str, Any]) -> None:
        """Keep the first, the last, and some in between at equal distances."""
        sample = (event["step"], event["text"][:SAMPLE_LENGTH])
        self.samples = [sample] if not self.samples else [*self._even(), sample]
        self._samples_seen += 1

    def _even(self) -> list[tuple[int, str]]:
        """The samples to keep when another one arrives."""
        kept = self.samples if (self._samples_seen - 1) % self._sample_stride == 0 else self.samples[:-1]
        if len(kept) == SAMPLES:
            self._sample_stride *= 2
            kept = kept[::2]
        return kept

    def _note(self, event: Mapping[str, Any], text: str) -> None:
        self.notes = [*self.notes[-NOTES + 1 :], (event.get("step", 0), text)]

    def _elapsed(self) -> dict[str, float]:
        return {"tokens": self.last.get("tokens", 0), "seconds": self.seconds}

    @property
    def name(self) -> str:
        return self.run.path.resolve().name

    @property
    def started(self) -> str:
        return datetime.fromtimestamp(self.start["time"]).astimezone().isoformat(" ", "minutes") if self.start else ""

    def data(self) -> dict[str, Any]:
        """The numbers that page.js draws."""
        baselines = self.start.get("baselines") or {}
        return {
            "clip": self.config.train.grad_clip,
            "baselines": {name: rounded(value) for name, value in baselines.items()},
            "floor": self.start.get("floor"),
            "data": dict(self.config.data),
            "resumes": self.resumes,
            "steps": _axes(self.steps) | {metric.key: self.steps.ranges(metric.key) for metric in curves("step")},
            "clip_rate": self._clip_rate(),
            "evals": _axes(self.evals) | {metric.key: self.evals.ranges(metric.key) for metric in curves("eval")},
            "memory": {**_axes(self.memory), "bytes": self.memory.ranges("memory"), "on_device": self.on_device},
            "layers": {
                **_axes(self.layers),
                "groups": self.groups,
                "grad_norm": [self.layers.means(f"grad {name}") for name in self.groups],
                "update_ratio": [self.layers.means(f"ratio {name}") for name in self.groups],
            },
        }

    def _clip_rate(self) -> dict[str, Any]:
        """The share of clipped steps, each point over several spans of steps: a single step is either clipped or not."""
        cells = list(self.steps.cells.values())
        together = max(-(-len(cells) // CLIP_POINTS), -(-CLIP_STEPS // self.steps.width))
        axes, clipped, steps = _axes(self.steps), self.steps.sums("clipped"), self.steps.sums("steps")
        starts = range(0, len(cells), together)
        rate = [rounded(sum(clipped[i : i + together]) / max(sum(steps[i : i + together]), 1)) for i in starts]
        ends = [min(i + together, len(cells)) - 1 for i in starts]
        return {name: [values[i] for i in ends] for name, values in axes.items()} | {"rate": {"mean": rate}}


def _numbers(event: Mapping[str, Any]) -> dict[str, float]:
    metrics = curves(event["event"])
    return {metric.key: float(event[metric.key]) for metric in metrics if metric.key in event or not metric.optional}


def _lower(key: str, event: Mapping[str, Any], best: Mapping[str, Any]) -> Mapping[str, Any]:
    loss = float(event.get(key, math.nan))
    return event if math.isfinite(loss) and loss < float(best.get(key, math.inf)) else best


def _axes(buckets: Buckets) -> dict[str, list[Any]]:
    return {"step": buckets.steps(), "tokens": buckets.last("tokens"), "seconds": buckets.last("seconds")}


def plain(value: Any) -> str:
    """A setting's value, as a TOML file has it; `none` where it is not set."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
