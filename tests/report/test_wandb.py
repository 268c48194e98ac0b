"""W&B by its public API: which mode, one run over all resumes, every step once; and the error if it is not installed."""

import json
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_fixtures import course, empty_run, eval_event, logged_run, loss_at, step_event
from wandb_records import wandb_records

from tapeless.errors import MissingError
from tapeless.report.reporters import Reporters
from tapeless.report.reporters.wandb import WandbReporter
from tapeless.training.run_dir import RunDir


def test_if_it_is_missing_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingError, match=r"report_to wandb: .*pip install 'tapeless\[wandb\]'"):
        WandbReporter(empty_run(tmp_path / "run"))


class FakeWandb(SimpleNamespace):
    """The part of the package that the reporter uses. `step`: where the server says that a resumed run continues."""

    def __init__(self, *, logged_in: bool = False, step: int = 0):
        super().__init__(Settings=dict, Html=lambda text, inject: text, step=step, url=None, dir="", torn_down=False)
        self.logged_in, self.inits, self.rows, self.exit_codes = logged_in, list[Any](), list[Any](), list[int]()
        self.fails_at: int | None = None

    def login(self, **options: Any) -> bool:
        assert options == {"prompt": False, "verify": False}
        return self.logged_in

    def init(self, **options: Any) -> "FakeWandb":
        self.inits.append(options)
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionResetError("connection lost")
        self.rows.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)

    def teardown(self) -> None:
        self.torn_down = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    made = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def log_run(run: RunDir, events: list[dict[str, Any]]) -> None:
    """One process: all events are history."""
    reporter = WandbReporter(run)
    reporter.begin(events)
    reporter.close()


@pytest.mark.parametrize(
    ("logged_in", "variable", "mode", "resume"),
    [
        (False, None, "offline", None),
        (True, None, "online", "allow"),
        (True, "offline", "offline", None),
        (False, "online", "online", "allow"),
    ],
)
def test_online_if_the_user_is_logged_in_or_wandb_mode_says_so(
    tmp_path: Path,
    fake: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    logged_in: bool,
    variable: str | None,
    mode: str,
    resume: str | None,
):
    fake.logged_in = logged_in
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    log_run(empty_run(tmp_path / "named", lr=0.25), list(course(3)))
    (options,) = fake.inits
    assert (options["mode"], options["resume"], options["project"], options["name"]) == (mode, resume, "tapeless", "named")
    assert options["config"]["train"]["lr"] == 0.25
    assert options["dir"] == str(tmp_path / "named")
    assert fake.exit_codes == [0]


def test_online_a_resume_continues_the_run_and_sends_no_step_twice(tmp_path: Path, fake: FakeWandb):
    run, fake.logged_in = empty_run(tmp_path / "run"), True
    log_run(run, [event for event in course(120) if event["event"] != "end"])
    fake.step = 121  # as the server says
    log_run(run, list(course(150)))
    assert fake.inits[0]["id"] == fake.inits[1]["id"]
    losses = [(step, values["loss/train"]) for step, values in fake.rows if "loss/train" in values]
    assert losses == [(step, loss_at(step)) for step in range(1, 151)]
    assert fake.exit_codes == [1, 0]  # the first process ended without an end


def test_offline_a_resume_writes_everything_again_and_removes_the_file_before(tmp_path: Path, fake: FakeWandb):
    run = empty_run(tmp_path / "run")
    log_run(run, list(course(12)))
    before = run.path / "wandb" / f"offline-run-20260101_000000-{fake.inits[0]['id']}"
    before.mkdir(parents=True)
    log_run(run, list(course(15)))
    losses = [step for step, values in fake.rows if "loss/train" in values]
    assert losses == [*range(1, 13), *range(1, 16)]
    assert not before.exists()


def test_a_new_event_at_a_step_that_the_server_has_is_not_sent(tmp_path: Path, fake: FakeWandb):
    fake.step = 5
    log_run(empty_run(tmp_path / "run"), [step_event(step) for step in range(1, 9)])
    assert [step for step, _ in fake.rows] == [5, 6, 7, 8]


def test_the_loss_of_averaged_weights_is_sent(tmp_path: Path, fake: FakeWandb):
    log_run(empty_run(tmp_path / "run"), [eval_event(1, 2.0) | {"ema_val_loss": 1.5}])
    assert fake.rows[0][1]["loss/validation_ema"] == 1.5


def test_a_failure_is_one_warning_and_the_next_resume_sends_everything(
    tmp_path: Path, fake: FakeWandb, caplog: pytest.LogCaptureFixture
):
    run, fake.fails_at = logged_run(tmp_path / "run", 20), 13
    with caplog.at_level(logging.WARNING, "tapeless"), Reporters(run, "wandb") as reporters:
        reporters.event(step_event(21))
    assert caplog.messages == ["report_to wandb stopped, ConnectionResetError: connection lost; training continues"]
    assert fake.torn_down
    fake.fails_at = None
    with Reporters(run, "wandb"):
        pass
    assert [step for step, values in fake.rows if "loss/train" in values] == [*range(1, 13), *range(1, 21)]


@pytest.mark.filterwarnings("ignore")
def test_offline_files_of_the_package_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="needs the package wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    run = empty_run(tmp_path / "run", lr=0.25)
    log_run(run, [event for event in course(12) if event["event"] != "end"])
    time.sleep(1.1)  # the name of a folder has the second it was made in
    log_run(run, list(course(15)))
    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    records = [Record.FromString(record) for record in wandb_records(file)]
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [row["loss/train"] for row in rows] == [loss_at(step) for step in range(1, 16)]
    assert len({record.run.run_id for record in records if record.HasField("run")}) == 1
