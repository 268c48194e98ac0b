"""The database, read back by Trackio's own reader; and the error where it is not installed.

Trackio reads its folder once in a process, so each test of it has one of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import empty_run, loss_at

from tapeless.errors import MissingError
from tapeless.report.trackio_database import TrackioDatabase

needs_trackio = pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs the package trackio")

PRELUDE = """
import json, sys
from pathlib import Path
from report_fixtures import course, empty_run, step_event
from tapeless.errors import ConfigError
from tapeless.report.trackio_database import TrackioDatabase
run = empty_run(Path(sys.argv[1]), lr=0.25)

def told(events):
    database = TrackioDatabase(run)
    database.begin(events)
    database.close()

def read():
    import trackio
    from trackio.sqlite_storage import SQLiteStorage
    (found,) = trackio.Api().runs("tapeless")
    print(json.dumps([found.name, found.id, found.config, SQLiteStorage.get_logs("tapeless", found.name, run_id=found.id)]))
"""


def python(code: str, run: Path) -> Any:
    """What it prints, in an environment that would have it elsewhere and online."""
    hostile = {"TRACKIO_DIR": str(run.with_name("elsewhere")), "TRACKIO_SPACE_ID": "someone/space", "HF_TOKEN": "hf_none"}
    hostile |= {"HF_ENDPOINT": "http://127.0.0.1:9"}  # should it be online: not into the world
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + code, str(run)],
        env=os.environ | hostile | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not run.with_name("elsewhere").exists()
    return json.loads(done.stdout)


def test_where_it_is_missing_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", "")  # the reporter sets it; it goes again
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingError, match=r"report_to trackio: .*pip install 'tapeless\[trackio\]'"):
        TrackioDatabase(empty_run(tmp_path / "run"))


@needs_trackio
def test_every_value_once_also_after_a_resume(tmp_path: Path):
    name, found, config, rows = python("told(course(120)); told(course(100)); read()", tmp_path / "run")
    assert (name, found, config["train"]["lr"]) == ("run", "run", 0.25)
    steps = [row for row in rows if "loss/train" in row]
    assert [row["step"] for row in steps] == [*range(1, 101)]
    assert [row["loss/train"] for row in steps] == [loss_at(step) for step in range(1, 101)]
    assert steps[0]["timestamp"] == "2023-11-14T22:13:21+00:00"
    names = {name for row in rows for name in row}
    assert {"loss/validation", "grad_norm/head", "update_ratio/head", "memory/process", "sample"} <= names
    assert "memory/device" not in names


@needs_trackio
def test_what_comes_later_is_appended_and_what_is_not_finite_is_kept(tmp_path: Path):
    code = """
database = TrackioDatabase(run)
database.begin([step_event(1, loss="NaN")])
for step in (2, 3):
    database.event(step_event(step, loss=float("inf")))
database.close()
read()
"""
    *_, rows = python(code, tmp_path / "run")
    assert [(row["step"], str(row["loss/train"])) for row in rows] == [(1, "nan"), (2, "inf"), (3, "inf")]


@needs_trackio
def test_a_process_has_one_folder(tmp_path: Path):
    code = """
told(course(3))
try:
    TrackioDatabase(empty_run(Path(sys.argv[1]).with_name("second")))
except ConfigError as error:
    print(json.dumps(str(error)))
"""
    assert "begin the run in a process of its own" in python(code, tmp_path / "run")
