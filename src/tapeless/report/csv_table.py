"""metrics.csv: a row for each step, evaluation and look at the layers, for spreadsheets and data frames.

One row a step, its evaluation and its look in the same row: a step's row is written when the next step begins.
Tested by: tests/report/test_csv_table.py."""

import csv
from collections.abc import Iterable
from typing import Any

from tapeless.report.reporters import Event, Reporter
from tapeless.training.run_dir import RunDir

STEP = ("step", "epoch", "tokens", "loss", "lr", "grad_norm", "step_seconds", "tokens_per_second", "time")
EVAL = ("val_loss", "perplexity", "bits_per_byte")
WATCH = ("memory_bytes", "device_memory_bytes")


class CsvTable(Reporter):
    def __init__(self, run: RunDir):
        self._file = open(run.path / "metrics.csv", "w", newline="", encoding="utf-8")  # noqa: SIM115  for the life of the run
        self._table = csv.DictWriter(self._file, [*STEP, *EVAL, *WATCH], extrasaction="ignore")
        self._table.writeheader()
        self._row: dict[str, Any] = {}

    def begin(self, history: Iterable[Event]) -> None:
        super().begin(history)
        self._file.flush()

    def event(self, event: Event) -> None:
        if event["event"] == "step":
            self._write_row()
            self._row = dict(event)
        elif event["event"] in ("eval", "layer_stats") and event["step"] == self._row.get("step"):
            self._row |= {name: event[name] for name in (*EVAL, *WATCH) if name in event}
        elif event["event"] == "checkpoint":
            self._file.flush()

    def close(self) -> None:
        self._write_row()
        self._file.close()

    def _write_row(self) -> None:
        if self._row:
            self._table.writerow(self._row)
        self._row = {}
