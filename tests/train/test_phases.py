"""Where the seconds of a start go: phases that follow each other, from the start of the process or of the call."""

import time
from pathlib import Path

import pytest
from run_fixtures import MODEL, text_file

from tapeless import resume, train
from tapeless.cli.main import main
from tapeless.training import phases as module
from tapeless.training.metrics_log import read_metrics
from tapeless.training.phases import Phases, process_age

FEW = {"batch_size": 2, "max_steps": 1, "sample_tokens": 1}
NEW = ["resource check", "data", "model", "gradient check"]


def test_each_phase_begins_where_the_last_ended(monkeypatch: pytest.MonkeyPatch):
    clock = iter([10.0, 11.5, 15.5])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    phases = Phases(age=2.0)
    phases.end("a")
    phases.end("b")
    assert phases.seconds == {"a": 3.5, "b": 4.0}


def test_the_age_of_this_process_grows_with_the_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    first, start = process_age(), time.perf_counter()
    time.sleep(0.1)
    assert process_age() - first == pytest.approx(time.perf_counter() - start, abs=0.03)
    monkeypatch.setattr(module, "STAT", tmp_path / "missing")
    assert process_age() == pytest.approx(time.process_time(), abs=0.1)


def test_a_run_records_the_phases_of_its_start_and_of_each_resume(tmp_path: Path):
    result = train(MODEL, text_file(tmp_path, 700), out_dir=tmp_path / "run", display=None, **FEW)
    (start,) = (event for event in result.events() if event["event"] == "start")
    assert list(start["startup_seconds"]) == NEW
    assert all(seconds >= 0 for seconds in start["startup_seconds"].values())
    again = resume(tmp_path / "run", display=None, max_steps=2)
    (event,) = (event for event in again.events() if event["event"] == "resume")
    assert list(event["startup_seconds"]) == ["data", "model"]


def test_a_command_records_what_came_before(tmp_path: Path):
    words = [f"--{key.replace('_', '-')}={value}" for key, value in FEW.items()]
    flags = ["--preset", "tiny", "--dataset-path", text_file(tmp_path, 3000), "--out-dir", str(tmp_path / "run")]
    assert main(["train", "new", *flags, *words, "--no-verify"]) == 0
    start = next(iter(read_metrics(tmp_path / "run" / "metrics.jsonl")))
    assert list(start["startup_seconds"]) == ["command", "imports", *NEW[:-1]]
