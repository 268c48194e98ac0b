"""`tapeless.train` and `tapeless.resume`: everything that `tapeless train new` and `train resume` do, from Python.

    result = tapeless.train("tiny", "my.txt", out_dir="runs/mine", max_steps=200, callbacks=[on_event])
    result = tapeless.resume("runs/mine", max_steps=400)
Resource check, run directory, metrics.jsonl, display, reporters, signals, baselines, gradient check, training, checkpoints.
Tested by: tests/train/test_runner.py."""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from tapeless.config import FUNCTION, KINDS, AnyModelConfig, Recipe, TrainConfig, preset_recipe, read_recipe
from tapeless.data.files import unused_path
from tapeless.data.prepare import Dataset, open_prepared
from tapeless.dist.world import World, joined
from tapeless.errors import ConfigError, GradientError, TapelessError, WriteError
from tapeless.estimate.disk import disk_of
from tapeless.estimate.fit import resource_errors
from tapeless.estimate.memory import memory_of
from tapeless.model.build import AnyModel
from tapeless.output import ignore_write_errors
from tapeless.progress import busy
from tapeless.report.reporters import Reporters, check_packages
from tapeless.training.checkpoint import checkpoints, read_checkpoint
from tapeless.training.display import Display, make_display
from tapeless.training.functions import Batches, Schedule, check_functions
from tapeless.training.init_from import load_initial_weights, resolve_recipe
from tapeless.training.loading import attach_tokenizer
from tapeless.training.metrics_log import copied, read_metrics
from tapeless.training.phases import Phases
from tapeless.training.plan import planned_rate, total_steps
from tapeless.training.process import process_settings
from tapeless.training.run_config import Change, RunConfig, is_edited, write_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import (
    Recorder,
    create_run,
    has_progress,
    make_model,
    resolve_defaults,
    restore_trainer,
    resume_config,
    set_fields,
)
from tapeless.training.seal import seal_of
from tapeless.training.signals import Interrupted, StopSignals
from tapeless.training.threads import slower_threads
from tapeless.training.trainer import Trainer
from tapeless.training.vocabulary import infer_vocab_size

STOP = "stop"  # what a callback returns to stop the run
JUMP = 1.2  # growth of the learning rate at a resume that is worth a warning
Event = dict[str, Any]
Callback = Callable[[Event], object]
Config = str | Path | AnyModelConfig | Recipe | tuple[AnyModelConfig, TrainConfig]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    path: Path  # the run directory
    model: AnyModel  # with its tokenizer: result.model.generate("text")
    reason: str  # done | early (--patience) | stopped (resumable)
    step: int
    loss: float | None  # of the last step; None if no step was taken
    val_loss: float | None  # of the last evaluation
    best_val_loss: float | None

    def events(self) -> list[Event]:
        """The lines of metrics.jsonl."""
        return list(read_metrics(RunDir(self.path).metrics))


def train(
    config: Config = "default",
    data: Dataset | str | Path | None = None,
    *,
    out_dir: str | Path | None = None,
    batches: Batches | None = None,
    lr_schedule: str | Schedule | None = None,
    callbacks: Iterable[Callback] | None = None,
    display: str | None = "auto",
    skip_resource_check: bool = False,
    name: str | None = None,
    phases: Phases | None = None,
    **settings: Any,
) -> TrainResult:
    """Create a run and train it to the end.

    config: a preset's name, the path of a TOML file, a ModelConfig, or a pair (ModelConfig, TrainConfig). data: what
    dataset_path takes, or a Dataset; default the dataset_path or corpus of the settings. out_dir: default runs/NAME, NAME being
    that of the preset, or `name`. batches: a function step -> (tokens, targets), or an iterable of such pairs, to train on in
    place of the training part of data; the rest of data remains for the tokenizer, validation, baselines and samples.
    lr_schedule: the name of a schedule, or a function step -> learning rate; step is 0 at first. callbacks: called with every
    event; one that returns tapeless.STOP stops the run. display: auto (live in a terminal or notebook, else plain lines),
    plain, json, or None. skip_resource_check: only warn if memory or disk do not suffice. phases: continued by those of this
    start, for the event `start`. settings: fields of TrainConfig or of the model's configuration, such as max_steps=200,
    lr=1e-3, num_layers=2.

    The run is stopped by a callback, by max_time, and in the main thread by SIGINT and SIGTERM: it saves a checkpoint and can
    be resumed. An exception in a callback, in batches or in lr_schedule stops it in the same way, and is raised once the
    checkpoint is written."""
    user, phases = _Callbacks(callbacks), phases or Phases()
    found, recipe = _recipe(config)
    if data is not None:
        settings["dataset_path"] = str(_folder(data) if isinstance(data, Dataset) else data)
    if out_dir is not None:
        settings["out_dir"] = str(out_dir)
    schedule = _schedule(lr_schedule, settings)
    of_model = {key: settings.pop(key) for key in [f.name for f in fields(KINDS[recipe.kind])] if key in settings}
    recipe = recipe._replace(model={**recipe.model, **of_model}, train={**recipe.train, **settings})
    name = name or found
    if batches is not None and not recipe.train.keys() & {"dataset_path", "corpus"}:
        raise ConfigError(
            "batches replace the training part of the data only: pass data too, for the tokenizer, the validation loss, the "
            "baselines and the samples"
        )
    model_config, train_config = resolve_recipe(recipe)
    check_functions(train_config, batches, schedule)
    model_config, vocabulary = infer_vocab_size(recipe, model_config, train_config)
    if train_config.init_from:
        name = Path(train_config.init_from).resolve().name
    check_packages(train_config.report_to)
    shown = make_display(display, train_config.log_every)
    path = Path(train_config.out_dir) if train_config.out_dir else unused_path(name)
    with joined(train_config.device) as world, process_settings(train_config):
        if not world.is_first:
            return _follow(world, batches, schedule)
        if world.size > train_config.num_micro_batches and train_config.micro_batches is None:
            if (rows := train_config.batch_size * train_config.grad_accum) % world.size:
                raise ConfigError(
                    f"the {rows} rows of a step are not {world.size} equal micro-batches, one for each rank: use a multiple of "
                    f"{world.size} as batch_size, or more micro_batches"
                )
            train_config = replace(train_config, micro_batches=world.size)
        if vocabulary:
            shown.rows([("vocabulary", vocabulary)])
        with busy("checking memory and disk"):
            train_config = resolve_defaults(model_config, train_config)
            ranks = world.local_size if train_config.device == "cpu" else 1  # which then share the memory
            errors = _resource_errors(model_config, train_config.accumulated(), path, ranks)
        for error in errors:
            if not skip_resource_check:
                raise error
            shown.warn(str(error))
        phases.end("resource check")
        with busy("reading and tokenizing the data"):
            facts = {} if batches is None else {"batches": FUNCTION}
            run, run_config, dataset = create_run(model_config, train_config, path, sys.argv, facts)
        phases.end("data")
        try:
            return _train(run, run_config, dataset, shown, user, phases, batches, schedule, world)
        except BaseException as error:
            lost = not checkpoints(run.checkpoints) if isinstance(error, Interrupted) else not has_progress(run)
            if lost and not isinstance(error, GradientError):
                shutil.rmtree(run.path, ignore_errors=True)
            raise


def resume(
    path: str | Path,
    *,
    batches: Batches | None = None,
    lr_schedule: str | Schedule | None = None,
    callbacks: Iterable[Callback] | None = None,
    display: str | None = "auto",
    fallback: bool = True,
    phases: Phases | None = None,
    **overrides: Any,
) -> TrainResult:
    """Continue a run from its newest checkpoint; on the same machine the result is bit for bit that of an uninterrupted run.

    path: the run's directory. batches, lr_schedule: a run that was trained with functions needs them again, and refuses those
    that give something else for its last step; an iterable is skipped up to there. fallback: use the checkpoint before a
    damaged one. overrides: fields of TrainConfig to change, such as max_steps=400 or device="cpu"; they are recorded in the
    run. callbacks, display, phases: as for train()."""
    user, phases = _Callbacks(callbacks), phases or Phases()
    schedule = _schedule(lr_schedule, overrides)
    run = RunDir.open(path)
    config, changes = resume_config(run, overrides)
    if ("batches" in config.functions) != (batches is not None):
        needed = "the batches of a Python function or iterable: pass it again, tapeless.resume(PATH, batches=FUNCTION)"
        raise ConfigError(f"{path} is trained on {needed if batches is None else 'prepared data: leave out batches'}")
    check_functions(config.train, batches, schedule)
    check_packages(config.train.report_to)
    shown = make_display(display, config.train.log_every)
    with joined(config.train.device) as world, process_settings(config.train):
        if not world.is_first:
            return _follow(world, batches, schedule)
        with busy("opening the data"):
            data = open_prepared(run.path)
        phases.end("data")
        options: dict[str, Any] = {"resume": True, "fallback": fallback, "changes": changes}
        return _train(run, config, data, shown, user, phases, batches, schedule, world, **options)


def _recipe(config: Config) -> tuple[str, Recipe]:
    """A configuration in any of its forms as a recipe, and its name."""
    if isinstance(config, Recipe):
        return "recipe", config
    if isinstance(config, Path) or (isinstance(config, str) and config.endswith(".toml")):
        return str(config), read_recipe(Path(config))
    if isinstance(config, str):
        return config, preset_recipe(config)
    model, train = config if isinstance(config, tuple) and len(config) == 2 else (config, None)
    if type(model) not in KINDS.values() or not isinstance(train, TrainConfig | None):
        raise ConfigError(
            f"config is a {type(config).__name__}; expected a preset's name, a TOML file, a ModelConfig, or a pair of "
            "ModelConfig and TrainConfig"
        )
    kind = next(kind for kind, cls in KINDS.items() if type(model) is cls)
    return "model", Recipe(kind, asdict(model), set_fields(train) if train else {})


def _schedule(given: str | Schedule | None, settings: dict[str, Any]) -> Schedule | None:
    """The caller's own schedule, if it is one; records in the settings which it is."""
    if given is None or isinstance(given, str):
        settings |= {} if given is None else {"lr_schedule": given}
        return None
    for name in ("lr", "min_lr", "warmup_steps"):
        if name in settings:
            raise ConfigError(
                f"{name} has no effect if lr_schedule is a function, which decides the learning rate: leave it out"
            )
    settings["lr_schedule"] = FUNCTION
    return given


def _folder(data: Dataset) -> Path:
    """Where `tapeless.prepare` wrote a dataset."""
    file = getattr(data.train, "filename", None)
    if file is None:
        raise ConfigError("this dataset is not one folder of prepared data; pass the path of its folder instead")
    return Path(file).parent


def _resource_errors(config: AnyModelConfig, train: TrainConfig, out_dir: Path, ranks: int) -> list[TapelessError]:
    """Why free memory or disk will not suffice, before anything is written."""
    memory = memory_of(config, train)
    steps = total_steps(train, 0) if train.epochs is None else train.max_steps
    return resource_errors(config, train, memory, disk_of(memory.checkpoint, train, steps), out_dir, ranks=ranks)


class _Callbacks:
    """Calls the user's callbacks, and remembers a request to stop or the first exception."""

    def __init__(self, callbacks: Iterable[Callback] | None):
        if not isinstance(callbacks, Iterable | None) or not all(map(callable, given := tuple(callbacks or ()))):
            raise ConfigError(f"callbacks is {callbacks!r}; expected a list of functions")
        self.callbacks = given
        self.stop = False
        self.error: Exception | None = None

    def __call__(self, event: Event) -> None:
        for callback in self.callbacks:
            try:
                answer = callback(copied(event))  # it may change its own
            except Exception as error:
                self.stop, self.error, self.callbacks = True, error, ()
                return
            if isinstance(answer, str) and answer == STOP:
                self.stop = True


def _train(
    run: RunDir,
    config: RunConfig,
    data: Dataset,
    display: Display,
    user: _Callbacks,
    phases: Phases,
    batches: Batches | None,
    schedule: Schedule | None,
    world: World,
    *,
    resume: bool = False,
    fallback: bool = True,
    changes: Sequence[Change] = (),
) -> TrainResult:
    with ExitStack() as stack:
        signals = StopSignals()
        if current_thread() is main_thread():
            stack.enter_context(ignore_write_errors())
        record = stack.enter_context(Recorder(run, user, delayed=[display.event]))
        world.from_first((str(run.path.resolve()), config))
        with busy("building the model"):
            model = make_model(config.model, config.train)
        load_initial_weights(model, run, config, on_warning=display.warn)
        trainer = Trainer(
            model,
            config.train,
            data,
            run=run,
            on_event=record,
            before_save=record.before_save,
            stopped=lambda: user.stop or signals.requested(),
            base=config.data.get("base_sha256") if config.train.lora else None,
            seal=seal_of(config, model),
            world=world,
            batches=batches,
            lr_schedule=schedule,
        )
        if resume:
            restore_trainer(trainer, record, fallback=fallback, on_warning=display.warn, changes=changes)
            if changes or is_edited(run.config) is not False:
                write_run_config(run.config, config)
                record.reopen()
            _say_what_changes(trainer, changes, display)
        world.from_first(trainer.resumed_from)
        record.delayed.append(stack.enter_context(Reporters(run, config.train.report_to)).event)
        with busy("computing the baselines"):
            found = data.baselines()
        display.introduce(run.path, trainer, found)
        if text := slower_threads(config.train.device):
            display.warn(text)
        phases.end("model")
        if config.train.verify and not resume:
            _check_gradients(trainer, display)
            phases.end("gradient check")
        world.from_first(None)  # the others wait until the first step
        if current_thread() is main_thread() and not signals.interrupts():  # Python sets signal handlers there only
            stack.enter_context(signals)
        record(
            {
                "event": "resume" if resume else "start",
                "step": trainer.steps,
                "parameters": model.num_params,
                "total_steps": trainer.total_steps,
                "baselines": found._asdict(),
                "floor": data.floor,
                "changes": {change.name: [change.old, change.new] for change in changes},
                "startup_seconds": phases.seconds,
                "time": time.time(),
            }
        )

        def poll_signals(event: Event) -> None:
            if event["event"] == "step" and signals.interrupts():
                stack.enter_context(signals)

        with display, ExitStack() as first_step:
            first_step.enter_context(busy("taking the first step"))
            record.listeners.insert(0, lambda event: first_step.close())
            if signals.interrupts():  # until there is a step to lose: compiling its kernels may take a minute
                record.listeners.insert(0, poll_signals)
            try:
                reason = trainer.run(display=None)
            except WriteError as error:  # of the last save, which would hide why it was made
                if user.error is not None:
                    raise error from user.error
                raise
            finally:
                record.deliver()
        record({"event": "end", "step": trainer.steps, "reason": reason, "time": time.time()})
        display.close(run.path, trainer, reason)
    if user.error is not None:
        raise user.error
    attach_tokenizer(model, data.tokenizer, trainer.generation)
    losses = trainer.last_loss, trainer.last_val_loss, trainer.best_val_loss
    return TrainResult(run.path, model, reason, trainer.steps, *losses)


def _follow(world: World, batches: Batches | None, schedule: Schedule | None) -> TrainResult:
    """What all ranks but the first do: the same steps, without files, output and samples."""
    path, config = world.from_first(None)
    run, signals = RunDir.open(path), StopSignals(says=None)
    with ExitStack() as stack:
        if current_thread() is main_thread():  # from the start: it is the first rank that stops, and tells the others
            stack.enter_context(signals)
        data, model = open_prepared(run.path), make_model(config.model, config.train)
        load_initial_weights(model, run, config, on_warning=lambda text: None)
        functions: dict[str, Any] = {"batches": batches, "lr_schedule": schedule}
        seal = seal_of(config, model)
        trainer = Trainer(model, config.train, data, stopped=signals.requested, seal=seal, world=world, **functions)
        step = world.from_first(None)
        if step is not None:
            trainer.resume(read_checkpoint(checkpoints(run.checkpoints)[step]))
        world.from_first(None)
        reason = trainer.run(display=None)
    return TrainResult(run.path, model, reason, trainer.steps, trainer.last_loss, trainer.last_val_loss, trainer.best_val_loss)


def _say_what_changes(trainer: Trainer, changes: Sequence[Change], display: Display) -> None:
    """What a resume does that may surprise: nothing, or a jump of the learning rate."""
    step = trainer.steps
    if step >= trainer.total_steps:
        display.warn(f"all {step:,} steps are done already; --max-steps {2 * step} trains for longer")
        return
    old = {change.name: change.old for change in changes if change.table == "train"}
    if not step or not old or FUNCTION in (old.get("lr_schedule"), trainer.config.lr_schedule):
        return
    before = planned_rate(replace(trainer.config, **old), step - 1, trainer.loader.num_windows, trainer.samples)
    rate = trainer.learning_rate(step)
    if rate > JUMP * before:
        display.warn(
            f"the learning rate rises from {before:.2e} to {rate:.2e} at step {step + 1}: {trainer.config.lr_schedule} is now "
            f"planned over {trainer.total_steps:,} steps; --lr-schedule constant --lr {before:.3g} keeps the rate, with "
            "--lr-schedule wsd it also falls at the end"
        )


def _check_gradients(trainer: Trainer, display: Display) -> None:
    from tapeless.verify.first_batch import first_batch_findings  # only runs that verify load it

    with busy("checking the gradients of the first batch"):
        findings = list(first_batch_findings(trainer.model, *trainer.next_batch()))
    failed = [finding for finding in findings if not finding.ok]
    display.verified(len(findings), failed)
    if failed:
        raise GradientError(
            f"{len(failed)} of {len(findings)} gradient checks failed on the first batch, the worst: {failed[0]}; "
            "nothing was trained"
        )
