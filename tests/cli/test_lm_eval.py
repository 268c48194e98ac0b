"""`tapeless lm-eval`: which words are ours, which go on; and what is said where the package is not there."""

import sys
from pathlib import Path

import pytest

from tapeless.cli.main import build_parser, main


def test_what_is_not_ours_is_passed_on_in_order():
    ours = ["--weights", "ema", "--checkpoint", "best"]
    words = ["lm-eval", "runs/tiny", "--tasks", "a,b", *ours, "--batch_size", "8"]
    args = build_parser().parse_args(words)
    assert (str(args.run_dir), args.weights, args.checkpoint) == ("runs/tiny", "ema", "best")
    assert args.passed_on == ["--tasks", "a,b", "--batch_size", "8"]


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith(("lm_eval.", "tapeless.tasks.lm"))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["lm-eval", str(tmp_path), "--tasks", "a"]) == 2
    assert "error[MISSING]: this needs EleutherAI's package lm_eval: pip install 'tapeless[lm-eval]'" in capsys.readouterr().err
