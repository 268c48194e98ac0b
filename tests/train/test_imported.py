"""A model from elsewhere is a run like any other, but for its text."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

import tapeless
from tapeless.config import ModelConfig, Sampling
from tapeless.data.chat import CHATML, write_template
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.errors import ConfigError, DataError, InputError, UntrustedFileError, WriteError
from tapeless.interop.generation import Generation
from tapeless.interop.hf_export import export_hugging_face
from tapeless.model.transformer import Transformer
from tapeless.training.imported import generation_of, import_model
from tapeless.training.info import describe, run_facts
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import load, resume_config

SHAPE = ModelConfig(vocab_size=260, hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=8, max_seq_len=2000)
WANTED = Generation((10,), sampling=Sampling(top_k=5))


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, Transformer]:
    model = Transformer(SHAPE, seed=3)
    export_hugging_face(tmp_path / "theirs", SHAPE, model.params, ByteTokenizer(), WANTED)
    return tmp_path / "theirs", model


def test_the_run_has_the_weights_the_tokenizer_and_the_wishes(source, tmp_path: Path):
    folder, model = source
    run, found, tokenizer = import_model(folder, tmp_path / "run", ["test"])
    assert tapeless.load(run.path).store.flat.equal(model.store.flat)
    assert (found.family.name, tokenizer.kind) == ("LlamaForCausalLM", "bytes")
    loaded = load(run.path, on_warning=pytest.fail)
    assert loaded.config.imported
    assert loaded.config.model == SHAPE
    assert loaded.config.train.seq_len == 1024
    assert loaded.checkpoint.state["step"] == 0
    assert len(loaded.data.val) == 0
    assert generation_of(run) == WANTED
    assert json.loads(run.env.read_text())["argv"] == ["test"]


def test_the_first_failure_is_the_one_that_is_told(source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not that of cleaning up after it, on a disk that has become read-only."""

    def refused(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refused)
    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(WriteError, match=r"tokenizer.json could not be written: Read-only file system"):
        import_model(source[0], tmp_path / "run", [])


def test_a_run_that_was_trained_here_leaves_generation_open(tmp_path: Path):
    """Unless its tokenizer has an end of text, and its data were conversations, whose answers have an end of their own."""
    run = RunDir(tmp_path)
    ByteTokenizer().save(run.tokenizer)
    assert generation_of(run) == Generation()
    ByteTokenizer(chat=True).save(run.tokenizer)
    assert generation_of(run) == Generation(eos_ids=(256,), pad_id=256)
    write_template(tmp_path, CHATML)
    assert generation_of(run) == Generation(eos_ids=(258, 256), pad_id=256)


def test_a_wish_that_cannot_be_read(source, tmp_path: Path):
    run = import_model(source[0], tmp_path / "run", []).run
    (run.path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json: cannot be read"):
        generation_of(run)


def test_it_has_no_text_to_go_on_with(source, tmp_path: Path):
    run = import_model(source[0], tmp_path / "run", []).run
    with pytest.raises(ConfigError, match="was imported and has no data to train on"):
        resume_config(run, {})


def test_info_says_what_it_is(source, tmp_path: Path):
    run = import_model(source[0], tmp_path / "run", []).run
    text = describe(run_facts(run.path))
    assert "imported: not trained here" in text
    assert f"tapeless generate {run.path}" in text
    assert "train resume" not in text


def test_a_directory_without_a_tokenizer_needs_one_named(source, tmp_path: Path):
    folder, _ = source
    with pytest.raises(InputError, match="has its own tokenizer"):
        import_model(folder, tmp_path / "run", [], tokenizer="bytes")
    (folder / "tokenizer.json").unlink()
    for asked, says in ((None, "has no tokenizer.json; pass one: --tokenizer bytes"), ("bpe", "is trained on a text")):
        with pytest.raises(InputError, match=says):
            import_model(folder, tmp_path / "run", [], tokenizer=asked)
    with pytest.raises(DataError, match="no such tokenizer"):
        import_model(folder, tmp_path / "run", [], tokenizer="nowhere.json")
    assert not (tmp_path / "run").exists()
    assert import_model(folder, tmp_path / "run", [], tokenizer="bytes").tokenizer.kind == "bytes"


def test_a_tokenizer_that_is_named_must_fit(tmp_path: Path):
    config = ModelConfig(vocab_size=200, hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=8)
    export_hugging_face(tmp_path / "x", config, Transformer(config).params, ByteTokenizer(), Generation())
    (tmp_path / "x" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="bytes has 256 ids, but the model's vocabulary has 200"):
        import_model(tmp_path / "x", tmp_path / "run", [], tokenizer="bytes")


def test_nothing_is_left_of_an_import_that_failed(source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tapeless.training.imported.save_checkpoint", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        import_model(source[0], tmp_path / "run", [])
    assert not (tmp_path / "run").exists()
    with pytest.raises(UntrustedFileError):
        import_model(tmp_path / "nowhere", tmp_path / "run", [])


def test_weights_of_half_the_width_come_in_as_float32(tmp_path: Path):
    model = Transformer(SHAPE, seed=3)
    export_hugging_face(tmp_path / "half", SHAPE, model.params, ByteTokenizer(), WANTED, dtype="bfloat16")
    run = import_model(tmp_path / "half", tmp_path / "run", []).run
    assert tapeless.load(run.path).store.flat.equal(model.store.flat.to(torch.bfloat16).float())
