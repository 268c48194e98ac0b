"""Documents that are packed into one window teach what they would alone, and a resumed run sees the same ones."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tapeless
from tapeless.cli.main import main
from tapeless.config import ModelConfig, SimpleLMConfig, TrainConfig
from tapeless.data.loader import IGNORED, Loader, validation_windows
from tapeless.data.prepare import prepare
from tapeless.errors import ConfigError
from tapeless.model.build import build_model
from tapeless.training.checkpoint import read_checkpoint
from tapeless.training.run_dir import RunDir
from tapeless.training.trainer import Trainer

MODEL = ModelConfig(vocab_size=256, hidden_dim=16, num_layers=2, num_heads=2, intermediate_dim=24, max_seq_len=24)
TRAIN = TrainConfig(
    seq_len=24, batch_size=4, grad_accum=2, max_steps=6, warmup_steps=1, document_attention=True, sample_tokens=4, save_every=3
)


@pytest.fixture
def data(tmp_path: Path):
    for i in range(60):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i}: {'word ' * (i % 4)}")
    return prepare(replace(TRAIN, dataset_path=str(tmp_path / "*.txt")), 256, tmp_path / "data")


def test_ids_of_documents_and_targets_inside_them():
    tokens, starts = np.arange(100), np.array([0, 5, 5, 30, 31, 70])
    x, y, documents = Loader(tokens, 10, 4, seed=0, starts=starts).batch(0)
    at = x.numpy()  # each token is its own place
    np.testing.assert_array_equal(documents.numpy(), np.searchsorted(starts, at, side="right"))
    ends = np.isin(at + 1, starts)
    np.testing.assert_array_equal(y.numpy(), np.where(ends, IGNORED, at + 1))
    assert ends.any()
    ((x, y, _),) = validation_windows(tokens, 30, starts=starts).batches(4)
    assert y[-1, -1] == IGNORED  # filled up
    assert set(x[y == IGNORED].tolist()) == {4, 29, 30, 69, 99}


def test_a_packed_document_teaches_what_it_would_alone():
    """Rotary positions are relative, so that where in a window a document stands does not matter."""
    tokens, starts = np.random.default_rng(0).integers(0, 256, 25), np.array([0, 7, 16])
    model = build_model(MODEL, seed=0, dtype="float64", ops="reference")
    x, y, documents = Loader(tokens, 24, 1, seed=0, starts=starts).batch(0)
    model.zero_grads()
    packed = float(model.forward_backward(x, y, documents=documents, num_targets=1))
    gradients = {name: g.clone() for name, g in model.grads.items()}
    model.zero_grads()
    alone = 0.0
    for ids in np.split(tokens, starts[1:]):
        row = torch.from_numpy(ids)[None]
        alone += float(model.forward_backward(row[:, :-1], row[:, 1:], num_targets=1))
    assert packed == pytest.approx(alone, rel=1e-12)
    for name, g in model.grads.items():
        torch.testing.assert_close(gradients[name], g, rtol=1e-9, atol=1e-12)


def trained(data, folder: Path, steps: int | None = None):
    model = build_model(MODEL, seed=0, ops="reference")
    trainer = Trainer(model, TRAIN, data, run=RunDir.create(folder))
    trainer.stopped = lambda: steps is not None and trainer.steps >= steps
    trainer.run()
    return trainer


def test_a_resume_is_bit_exact(data, tmp_path: Path):
    whole = trained(data, tmp_path / "whole")
    trained(data, tmp_path / "broken", steps=3)
    again = Trainer(build_model(MODEL, seed=9, ops="reference"), TRAIN, data, run=RunDir(tmp_path / "broken"))
    again.resume(read_checkpoint(tmp_path / "broken" / "checkpoints" / "step-00000003"))
    again.run()
    assert again.steps == whole.steps == 6
    assert again.model.store.flat.equal(whole.model.store.flat)
    assert again.best_val_loss == whole.best_val_loss


def test_it_changes_the_training(data):
    def loss(apart: bool) -> float:
        config = replace(TRAIN, document_attention=apart)
        trainer = Trainer(build_model(MODEL, seed=0, ops="reference"), config, data)
        return trainer.step(*trainer.next_batch()).loss

    assert loss(True) != loss(False)


def test_validation_is_of_its_own_documents_one_by_one(data, tmp_path: Path, capsys: pytest.CaptureFixture):
    """The trainer and the command say the loss that the held-out documents have alone."""
    assert not np.array_equal(data.train_starts[: len(data.val_starts)], data.val_starts)
    words = (
        "--hidden-dim 16 --num-layers 1 --num-heads 2 --intermediate-dim 24 --max-seq-len 24 --document-attention --max-steps 2"
    )
    words += f" --eval-windows 0 --batch-size 2 --no-verify --sample-tokens 1 --json --dataset-path {tmp_path / 'data'}"
    assert main(["train", "new", *shlex.split(words), "--out-dir", str(tmp_path / "run")]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    model, loss, count = tapeless.load(tmp_path / "run"), 0.0, 0
    for first in range(0, len(data.val) - 1, 24):  # window by window, and in it document by document
        window = np.arange(first, min(first + 25, len(data.val)))
        for places in np.split(window, np.flatnonzero(np.isin(window, data.val_starts) & (window > first))):
            row = torch.from_numpy(data.val[places].astype(np.int64))[None]
            if len(places) > 1:
                loss += float(model.loss(row[:, :-1], row[:, 1:], num_targets=1))
                count += len(places) - 1
    assert evaluated["tokens"] == count
    assert evaluated["val_loss"] == pytest.approx(loss / count, rel=1e-5)
    assert next(event for event in told if event["event"] == "eval")["val_loss"] == pytest.approx(loss / count, rel=1e-5)


def test_what_it_needs(data):
    with pytest.raises(ConfigError, match="needs a model with attention"):
        Trainer(build_model(SimpleLMConfig()), TRAIN, data)
    with pytest.raises(ConfigError, match="needs document boundaries"):
        Trainer(build_model(MODEL), TRAIN, data._replace(train_starts=None))
