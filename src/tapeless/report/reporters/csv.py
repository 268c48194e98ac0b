"""metrics.csv: one row per step, with its evaluation and layer statistics, for spreadsheets and data frames.

A step's row is written when the next step begins.
Tested by: tests/report/test_csv.py."""

import csv
from collections.abc import Iterable
from typing import Any

from tapeless.report.metrics import METRICS, Event
from tapeless.report.reporters import Reporter
from tapeless.training.run_dir import RunDir

COLUMNS = [metric.key for metric in METRICS if not metric.per_layer]


class CsvReporter(Reporter):
    def __init__(self, run: RunDir):
        self._file = open(run.path / "metrics.csv", "w", newline="", encoding="utf-8")  # noqa: SIM115  for the life of the run
        self._table = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        self._table.writeheader()
        self._row: dict[str, Any] = {}

    def begin(self, history: Iterable[Event]) -> None:
        super().begin(history)
        self._file.flush()

    def event(self, event: Event) -> None:
        if event["event"] == "step":
            self._write_row()
        if event["event"] == "step" or (event["event"] in ("eval", "layer_stats") and event["step"] == self._row.get("step")):
            self._row |= {m.key: event.get(m.key) for m in METRICS if m.event == event["event"] and not m.per_layer}
        elif event["event"] == "checkpoint":
            self._file.flush()

    def close(self) -> None:
        self._write_row()
        self._file.close()

    def _write_row(self) -> None:
        if self._row:
            self._table.writerow(self._row)
        self._row = {}
