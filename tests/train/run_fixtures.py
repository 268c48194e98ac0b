"""Small runs to stop, kill, resume and compare."""

import json
import random
import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapeless.config import AnyModelConfig, ModelConfig, TrainConfig
from tapeless.data.files import file_sha256
from tapeless.data.prepare import Dataset, open_prepared, prepare
from tapeless.training.checkpoint_writer import CheckpointWriter, Outcome
from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_config import read_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import Recorder, create_run, make_model, restore_trainer
from tapeless.training.trainer import Trainer

MODEL = ModelConfig(vocab_size=256, hidden_dim=16, num_layers=2, num_heads=2, intermediate_dim=24, max_seq_len=8)
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "home"]
# what no two runs agree on
TIMES = {"time", "startup_seconds", "step_seconds", "tokens_per_second", "memory_bytes", "device_memory_bytes"}


def text_of(characters: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(characters))[:characters]


def text_file(folder: Path, characters: int) -> str:
    path = folder / "text.txt"
    path.write_text(text_of(characters))
    return str(path)


def dataset(folder: Path, characters: int = 700, seq_len: int = 8) -> Dataset:
    """By default 77 windows of 8 to train on, 9 to validate on."""
    return prepare(TrainConfig(dataset_path=text_file(folder, characters), seq_len=seq_len), 256, folder / "data")


def config(**changes: Any) -> TrainConfig:
    usual = {"batch_size": 2, "max_steps": 12, "save_every": 4, "eval_every": 3, "sample_every": 6, "sample_tokens": 5}
    return TrainConfig(**(usual | {"keep_last": 2, "lr": 1e-2, "verify": False} | changes))


def begin_run(out: Path, train: TrainConfig, model: AnyModelConfig = MODEL) -> RunDir:
    path = train.dataset_path or text_file(out.parent, 700)
    return create_run(model, replace(train, dataset_path=path), out, ["test"])[0]


def play(
    run: RunDir,
    *,
    resume: bool = False,
    stopped: Callable[[Trainer], bool] = lambda trainer: False,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    **changes: Any,
) -> tuple[str, Trainer]:
    """What the command does: train a run to its end, or until `stopped`. changes: of [train]."""
    settings = read_run_config(run.config)
    train = replace(settings.train, **changes)
    with Recorder(run, on_event) as record:
        trainer = Trainer(
            make_model(settings.model, train),
            train,
            open_prepared(run.path),
            run=run,
            on_event=record,
            before_save=record.before_save,
            stopped=lambda: stopped(trainer),
        )
        if resume:
            restore_trainer(trainer, record, fallback=True, on_warning=lambda text: None)
        return trainer.run(display=None), trainer


def events(
    run: RunDir, kinds: Collection[str] = ("step", "layer_stats", "eval", "sample", "checkpoint")
) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says, by step and kind: the line of a checkpoint comes when it is written."""
    found = [event for event in read_metrics(run.metrics) if event["event"] in kinds]
    found.sort(key=lambda event: (event["step"], list(kinds).index(event["event"])))
    return [{key: value for key, value in event.items() if key not in TIMES} for event in found]


def final_bytes(run: RunDir) -> dict[str, str]:
    """What must not depend on how often a run was interrupted: the last checkpoint, the names beside it, and the samples."""
    latest = run.checkpoints / (run.checkpoints / "latest").read_text().strip()
    files = [latest / name for name in ("model.safetensors", "optim.safetensors", "state.json")]
    files += [run.checkpoints / "latest", run.checkpoints / "best", *sorted(run.samples.iterdir())]
    return {file.name: file_sha256(file) for file in files}


def played_with_copies(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    """Train a run to its end; what a kill after each of its events would leave. A copy is taken before or after a checkpoint is
    written, not meanwhile: tests/faults kills there."""
    copies: list[RunDir] = []
    writing = threading.Lock()

    def locked(write: Callable[..., Outcome]) -> Callable[..., Outcome]:
        def call(*args: Any) -> Outcome:
            with writing:
                return write(*args)

        return call

    def copy(event: dict[str, Any]) -> None:
        with writing:
            copies.append(copy_of(run, f"killed-{len(copies)}"))

    for name in ("_write", "_mark_best"):
        monkeypatch.setattr(CheckpointWriter, name, locked(getattr(CheckpointWriter, name)))
    play(run, on_event=copy)
    return copies


def copy_of(run: RunDir, name: str) -> RunDir:
    """What a kill -9 at this moment would leave: the operating system has every byte that was written."""
    return RunDir(shutil.copytree(run.path, run.path.with_name(name)))


def state(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_bytes())
