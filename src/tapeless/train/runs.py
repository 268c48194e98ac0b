"""Runs as a whole: begin one, go on with one, load what one has made.

    tapeless train new        begin()        tapeless train resume    resumed_configuration(), restore_trainer()
    tapeless generate, eval   load()
Tested by: tests/train/test_runs.py."""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import WEIGHTS, AnyModelConfig, SimpleLMConfig, TrainConfig, checked, nearest
from tapeless.data.prepare import Dataset, fingerprints, open_prepared, prepare, source_hashes, tokenizer_only
from tapeless.errors import DISK_FULL, CheckpointError, ConfigError, WriteError
from tapeless.interop.generation import FILE as GENERATION
from tapeless.interop.hf_import import is_hugging_face
from tapeless.kernels.determinism import enable_determinism
from tapeless.model.build import AnyModel, build_model
from tapeless.optim.ema import EMA
from tapeless.train.base import named_base, with_base
from tapeless.train.checkpoint import Checkpoint, checkpoints, load_checkpoint, read_checkpoint, restore
from tapeless.train.fastest import fastest_dtype
from tapeless.train.imported import asked_tokenizer, generation_of, import_model
from tapeless.train.metrics_log import MetricsLog
from tapeless.train.plan import default_seq_len
from tapeless.train.rotation import remove_stale
from tapeless.train.run_config import Change, RunConfig, check_resume, read_run_config, write_run_config
from tapeless.train.run_dir import RunDir, RunLock, write_environment
from tapeless.train.trainer import REDONE, Listener, Trainer

log = logging.getLogger("tapeless")
Warn = Callable[[str], None]


def fresh_name(name: str, parent: Path = Path("runs")) -> Path:
    """A directory that is not there yet: runs/tiny, runs/tiny-2, …"""
    stem = Path(name).stem
    paths = [parent / stem, *(parent / f"{stem}-{n}" for n in range(2, 10_000))]
    return next(path for path in paths if not path.exists())


def usable_device(name: str) -> str:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # what torch raises of a name, a build, a driver
        raise ConfigError(
            f"device {name!r} cannot be used here: {str(error).splitlines()[0]}; --device cpu always can"
        ) from None
    return name


def prepare_process(train: TrainConfig) -> None:
    """What a configuration asks of the whole process, before the first product is computed in it."""
    if train.threads:
        cores = os.cpu_count() or 1
        if train.threads > cores:
            raise ConfigError(f"threads = {train.threads}, but this machine has {cores}; --threads {cores} at most")
        torch.set_num_threads(train.threads)
    if train.deterministic:
        enable_determinism()


def make_model(config: AnyModelConfig, train: TrainConfig) -> AnyModel:
    prepare_process(train)
    options: dict[str, Any] = {"seed": train.seed, "device": usable_device(train.device), "dtype": with_dtype(train).dtype}
    if not isinstance(config, SimpleLMConfig):
        options |= {"ops": train.ops, "recompute": train.recompute, "freeze": train.freeze, "lora": train.lora}
    elif train.freeze or train.lora:
        raise ConfigError("freeze and lora_rank are for transformers; a SimpleLM trains as a whole")
    return build_model(config, **options)


def with_dtype(train: TrainConfig) -> TrainConfig:
    """`auto` becomes a dtype, aloud. The run keeps what was chosen: a resume must compute as before, wherever it runs."""
    if train.dtype != "auto":
        return train
    found = fastest_dtype(usable_device(train.device))
    log.warning("dtype auto is %s: %s", found.dtype, found.reason)
    return replace(train, dtype=found.dtype)


def resolved(config: AnyModelConfig, train: TrainConfig) -> TrainConfig:
    """With a device that is there, a length of the windows and a dtype, whatever was left open."""
    usable_device(train.device)
    return with_dtype(replace(train, seq_len=train.seq_len or default_seq_len(config)))


def begin(
    model_config: AnyModelConfig, train_config: TrainConfig, out_dir: Path, argv: Sequence[str]
) -> tuple[RunDir, RunConfig, Dataset]:
    """A new run's directory with everything a resume needs; it is removed again where the data or the model do not work."""
    run = RunDir.create(out_dir)
    try:
        prepare_process(train_config)
        train_config = import_base_model(resolved(model_config, train_config), run, argv)
        data = prepare(train_config, model_config.vocab_size, run.path, end=eos_ids(train_config))
        named = {"tokenizer_hash": data.tokenizer.fingerprint, "dataset_fingerprint": data.fingerprint}
        if train_config.init_from:
            named |= _inherited(RunDir.open(train_config.init_from), run, adapters=train_config.lora is not None)
        config = RunConfig(model_config, train_config, named)
        write_run_config(run.config, config)
        write_environment(run.env, argv)
    except BaseException as error:  # also an impatient Ctrl-C: half a directory would only be in the way of the next attempt
        shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DISK_FULL(path=out_dir, detail="the data do not fit") from None
        raise
    return run, config, data


def import_base_model(train: TrainConfig, run: RunDir, argv: Sequence[str]) -> TrainConfig:
    """init_from names a run from here on: a Hugging Face directory is imported as one, within the new run, which then needs
    the directory no more."""
    if not train.init_from or not is_hugging_face(Path(train.init_from)):
        return train
    found = import_model(Path(train.init_from), run.path / "base", argv, tokenizer=asked_tokenizer(train))
    for note in found.model.notes:
        log.warning(note)
    return replace(train, init_from=str(found.run.path), tokenizer=str(found.run.tokenizer))


def eos_ids(train: TrainConfig) -> tuple[int, ...]:
    """The token with which the model that a run begins with ends a text, where it has one."""
    return generation_of(RunDir.open(train.init_from)).stop[:1] if train.init_from else ()


def _inherited(other: RunDir, run: RunDir, *, adapters: bool) -> dict[str, str]:
    """What a run takes along from the one it begins with, beside the model: how it wants to be sampled, and the checkpoint
    itself, by name."""
    if (other.path / GENERATION).is_file():
        shutil.copy(other.path / GENERATION, run.path / GENERATION)
    if adapters and read_run_config(other.config).train.lora:
        raise ConfigError(f"{other.path} holds adapters itself; first: tapeless merge {other.path} --out DIR")
    return named_base(load_checkpoint(other.checkpoints, on_warning=log.warning).path)


def resumed_configuration(run: RunDir, overrides: Mapping[str, Any]) -> tuple[RunConfig, list[Change]]:
    """The run's configuration with `overrides` in it, and what they change; what may not change is refused."""
    before = read_run_config(run.config)
    if before.imported:
        raise ConfigError(
            f"{run.path} was imported and has no text to go on with; begin a run from it: "
            f"tapeless train new --init-from {run.path}"
        )
    architecture = {field.name for field in fields(before.model)}
    of_model = {name: value for name, value in overrides.items() if name in architecture}
    of_train = {name: value for name, value in overrides.items() if name not in of_model}
    model = replace(before.model, **of_model)
    train = with_dtype(checked("train", {**set_fields(before.train), **of_train}, "--override"))
    now = RunConfig(model, train, {**before.data, **fingerprints(run.path)})
    if (train.dataset_path, train.corpus) != (before.train.dataset_path, before.train.corpus):  # moved: is it the same text?
        hashes = source_hashes(run.path, train)
        kept, found = (replace(c, data={**c.data, "source_sha256": x}) for c, x in zip((before, now), hashes, strict=True))
        check_resume(kept, found, overrides.keys())
    return now, check_resume(before, now, overrides.keys())


def set_fields(train: TrainConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(train).items() if value is not None}


class Recorder:
    """Writes every event into metrics.jsonl and passes it on, while it holds the run's lock."""

    def __init__(self, run: RunDir, *listeners: Listener):
        self.run, self.listeners = run, list(listeners)
        self.lock = RunLock(run.lock)
        try:
            self.log = MetricsLog(run.metrics, on_warning=self._warn)
        except BaseException:
            self.lock.release()
            raise
        remove_stale(run.checkpoints, on_warning=self._warn)

    def __call__(self, event: dict[str, Any]) -> None:
        self.log.append(event)
        self._pass_on(event)

    def _warn(self, text: str) -> None:
        """About the log itself, and so past it."""
        self._pass_on({"event": "guard", "warning": text})

    def _pass_on(self, event: dict[str, Any]) -> None:
        for listener in self.listeners:
            listener(event)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.log.close()
        except WriteError:
            if kind is None:  # else that is the failure to be told
                raise
        finally:
            self.lock.release()


def restore_trainer(trainer: Trainer, record: Recorder, *, fallback: bool, on_warning: Warn) -> None:
    """Bring a new trainer to where its run stands: the newest checkpoint, or the beginning where none was written yet. What
    metrics.jsonl has from behind it is dropped, since it will come again."""
    folder = record.run.checkpoints
    if not checkpoints(folder) and had_checkpoints(record.run):
        raise CheckpointError(f"{folder}: the run's checkpoints are gone; put them back, or begin a new run")
    checkpoint = load_checkpoint(folder, on_warning=on_warning, fallback=fallback) if checkpoints(folder) else None
    record.log.truncate_to(checkpoint.state["step"] if checkpoint else 0, redone=REDONE)
    if checkpoint:
        trainer.resume(checkpoint)
    else:
        on_warning(f"{record.run.path} has no checkpoint yet: it begins again at step 0")


def had_checkpoints(run: RunDir) -> bool:
    """Whether any was ever written: `latest` would name it, and metrics.jsonl tell of it."""
    return (run.checkpoints / "latest").exists() or b'{"event": "checkpoint"' in run.metrics.read_bytes()


def has_begun(run: RunDir) -> bool:
    """Whether there is anything to lose. A full disk may have taken a checkpoint and no line, or the other way round."""
    return bool(checkpoints(run.checkpoints)) or (run.metrics.is_file() and run.metrics.stat().st_size > 0)


class Loaded(NamedTuple):
    model: AnyModel
    data: Dataset
    config: RunConfig
    checkpoint: Checkpoint


def saved_weights(run: RunDir, *, which: str = "latest", fallback: bool = True, on_warning: Warn) -> Checkpoint:
    """The checkpoint `latest`, `best`, or of the step that `which` names, with all weights of the model: adapters are merged
    into their base."""
    steps = checkpoints(run.checkpoints)
    if which in ("latest", "best"):
        found = load_checkpoint(run.checkpoints, which=which, fallback=fallback, on_warning=on_warning)
    elif which.isdigit() and int(which) in steps:
        found = read_checkpoint(steps[int(which)])
    else:
        raise CheckpointError(f"{run.path} has no checkpoint {which!r}; there are latest, best, {', '.join(map(str, steps))}")
    return with_base(found, read_run_config(run.config))


def chosen_weights(checkpoint: Checkpoint, weights: str) -> Mapping[str, Tensor]:
    """weights: one of WEIGHTS."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights is {weights!r}; {nearest(weights, WEIGHTS)}")
    if weights == "raw":
        return checkpoint.params
    if EMA not in checkpoint.optim:
        raise CheckpointError(
            f"{checkpoint.path} holds no average of the weights: it was trained with ema_decay 0; take the raw weights"
        )
    return {**checkpoint.params, **checkpoint.optim[EMA]}  # what is frozen has no average


def load(
    path: str | Path,
    *,
    which: str = "latest",
    weights: str = "raw",
    device: str | None = None,
    fallback: bool = True,
    on_warning: Warn,
) -> Loaded:
    """The model of a run, its weights from `latest`, from `best`, or from the step that `which` names: as they were trained,
    or (`ema`) their moving average. device: another than the run's."""
    run = RunDir.open(path)
    config = read_run_config(run.config)
    checkpoint = saved_weights(run, which=which, fallback=fallback, on_warning=on_warning)
    model = make_model(config.model, replace(config.train, freeze="", lora_rank=0, device=device or config.train.device))
    restore(model.params, chosen_weights(checkpoint, weights), checkpoint.path)
    data = tokenizer_only(run.path) if config.imported else open_prepared(run.path)
    return Loaded(model, data, config, checkpoint)
