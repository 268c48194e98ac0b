"""Runs as a whole: create one, record its events, restore one, load the model of one.

    tapeless train new        create_run()       tapeless train resume    resume_config(), restore_trainer()
    tapeless generate, eval   load()
Tested by: tests/train/test_runs.py."""

import errno
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import WEIGHTS, AnyModelConfig, SimpleLMConfig, TrainConfig, checked, nearest, training_names
from tapeless.data.chat import FILE as CHAT_TEMPLATE
from tapeless.data.chat import read_template
from tapeless.data.files import reason, write_json
from tapeless.data.locks import RunLock
from tapeless.data.prepare import (
    Dataset,
    data_facts,
    fingerprints,
    open_prepared,
    prepare,
    source_hashes,
    tokenizer_only,
)
from tapeless.errors import DISK_FULL, EDITED, CheckpointError, ConfigError, WriteError
from tapeless.interop.generation import FILE as GENERATION
from tapeless.interop.hf_import import is_hugging_face
from tapeless.model.build import AnyModel, build_model
from tapeless.optim.ema import EMA
from tapeless.plugins import changed_plugins, require_plugins, required_plugins
from tapeless.training.base import base_facts, keep_base, merge_base
from tapeless.training.checkpoint import Checkpoint, checkpoints, load_checkpoint, newest_state, read_checkpoint, restore
from tapeless.training.fastest import fastest_dtype
from tapeless.training.imported import FACTS, file_facts, generation_of, import_model, requested_tokenizer
from tapeless.training.metrics_log import MetricsLog
from tapeless.training.moved import OpenRun
from tapeless.training.plan import resolve_seq_len
from tapeless.training.process import default_device, limit_threads, usable_device
from tapeless.training.rotation import remove_stale
from tapeless.training.run_config import Change, RunConfig, check_resume, is_edited, read_run_config, write_run_config
from tapeless.training.run_dir import RunDir, environment
from tapeless.training.seal import require_same_model, trained_with
from tapeless.training.trainer import REPEATED, Listener, Trainer

log = logging.getLogger("tapeless")
Warn = Callable[[str], None]
DELAY = 0.1  # seconds


def make_model(config: AnyModelConfig, train: TrainConfig) -> AnyModel:
    """The model with its initial weights, as training sees it."""
    options: dict[str, Any] = {"seed": train.seed, "device": usable_device(train.device), "dtype": resolve_dtype(train).dtype}
    if not isinstance(config, SimpleLMConfig):
        options |= {"ops": train.ops, "recompute": train.recompute, "freeze": train.freeze, "lora": train.lora}
    elif train.freeze or train.lora:
        raise ConfigError("freeze and lora_rank are for transformers; a SimpleLM trains as a whole")
    return build_model(config, **options)


def resolve_dtype(train: TrainConfig) -> TrainConfig:
    """Replace dtype `auto` by the dtype it means here, and log it. The run records the result, so that a resume on another
    machine computes as before."""
    if train.dtype != "auto":
        return train
    found = fastest_dtype(usable_device(train.device))
    log.warning("dtype auto is %s: %s", found.dtype, found.reason)
    return replace(train, dtype=found.dtype)


def resolve_defaults(config: AnyModelConfig, train: TrainConfig, *, here: bool = True) -> TrainConfig:
    """Fill in seq_len and dtype where they were left open, and check that the device exists if the run is to be on this
    machine."""
    if here:
        usable_device(train.device)
    return resolve_dtype(replace(train, seq_len=resolve_seq_len(config, train)))


def create_run(
    model_config: AnyModelConfig,
    train_config: TrainConfig,
    out_dir: Path,
    argv: Sequence[str],
    facts: Mapping[str, str] | None = None,
) -> tuple[RunDir, RunConfig, Dataset]:
    """A new run directory with everything a resume needs; it is removed again if the data or the model cannot be used.
    facts: more of them for [data] of config.toml."""
    run = RunDir.create(out_dir)
    try:
        train_config = import_base_model(resolve_defaults(model_config, train_config), run, argv)
        data = prepare(train_config, model_config.vocab_size, run.path, **text_format(train_config))
        known = {"tokenizer_hash": data.tokenizer.fingerprint, "dataset_fingerprint": data.fingerprint, **(facts or {})}
        known |= data_facts(run.path)
        if train_config.init_from:
            known |= _inherit(RunDir.open(train_config.init_from), run, adapters=train_config.lora is not None)
        known |= file_facts(run.path)
        config = RunConfig(model_config, train_config, known, required_plugins(model_config, train_config))
        write_json(run.env, environment(argv))
        write_run_config(run.config, config)
        run.complete()
    except BaseException as error:  # also Ctrl-C: an incomplete directory would block the next attempt
        shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DISK_FULL(path=out_dir, detail="the data do not fit") from None
        raise
    return run, config, data


def import_base_model(train: TrainConfig, run: RunDir, argv: Sequence[str]) -> TrainConfig:
    """If init_from names a Hugging Face directory, import it into the new run, so that the run no longer depends on it."""
    if not train.init_from or not is_hugging_face(Path(train.init_from)):
        return train
    found = import_model(Path(train.init_from), run.path / "base", argv, tokenizer=requested_tokenizer(train))
    for note in found.model.notes:
        log.warning(note)
    return replace(train, init_from=str(found.run.path), tokenizer=str(found.run.tokenizer))


def text_format(train: TrainConfig) -> dict[str, Any]:
    """How the model that training starts from begins and ends a text, and writes conversations."""
    if not train.init_from:
        return {}
    run = RunDir.open(train.init_from)
    generation = generation_of(run)
    return {"bos_id": generation.bos_id, "eos_ids": generation.eos_ids, "chat_template": read_template(run.path)}


def _inherit(other: RunDir, run: RunDir, *, adapters: bool) -> dict[str, str]:
    """What a run takes from the one it starts from, besides the model: its generation settings and chat template, and the name
    and hash of the checkpoint."""
    for name in (GENERATION, CHAT_TEMPLATE):
        if (other.path / name).is_file():
            shutil.copy(other.path / name, run.path / name)
    if adapters and read_run_config(other.config).train.lora:
        raise ConfigError(f"{other.path} holds adapters itself; first: tapeless merge {other.path} --out DIR")
    found = load_checkpoint(other.checkpoints, on_warning=log.warning).path
    if adapters and run.path.resolve() not in found.resolve().parents:
        found = keep_base(found, run.path)
    return base_facts(found, run.path)


def resume_config(run: RunDir, overrides: Mapping[str, Any]) -> tuple[RunConfig, list[Change]]:
    """The run's configuration with `overrides` applied, and what they change; a change that is not allowed is an error."""
    before = usable_config(run)
    if before.imported:
        raise ConfigError(
            f"{run.path} was imported and has no data to train on; start a run from it: "
            f"tapeless train new --init-from {run.path}"
        )
    architecture = {field.name for field in fields(before.model)}
    of_model = {name: value for name, value in overrides.items() if name in architecture}
    of_train = {name: value for name, value in overrides.items() if name not in of_model}
    model, settings = replace(before.model, **of_model), {**set_fields(before.train), **of_train}
    require_plugins(before.plugins, run.path, training_names(str(settings["optimizer"]), str(settings["report_to"])))
    train = resolve_dtype(checked("train", settings, "--override"))
    if "seq_len" in overrides:
        resolve_seq_len(model, train)
    plugins = required_plugins(model, train)
    changed = changed_plugins(before.plugins, plugins)
    before = replace(before, plugins={**plugins, **{name: before.plugins[name] for name in changed}})
    edited, state = is_edited(run.config), newest_state(run.checkpoints)
    # As written: it may be ahead of the checkpoint by the overrides of a resume that was killed before it saved.
    trained = trained_with(state, frozen=not edited)
    facts = fingerprints(run.path) | data_facts(run.path)
    unedited = {name for name, x in before.data.items() if trained.get(f"data.{name}", x) == x}
    now = RunConfig(model, train, {**before.data, **{name: x for name, x in facts.items() if name in unedited}}, plugins)
    if (train.dataset_path, train.corpus) != (before.train.dataset_path, before.train.corpus):  # moved: is it the same text?
        hashes = source_hashes(run.path, train)
        old, new = (replace(c, data={**c.data, "source_sha256": x}) for c, x in zip((before, now), hashes, strict=True))
        check_resume(old, new, overrides.keys())
    return now, check_resume(before, now, overrides.keys(), trained)


def usable_config(run: RunDir) -> RunConfig:
    """The configuration of a run whose model is to be built; an error if one of its plugins is not loaded."""
    config = read_run_config(run.config)
    require_plugins(config.plugins, run.path)
    return config


def set_fields(train: TrainConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(train).items() if value is not None}


class Recorder:
    """Writes every event to metrics.jsonl and passes it to the listeners, while it holds the run's lock.

    Steps reach the file and the delayed listeners several at a time: with the next event of another kind, or the first step
    that comes DELAY after the last delivery. Python that runs between every two steps of a small model is not in the
    processor's caches, and slower than the same Python for many steps at once."""

    def __init__(self, run: RunDir, *listeners: Listener, delayed: Iterable[Listener] = ()):
        self.run, self.listeners, self.delayed = run, list(listeners), list(delayed)
        self._waiting: list[dict[str, Any]] = []
        self._delivered, self._failed, self._lost = 0.0, False, False
        self.lock = RunLock(run.lock)
        try:
            self.log = MetricsLog(run.metrics, on_warning=self._warn)
        except BaseException:
            self.lock.release()
            raise
        self._open_run, self._following = OpenRun(run), Lock()
        remove_stale(run.checkpoints, on_warning=self._warn)

    def __call__(self, event: dict[str, Any]) -> None:
        self.log.append(event)
        self._emit(event)

    def _warn(self, text: str) -> None:
        """A warning about the log itself, which is therefore not written to it."""
        self._emit({"event": "guard", "warning": text})

    def _emit(self, event: dict[str, Any]) -> None:
        for listener in self.listeners:
            listener(event)
        self._waiting.append(event)
        if event["event"] not in ("step", "layer_stats") or time.perf_counter() - self._delivered > DELAY:
            self.deliver()

    def reopen(self) -> None:
        """After a file of the directory was replaced, such as config.toml by a resume: it is the new one that is kept."""
        self._open_run.close()
        self._open_run = OpenRun(self.run)

    def before_save(self) -> None:
        """Called before a checkpoint, by the thread that writes it: the directory must be there, and the log on the disk."""
        self._follow()
        self.log.sync()

    def _follow(self) -> None:
        """If the directory was renamed or removed, write to where it is now. One that cannot be made again (a disk that is
        gone) ends no training: the last checkpoint is then written elsewhere."""
        with self._following:
            try:
                warning = self._open_run.follow()
            except OSError as error:
                if not self._lost:
                    self._lost = True
                    why = f"is gone and cannot be made again: {reason(error)}"
                    self.log.warn_later(f"{self.run.path} {why}; training continues")
                return
            if warning:
                self.log.path = self.run.metrics
                self.log.warn_later(warning)
                if not self.run.lock.exists():  # the one that is held was removed
                    self.lock.release()
                    self.lock = RunLock(self.run.lock)

    def deliver(self) -> None:
        """Bring the file and the delayed listeners up to date."""
        self._follow()
        self.log.flush()
        while self._waiting:
            event = self._waiting.pop(0)
            for listener in self.delayed:
                try:
                    listener(event)
                except Exception as error:  # a display or a reporter; the run is worth more
                    if not self._failed:
                        self._failed = True
                        log.warning("the display failed, %s: %s; training continues", type(error).__name__, error)
        self._delivered = time.perf_counter()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._follow()
            if self.run.elsewhere is not None:
                self.log.copy_to(self.run.elsewhere)
                if not self.run.path.is_dir():
                    self._open_run.copy_to(self.run.elsewhere)
            self.log.close()
        except WriteError:
            if kind is None:  # otherwise the first failure is the one to report
                raise
        finally:
            self._open_run.close()
            self.lock.release()


def restore_trainer(
    trainer: Trainer, record: Recorder, *, fallback: bool, on_warning: Warn, changes: Sequence[Change] = ()
) -> None:
    """Bring a new trainer to the newest checkpoint of its run, or to step 0 if none was written yet. Events of metrics.jsonl
    that come after it are dropped, since they will be written again. changes: what overrides change, to be announced."""
    folder = record.run.checkpoints
    if not checkpoints(folder) and had_checkpoints(record.run):
        raise CheckpointError(f"{folder}: the run's checkpoints are missing; restore them, or start a new run")
    checkpoint = load_checkpoint(folder, on_warning=on_warning, fallback=fallback) if checkpoints(folder) else None
    record.log.truncate_to(checkpoint.state["step"] if checkpoint else 0, repeated=REPEATED)
    if is_edited(record.run.config):  # and nothing in it was refused (resume_config)
        known = "no field that its checkpoints record differs" if checkpoint else "no checkpoint tells what it was"
        on_warning(f"{record.run.config} was edited after it was written: {known}")
    if checkpoint:
        trainer.resume(checkpoint, changes)
    else:
        on_warning(f"{record.run.path} has no checkpoint yet: training starts again at step 0")


def had_checkpoints(run: RunDir) -> bool:
    """Whether any was ever written: `latest` or metrics.jsonl would mention it."""
    return (run.checkpoints / "latest").exists() or b'{"event": "checkpoint"' in run.metrics.read_bytes()


def has_progress(run: RunDir) -> bool:
    """Whether there is anything to lose: a checkpoint or a line of metrics.jsonl."""
    return bool(checkpoints(run.checkpoints)) or (run.metrics.is_file() and run.metrics.stat().st_size > 0)


class Loaded(NamedTuple):
    model: AnyModel
    data: Dataset
    config: RunConfig
    checkpoint: Checkpoint


def load_weights(run: RunDir, *, which: str = "latest", fallback: bool = True, on_warning: Warn) -> Checkpoint:
    """The checkpoint `latest`, `best`, or of the step that `which` names, with all weights of the model: adapters are merged
    into their base."""
    steps = checkpoints(run.checkpoints)
    if which in ("latest", "best"):
        found = load_checkpoint(run.checkpoints, which=which, fallback=fallback, on_warning=on_warning)
    elif which.isdigit() and int(which) in steps:
        found = read_checkpoint(steps[int(which)])
    else:
        raise CheckpointError(f"{run.path} has no checkpoint {which!r}; there are latest, best, {', '.join(map(str, steps))}")
    config = read_run_config(run.config)
    require_same_model(found.state, config, run.path)
    if is_edited(run.config):
        on_warning(f"{run.config} was edited after it was written: its fields that determine the model are as they were")
    return merge_base(found, config)


def select_weights(checkpoint: Checkpoint, weights: str) -> Mapping[str, Tensor]:
    """weights: one of WEIGHTS."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights is {weights!r}; {nearest(str(weights), WEIGHTS)}")
    if weights == "raw":
        return checkpoint.params
    if EMA not in checkpoint.optim:
        raise CheckpointError(
            f"{checkpoint.path} holds no average of the weights: it was trained with ema_decay 0; use the raw weights"
        )
    return {**checkpoint.params, **checkpoint.optim[EMA]}  # frozen parameters have no average


def load(
    path: str | Path, *, which: str = "latest", weights: str = "raw", fallback: bool = True, on_warning: Warn, **machine: Any
) -> Loaded:
    """The model of a run, with the weights of `latest`, of `best`, or of the step that `which` names: as trained, or their
    moving average (`ema`). machine: device, dtype, ops and threads of inference_model(), never those of the training."""
    run = RunDir.open(path)
    config = usable_config(run)
    now = required_plugins(config.model, TrainConfig())
    for name in changed_plugins(config.plugins, now):
        on_warning(
            f"{run.path} was trained with another version of its plugin: {config.plugins[name]} then, {now[name]} now; "
            "results may differ"
        )
    checkpoint = load_weights(run, which=which, fallback=fallback, on_warning=on_warning)
    params = select_weights(checkpoint, weights)
    model = inference_model(config.model, params, checkpoint.path, seed=config.train.seed, **machine)
    data = tokenizer_only(run.path) if config.imported else open_prepared(run.path)
    for name, value in file_facts(run.path).items():
        if config.data.get(name, value) != value:
            on_warning(f"{run.path / FACTS[name]} was edited since the run began: texts may differ")
    recorded = config.data.get("tokenizer_hash", data.tokenizer.fingerprint)
    if data.tokenizer.fingerprint != recorded:
        what = f"data.tokenizer_hash is {data.tokenizer.fingerprint!r}, expected {recorded!r}"
        raise EDITED(where=run.tokenizer, step=checkpoint.state["step"], fields=what)
    return Loaded(model, data, config, checkpoint)


def inference_model(
    config: AnyModelConfig,
    params: Mapping[str, Tensor],
    source: Path,
    *,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    ops: str | None = None,
    threads: int | None = None,
) -> AnyModel:
    """A model with given weights on this machine. device: a GPU if torch has one, else the CPU. dtype: that of the weights;
    `auto` measures. ops: chosen for device and dtype. threads: around this model's calls; None leaves torch's number.
    Changes no setting of the process."""
    device = usable_device(device or default_device())
    stored = "float64" if any(w.dtype == torch.float64 for w in params.values()) else "float32"
    given = {"dtype": dtype or stored, "device": device, "ops": ops or "auto", "threads": threads}
    resolved = resolve_dtype(checked("train", {key: value for key, value in given.items() if value is not None}, "load"))
    options: dict[str, Any] = {"seed": seed, "device": device, "dtype": resolved.dtype, "initialized": False}
    model = build_model(config, **options, **({} if isinstance(config, SimpleLMConfig) else {"ops": ops or "auto"}))
    restore(model.params, params, source)
    limit_threads(model, threads)
    return model
