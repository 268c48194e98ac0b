"""What was asked for and would do nothing is refused in one line, with exit status 2, before anything is made."""

from pathlib import Path

import pytest

from tapeless.cli.main import main
from tapeless.config import TrainConfig

ALONE = [
    (["--lora-alpha", "3"], "lora_alpha and lora_targets need adapters"),
    (["--lora-targets", "wo"], "lora_alpha and lora_targets need adapters"),
    (["--nesterov"], "nesterov is an option of sgd, muon; adamw does not"),
    (["--nesterov", "--optimizer", "adam"], "nesterov is an option of sgd, muon; adam does not"),
    (["--momentum", "0.5"], "momentum is an option of sgd, muon; adamw does not use it"),
    (["--momentum", "0"], "momentum is an option of sgd, muon; adamw does not use it"),
    (["--beta2", "0.99", "--optimizer", "sgd"], "beta2 is an option of adamw, adam, muon; sgd does not use it"),
    (["--corpus", "markov"], "corpus markov is used only without a dataset_path"),
    (["--patience", "2", "--eval-every", "0"], "patience counts evaluations"),
    (["--freeze", " , "], "names no parameter"),
    (["--eps", "inf"], "eps must be above 0"),
    (["--report-to", "none,html"], "none cannot be combined"),
]


@pytest.mark.parametrize(("words", "said"), ALONE)
@pytest.mark.parametrize("command", [["train", "new"], ["estimate", "--no-calibrate"]])
def test_refused(
    command: list[str], words: list[str], said: str, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    out = tmp_path / "run"
    assert main([*command, "--dataset-path", str(text_file), "--out-dir", str(out), *words]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
    assert not out.exists()


def test_a_run_that_has_such_a_thing_already_is_still_read():
    """It was begun by a version that did not mind."""
    assert TrainConfig(patience=2, eval_every=0, nesterov=True, dataset_path="text", corpus="markov").patience == 2


def test_shards_are_of_hugging_face_alone(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["export", str(tmp_path), "--to", "gguf", "--shard-size", "1MB"]) == 2
    assert "a GGUF is one file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"), [(["--val-path", "TEXT"], "leave out val_path"), (["--tokenizer", "char"], "a tokenizer of its own")]
)
def test_tokens_have_their_validation_part_and_their_tokenizer(
    words: list[str], said: str, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert main(["data", "prepare", str(text_file), "--out", str(tmp_path / "data"), "--processes", "1"]) == 0
    words = [str(text_file) if word == "TEXT" else word for word in words]
    assert main(["train", "new", "--dataset-path", str(tmp_path / "data"), "--out-dir", str(tmp_path / "run"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
