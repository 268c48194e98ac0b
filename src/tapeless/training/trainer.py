"""The trainer: the training loop of `tapeless train new`, also for loops of your own.

    trainer = Trainer(model, TrainConfig(max_steps=200), data)
    trainer.run()                                  # the whole loop, with its progress, or
    metrics = trainer.step(*trainer.next_batch())  # one step at a time

The batch, the learning rate, the dropout masks and what is due are functions of the step and of the number of samples before
it, so a run that is stopped and resumed continues as if it had not been interrupted. After a step the order is save, evaluate,
sample: a checkpoint has the state from before the evaluation, so a resume from it evaluates and samples again. Checkpoints are
written in the background (checkpoint_writer.py); an error in the loop still waits for the one being written. A failed write
during training is a warning, since the weights in memory are worth more than any file: the next save tries again. Only the last
one must succeed.
Tested by: tests/train/test_trainer.py, tests/train/test_resume.py."""

import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tapeless.config import FUNCTION, Sampling, TrainConfig, seconds
from tapeless.data.files import atomic_write
from tapeless.data.loader import ExampleLoader, Loader, training_batches, validation_set
from tapeless.data.prepare import Dataset
from tapeless.dist.gradient_sum import gradient_sum
from tapeless.dist.world import ALONE, World
from tapeless.errors import ConfigError, InvariantError, NonFiniteError, WriteError
from tapeless.generate.engine import Engine
from tapeless.interop.generation import Generation
from tapeless.model.build import AnyModel
from tapeless.model.trained import checkpointed
from tapeless.model.transformer import Transformer
from tapeless.optim.ema import EMA
from tapeless.training.captured_step import captured_step
from tapeless.training.checkpoint import Checkpoint, restore, save_checkpoint
from tapeless.training.checkpoint_writer import CheckpointWriter
from tapeless.training.evaluate import Evaluation, evaluate
from tapeless.training.functions import Batches, OwnBatches, OwnSchedule, Schedule, check_functions
from tapeless.training.guard import SpikeGuard
from tapeless.training.imported import generation_of
from tapeless.training.invariants import check_invariants
from tapeless.training.layer_stats import LayerStats
from tapeless.training.nonfinite import explained
from tapeless.training.plan import default_seq_len, scheduled_rate, total_steps, warmup_steps
from tapeless.training.prefetch import Prefetch
from tapeless.training.rotation import is_new_best, repair_names
from tapeless.training.run_config import Change
from tapeless.training.run_dir import RunDir, resume_command
from tapeless.training.seal import Seal, announcements, differences
from tapeless.training.step import StepMetrics, StepResult, ema_of, optimizer_of, train_step
from tapeless.training.time_spent import TimeSpent

log = logging.getLogger("tapeless")
# Events that a resume writes again for the step it starts at.
REPEATED = ("checkpoint", "eval", "sample", "guard", "end")

RETRIES = (0.0, 0.2, 0.8)  # seconds before each attempt to write the last checkpoint
SLOW_DISK = 1.0  # seconds of waiting that are worth a warning
Listener = Callable[[dict[str, Any]], None]


def log_warnings(event: dict[str, Any]) -> None:
    """The listener of a trainer without one."""
    if "warning" in event:
        log.warning("%s", event["warning"])


def document_starts(model: AnyModel, data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Where the documents of both parts start, for attention that is masked by document."""
    if not isinstance(model, Transformer):
        raise ConfigError("document_attention needs a model with attention; leave it out for a SimpleLM")
    if data.train_starts is None or data.val_starts is None:
        raise ConfigError(f"document_attention needs document boundaries, which {data.source} does not have")
    return data.train_starts, data.val_starts


class Trainer:
    __doc__ = __doc__

    def __init__(
        self,
        model: AnyModel,
        config: TrainConfig,
        data: Dataset,
        *,
        run: RunDir | None = None,
        on_event: Listener = log_warnings,
        before_save: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
        base: str | None = None,
        seal: Seal | None = None,
        world: World = ALONE,
        batches: Batches | None = None,
        lr_schedule: Schedule | None = None,
    ):
        """model, config, data: what is trained, how, and on what. batches, lr_schedule: functions of the step in place of the
        training part of data and of the schedule of config (functions.py). run: where checkpoints and samples are written; None
        writes nothing. on_event: called with every event of metrics.jsonl; by default warnings are logged. before_save: called
        before each checkpoint by the thread that writes it, to sync the events so far to the disk. stopped: polled at every
        step and during evaluation; True saves and ends the run, as does max_time, which counts from here. base: the hash of the
        base weights of adapters, recorded in checkpoints. seal: what determines the result (seal.py), likewise, and compared by
        a resume. world: the ranks that train together, each with a Trainer of the same arguments; only the first one's has a
        run and events."""
        if world.size > config.num_micro_batches:
            raise ConfigError(
                f"{world.size} ranks, but a step has {config.num_micro_batches} micro-batches: use as many ranks or fewer, or "
                "more micro_batches"
            )
        if lr_schedule is not None:
            config = replace(config, lr_schedule=FUNCTION)
        check_functions(config, batches, lr_schedule)
        self.model, self.config, self.data, self.run_dir = model, config, data, run
        # Read once: a sample that needed a file would be missing where the disk fails for a moment.
        self.generation = Generation() if run is None else generation_of(run, data.tokenizer)
        self.on_event, self.base, self.seal, self.world = on_event, base, seal, world
        self._stop_requested, self._deadline = stopped, time.monotonic() + seconds(config.max_time)
        self.seq_len: int = config.seq_len or default_seq_len(model.config)
        starts = document_starts(model, data) if config.document_attention else (None, None)
        self._schedule: OwnSchedule | None = None
        if lr_schedule is not None:
            self._schedule = OwnSchedule(lr_schedule)
            self._schedule(0)  # raises if that is no rate
        self._own: OwnBatches | None = None
        if batches is None:
            loader = training_batches(data, self.seq_len, config.batch_size * config.grad_accum, config.seed, starts[0])
            self.loader: Loader | ExampleLoader | OwnBatches = loader
            self._batches = Prefetch(loader, model.device)
        else:
            self.loader = self._own = OwnBatches(batches, config, self.seq_len, model.config.vocab_size, model.device)
            self._own.check_first()
            if world.size > 1 and len({number for (number,) in world.gather([int(self._own.fingerprint(0)[:12], 16)])}) > 1:
                raise ConfigError(
                    "batches: the first batch is not the same on all ranks, which compute parts of it: draw from the step, or "
                    "from a generator that every rank seeds alike"
                )
        self.validation = validation_set(data, self.seq_len, config.eval_windows, starts[1])
        self.optimizer = optimizer_of(model, config)
        self.ema = ema_of(model, config)
        invariant = config.sums_in_order
        self._sum = gradient_sum(model.store.flat_grads, config.num_micro_batches, world, rank_invariant=invariant)
        self._captured = captured_step(model, self.optimizer, config, self._sum)
        # Events of a step are emitted while a GPU computes the next one, or before what is due after it.
        self.reports_late = self._captured is not None and model.device.type != "cpu"
        self.spikes = SpikeGuard(config.spike_z)
        self._layer_stats = LayerStats(model, config.layer_stats_every if world.is_first else 0)
        self._engine: Engine | None = None  # of the samples: on a GPU it takes longer to capture than to run
        self.steps = self.samples = self.tokens = 0  # so far
        self.skipped = 0  # updates not made, because the loss was a spike
        self._stop_agreed = False
        self.last_loss: float | None = None
        self.last_val_loss: float | None = None
        self.best_val_loss: float | None = None
        self.best_step: int | None = None
        self.evals_without_best, self.last_eval = 0, 0  # in a row; the step of the last evaluation
        self.resumed_from: int | None = None
        self._writer: CheckpointWriter | None = None
        if run is not None:
            run.checkpoints.mkdir(parents=True, exist_ok=True)  # later it is not made: the directory may have been renamed
            keep = {"keep_last": config.keep_last, "keep_every": config.keep_every}
            self._writer = CheckpointWriter(run.checkpoints, **keep, before_write=partial(self._before_write, run, before_save))
        self._saved_step: int | None = None  # of the last checkpoint, which may still be being written
        self._state_to_save: dict[str, Any] = {}
        self._waited = 0.0  # seconds, for a checkpoint that was still being written when the next was due
        self.spent = TimeSpent()
        self._unreported: Callable[[], None] | None = None  # emits the events of the last step
        self._raised: BaseException | None = None  # by a listener, meanwhile
        self._last_end: float | None = None  # perf_counter at the end of the last step, moved on by pauses
        self._plan()

    def _plan(self) -> None:
        """Number of steps and warm-up, from the current position."""
        self.total_steps = total_steps(self.config, self.loader.num_windows, steps=self.steps, samples=self.samples)
        self.warmup_steps = warmup_steps(self.config, self.total_steps)

    @property
    def functions(self) -> list[str]:
        """The arguments that are the caller's functions, without which the run cannot be resumed."""
        return ["batches"] * (self._own is not None) + ["lr_schedule"] * (self._schedule is not None)

    def learning_rate(self, step: int) -> float:
        """Of a step, 0 being the first."""
        if self._schedule is not None:
            return self._schedule(step)
        return scheduled_rate(self.config, step, self.total_steps, self.warmup_steps)

    def next_batch(self) -> tuple[Tensor, ...]:  # tokens, targets (k*B, T) int64, k = grad_accum; document_ids if masked
        """The batch of the coming step: the same one until step() is called."""
        return self._batches.at(self.samples) if self._own is None else self._own.at(self.steps)

    def step(
        self,
        tokens: Tensor,  # (k*B, T) int64, k = grad_accum
        targets: Tensor,  # (k*B, T) int64
        documents: Tensor | None = None,  # (k*B, T) int64: attention stays inside each
    ) -> StepMetrics:
        """One update by any batch of grad_accum micro-batches: forward, backward, clipping, the optimizer. A checkpoint that
        could not be written in the background is a warning here."""
        self._collect_saves()
        if self.config.check_invariants_every and (self.steps + 1) % self.config.check_invariants_every == 0:
            check_invariants(self.model, tokens, targets, documents, step=self.steps, first_sample=self.samples)
        start = time.perf_counter()
        epoch, lr = self.loader.epoch_of(self.samples), self.learning_rate(self.steps)
        try:
            result = self._computed(tokens, targets, documents, lr)
        except NonFiniteError as error:
            counts = {"grad_accum": self.config.num_micro_batches, "step": self.steps, "first_sample": self.samples}
            batch = {"tokens": tokens, "targets": targets, "documents": documents}
            peak = self.config.lr if self._schedule is None else None
            options: dict[str, Any] = {"peak": peak, "functions": self.functions}
            raise explained(error, self.model, batch, counts, lr, self.run_dir, **options) from None
        if self.ema is not None and not result.skipped:
            self.ema.update(self.optimizer.t)
        now = time.perf_counter()
        wall = now - (start if self._last_end is None else self._last_end)  # with the time that the batch took to load
        self._last_end = now
        self.steps += 1
        self.samples += tokens.shape[0]
        self.tokens += tokens.numel()
        self.last_loss = result.loss
        speed = tokens.numel() / wall
        return StepMetrics(self.steps, epoch, self.tokens, result.loss, lr, result.grad_norm, now - start, speed)

    @contextmanager
    def _pause(self, activity: str) -> Iterator[None]:
        """Around work between steps that tokens per second leaves out: evaluations, checkpoints, samples."""
        busy = None if self._last_end is None else time.perf_counter() - self._last_end
        with self.spent(activity):
            yield
        if busy is not None:
            self._last_end = time.perf_counter() - busy

    def _computed(self, tokens: Tensor, targets: Tensor, documents: Tensor | None, lr: float) -> StepResult:
        """The step itself, with the spike guard."""
        limit = self.spikes.limit()
        if self._captured is not None:
            options: dict[str, Any] = {"loss_limit": limit.loss, "meanwhile": self._report_meanwhile}
            result = self._captured(tokens, targets, documents, lr=lr, step=self.steps, **options)
        else:
            options = {"grad_clip": self.config.grad_clip, "reduction": self._sum}
            options |= {"lr": lr, "first_sample": self.samples, "loss_limit": limit.loss}
            result = train_step(self.model, self.optimizer, tokens, targets, documents, step=self.steps, **options)
        self.spikes.take(result.loss)
        if result.skipped:
            self.skipped += 1
            spike = {"skipped_step": self.steps + 1, "spike": result.loss, "limit": limit.loss, "skipped": self.skipped}
            text = f"step {self.steps + 1}: {limit.exceeded_by(result.loss)}: the update was skipped, {self.skipped} so far"
            self._warn(text, **spike)
        return result

    @property
    def out_of_time(self) -> bool:
        """Whether max_time is over."""
        return time.monotonic() >= self._deadline

    def stopped(self) -> bool:
        """Whether to end the run here, resumable. Several ranks agree on it between steps."""
        return self._stop_agreed if self.world.size > 1 else self._stop_requested() or self.out_of_time

    def _agree_to_stop(self) -> None:
        """On several ranks: at the same step, though signals reach them at different times. Also if nobody waits for them."""
        if self.world.size > 1:
            wanted = self._stop_requested() or self.out_of_time or self.world.abandoned()
            self._stop_agreed = any(flag for (flag,) in self.world.gather([float(wanted)]))

    def run(self, *, display: str | None = "auto") -> str:
        """Train to the end; returns `done`, `early` (no new best for too long) or `stopped` (requested, or out of time).

        display: auto (live in a terminal or a notebook, else plain lines), plain, json, or None for no output."""
        if display is None:
            return self._run()
        from tapeless.training.display import make_display  # which imports this file

        shown, on_event = make_display(display, self.config.log_every), self.on_event

        def both(event: dict[str, Any]) -> None:
            if on_event is not log_warnings:  # which the display shows
                on_event(event)
            shown.event(event)

        shown.begin(self)
        self.on_event = both
        try:
            with shown:
                return self._run()
        finally:
            self.on_event = on_event

    def _run(self) -> str:
        try:
            self.spent.restart()
            complete, self._last_end = True, time.perf_counter()
            if self.resumed_from is not None:
                self._emit("checkpoint", path=f"step-{self.steps:08d}")
                complete = self._after_step()
            while (ending := self._ending(complete)) is None:
                self._take_step()
                complete = self._after_step()
            self._report()
            self.save()
            self._emit("time_spent", seconds=self.spent.seconds())
        except (NonFiniteError, InvariantError) as error:
            self._report()
            self._emit("guard", error=str(error))
            raise
        finally:
            try:
                self._report()
                self._collect_saves(wait=True)
            finally:
                if self._writer is not None:
                    self._writer.close()
                if self._own is None:
                    self._batches.close()
        return ending

    def _take_step(self) -> None:
        measured = self._layer_stats.due(self.steps + 1)
        if measured:
            self._layer_stats.before()
        try:
            self.learning_rate(self.steps)
            with self.spent("data"):
                batch = self.next_batch()
        except Exception:  # mostly of the caller's functions: nothing of this step was done, and no work is lost
            self._report()
            if self.steps:
                self.save()
            raise
        with self.spent("step"):
            metrics = self.step(*batch)
        with self.spent("metrics"):
            stats = self._layer_stats.after(metrics.grad_norm) if measured else None

        def report() -> None:
            with self.spent("metrics"):
                self._emit("step", **metrics._asdict())
                if stats is not None:
                    self._emit("layer_stats", step=metrics.step, **stats)

        self._report()  # of the step before, if nothing did meanwhile
        self._unreported = report
        if self._raised is not None:
            error, self._raised = self._raised, None
            raise error
        if not self.reports_late:
            self._report()

    def _report(self) -> None:
        report, self._unreported = self._unreported, None
        if report is not None:
            report()

    def _report_meanwhile(self) -> None:
        """While a GPU computes a step. What a listener raises is raised after it, since the weights are changing already."""
        try:
            self._report()
        except BaseException as error:
            self._raised = error

    def _ending(self, complete: bool) -> str | None:
        """Why the run ends here, or None. complete: everything due at this step has been done."""
        if complete and self.steps >= self.total_steps:
            return "done"
        if complete and self.config.patience and self.evals_without_best >= self.config.patience:
            return "early"
        self._agree_to_stop()
        return "stopped" if self.stopped() else None

    def _after_step(self) -> bool:
        """What is due after a step: save, evaluate, sample. False if a stop interrupted it: a resume does it again."""
        if self.steps == 0:
            return True
        c, last = self.config, self.steps >= self.total_steps
        if last or any(every and self.steps % every == 0 for every in (c.save_every, c.eval_every, c.sample_every)):
            self._report()
        if last or self.steps % c.save_every == 0:
            self._start_save()
        evaluation_due = last or (c.eval_every and self.steps % c.eval_every == 0)
        if evaluation_due:
            if self.evaluate() is None:
                return False
            self._emit("time_spent", seconds=self.spent.seconds())
        if last or (c.sample_every and self.steps % c.sample_every == 0):
            if self.stopped():
                return False
            try:
                return self.sample() is not None
            except (NonFiniteError, MemoryError):
                raise
            except Exception as error:  # a tokenizer of unknown origin, a compiler: the weights are worth more than a sample
                self._warn(f"no sample, {type(error).__name__}: {error}; training continues")
        return True

    def evaluate(self) -> Evaluation | None:
        """The loss on the validation windows, and a checkpoint if it is the best; None if a stop interrupted it."""
        with self._pause("evaluation"):
            options: dict[str, Any] = {"rows": self.config.micro_batch_size, "stopped": self.stopped, "world": self.world}
            evaluated = partial(evaluate, self.model, self.validation, self.data.bytes_per_token, **options)
            found, average = evaluated(), None
            if found is not None and self.ema is not None:
                with self.ema.as_weights():
                    average = evaluated()
            if found is None or (average is None and self.ema is not None):
                return None
            if is_new_best(found.val_loss, self.best_val_loss):
                self._start_save()  # with the state from before this evaluation
                if self._writer is not None:
                    self._writer.mark_best(self.steps)
                self.best_val_loss, self.best_step, self.evals_without_best = found.val_loss, self.steps, 0
            elif self.last_eval != self.steps:  # otherwise the run was resumed here, and it was counted before
                self.evals_without_best += 1
            self.last_eval, self.last_val_loss = self.steps, found.val_loss
            ema = {} if average is None else {"ema_val_loss": average.val_loss}
            self._emit("eval", **found._asdict(), **ema, floor=self.data.floor, best=self.best_val_loss)
            return found

    def _warn_if_write_fails(self, write: Callable[[], object]) -> None:
        try:
            write()
        except WriteError as error:
            self._warn(f"{error}; training continues")

    def sample(self) -> str | None:
        """A text that continues the prompt, or the first validation token; None if a stop interrupted it. Only the first rank
        generates one."""
        if not self.world.is_first:
            return ""
        with self._pause("samples"):
            c, tokenizer = self.config, self.data.tokenizer
            prompt = tokenizer.encode(c.sample_prompt) if c.sample_prompt else self.data.beginning()
            sampling = Sampling(temperature=c.sample_temperature, seed=c.seed)
            engine, self._engine = self._engine, None  # none again if this raises: what its slots hold is then unknown
            if engine is None:
                # No prefixes: those of the last sample are of other weights.
                options: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "reuse_prefixes": False}
                engine = Engine(self.model, capacity=len(prompt) + c.sample_tokens, **options)
            self.model.store.refresh()  # the engine trusts torch's count of writes, which some optimizers bypass
            stream = engine.submit(prompt, max_tokens=c.sample_tokens, sampling=sampling, stop=self.generation.eos_ids)
            for _ in stream:
                # Not if out of time: a budget shorter than a sample would never get beyond it.
                if self.world.size == 1 and self._stop_requested():
                    return None
            self._engine = engine
            text = tokenizer.decode([*prompt, *stream.tokens])
            self._warn_if_write_fails(lambda: self._write_sample(text))
            self._emit("sample", text=text)
            return text

    def _write_sample(self, text: str) -> None:
        if self.run_dir is not None:
            with atomic_write(self.run_dir.samples / f"step-{self.steps:08d}.txt") as file:
                file.write(text.encode())

    def save(self) -> Path | None:
        """Write a checkpoint of this step, once, and wait until it is on disk. Its state is from before the step's evaluation,
        so that a resume evaluates again and decides the same. Weights that are not finite are an error and not saved."""
        if self.run_dir is None or self._writer is None:
            return None
        with self._pause("checkpoints"):
            self._collect_saves(wait=True)  # if the one of this step failed, it is written again
            for pause in RETRIES:
                time.sleep(pause)
                try:
                    self._start_save(background=False)
                    if self.best_step == self.steps:
                        self._writer.mark_best(self.steps)
                    self._collect_saves(wait=True, must_succeed=True)
                    break
                except WriteError as error:
                    failure = error
            else:
                raise self._saved_elsewhere(self.run_dir, failure) from failure
        return self.run_dir.checkpoints / f"step-{self.steps:08d}"

    def _saved_elsewhere(self, run: RunDir, error: WriteError) -> WriteError:
        """Write the checkpoint into a new folder for temporary files, or else of the user, or else here: laid out like the run,
        so that one copy brings it back. Returns the error that says so."""
        for parent in (tempfile.gettempdir, Path.home, Path.cwd):
            try:
                folder = Path(tempfile.mkdtemp(prefix=f"tapeless-{run.path.resolve().name}-", dir=parent()))
                save_checkpoint(folder / "checkpoints", *self._tensors_to_save(), self._state_to_save)
            except (OSError, RuntimeError):  # RuntimeError: no home
                continue
            run.elsewhere = folder
            copy = f"cp -r {shlex.quote(str(folder))}/. {shlex.quote(str(run.path))}/"
            command = resume_command(run.path, self.functions)
            where = f"the checkpoint of step {self.steps} is in {folder}"
            found = WriteError(f"{error}; {where}; to continue, free some space, then: {copy} && {command}")
            found.errno = error.errno
            return found
        return error

    def _tensors_to_save(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        state = self.optimizer.named_state() | ({} if self.ema is None else {EMA: self.ema.named()})
        return checkpointed(self.model.params), state

    def _start_save(self, *, background: bool = True) -> None:
        if self._writer is None or self._saved_step == self.steps:
            return
        with self._pause("checkpoints"):
            self.data.require_unaltered()
            self.model.store.raise_if_non_finite()
            before, self._waited = self._waited, self._waited + self._writer.wait()
            if background and before <= SLOW_DISK < self._waited:
                self._warn(
                    f"step {self.steps}: training has waited {self._waited:.1f} s for the checkpoint before to be written: the "
                    "disk is slower than save_every and eval_every allow"
                )
            self._collect_saves()  # before the next is on disk, from which a resume would not report the one before
            if self._state_to_save.get("step") != self.steps:  # otherwise a save that failed is repeated
                self._state_to_save = self._state()
            self._writer.save(*self._tensors_to_save(), self._state_to_save, protect=self.resumed_from, background=background)
            self._saved_step = self.steps

    def _before_write(self, run: RunDir, before_save: Callable[[], None]) -> None:
        before_save()
        assert self._writer is not None
        self._writer.folder = run.checkpoints  # which may have been renamed

    def _collect_saves(self, *, wait: bool = False, must_succeed: bool = False) -> None:
        """Report the checkpoints that were written, and what went wrong."""
        if self._writer is None:
            return
        for outcome in self._writer.outcomes(wait=wait):
            for text in outcome.warnings:
                self._warn(text)
            if outcome.path is not None:
                self.on_event({"event": "checkpoint", "step": outcome.step, "path": outcome.path.name, "time": time.time()})
            if outcome.error is not None:
                if self._saved_step == outcome.step and outcome.path is None:
                    self._saved_step = None
                if must_succeed:
                    raise outcome.error
                text = str(outcome.error)
                if not isinstance(outcome.error, WriteError):
                    text = f"step {outcome.step}: the checkpoint writer failed: {outcome.error!r}"
                    log.error(text, exc_info=outcome.error)
                self._warn(f"{text}; training continues")

    def resume(self, checkpoint: Checkpoint, changes: Collection[Change] = ()) -> None:
        """Restore weights, optimizer and position from a checkpoint. changes: of its configuration, to be announced."""
        state, moments = checkpoint.state, self.optimizer.named_state()
        saved = {name: views for name, views in checkpoint.optim.items() if name != EMA}
        if saved.keys() != moments.keys():
            raise ConfigError(
                f"{checkpoint.path} holds the optimizer state {', '.join(saved)}, but optimizer "
                f"{self.config.optimizer!r} has {', '.join(moments)}; resume with the run's own optimizer"
            )
        restore(checkpointed(self.model.params), checkpoint.params, checkpoint.path)
        for name, views in moments.items():
            restore(views, saved[name], checkpoint.path)
        self.steps = self.resumed_from = state["step"]
        self.samples, self.tokens = state["sample_index"], state["tokens"]
        self.best_val_loss, self.best_step = state["best_val_loss"], state["best_step"]
        guard = state["guard"]
        self.evals_without_best, self.last_eval = guard["evals_without_best"], guard["last_eval"]
        self.skipped = guard.get("skipped", 0)  # older checkpoints have neither
        self.spikes = SpikeGuard(self.config.spike_z, guard.get("losses", ()))
        self.optimizer.t = self.steps - self.skipped
        self._saved_step = self.steps
        self._check_functions(state["functions"])
        self._plan()
        self._resume_average(checkpoint)
        ranks = None if self.config.sums_in_order else self.world.size
        if self.run_dir is not None:
            folder = self.run_dir.checkpoints
            self._warn_if_write_fails(lambda: repair_names(folder, self.steps, self.best_step, on_warning=self._warn))
        for text in announcements(differences(state, self.seal, changes, ranks=ranks)):
            self._warn(text)

    def _check_functions(self, saved: dict[str, Any] | None) -> None:
        """The caller's functions must give for the last step what they gave the run."""
        now = self._last_given() or {}
        for name, value in (saved or {}).items():
            if now.get(name, value) != value:
                what = f"the rate {value:.8g}, now {now[name]:.8g}" if name == "lr_schedule" else "another batch"
                raise ConfigError(
                    f"{name}: for step {self.steps} the run was given {what}; pass what it began with, or a function that "
                    "differs only for later steps"
                )

    def _last_given(self) -> dict[str, Any] | None:
        """What the caller's functions gave for the last step: a hash, and a rate."""
        given: dict[str, Any] = {}
        if self._own is not None:
            given["batches"] = self._own.fingerprint(self.steps - 1)
        if self._schedule is not None:
            given["lr_schedule"] = self._schedule(self.steps - 1)
        return given or None

    def _resume_average(self, checkpoint: Checkpoint) -> None:
        """An override of ema_decay may start or end the average here, with a warning."""
        average = checkpoint.optim.get(EMA)
        if self.ema is None:
            if average is not None:
                self._warn("the average of the weights ends here: ema_decay is 0")
        elif average is not None:
            restore(self.ema.named(), average, checkpoint.path)
        else:
            self.ema.begin()
            self._warn(f"{checkpoint.path} holds no average of the weights: it starts from the weights of step {self.steps}")

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.steps,
            "tokens": self.tokens,
            "epoch": self.loader.epoch_of(self.samples),
            "sample_index": self.samples,
            "seed": self.config.seed,
            "best_val_loss": self.best_val_loss,
            "best_step": self.best_step,
            "guard": {
                "evals_without_best": self.evals_without_best,
                "last_eval": self.last_eval,
                "skipped": self.skipped,
                "losses": list(self.spikes.losses),
            },
            "world_size": self.world.size,
            "base": self.base,
            "functions": self._last_given() if self.steps else None,
            "seal": self.seal,
        }

    def _emit(self, event: str, **facts: Any) -> None:
        self.on_event({"event": event, "step": self.steps, **facts, "time": time.time()})

    def _warn(self, text: str, **facts: Any) -> None:
        self._emit("guard", warning=text, **facts)
