"""The command, and the page that a run leaves."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tapeless.cli.main import main
from tapeless.training.metrics_log import read_metrics

SMALL = shlex.split("--hidden-dim 16 --num-layers 1 --num-heads 2 --intermediate-dim 32 --max-seq-len 32")


def runs_in(page: Path) -> list[dict]:
    (data,) = re.findall(r'id="data">(.*?)</script>', page.read_text(), re.S)
    return json.loads(data)["runs"]


def test_a_run_leaves_its_report(trained: tuple[Path, str]):
    run, _ = trained
    (told,) = runs_in(run / "report.html")
    assert told["name"] == "small"
    assert told["steps"]["step"] == [*range(1, 41)]
    assert told["evals"]["step"] == [20, 40]
    assert told["layers"]["step"] == [1, 2, 4, 8, 16, 32]
    assert "done, " in (run / "report.html").read_text()


def test_the_command_writes_the_same(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture):
    run, _ = trained
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert runs_in(out) == runs_in(run / "report.html")


def test_several_runs(trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, _ = trained
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(run)]) == 0
    assert [told["name"] for told in runs_in(tmp_path / "report.html")] == [
        str(run),
        str(run),
    ]  # one name would not tell them apart


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err


def test_a_directory_is_no_page(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture):
    for out in (".", str(tmp_path)):
        assert main(["report", str(trained[0]), "--out", out]) == 2
        assert "is a directory; name the file" in capsys.readouterr().err


def test_a_resume_goes_on_in_the_same_files(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped, and resumed from a checkpoint further back: page and table have every step once."""
    from tapeless.training.signals import StopSignals

    run = tmp_path / "run"
    words = ["--dataset-path", str(text_file), "--out-dir", str(run), "--batch-size", "2", "--max-steps", "12", "--no-verify"]
    with monkeypatch.context() as patch:
        asked = iter(range(7))
        patch.setattr(StopSignals, "requested", lambda self: next(asked, None) is None)
        assert main(["train", "new", *SMALL, *words, "--report-to", "html,csv", "--layer-stats-every", "3"]) == 75
    stopped = runs_in(run / "report.html")[0]["steps"]["step"]
    assert 1 < len(stopped) < 12
    assert main(["train", "resume", str(run)]) == 0
    assert runs_in(run / "report.html")[0]["steps"]["step"] == [*range(1, 13)]
    rows = (run / "metrics.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == [str(step) for step in range(1, 13)]
    assert [event["step"] for event in read_metrics(run / "metrics.jsonl") if event["event"] == "layer_stats"] == [
        1,
        2,
        3,
        6,
        9,
        12,
    ]
    assert "resumed" in (run / "report.html").read_text()


def test_without_a_report_there_is_none(text_file: Path, tmp_path: Path):
    run = tmp_path / "run"
    words = ["--dataset-path", str(text_file), "--out-dir", str(run), "--max-steps", "2", "--no-verify", "--report-to", "none"]
    assert main(["train", "new", *SMALL, *words]) == 0
    assert not (run / "report.html").exists()


PACKAGES = ["tensorboard", "wandb", "trackio"]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_ends_the_run_before_it_begins(
    name: str, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("tapeless.training.runs.prepare", lambda *_, **__: pytest.fail("the data were prepared first"))
    run = tmp_path / "run"
    words = ["--dataset-path", str(text_file), "--out-dir", str(run), "--report-to", f"csv,{name}", "--no-verify"]
    assert main(["train", "new", *SMALL, *words]) == 2
    assert f"error[MISSING]: report_to {name}" in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_leaves_a_run_that_would_go_on_as_it_is(
    name: str, trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    run, _ = trained
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", "resume", str(run), "--override", f"report_to={name}", "--override", "max_steps=50"]) == 2
    assert f"error[MISSING]: report_to {name}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
