"""`tapeless export` and `tapeless import` from outside: out, in again, and the same text."""

import json
from pathlib import Path

import pytest
import torch

from tapeless.cli.export import size_in_bytes
from tapeless.cli.main import main
from tapeless.errors import UsageError
from tapeless.model.transformer import Transformer


def said(capsys: pytest.CaptureFixture, *words: object) -> tuple[str, str]:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr()


def test_out_and_in_again_writes_the_same_text(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture):
    out, err = said(capsys, "export", trained[0], "--to", "hf", "--out", tmp_path / "hf", "--shard-size", "10KB")
    assert "LlamaForCausalLM, float32, step 40" in out
    assert "warning: the weights are in 4 files" in err
    out, _ = said(capsys, "import", tmp_path / "hf", "--out", tmp_path / "run")
    assert "LlamaForCausalLM" in out
    assert "tokenizer bytes" in out
    words = ["--prompt", "9 bottles", "--max-tokens", "40", "--seed", "3"]
    assert said(capsys, "generate", tmp_path / "run", *words) == said(capsys, "generate", trained[0], *words)


def test_an_imported_model_is_evaluated_on_a_text_that_is_named(
    trained: tuple[Path, str], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    said(capsys, "export", trained[0], "--to", "hf", "--out", tmp_path / "hf")
    said(capsys, "import", tmp_path / "hf", "--out", tmp_path / "run")
    found = json.loads(said(capsys, "eval", tmp_path / "run", "--dataset-path", text_file, "--json")[0])
    here = json.loads(said(capsys, "eval", trained[0], "--dataset-path", text_file, "--json")[0])
    assert found["val_loss"] == here["val_loss"]
    assert found["tokens"] == len(text_file.read_bytes()) - 1
    assert "bigram" in here
    assert "bigram" not in found  # there is no training text to count
    own = json.loads(said(capsys, "eval", trained[0], "--json")[0])
    assert own["tokens"] < here["tokens"]


def test_defaults_lie_within_the_run(trained: tuple[Path, str], capsys: pytest.CaptureFixture):
    pytest.importorskip("gguf")
    out, err = said(capsys, "export", trained[0], "--to", "gguf", "--dtype", "float16")
    assert out.startswith(f"{trained[0] / 'small-float16.gguf'}: LlamaForCausalLM, float16")
    assert "requires an end-of-text token" in err
    assert (trained[0] / "small-float16.gguf").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export", "RUN", "--to", "hf", "--dtype", "q8_0", "--out", "x"], "q8_0 exists in GGUF only"),
        (["export", "RUN", "--to", "onnx"], "invalid choice: 'onnx'"),
        (["export", "RUN"], "required: --to"),
        (["export", "RUN", "--to", "hf", "--shard-size", "5"], "--shard-size 5: expected a size such as 500MB"),
        (["export", "RUN", "--to", "hf", "--checkpoint", "7", "--out", "x"], "has no checkpoint '7'"),
        (["export", "nowhere", "--to", "hf"], "is not the directory of a run"),
        (["import", "nowhere"], "nowhere is not a directory"),
        (["import", "RUN"], "no config.json; is it a Hugging Face directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(words: list[str], says: str, trained: tuple[Path, str], capsys: pytest.CaptureFixture):
    assert main([str(trained[0]) if word == "RUN" else word for word in words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_an_imported_run_needs_what_it_has_not(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture):
    said(capsys, "export", trained[0], "--to", "hf", "--out", tmp_path / "hf")
    said(capsys, "import", tmp_path / "hf", "--out", tmp_path / "run")
    for words, says in (
        (["generate"], "no text to start from; pass --prompt"),
        (["eval"], "has no validation text; pass --dataset-path"),
        (["train", "resume"], "tapeless train new --init-from"),
    ):
        assert main([*words, str(tmp_path / "run")]) == 2
        assert says in capsys.readouterr().err


def test_a_text_ends_where_the_model_says(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture):
    said(capsys, "export", trained[0], "--to", "hf", "--out", tmp_path / "hf")
    wanted = tmp_path / "hf" / "generation_config.json"
    wanted.write_text(json.dumps({"eos_token_id": [32], "do_sample": True, "temperature": 0.0}))
    said(capsys, "import", tmp_path / "hf", "--out", tmp_path / "run")
    words = ["--prompt", "9", "--max-tokens", "60"]
    text, _ = said(capsys, "generate", tmp_path / "run", *words)
    greedy, _ = said(capsys, "generate", trained[0], *words, "--temperature", "0")
    assert text.rstrip("\n") == greedy[: greedy.index(" ")]
    other, _ = said(capsys, "generate", tmp_path / "run", *words, "--temperature", "5", "--seed", "1")
    assert other != text  # a flag goes before the file


def test_sizes():
    assert (size_in_bytes("5GB"), size_in_bytes("1.5 mb"), size_in_bytes("10KB")) == (5 * 10**9, 1_500_000, 10_000)
    for text in ("5", "GB", "0GB", "-1GB", "5TB"):
        with pytest.raises(UsageError):
            size_in_bytes(text)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "nowhere"], "device 'nowhere' cannot be used"),
        (["--ops", "nothing"], "nothing"),
        (["--threads", "4096"], "4096"),
    ],
)
def test_the_machine_of_an_export_must_exist(
    trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture, words: list[str], says: str
):
    assert main(["export", str(trained[0]), "--to", "hf", "--out", str(tmp_path / "hf"), *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_a_model_whose_logits_are_not_finite_is_not_exported(
    trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Transformer, "logits", lambda self, tokens: torch.full((1, 1, 256), torch.nan))
    assert main(["export", str(trained[0]), "--to", "hf", "--out", str(tmp_path / "hf")]) == 2
    assert "its logits are not finite on cpu, ops reference" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
