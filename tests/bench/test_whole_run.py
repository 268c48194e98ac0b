"""A real run by the trainer, from a command of its own."""

import json

import pytest

from tapeless.bench.report import text
from tapeless.cli.main import main

SMALL = ["--preset", "llama-tiny", "--batch-size", "2", "--seq-len", "16", "--dtypes", "float32", "--ops", "reference"]


def test_a_run_by_the_command(capsys: pytest.CaptureFixture):
    assert main(["bench", *SMALL, "--run", "--steps", "6", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = result["runs"]["float32"]
    assert (result["steps"], found["steps"], found["processes"]) == (6, 4, 1)
    assert {"step", "data", "metrics", "evaluation", "checkpoints", "samples"} <= found["seconds"].keys()
    assert {"imports", "model", "gradient check", "first steps"} <= found["startup_seconds"].keys()
    assert found["wall_per_step_s"] == pytest.approx(sum(found["seconds"].values()) / 4)
    shown = text(result)
    assert "2x16, a run of 6 steps by the trainer" in shown
    assert "of the median step" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "2"], "--steps 2: a run is measured after its first 2 steps"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--contenders", "eager"], "--run ours"),
        (["--generate"], "not allowed with"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture, words: list[str], says: str):
    assert main(["bench", *SMALL, "--run", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_run_that_fails_says_why(capsys: pytest.CaptureFixture):
    assert main(["bench", *SMALL, "--set", "train.dataset_path=/does/not/exist", "--run", "--steps", "6"]) != 0
    assert "/does/not/exist" in capsys.readouterr().err
