"""`tapeless data` and `tapeless tokenizer`: prepare once, train from it, look at it."""

import json
import shlex
from pathlib import Path

import pytest

from tapeless.cli.main import main
from tapeless.config import READERS

SMALL = shlex.split("--hidden-dim 16 --num-layers 1 --num-heads 2 --intermediate-dim 32 --max-seq-len 16 --sample-tokens 4")
FEW = shlex.split("--max-steps 3 --warmup-steps 1 --batch-size 2 --document-attention --no-verify --eval-windows 2")


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"body": f"document {i}: the cat sat on the mat"}) for i in range(60)))
    return str(path)


def facts(capsys: pytest.CaptureFixture, *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_prepare_then_train(source: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    out, field = str(tmp_path / "data"), ["--text-field", "body"]
    made = facts(capsys, "tokenizer", "train", source, "--out", str(tmp_path / "t.json"), "--vocab-size", "300", *field)
    assert (made["kind"], made["vocab_size"], made["round_trip"], made["unknown"]) == ("bpe", 300, True, 0)
    assert made["bytes_per_token"] > 2
    looked = facts(capsys, "tokenizer", "info", str(tmp_path / "t.json"), "--text", source, *field)
    assert looked == made
    prepared = facts(capsys, "data", "prepare", source, "--out", out, "--tokenizer", str(tmp_path / "t.json"), *field)
    assert prepared["tokenizer_hash"] == made["hash"]
    assert facts(capsys, "data", "info", out) == prepared
    assert facts(capsys, "data", "info", source, *field)["documents"] == 60
    windows = facts(capsys, "data", "sample", out, "--count", "2", "--tokens", "40")
    assert len(windows) == 2
    assert all("⟦document⟧document" in window for window in windows)
    Path(source).unlink()  # not needed any more
    run = str(tmp_path / "run")
    assert main(["train", "new", *SMALL, *FEW, "--dataset-path", out, "--vocab-size", "300", "--out-dir", run]) == 0
    assert prepared["fingerprint"] in (tmp_path / "run" / "config.toml").read_text()
    capsys.readouterr()
    assert facts(capsys, "eval", run)["tokens"] < prepared["validation_tokens"] - 1  # no target across documents


def test_a_file_format_of_a_plugin(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(READERS, "_entries", dict(READERS._entries))
    monkeypatch.setattr("tapeless.plugins.LOADED", {})
    plugin, source = tmp_path / "plugin.py", tmp_path / "a.lines"
    plugin.write_text("""
from tapeless.config import READERS
READERS.register("lines", lambda path, field: iter(path.read_text().splitlines()))
""")
    source.write_text("".join(f"document {n} of the file\n" for n in range(40)))
    with_plugin = ["--plugin", str(plugin)]
    assert facts(capsys, "data", "info", str(source), *with_plugin)["documents"] == 40
    table = str(tmp_path / "t.json")
    facts(capsys, "tokenizer", "train", str(source), "--vocab-size", "300", "--out", table, *with_plugin)
    made = facts(capsys, "data", "prepare", str(source), "--out", str(tmp_path / "data"), "--tokenizer", table, *with_plugin)
    assert made["documents"] == 40
    run = str(tmp_path / "run")
    assert main(["train", "new", *SMALL, *FEW, "--dataset-path", str(source), "--out-dir", run, *with_plugin]) == 0
    del READERS._entries["lines"]  # as in a process without the plugin: a run has its tokens
    assert main(["train", "resume", run, "--max-steps", "4"]) == 0
    assert main(["eval", run]) == 0


def test_they_are_readable_too(source: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["data", "prepare", source, "--out", str(tmp_path / "data"), "--text-field", "body"]) == 0
    assert "tokens per document" in capsys.readouterr().out
    assert main(["tokenizer", "info", "bytes"]) == 0
    out = capsys.readouterr().out
    assert "vocab size           256" in out
    assert "special              none" in out
    assert main(["tokenizer", "info", "bytes+chat", "--text", source, "--text-field", "body"]) == 0
    out = capsys.readouterr().out
    assert "special              <|endoftext|>, <|im_start|>, <|im_end|>" in out
    assert "round trip           yes" in out
    assert main(["data", "sample", str(tmp_path / "data"), "--part", "val"]) == 0
    assert "cat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data", "prepare", "{source}", "--out", "{folder}"], "already exists and is not empty"),
        (["data", "prepare", "{source}", "--out", "{folder}/new", "--processes", "0"], "--processes must be at least 1"),
        (["data", "prepare", "{source}", "--out", "{folder}/new"], "no field `text`, got body"),
        (["data", "sample", "{folder}"], "no prepared data here"),
        (["data", "sample", "{source}"], "no prepared data here"),
        (["data", "sample", "{folder}", "--count", "0"], "must be at least 1"),
        (["tokenizer", "train", "{source}", "--out", "{source}"], "already exists"),
        (["tokenizer", "train", "{folder}/nowhere", "--out", "{folder}/t.json"], "no such file or folder"),
        (["tokenizer", "info", "{folder}/nowhere"], "no such tokenizer"),
    ],
)
def test_mistakes(source: str, tmp_path: Path, capsys: pytest.CaptureFixture, words: list[str], says: str):
    assert main([word.format(source=source, folder=tmp_path) for word in words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
