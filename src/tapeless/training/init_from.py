"""Training that starts from an existing model: `tapeless train new --init-from RUN`, or a Hugging Face directory.

Architecture, weights and tokenizer come from the other run; data, optimizer, schedule and step count are new. A Hugging Face
directory is first imported as such a run, inside the new one (RUN/base, by runs.create_run). Of the model only the fields that
matter in training alone may change: dropout, z-loss, label smoothing. With lora_rank the weights stay frozen, and every resume
reads them again (base.py).
Tested by: tests/train/test_init_from.py, tests/train/test_adapter_runs.py."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tapeless.config import AnyModelConfig, Recipe, TrainConfig, checked
from tapeless.errors import ConfigError
from tapeless.interop.hf_import import is_hugging_face, read_model
from tapeless.model.build import AnyModel
from tapeless.model.trained import plain
from tapeless.training.base import HASH, base_checkpoint, merge_base
from tapeless.training.checkpoint import checkpoints, restore
from tapeless.training.imported import choose_tokenizer, requested_tokenizer
from tapeless.training.run_config import RunConfig, read_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import load_weights, usable_config
from tapeless.training.unused_options import refuse_unused

CHANGEABLE = {"dropout", "z_loss", "label_smoothing"}


def resolve_recipe(recipe: Recipe) -> tuple[AnyModelConfig, TrainConfig]:
    """The configurations that a recipe describes, with the model and tokenizer of init_from if it names one."""
    model, train = checked(recipe.kind, recipe.model), checked("train", recipe.train)
    refuse_unused(train)
    if train.init_from is None:
        return model, train
    if is_hugging_face(Path(train.init_from)):
        return _from_directory(train, Path(train.init_from), recipe.model)
    run = RunDir.open(train.init_from)
    if train.tokenizer != TrainConfig().tokenizer:
        raise ConfigError(f"init_from {run.path} has its own tokenizer: leave out tokenizer = {train.tokenizer!r}")
    model = _changed(usable_config(run).model, run.path, recipe.model)
    return model, replace(train, tokenizer=str(run.tokenizer))


def _from_directory(train: TrainConfig, source: Path, requested: Mapping[str, Any]) -> tuple[AnyModelConfig, TrainConfig]:
    """Reads the whole directory, so that every problem is reported before anything is written. The import brings its
    tokenizer."""
    found, tokenizer = read_model(source), requested_tokenizer(train)
    choose_tokenizer(found, source, tokenizer)
    return _changed(found.config, source, requested), train


def _changed(model: AnyModelConfig, source: Path, requested: Mapping[str, Any]) -> AnyModelConfig:
    """The existing model with the requested fields; one that differs and may not change is an error."""
    existing = asdict(model)
    differ = [
        f"{name} is {existing.get(name, 'not a field')} there, {value} was requested"
        for name, value in requested.items()
        if name not in CHANGEABLE and existing.get(name) != value
    ]
    if differ:
        allowed = ", ".join(sorted(CHANGEABLE))
        raise ConfigError(f"init_from {source} has its own model: {'; '.join(differ)}; only {allowed} may change")
    return replace(model, **{name: value for name, value in requested.items() if name in CHANGEABLE})


def load_initial_weights(model: AnyModel, run: RunDir, config: RunConfig, *, on_warning: Callable[[str], None]) -> None:
    """Replace the initial weights by those of init_from: the newest checkpoint of the other run when this one was created.
    Checkpoints of adapters do not contain them, so every resume of adapters reads them again."""
    if config.train.lora:
        base = base_checkpoint(config.data, run.path)
        restore(plain(model.params), base.params, base.path)
    elif config.train.init_from and not checkpoints(run.checkpoints):
        if HASH in config.data:
            found = base_checkpoint(config.data, run.path)
            checkpoint = merge_base(found, read_run_config(RunDir.open(found.path.parents[1]).config))
        else:  # created by a version that did not record it
            checkpoint = load_weights(RunDir.open(config.train.init_from), on_warning=on_warning)
        restore(model.params, checkpoint.params, checkpoint.path)
