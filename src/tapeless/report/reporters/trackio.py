"""Trackio: in its local database, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say; `trackio show --project tapeless`.

Needs the package trackio: pip install 'tapeless[trackio]'.
Tested by: tests/report/test_trackio.py."""

import sys
from contextlib import redirect_stdout
from typing import Any

from tapeless.report.metrics import Event, as_markdown, scalars
from tapeless.report.reporters import PROJECT, ServiceReporter


class TrackioReporter(ServiceReporter):
    requires = "trackio"

    def open(self, run_id: str, name: str, config: dict[str, Any]) -> int:
        with redirect_stdout(sys.stderr):  # it prints, and stdout may be JSON
            self.package.init(PROJECT, f"{name}-{run_id}", config=config, resume="allow", embed=False)
        return self._step + 1

    def send(self, event: Event) -> None:
        values: dict[str, Any] = dict(scalars(event))
        if event["event"] == "sample":
            values["sample"] = self.package.Markdown(as_markdown(event["text"]))
        if values:
            self.package.log(values, step=event["step"])

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self.package.finish()
        self._save()
