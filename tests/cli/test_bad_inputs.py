"""The bad inputs of acceptance/bad_inputs.py, each: one line, its code, a hint, exit status 2, nothing left behind."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHAT = {
    "missing path",
    "empty file",
    "whitespace only",
    "fewer tokens than one window",
    "validation too short",
    "non-UTF-8 byte",
    "UTF-16",
    "binary file",
    "unreadable file",
    "JSONL, bad line",
    "JSONL, missing field",
    "token id beyond the vocabulary",
    "unknown flag",
    "unknown key",
    "wrong type in a file",
    "wrong type of a flag",
    "lr NaN",
    "lr negative",
    "lr 0",
    "indivisible width",
    "indivisible heads",
    "warm-up beyond the steps",
    "run directory not empty",
    "run locked",
    "resume with nothing there",
    "changed architecture",
    "changed tokenizer",
    "changed data",
    "newer format",
    "pickle as text",
    "pickle as a run",
    "disk full at start",
}


def test_every_bad_input_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "acceptance"))
    import bad_inputs

    cases = bad_inputs.cases(tmp_path)
    assert {case.what for case in cases} >= WHAT
    assert [problem for case in cases if (problem := bad_inputs.problem(case, tmp_path))] == []
    del sys.modules["bad_inputs"]


def test_a_disk_that_is_full_while_the_data_are_written(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import errno

    from tapeless.cli.main import main
    from tapeless.data import prepare

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare, "token_writer", full)
    assert main(["train", "new", "--dataset-path", str(text_file), "--out-dir", str(tmp_path / "run")]) == 2
    assert "error[DISK_FULL]: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
