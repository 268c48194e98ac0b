"""A run of adapters: its checkpoints hold them alone and name their base, and whoever loads it gets the whole model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tapeless
from tapeless.cli.main import main
from tapeless.config import ModelConfig
from tapeless.data.files import file_sha256
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.errors import CheckpointError
from tapeless.interop.generation import Generation
from tapeless.model.transformer import Transformer
from tapeless.training.checkpoint import MODEL, read_checkpoint, restore
from tapeless.training.imported import write_run
from tapeless.training.init_from import load_initial_weights
from tapeless.training.run_config import read_run_config, write_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import make_model

SHAPE = ModelConfig(vocab_size=256, hidden_dim=16, num_layers=2, num_heads=2, intermediate_dim=12, max_seq_len=16)
TEXT = "every forward has its backward, and every backward has its judges\n" * 30
USUAL = ["--batch-size", "2", "--lr", "0.05", "--no-verify", "--sample-tokens", "2", "--eval-windows", "2", "--json"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    wanted = Generation((10,))
    return write_run(tmp_path / "base", SHAPE, Transformer(SHAPE, seed=3).params, ByteTokenizer(), wanted, None, []).path


def train(base: Path, name: str, *words: object) -> RunDir:
    out = base.parent / name
    start = ["train", "new", "--init-from", base, "--dataset-path", base.parent / "text.txt", "--out-dir", out]
    assert main([str(word) for word in [*start, *USUAL, *words]]) == 0
    return RunDir(out)


def adapted(base: Path, *words: object, name: str = "run") -> RunDir:
    return train(base, name, "--lora-rank", 2, "--lora-targets", "wq,wv,w_down", "--max-steps", 6, "--save-every", 3, *words)


def test_checkpoints_hold_adapters_and_name_the_base(base: Path):
    run = adapted(base)
    weights = base / "checkpoints" / "step-00000000" / MODEL
    checkpoint = read_checkpoint(run.checkpoints / "step-00000006")
    assert all(name.endswith((".lora_a", ".lora_b")) for name in checkpoint.params)
    assert len(checkpoint.params) == 2 * 3 * SHAPE.num_layers
    assert checkpoint.optim["exp_avg"].keys() == checkpoint.params.keys()
    assert checkpoint.state["base"] == read_run_config(run.config).data["base_sha256"] == file_sha256(weights)
    assert (checkpoint.path / MODEL).stat().st_size < weights.stat().st_size / 2


def test_whoever_loads_it_gets_the_merged_model(base: Path):
    run = adapted(base)
    config = read_run_config(run.config)
    unmerged = make_model(config.model, config.train)
    load_initial_weights(unmerged, run, config, on_warning=pytest.fail)
    own = read_checkpoint(run.checkpoints / "step-00000006")
    restore({name: w for name, w in unmerged.params.items() if name in own.params}, own.params, own.path)
    tokens = torch.arange(16).view(1, 16)
    loaded, before = tapeless.load(run.path).logits(tokens), tapeless.load(base).logits(tokens)
    size = loaded.abs().max()
    assert (unmerged.logits(tokens) - loaded).abs().max() < 1e-5 * size
    assert (before - loaded).abs().max() > 1e-2 * size
    assert unmerged.params["embed.w"].equal(tapeless.load(base).params["embed.w"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])  # to muon, adapters are matrices and nothing else
def test_a_resume_ends_where_an_unbroken_run_does(base: Path, optimizer: str):
    whole, cut = (adapted(base, "--optimizer", optimizer, name=name) for name in ("whole", "cut"))
    shutil.rmtree(cut.checkpoints / "step-00000006")
    (cut.checkpoints / "latest").write_text("step-00000003\n")
    (cut.checkpoints / "best").unlink(missing_ok=True)
    assert main(["train", "resume", str(cut.path), "--json"]) == 0
    ends = [read_checkpoint(run.checkpoints / "step-00000006").params for run in (whole, cut)]
    assert all(w.equal(ends[1][name]) for name, w in ends[0].items())


def test_every_command_takes_it(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run = str(adapted(base).path)
    capsys.readouterr()
    assert main(["eval", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["generate", run, "--prompt", "ev", "--max-tokens", "3"]) == 0
    assert main(["train", "info", run]) == 0
    assert main(["merge", run, "--out", str(tmp_path / "merged")]) == 0
    assert main(["export", run, "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    text = tmp_path / "tail.txt"
    text.write_text(TEXT[len(TEXT) * 9 // 10 :])
    assert main(["eval", str(tmp_path / "merged"), "--dataset-path", str(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == pytest.approx(found["val_loss"], rel=1e-5)
    merged, exported = tapeless.load(tmp_path / "merged"), tapeless.load(tmp_path / "hf")
    assert merged.store.flat.equal(exported.store.flat)
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text())["eos_token_id"] == 10
    shutil.rmtree(base)  # the merged one stands alone
    assert main(["generate", str(tmp_path / "merged"), "--prompt", "ev", "--max-tokens", "3"]) == 0


def test_adapters_and_whole_models_begin_with_it(base: Path, capsys: pytest.CaptureFixture):
    run = adapted(base)
    full = train(run.path, "full", "--max-steps", 1, "--lr", "1e-12")
    assert torch.allclose(tapeless.load(full.path).store.flat, tapeless.load(run.path).store.flat, atol=1e-9)
    capsys.readouterr()
    words = ["train", "new", "--init-from", run.path, "--dataset-path", base.parent / "text.txt", "--lora-rank", 2, *USUAL]
    assert main([str(word) for word in [*words, "--out-dir", base.parent / "again"]]) == 2
    assert "first: tapeless merge" in capsys.readouterr().err


def test_frozen_parameters_of_a_run_are_those_it_began_with(base: Path):
    run = train(base, "frozen", "--freeze", "embed*,blocks.0.*", "--max-steps", 3, "--weight-decay", "0.5")
    before, after = tapeless.load(base).params, tapeless.load(run.path).params
    frozen = {name for name in before if before[name].equal(after[name])}
    assert frozen == {name for name in before if name.startswith(("embed", "blocks.0."))}


@pytest.mark.parametrize("trains", [["--lora-rank", 2], ["--freeze", "embed*,head.w,blocks.0.*"]], ids=["lora", "freeze"])
def test_the_average_and_the_identities_are_of_what_trains(base: Path, trains: list):
    run = train(base, "averaged", *trains, "--max-steps", 4, "--ema-decay", "0.5", "--check-invariants-every", 2)
    raw, average = tapeless.load(run.path).params, tapeless.load(run.path, weights="ema").params
    assert average["embed.w"].equal(raw["embed.w"])
    assert not average["blocks.1.attn.wq"].equal(raw["blocks.1.attn.wq"])
    assert torch.allclose(average["blocks.1.attn.wq"], raw["blocks.1.attn.wq"], atol=0.2)
    average = read_checkpoint(run.checkpoints / "step-00000004").optim["ema"]
    assert "embed.w" not in average


@pytest.mark.parametrize("source", ["run", "hugging face", "older run"])
def test_a_run_moves_with_its_base(base: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Loading and resuming need no path that was recorded when the run began."""
    if source == "hugging face":
        assert main(["export", str(base), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    run = adapted(tmp_path / "hf" if source == "hugging face" else base)
    expected = tapeless.load(run.path).store.flat.clone()
    assert read_run_config(run.config).data["base_checkpoint"] == "base/checkpoints/step-00000000"
    if source == "older run":
        config = read_run_config(run.config)
        absolute = str(run.path.resolve() / config.data["base_checkpoint"])
        write_run_config(run.config, replace(config, data={**config.data, "base_checkpoint": absolute}))
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    run.path.rename(moved)
    for path in (base, tmp_path / "hf"):
        shutil.rmtree(path, ignore_errors=True)
    monkeypatch.chdir(moved.parent)
    assert tapeless.load("moved").store.flat.equal(expected)
    assert main(["generate", "moved", "--prompt", "ev", "--max-tokens", "3"]) == 0
    shutil.rmtree(moved / "checkpoints" / "step-00000006")
    (moved / "checkpoints" / "latest").write_text("step-00000003\n")
    (moved / "checkpoints" / "best").unlink(missing_ok=True)
    assert main(["train", "resume", "moved", "--json"]) == 0
    assert tapeless.load("moved").store.flat.equal(expected)


def test_another_base_is_refused(base: Path):
    run = adapted(base)
    kept = run.path / "base"
    shutil.rmtree(kept)
    with pytest.raises(CheckpointError, match="which is missing"):
        tapeless.load(run.path)
    write_run(kept, SHAPE, Transformer(SHAPE, seed=4).params, ByteTokenizer(), Generation(), None, [])
    with pytest.raises(CheckpointError, match="is not the model that the run started from"):
        tapeless.load(run.path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lora-rank", "2"], "name it with init_from"),
        (["--init-from", "BASE", "--lora-rank", "2", "--freeze", "embed*"], "leave out freeze"),
        (["--init-from", "BASE", "--lora-rank", "2", "--lora-targets", "wz"], "this model has no 'wz'"),
        (["--init-from", "BASE", "--freeze", "nothing*"], "no parameter is named 'nothing*'"),
        (["--preset", "simplelm", "--freeze", "embed*"], "a SimpleLM trains as a whole"),
    ],
)
def test_mistakes(base: Path, words: list[str], says: str, capsys: pytest.CaptureFixture):
    out = base.parent / "mistake"
    named = [str(base) if word == "BASE" else word for word in words]
    assert main(["train", "new", *named, "--dataset-path", str(base.parent / "text.txt"), "--out-dir", str(out), *USUAL]) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_what_trains_is_fixed_for_the_run(base: Path, capsys: pytest.CaptureFixture):
    run = adapted(base)
    assert main(["train", "resume", str(run.path), "--override", "lora_rank=3"]) == 2
    assert "lora_rank: 2 in the run, 3 now (fixed for the run)" in capsys.readouterr().err
