"""Training that begins with another run's weights: they are there at step 0, and a resume does not begin with them again."""

import json
import shutil
from pathlib import Path

import pytest

import tapeless
from tapeless.cli.main import main
from tapeless.config import ModelConfig, Recipe
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.errors import CheckpointError, ConfigError
from tapeless.interop.generation import Generation
from tapeless.interop.hf_export import export_hugging_face
from tapeless.model.transformer import Transformer
from tapeless.training.checkpoint import read_checkpoint
from tapeless.training.imported import import_model
from tapeless.training.init_from import load_initial_weights, resolve_recipe
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_config import read_run_config
from tapeless.training.run_dir import RunDir

SHAPE = ModelConfig(vocab_size=256, hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=8, max_seq_len=16)
TEXT = "every forward has its backward, and every backward has its judges\n" * 30


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An imported run whose model is sure of itself, so that its first loss is not that of a new one."""
    model = Transformer(SHAPE, seed=3)
    model.params["head.w"].mul_(30)
    export_hugging_face(tmp_path / "theirs", SHAPE, model.params, ByteTokenizer(), Generation())
    (tmp_path / "text.txt").write_text(TEXT)
    return import_model(tmp_path / "theirs", tmp_path / "source", []).run.path


def train(*words: object) -> int:
    usual = ["--batch-size", "2", "--lr", "0.01", "--no-verify", "--sample-tokens", "2", "--eval-windows", "2", "--json"]
    return main(["train", "new", *map(str, words), *usual])


def test_the_first_loss_is_that_of_the_model(source: Path, tmp_path: Path):
    out = RunDir(tmp_path / "run")
    assert train("--init-from", source, "--dataset-path", tmp_path / "text.txt", "--out-dir", out.path, "--max-steps", "3") == 0
    first = next(event for event in read_metrics(out.metrics) if event["event"] == "step")
    data = tapeless.data.prepare.open_prepared(out.path)
    config = read_run_config(out.config)
    assert config.model == SHAPE
    begun = tapeless.Trainer(tapeless.load(source), config.train, data)
    fresh = tapeless.Trainer(Transformer(SHAPE, seed=0), config.train, data)
    batch = begun.next_batch()
    assert first["loss"] == pytest.approx(begun.model.loss(*batch).item(), rel=1e-6)
    assert abs(first["loss"] - fresh.model.loss(*batch).item()) > 0.1
    assert data.tokenizer.kind == "bytes"


def test_a_resume_without_a_checkpoint_begins_with_them_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, cut = RunDir(tmp_path / "whole"), RunDir(tmp_path / "cut")
    for run in (whole, cut):
        words = ["--init-from", source, "--dataset-path", tmp_path / "text.txt", "--out-dir", run.path, "--max-steps", "4"]
        assert train(*words) == 0
    shutil.rmtree(cut.checkpoints)  # what a kill before the first checkpoint leaves
    cut.checkpoints.mkdir()
    told = cut.metrics.read_text().splitlines(keepends=True)
    cut.metrics.write_text("".join(line for line in told if json.loads(line)["event"] in ("start", "step")))
    assert main(["train", "resume", str(cut.path), "--json"]) == 0
    ends = [read_checkpoint(run.checkpoints / "step-00000004").params for run in (whole, cut)]
    assert all(ends[0][name].equal(w) for name, w in ends[1].items())


def test_what_the_other_run_learns_later_is_not_begun_with(source: Path, tmp_path: Path):
    words = ["--dataset-path", tmp_path / "text.txt", "--max-steps", "2"]
    other = RunDir(tmp_path / "other")
    assert train("--init-from", source, "--out-dir", other.path, *words) == 0
    before = tapeless.load(other.path).store.flat.clone()
    assert train("--init-from", other.path, "--out-dir", tmp_path / "run", *words) == 0
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002").state["base"] is None  # that is of adapters
    assert main(["train", "resume", str(other.path), "--override", "max_steps=4", "--json"]) == 0
    model, config = Transformer(SHAPE), read_run_config(tmp_path / "run" / "config.toml")
    load_initial_weights(model, RunDir(tmp_path / "no checkpoint yet"), config, on_warning=pytest.fail)
    assert model.store.flat.equal(before)
    shutil.rmtree(other.checkpoints / "step-00000002")
    with pytest.raises(CheckpointError, match=r"the run started from .*step-00000002, which is missing"):
        load_initial_weights(model, RunDir(tmp_path / "no checkpoint yet"), config, on_warning=pytest.fail)


def test_a_run_that_was_trained_here_will_do(source: Path, tmp_path: Path):
    words = ["--dataset-path", tmp_path / "text.txt", "--max-steps", "2"]
    assert train("--init-from", source, "--out-dir", tmp_path / "one", *words) == 0
    assert train("--init-from", tmp_path / "one", "--out-dir", tmp_path / "two", *words) == 0
    model, two = Transformer(SHAPE), RunDir.open(tmp_path / "two")
    config = read_run_config(two.config)
    load_initial_weights(model, RunDir(tmp_path / "three"), config, on_warning=pytest.fail)
    assert model.store.flat.equal(tapeless.load(tmp_path / "one").store.flat)


def test_only_what_is_of_training_alone_may_change(source: Path):
    def resolved(model: dict, **train: str) -> tuple:
        return resolve_recipe(Recipe("model", model, {"init_from": str(source), **train}))

    model, settings = resolved({"dropout": 0.1})
    assert (model.dropout, model.hidden_dim, settings.tokenizer) == (0.1, 16, str(source / "tokenizer.json"))
    assert resolved({"num_layers": 1})[0] == SHAPE  # as it is
    with pytest.raises(ConfigError, match="num_layers is 1 there, 3 was requested; head_dim is 8 there, 4 was"):
        resolved({"num_layers": 3, "hidden_dim": 16, "head_dim": 4})
    with pytest.raises(ConfigError, match="has its own tokenizer"):
        resolved({}, tokenizer="bpe")


def test_mistakes(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    for words, says in (
        (["--init-from", tmp_path / "theirs", "--num-layers", "2"], "num_layers is 1 there, 2 was requested"),
        (["--init-from", tmp_path / "theirs", "--tokenizer", "bpe"], "has its own tokenizer"),
        (["--init-from", tmp_path], "is not the directory of a run"),
        (["--init-from", source, "--num-layers", "2"], "num_layers is 1 there, 2 was requested"),
        (["--init-from", source, "--set", "model.num_layers=2"], "num_layers is 1 there, 2 was requested"),
        (["--init-from", source, "--preset", "tiny"], "hidden_dim is 16 there, 64 was requested"),
    ):
        assert train(*words) == 2
        assert says in capsys.readouterr().err


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_metrics(RunDir(run).metrics) if event["event"] == "step"]


@pytest.mark.parametrize("adapters", [[], ["--lora-rank", "2"]], ids=["all", "lora"])
def test_a_directory_trains_as_its_import_does(source: Path, tmp_path: Path, adapters: list[str]):
    """The same losses and the same weights, bit for bit; and the directory is not needed again."""
    runs = {"imported": source, "direct": tmp_path / "theirs"}
    for name, begin in runs.items():
        words = [
            "--init-from",
            begin,
            "--dataset-path",
            tmp_path / "text.txt",
            "--out-dir",
            tmp_path / name,
            "--max-steps",
            "4",
        ]
        assert train(*words, *adapters) == 0
    assert len(losses(tmp_path / "direct")) == 4
    assert losses(tmp_path / "direct") == losses(tmp_path / "imported")
    shutil.rmtree(tmp_path / "theirs")
    ends = [tapeless.load(tmp_path / name).params for name in runs]
    assert all(ends[0][name].equal(w) for name, w in ends[1].items())
    assert main(["train", "resume", str(tmp_path / "direct"), "--override", "max_steps=6", "--json"]) == 0
    assert len(losses(tmp_path / "direct")) == 6


def test_epochs_of_a_directory_are_counted_as_those_of_its_import(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    data = ["--dataset-path", str(tmp_path / "text.txt"), "--epochs", "3", "--batch-size", "2", "--no-calibrate", "--json"]
    found = []
    for begin in (source, tmp_path / "theirs"):
        assert main(["estimate", "--init-from", str(begin), *data]) == 0
        found.append(json.loads(capsys.readouterr().out)["steps"])
    assert found[0] == found[1] > 10


def test_begun_from_a_directory_and_cut_off_it_begins_with_the_same_weights(source: Path, tmp_path: Path):
    words = ["--init-from", tmp_path / "theirs", "--dataset-path", tmp_path / "text.txt", "--max-steps", "3"]
    whole, cut = RunDir(tmp_path / "whole"), RunDir(tmp_path / "cut")
    for run in (whole, cut):
        assert train(*words, "--out-dir", run.path) == 0
    shutil.rmtree(tmp_path / "theirs")
    shutil.rmtree(cut.checkpoints)
    cut.checkpoints.mkdir()
    told = cut.metrics.read_text().splitlines(keepends=True)
    cut.metrics.write_text("".join(line for line in told if json.loads(line)["event"] in ("start", "step")))
    assert main(["train", "resume", str(cut.path), "--json"]) == 0
    assert losses(cut.path) == losses(whole.path)


def test_a_directory_that_cannot_be_trusted_leaves_nothing_behind(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """The errors of an import, before a directory is made."""
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    words = ["--init-from", theirs, "--dataset-path", tmp_path / "text.txt", "--max-steps", "1", "--out-dir", out]
    (theirs / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert train(*words) == 2
    assert "has no tokenizer.json; pass one: --tokenizer bytes" in capsys.readouterr().err
    weights = theirs / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    said = []
    for command in (["import", theirs, "--out", tmp_path / "other"], ["train", "new", *words]):
        assert main([str(word) for word in command]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "error[UNTRUSTED_FILE]" in said[0]
    assert not out.exists()
    weights.write_bytes(whole)
    assert train(*words, "--tokenizer", tmp_path / "tokenizer.json") == 0
    assert read_run_config(RunDir(out).config).train.init_from == str(out / "base")
