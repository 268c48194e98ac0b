"""The command line as such: help, versions, and every mistake turned into one line and exit status 2."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tapeless.cli.main import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["gradchek"], "gradchek"),
        (["gradcheck", "--presett", "tiny"], "unknown flag --presett; did you mean '--preset'?"),
        (["gradcheck", "--hidden-dimm", "64"], "did you mean '--hidden-dim'?"),
        (["gradcheck", "--preset", "tinny"], "unknown preset 'tinny'; did you mean 'tiny'?"),
        (["gradcheck", "--preset", "tiny", "--config", "x.toml"], "x.toml: no such file"),
        (["gradcheck", "--set", "model.ffnn=relu"], "unknown key model.ffnn; did you mean 'ffn'?"),
        (["gradcheck", "--hidden-dim", "many"], "error[WRONG_TYPE]: --hidden-dim must be int, got 'many'"),
        (["gradcheck", "--hidden-dim", "0"], "hidden_dim must be at least 1, got 0"),
        (["gradcheck", "--num-heads", "3"], "hidden_dim 128 is not divisible by num_heads 3"),
        (["gradcheck", "--num-kv-heads", "3"], "num_heads 4 is not divisible by num_kv_heads 3"),
        (["gradcheck", "--head-dim", "7"], "head_dim is 7; make it even"),
        (["gradcheck", "--norm-bias"], "norm_bias needs norm = 'layer'"),
        (["gradcheck", "--ffn", "swish"], "invalid choice: 'swish'"),
        (["gradcheck", "--preset", "simplelm", "--num-layers", "2"], "simplelm is a SimpleLM"),
        (["gradcheck", "--config", "no/such/file.toml"], "no such file"),
        (["gradcheck", "--op", "atention"], "did you mean 'attention'?"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, words, says):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert err.startswith("error[")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["gradcheck", "--help"],
        ["train", "--help"],
        ["train", "new", "--help"],
        ["train", "resume", "--help"],
        ["train", "info", "--help"],
        ["generate", "--help"],
        ["eval", "--help"],
        ["bench", "--help"],
    ],
    ids=" ".join,
)
def test_help_and_version_end_well(capsys, words):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    assert "tapeless" in capsys.readouterr().out


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "tapeless", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tapeless ")


def test_an_unforeseen_failure_is_one_line_too_and_debug_shows_the_traceback(capsys, monkeypatch):
    from tapeless.cli import gradcheck

    def explode(args):
        raise KeyError("boom")

    monkeypatch.setattr(gradcheck, "run", explode)
    assert main(["gradcheck"]) == 1
    assert "error[INTERNAL]: KeyError: 'boom'" in capsys.readouterr().err
    with pytest.raises(KeyError):
        main(["--debug", "gradcheck"])


def test_a_limit_of_threads_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as Python does at `ulimit -u`

    monkeypatch.setattr(threading.Thread, "start", refused)
    (tmp_path / "text.txt").write_text("some text " * 500)
    words = ["--preset", "tiny", "--dataset-path", str(tmp_path / "text.txt"), "--out-dir", str(tmp_path / "run")]
    assert main(["train", "new", *words]) == 1
    assert not (tmp_path / "run").exists()
    assert "error[FAILED]: no thread can be started" in capsys.readouterr().err
