"""A database of Trackio, trackio/tapeless.db in the run's folder; `TRACKIO_DIR=RUN/trackio trackio show` opens it.

Rows go straight into Trackio's storage. Its own `init` asks the Hub who is logged in, gives every row the time at which it
was written and turns failures into warnings; here nothing leaves the machine, a row has the time of its event, and a failure
is one.
Needs the package trackio: pip install 'tapeless[trackio]'.
Tested by: tests/report/test_trackio_database.py."""

import os
import shutil
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tapeless.errors import ConfigError
from tapeless.report.reporters import PROJECT, Event, Reporter, package
from tapeless.report.scalars import as_markdown, scalars
from tapeless.training.run_config import read_run_config
from tapeless.training.run_dir import RunDir

SECONDS = 5.0  # between two writes, each of which opens the database: about 20 ms


class Row(NamedTuple):
    step: int
    timestamp: str
    metrics: dict[str, Any]


class TrackioDatabase(Reporter):
    def __init__(self, run: RunDir):
        self.run, self._folder = run, run.path.resolve() / "trackio"
        os.environ["TRACKIO_DIR"] = str(self._folder)  # read once, when the package is loaded
        self._markdown = package("trackio").Markdown
        self._storage = package("trackio", "trackio.sqlite_storage").SQLiteStorage
        elsewhere = self._storage.get_project_db_path(PROJECT).parent
        if elsewhere != self._folder:
            raise ConfigError(
                f"report_to trackio: trackio is loaded already, for {elsewhere}; begin the run in a process of its own"
            )
        self._rows: list[Row] = []
        self._next = 0.0  # when rows may be written again

    def begin(self, history: Iterable[Event]) -> None:
        if self._folder.exists():
            shutil.rmtree(self._folder)  # of the process before a resume: everything is told again
        self._config: dict[str, Any] | None = read_run_config(self.run.config).tables()
        for event in history:
            self._take(event)
        self._write()

    def event(self, event: Event) -> None:
        self._take(event)
        if event["event"] == "checkpoint" or time.monotonic() >= self._next:
            self._write()

    def close(self) -> None:
        self._write()

    def _take(self, event: Event) -> None:
        told: dict[str, Any] = dict(scalars(event))
        if event["event"] == "sample":
            told["sample"] = self._markdown(as_markdown(event["text"]))._to_dict()
        if told:
            self._rows.append(Row(event["step"], datetime.fromtimestamp(event["time"], UTC).isoformat(), told))

    def _write(self) -> None:
        if not self._rows:
            return
        steps, timestamps, metrics = map(list, zip(*self._rows, strict=True))
        name = self._folder.parent.name  # the run's, and its id
        self._storage.bulk_log(PROJECT, name, metrics, steps=steps, timestamps=timestamps, config=self._config)
        self._rows, self._config, self._next = [], None, time.monotonic() + SECONDS
