"""`tapeless eval` from outside: the numbers it prints are the model's, on all of the validation text."""

import json
import math
import shlex
from pathlib import Path

import pytest

from tapeless.cli.main import main
from tapeless.training.runs import load


@pytest.fixture
def facts(trained: tuple[Path, str], capsys: pytest.CaptureFixture) -> dict:
    assert main(["eval", str(trained[0]), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_numbers_are_the_models(facts: dict, trained: tuple[Path, str]):
    import torch

    model, data, *_ = load(trained[0], on_warning=pytest.fail)
    text = torch.tensor(data.val.astype("int64"))
    loss, right = 0.0, 0
    for start in range(0, len(text) - 1, 32):  # one window at a time, unlike the command
        tokens, targets = text[start : start + 32], text[start + 1 : start + 33]
        logits = model.logits(tokens[: len(targets)][None])[0].double()
        loss += float((logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]).sum())
        right += int((logits.argmax(-1) == targets).sum())
    count = len(text) - 1
    assert facts["tokens"] == count
    assert facts["val_loss"] == pytest.approx(loss / count, rel=1e-5)
    assert facts["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-4)
    assert facts["bits_per_byte"] == pytest.approx(loss / count / math.log(2), rel=1e-5)
    assert facts["accuracy"] == pytest.approx(right / count, abs=1.5 / count)
    assert facts["step"] == 40


def test_the_baselines_are_beside_it(facts: dict):
    assert facts["uniform"] == pytest.approx(math.log(256))
    assert facts["uniform"] > facts["unigram"] > facts["bigram"] > 0
    assert facts["val_loss"] < facts["uniform"]
    assert facts["floor"] is None


def test_as_text(trained: tuple[Path, str], facts: dict, capsys: pytest.CaptureFixture):
    assert main(["eval", str(trained[0])]) == 0
    out = capsys.readouterr().out
    for name in ("val loss", "perplexity", "bits per byte", "accuracy", "uniform", "unigram", "bigram"):
        assert name in out
    assert f"{facts['val_loss']:.4f}" in out
    assert "floor" not in out  # nobody knows it for this text


def test_an_earlier_checkpoint(trained: tuple[Path, str], facts: dict, capsys: pytest.CaptureFixture):
    assert main(["eval", str(trained[0]), "--checkpoint", "20", "--json"]) == 0
    earlier = json.loads(capsys.readouterr().out)
    assert earlier["step"] == 20
    assert earlier["val_loss"] > facts["val_loss"]


def test_the_floor_and_the_sources_own_loss_where_they_are_known(tmp_path: Path, capsys: pytest.CaptureFixture):
    small = shlex.split("--hidden-dim 8 --num-layers 1 --num-heads 1 --intermediate-dim 8 --max-seq-len 64 --no-verify")
    words = ["--corpus", "arithmetic", "--tokenizer", "char", "--vocab-size", "13", "--max-steps", "1", "--eval-windows", "2"]
    assert main(["train", "new", *small, *words, "--out-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "entropy of the source" in out
    assert "loss of the true source on the same windows" in " ".join(out.split())  # a long line is wrapped
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["floor"] < facts["source_loss"] < 1.1 * facts["floor"]  # above it: a window begins anywhere in a line
    assert facts["source_loss"] < facts["val_loss"]


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["eval", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err


def test_the_average_of_the_weights(tmp_path: Path, text_file: Path, trained: tuple[Path, str], capsys: pytest.CaptureFixture):
    run = tmp_path / "run"
    small = shlex.split("--hidden-dim 8 --num-layers 1 --num-heads 1 --intermediate-dim 8 --max-seq-len 16 --no-verify")
    words = ["--dataset-path", str(text_file), "--out-dir", str(run), "--max-steps", "20", "--ema-decay", "0.9"]
    assert main(["train", "new", *small, *words]) == 0
    capsys.readouterr()
    losses = {}
    for which in ("raw", "ema"):
        assert main(["eval", str(run), "--weights", which, "--json"]) == 0
        losses[which] = json.loads(capsys.readouterr().out)["val_loss"]
        assert main(["generate", str(run), "--weights", which, "--max-tokens", "3"]) == 0
        capsys.readouterr()
    assert losses["raw"] != losses["ema"]
    assert main(["eval", str(trained[0]), "--weights", "ema"]) == 2
    assert "holds no average of the weights" in capsys.readouterr().err
