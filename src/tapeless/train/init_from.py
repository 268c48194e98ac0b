"""Training that begins with a model that is there already: `tapeless train new --init-from RUN`, or a Hugging Face directory.

The architecture, the weights and the tokenizer are the other run's; data, optimizer, schedule and step count are new. A
directory of Hugging Face becomes such a run first, by the same import, within the new one (RUN/base, by runs.begin). Of the
model only what is of training alone may be chosen anew: dropout, z-loss, label smoothing. With lora_rank the weights stay what
they are, and a run finds them again whenever it goes on (base.py).
Tested by: tests/train/test_init_from.py, tests/train/test_adapter_runs.py."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tapeless.config import AnyModelConfig, TrainConfig
from tapeless.errors import ConfigError, InputError
from tapeless.interop.hf_import import is_hugging_face, read_model
from tapeless.model.build import AnyModel
from tapeless.model.trained import plain
from tapeless.train.base import HASH, base_checkpoint, base_weights, with_base
from tapeless.train.checkpoint import checkpoints, restore
from tapeless.train.imported import asked_tokenizer, tokenizer_for
from tapeless.train.run_config import RunConfig, read_run_config
from tapeless.train.run_dir import RunDir
from tapeless.train.runs import saved_weights

FREE = {"dropout", "z_loss", "label_smoothing"}


def inherited(train: TrainConfig, asked: Mapping[str, Any]) -> tuple[AnyModelConfig, TrainConfig]:
    """The other run's model, and this one's training with its tokenizer. asked: fields of the model, by whichever way they were
    named; what they say must be so already."""
    assert train.init_from is not None
    if is_hugging_face(Path(train.init_from)):
        return _of_directory(train, Path(train.init_from), asked)
    run = RunDir.open(train.init_from)
    if train.tokenizer != TrainConfig().tokenizer:
        raise ConfigError(f"init_from {run.path} brings its own tokenizer: leave out tokenizer = {train.tokenizer!r}")
    model = _changed(read_run_config(run.config).model, run.path, asked)
    return model, replace(train, tokenizer=str(run.tokenizer))


def _of_directory(train: TrainConfig, source: Path, asked: Mapping[str, Any]) -> tuple[AnyModelConfig, TrainConfig]:
    """All of it is read, so that whatever is wrong with it is said before anything is made. Its tokenizer comes with the
    import."""
    found, named = read_model(source), asked_tokenizer(train)
    if found.tokenizer is None and named is None:
        raise InputError(
            f"{source} has no tokenizer.json; name one by --tokenizer, or first: tapeless import {source} --tokenizer bytes"
        )
    tokenizer_for(found, source, named)
    return _changed(found.config, source, asked), train


def _changed(model: AnyModelConfig, where: Path, asked: Mapping[str, Any]) -> AnyModelConfig:
    there = asdict(model)
    differ = [
        f"{name} is {there.get(name, 'not a field')} there, {value} was asked for"
        for name, value in asked.items()
        if name not in FREE and there.get(name) != value
    ]
    if differ:
        raise ConfigError(f"init_from {where} brings its own model: {'; '.join(differ)}; {', '.join(sorted(FREE))} may change")
    free = {name: value for name, value in asked.items() if name in FREE}
    return replace(model, **free)


def load_initial_weights(model: AnyModel, run: RunDir, config: RunConfig, *, on_warning: Callable[[str], None]) -> None:
    """The weights that the run begins with, in place of the initial ones: those that were the newest of the other run when this
    one began. No checkpoint of adapters holds them, so that these need them again with each resume."""
    if config.train.lora:
        restore(plain(model.params), base_weights(config.data), Path(config.data["base_checkpoint"]))
    elif config.train.init_from and not checkpoints(run.checkpoints):
        other = RunDir.open(config.train.init_from)
        if HASH in config.data:
            checkpoint = with_base(base_checkpoint(config.data), read_run_config(other.config))
        else:  # begun by a version that did not name it
            checkpoint = saved_weights(other, on_warning=on_warning)
        restore(model.params, checkpoint.params, checkpoint.path)
