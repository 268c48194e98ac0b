"""Offline files, read back with W&B's own definition of a record; and the error where it is not installed."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import course, empty_run, loss_at, step_event

from tapeless.errors import MissingError
from tapeless.report.wandb_files import WandbFiles
from tapeless.report.wandb_records import wandb_records
from tapeless.training.run_dir import RunDir

pytestmark = pytest.mark.filterwarnings("ignore")  # of its own dependencies


def test_where_it_is_missing_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingError, match=r"report_to wandb: .*pip install 'tapeless\[wandb\]'"):
        WandbFiles(empty_run(tmp_path / "run"))


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that would have it elsewhere, under another name, and online."""
    pytest.importorskip("wandb", reason="needs the package wandb")
    elsewhere = {"WANDB_MODE": "online", "WANDB_DIR": str(tmp_path / "elsewhere"), "WANDB_RUN_ID": "other"}
    elsewhere |= {"WANDB_RESUME": "must", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    for name, value in elsewhere.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_PROJECT", "WANDB_ERROR_REPORTING", "WANDB_CACHE_DIR"):  # what the reporter sets goes again
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def told(run: RunDir, steps: int, *, ends: bool = True) -> None:
    """What one process tells: from the beginning, as after a resume."""
    files = WandbFiles(run)
    files.begin(event for event in course(steps) if ends or event["event"] != "end")
    files.close()


def the_file(run: RunDir) -> Path:
    (file,) = (run.path / "wandb").rglob("*.wandb")
    return file


def read(file: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(record) for record in wandb_records(file)]


def history(file: Path) -> list[dict[str, Any]]:
    rows = [record.history.item for record in read(file) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


@pytest.mark.usefixtures("hostile")
def test_every_value_once_also_after_a_resume(tmp_path: Path):
    run = empty_run(tmp_path / "run")
    told(run, 120, ends=False)
    first = the_file(run)
    told(run, 100)
    rows = history(the_file(run))
    assert the_file(run).name == first.name  # the id is in it
    assert [row["_step"] for row in rows] == [*range(1, 101)]
    assert [row["loss/train"] for row in rows] == [loss_at(step) for step in range(1, 101)]
    assert [row["_timestamp"] for row in rows[:-1]] == [1.7e9 if step in (1, 50) else 1.7e9 + step for step in range(1, 100)]
    assert {"loss/validation", "grad_norm/head", "update_ratio/head", "memory/process"} <= set(rows[-1])
    page = the_file(run).parent / "files" / rows[-1]["sample/path"]
    assert "<script>" not in page.read_text()
    assert "memory/device" not in rows[-1]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.usefixtures("hostile")
def test_the_run_has_its_name_its_configuration_and_its_end(tmp_path: Path):
    run = empty_run(tmp_path / "named", lr=0.25)
    told(run, 3)
    records = read(the_file(run))
    (about,) = [record.run for record in records if record.HasField("run")]
    assert (about.display_name, about.project) == ("named", "tapeless")
    assert {item.key: json.loads(item.value_json) for item in about.config.update}["train"]["lr"] == 0.25
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


@pytest.mark.usefixtures("hostile")
def test_a_process_that_ends_without_an_end_has_failed(tmp_path: Path):
    run = empty_run(tmp_path / "run")
    told(run, 3, ends=False)
    assert [record.exit.exit_code for record in read(the_file(run)) if record.HasField("exit")] == [1]


@pytest.mark.usefixtures("hostile")
def test_what_is_not_finite_is_not_lost(tmp_path: Path):
    run = empty_run(tmp_path / "run")
    files = WandbFiles(run)
    files.begin([step_event(1, loss="NaN"), step_event(2, loss=math.inf)])
    files.close()
    assert [str(float(row["loss/train"])) for row in history(the_file(run))] == ["nan", "inf"]


@pytest.mark.usefixtures("hostile")
def test_steps_that_did_not_reach_the_disk_are_missed(tmp_path: Path):
    run = empty_run(tmp_path / "run")
    files = WandbFiles(run)
    files.begin(course(10))
    files._writer.finish()
    file = the_file(run)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(OSError, match=r"holds \d of 10 steps"):
        files.close()
