"""`tapeless.load`, from outside: a run or a checkpoint becomes the model that wrote it."""

import shutil
from pathlib import Path

import pytest

import tapeless
from tapeless.errors import CheckpointError, ConfigError
from tapeless.train.runs import create_run, make_model

TEXT = "every forward has its backward, and every backward has its judges\n" * 20


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[int, tapeless.Transformer]]:
    """A run of four steps with two checkpoints, and copies of the model at each."""
    (tmp_path / "text.txt").write_text(TEXT)
    config = tapeless.TrainConfig(dataset_path=str(tmp_path / "text.txt"), seq_len=16, batch_size=2, max_steps=4)
    shape = tapeless.ModelConfig(vocab_size=256, hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=8, max_seq_len=16)
    run, _, data = create_run(shape, config, tmp_path / "run", [])
    trainer = tapeless.Trainer(make_model(shape, config), config, data, run=run)
    models = {}
    for step in range(1, 5):
        trainer.step(*trainer.next_batch())
        if step % 2 == 0:
            trainer.save()
            models[step] = make_model(shape, config)
            models[step].store.flat.copy_(trainer.model.store.flat)
    return run.path, models


def test_a_run_gives_its_newest_weights(run):
    path, models = run
    for given in (path, str(path)):
        model = tapeless.load(given)
        assert isinstance(model, tapeless.Transformer)
        assert model.config == models[4].config
        assert model.store.flat.equal(models[4].store.flat)


def test_a_checkpoint_gives_those_of_its_step(run, monkeypatch: pytest.MonkeyPatch):
    path, models = run
    assert not models[2].store.flat.equal(models[4].store.flat)
    for step, model in models.items():
        assert tapeless.load(path / "checkpoints" / f"step-{step:08d}").store.flat.equal(model.store.flat)
    monkeypatch.chdir(path / "checkpoints")
    assert tapeless.load("step-00000002").store.flat.equal(models[2].store.flat)


def test_a_damaged_checkpoint_of_a_run_is_passed_over_with_a_warning(run):
    path, models = run
    (path / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"step-00000004 is damaged|instead, "):
        model = tapeless.load(path)
    assert model.store.flat.equal(models[2].store.flat)


def test_what_is_neither_is_refused(run, tmp_path: Path):
    path, _ = run
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        tapeless.load(tmp_path / "nowhere")
    shutil.copytree(path / "checkpoints" / "step-00000004", tmp_path / "mine")
    with pytest.raises(CheckpointError, match="not named step-NUMBER"):
        tapeless.load(tmp_path / "mine")
