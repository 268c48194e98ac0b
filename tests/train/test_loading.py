"""`tapeless.load`, from outside: a run or a checkpoint becomes the model that wrote it."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

import tapeless
from tapeless.cli.main import main
from tapeless.errors import CheckpointError, ConfigError
from tapeless.training.run_config import read_run_config, write_run_config
from tapeless.training.runs import create_run, make_model

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
    with pytest.raises(ConfigError, match="weights is None; expected one of raw, ema"):
        tapeless.load(path, weights=None)
    with pytest.raises(ConfigError, match="device 'meta' cannot be used here"):
        tapeless.load(path, device="meta")
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        tapeless.load(tmp_path / "nowhere")
    shutil.copytree(path / "checkpoints" / "step-00000004", tmp_path / "mine")
    with pytest.raises(CheckpointError, match="not named step-NUMBER"):
        tapeless.load(tmp_path / "mine")


ELSEWHERE = {"device": '"cuda:7"', "dtype": '"fp8"', "threads": "6400", "deterministic": "true", "ops": '"triton"'}


@pytest.fixture
def from_a_gpu(run) -> Path:
    """The same run as a large machine would have recorded it."""
    path, _ = run
    text = (path / "config.toml").read_text()
    for name, value in ELSEWHERE.items():
        text = re.sub(rf"^{name} = .*\n", "", text, flags=re.M).replace("[train]\n", f"[train]\n{name} = {value}\n")
    (path / "config.toml").write_text(text)
    config = read_run_config(path / "config.toml")
    write_run_config(path / "config.toml", config)  # not edited by hand
    recorded = config.train
    assert (recorded.device, recorded.dtype, recorded.threads, recorded.deterministic) == ("cuda:7", "fp8", 6400, True)
    return path


def state_of_the_process() -> tuple:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        dict(os.environ),
        {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default device is a GPU then")
def test_a_run_of_another_machine_loads_here_and_changes_nothing(from_a_gpu: Path, run):
    before = state_of_the_process()
    model = tapeless.load(from_a_gpu)
    assert (str(model.device), model.dtype) == ("cpu", "float32")
    assert model.store.flat.equal(run[1][4].store.flat)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model.logits(tokens), run[1][4].logits(tokens))
    assert state_of_the_process() == before


def test_the_caller_chooses(from_a_gpu: Path):
    before = state_of_the_process()
    model = tapeless.load(from_a_gpu, device="cpu", dtype="bfloat16", ops="reference", threads=1)
    assert (model.dtype, model.ops.name) == ("bfloat16", "reference")
    model.logits(torch.tensor([[1, 2, 3]]))
    assert state_of_the_process() == before
    with pytest.raises(ConfigError, match="device 'cuda:7' cannot be used here"):
        tapeless.load(from_a_gpu, device="cuda:7")
    with pytest.raises(ConfigError, match="threads = 6400, but this machine has"):
        tapeless.load(from_a_gpu, threads=6400)
    with pytest.raises(ConfigError, match="dtype is 'float23'"):
        tapeless.load(from_a_gpu, dtype="float23")


@pytest.mark.parametrize("flags", [[], ["--device", "cpu", "--dtype", "bfloat16", "--ops", "reference", "--threads", "1"]])
def test_commands_too(from_a_gpu: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    before = state_of_the_process()
    assert main(["generate", str(from_a_gpu), "--prompt", "e", "--max-tokens", "3", *flags]) == 0
    assert main(["eval", str(from_a_gpu), "--json", *flags]) == 0
    for target in ("hf", "gguf"):
        assert main(["export", str(from_a_gpu), "--to", target, "--out", str(tmp_path / target), *flags]) == 0
    assert main(["train", "info", str(from_a_gpu)]) == 0
    after = state_of_the_process()
    assert after[:5] == before[:5]
    capsys.readouterr()
    assert main(["generate", str(from_a_gpu), "--device", "cuda:7"]) == 2
    assert "device 'cuda:7' cannot be used here" in capsys.readouterr().err


def test_a_loaded_model_continues_a_text(run):
    path, models = run
    model = tapeless.load(path, device="cpu")
    greedy = tapeless.Sampling(temperature=0)
    text = model.generate("every ", max_tokens=8, sampling=greedy)
    assert text.startswith("every ")
    assert model.generate(b"every ", max_tokens=8, sampling=greedy)[:6] == list(b"every ")
    assert models[4].generate([1, 2], max_tokens=3, sampling=greedy) == model.generate([1, 2], max_tokens=3, sampling=greedy)
    with pytest.raises(tapeless.TapelessError, match="no tokenizer"):
        models[4].generate("every ", max_tokens=3)
