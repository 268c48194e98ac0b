"""Training that begins with a model that is there already: `tapeless train new --init-from RUN`.

The architecture, the weights and the tokenizer are the other run's; data, optimizer, schedule and step count are new. Of the
model only what is of training alone may be chosen anew: dropout, z-loss, label smoothing.
Judged by: tests/train/test_init_from.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tapeless.config import AnyModelConfig, TrainConfig
from tapeless.errors import ConfigError
from tapeless.interop.hf_import import is_hugging_face
from tapeless.model.build import AnyModel
from tapeless.train.checkpoint import restore
from tapeless.train.run_config import read_run_config
from tapeless.train.run_dir import RunDir
from tapeless.train.runs import saved_weights

FREE = {"dropout", "z_loss", "label_smoothing"}


def inherited(train: TrainConfig, changes: Mapping[str, Any]) -> tuple[AnyModelConfig, TrainConfig]:
    """The other run's model, and this one's training with its tokenizer. changes: fields of the model that were asked for."""
    run = _other(train)
    model = read_run_config(run.config).model
    fixed = [name for name in changes if name not in FREE]
    if fixed:
        raise ConfigError(f"init_from brings its own model: leave out {', '.join(fixed)}; {', '.join(sorted(FREE))} may change")
    if train.tokenizer != TrainConfig().tokenizer:
        raise ConfigError(f"init_from brings its own tokenizer: leave out tokenizer = {train.tokenizer!r}")
    return replace(model, **changes), replace(train, tokenizer=str(run.tokenizer))


def begin_with(model: AnyModel, source: str, *, on_warning: Callable[[str], None]) -> None:
    """The newest weights of the other run, in place of the initial ones."""
    checkpoint = saved_weights(RunDir.open(source), on_warning=on_warning)
    restore(model.params, checkpoint.params, checkpoint.path)


def _other(train: TrainConfig) -> RunDir:
    assert train.init_from is not None
    if is_hugging_face(Path(train.init_from)):
        raise ConfigError(f"{train.init_from} is a Hugging Face directory; first: tapeless import {train.init_from}")
    return RunDir.open(train.init_from)
