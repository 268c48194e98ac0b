"""Trackio by its public API: one run over all resumes, nothing on stdout; and the error if it is not installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_fixtures import course, empty_run, eval_event, loss_at

from tapeless.errors import MissingError
from tapeless.report.reporters.trackio import TrackioReporter

needs_trackio = pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs the package trackio")


def test_if_it_is_missing_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingError, match=r"report_to trackio: .*pip install 'tapeless\[trackio\]'"):
        TrackioReporter(empty_run(tmp_path / "run"))


class FakeTrackio(SimpleNamespace):
    """The part of the package that the reporter uses; it prints, as the package does."""

    def __init__(self) -> None:
        super().__init__(Markdown=str)
        self.inits, self.rows, self.finished = list[Any](), list[Any](), 0

    def init(self, project: str, name: str, **options: Any) -> "FakeTrackio":
        print("* Trackio project initialized")
        self.inits.append((project, name, options))
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        print("* Run finished")
        self.finished += 1


def test_a_resume_continues_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    run = empty_run(tmp_path / "run", lr=0.25)
    for steps in (120, 150):
        reporter = TrackioReporter(run)
        reporter.begin([*course(steps), eval_event(steps, 2.0) | {"ema_val_loss": 1.5}])
        reporter.close()
    (project, name, options), again = fake.inits
    assert (project, name.startswith("run-"), options["resume"]) == ("tapeless", True, "allow")
    assert again[1] == name
    assert options["config"]["train"]["lr"] == 0.25
    assert [values["loss/train"] for _, values in fake.rows if "loss/train" in values] == [loss_at(s) for s in range(1, 151)]
    assert fake.rows[-1][1]["loss/validation_ema"] == 1.5
    assert fake.finished == 2
    assert capsys.readouterr().out == ""


REAL = """
import json, sys
from pathlib import Path
from report_fixtures import course, empty_run
from tapeless.report.reporters.trackio import TrackioReporter
run = empty_run(Path(sys.argv[1]))
for steps in (12, 15):
    reporter = TrackioReporter(run)
    reporter.begin(list(course(steps)))
    reporter.close()
from trackio.sqlite_storage import SQLiteStorage
import trackio
(found,) = trackio.Api().runs("tapeless")
print(json.dumps(SQLiteStorage.get_logs("tapeless", found.name, run_id=found.id)))
"""


@needs_trackio
def test_the_database_of_the_package_itself(tmp_path: Path):
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", REAL, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads(done.stdout) if "loss/train" in row]
    assert [(row["step"], row["loss/train"]) for row in rows] == [(step, loss_at(step)) for step in range(1, 16)]
