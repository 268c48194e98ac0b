"""`tapeless bench` from end to end: a real run of a small model, and every mistake in one line."""

import json

import pytest

from tapeless.bench import task
from tapeless.cli import bench
from tapeless.cli.main import main

QUICK = ["--preset", "llama-tiny", "--batch-size", "2", "--seq-len", "16", "--rounds", "1", "--turn", "0.05", "--threads", "1"]


def test_side_by_side(capsys: pytest.CaptureFixture, tmp_path):
    file = tmp_path / "found.json"
    words = ["--contenders", "ours,eager,floor", "--dtypes", "float32", "--json", str(file)]
    assert main(["bench", *QUICK, *words]) == 0
    out, err = capsys.readouterr()
    assert "llama-tiny (131,904 parameters), 2x16, one training step" in out
    assert "ours float32: " in out
    assert "round 1 of 1" in err
    found = json.loads(file.read_text())
    assert [row["contender"] for row in found["contenders"]] == ["ours", "eager", "floor"]
    assert found["contenders"][0]["result"] == pytest.approx(found["contenders"][1]["result"], rel=1e-4)
    assert found["disagreements"] == []
    assert found["left_out"] == {}
    assert found["conditions"]["threads"] == 1


def test_generation_as_json(capsys: pytest.CaptureFixture):
    pytest.importorskip("transformers")
    assert main(["bench", *QUICK, "--generate", "--tokens", "6", "--dtypes", "float32", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    ours, theirs = found["contenders"]
    assert ours["result"] == theirs["result"]
    assert found["verdicts"][0]["peer"] == "hf float32"


def test_contenders_that_differ_end_with_status_3(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    from tapeless.bench import measure

    def pretended(*args, **options):
        return {"kind": "training", "disagreements": ["ours gives 1, eager gives 2"]}

    monkeypatch.setattr(measure, "training", pretended)
    assert main(["bench", *QUICK, "--json", "-"]) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--contenders", "ours,egaer"], "--contenders: unknown 'egaer'; did you mean 'eager'?"),
        (["--dtypes", "float16"], "did you mean 'bfloat16'?"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--turn", "0"], "--turn must be above 0 and finite"),
        (["--seq-len", "65"], "seq_len must be at most max_seq_len = 64, got 65"),
        (["--dropout", "0.1"], "--dropout 0"),
        (["--device", "tpu"], "device 'tpu' cannot be used here"),
        (["--generate", "--scaling"], "not allowed with"),
        (["--round", "1"], "did you mean '--rounds'?"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture, words: list[str], says: str):
    assert main(["bench", "--preset", "llama-tiny", *words]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert err.count("\n") == 1
    assert out == ""


def test_the_command_knows_every_contender():
    """It has a list of its own, since --help must not import torch."""
    assert set(bench.CONTENDERS) == set(task.CONTENDERS)
    assert set(bench.DTYPES) == set(task.DTYPES)
