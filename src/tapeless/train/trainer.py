"""The trainer: what `tapeless train new` does, step by step, for people who write their own loop too.

    trainer = Trainer(model, TrainConfig(max_steps=200), data)
    trainer.run()                                  # everything, or
    metrics = trainer.step(*trainer.next_batch())  # one step at a time

Everything is a function of the step: the batch, the learning rate, the dropout masks, what is due. A run that is stopped and
resumed at a step therefore goes on as if nothing had been. At a step boundary the order is save, evaluate, sample: a
checkpoint is on disk before anything that could fail, and whoever resumes from it evaluates and samples again.
Judged by: tests/train/test_trainer.py, tests/train/test_resume.py."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tapeless.config import AnyModelConfig, ModelConfig, Sampling, TrainConfig
from tapeless.data.files import atomic_write
from tapeless.data.loader import Loader, validation_windows
from tapeless.data.prepare import Dataset
from tapeless.errors import ConfigError
from tapeless.generate.engine import generate
from tapeless.model.build import AnyModel
from tapeless.optim import make_optimizer
from tapeless.optim.schedule import learning_rate
from tapeless.train.checkpoint import Checkpoint, restore, save_checkpoint
from tapeless.train.evaluate import Evaluation, evaluate
from tapeless.train.rotation import is_new_best, mark_best, rotate
from tapeless.train.run_dir import RunDir
from tapeless.train.step import train_step

DEFAULT_STEPS = 1000
WARMUP_SHARE, WARMUP_MOST = 0.05, 100
REDONE = ("eval", "sample", "checkpoint", "end")  # events of a step that come after its checkpoint, and again after a resume

Listener = Callable[[dict[str, Any]], None]


def default_seq_len(config: AnyModelConfig) -> int:
    """The longest window a transformer is made for; a SimpleLM sees one token anyway."""
    return config.max_seq_len if isinstance(config, ModelConfig) else 32


class StepMetrics(NamedTuple):
    step: int  # steps taken, this one included
    epoch: int
    tokens: int  # seen so far
    loss: float
    lr: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float


class Trainer:
    def __init__(
        self,
        model: AnyModel,
        config: TrainConfig,
        data: Dataset,
        *,
        run: RunDir | None = None,
        on_event: Listener = lambda event: None,
        before_save: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ):
        """run: where checkpoints and samples go; without one nothing is written. on_event: told every event of
        metrics.jsonl. before_save: called before each checkpoint, which must not outlive what was told until then.
        stopped: asked at every step and inside evaluation; True saves and ends the run."""
        self.model, self.config, self.data, self.run_dir = model, config, data, run
        self.on_event, self.before_save, self.stopped = on_event, before_save, stopped
        self.seq_len: int = config.seq_len or default_seq_len(model.config)
        self.loader = Loader(data.train, self.seq_len, config.batch_size * config.grad_accum, config.seed)
        self.total_steps = self._total_steps()
        self.warmup_steps = self._warmup_steps()
        self.validation = validation_windows(data.val, self.seq_len, config.eval_windows)
        decay = {spec.name for spec in model.store.layout.specs.values() if spec.decay}
        self.optimizer = make_optimizer(model.params, model.grads, config, decay)
        self.steps = 0  # taken so far
        self.best_val_loss: float | None = None
        self.best_step: int | None = None
        self.resumed_from: int | None = None
        self._saved: tuple[int, Path] | None = None  # the last checkpoint: its step and place

    def _total_steps(self) -> int:
        c = self.config
        by_epochs = None if c.epochs is None else max(1, c.epochs * self.loader.num_windows // self.loader.batch_size)
        limits = [limit for limit in (c.max_steps, by_epochs) if limit is not None]
        return min(limits, default=DEFAULT_STEPS)

    def _warmup_steps(self) -> int:
        given, total = self.config.warmup_steps, self.total_steps
        if given is not None and given > total:
            raise ConfigError(f"warmup_steps {given} is beyond the {total} steps of the run")
        if given is None and self.config.lr_schedule != "warmup-cosine":
            return 0
        return min(WARMUP_MOST, int(WARMUP_SHARE * total)) if given is None else given

    def learning_rate(self, step: int) -> float:
        c = self.config
        return learning_rate(
            step,
            schedule=c.lr_schedule,
            total_steps=self.total_steps,
            lr=c.lr,
            min_lr=c.lr / 10 if c.min_lr is None else c.min_lr,
            warmup_steps=self.warmup_steps,
        )

    def next_batch(self) -> tuple[Tensor, Tensor]:  # tokens, targets (k*B, T) int64
        tokens, targets = self.loader.batch(self.steps * self.loader.batch_size)
        return tokens.to(self.model.device), targets.to(self.model.device)

    def step(
        self,
        tokens: Tensor,  # (k*B, T) int64, k = grad_accum
        targets: Tensor,  # (k*B, T) int64
    ) -> StepMetrics:
        start = time.perf_counter()
        first_sample = self.steps * self.loader.batch_size
        lr = self.learning_rate(self.steps)
        result = train_step(
            self.model,
            self.optimizer,
            tokens,
            targets,
            lr=lr,
            grad_clip=self.config.grad_clip,
            grad_accum=self.config.grad_accum,
            step=self.steps,
            first_sample=first_sample,
        )
        seconds = time.perf_counter() - start
        self.steps += 1
        return StepMetrics(
            step=self.steps,
            epoch=self.loader.epoch_of(first_sample),
            tokens=self.steps * tokens.numel(),
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            step_seconds=seconds,
            tokens_per_second=tokens.numel() / seconds,
        )

    def run(self) -> str:
        """Train to the end; `done`, `early` (no new best for too long) or `stopped` (asked to, and resumable)."""
        if self.resumed_from is not None and self._boundary():
            return "early"
        while self.steps < self.total_steps and not self.stopped():
            metrics = self.step(*self.next_batch())
            self.on_event({"event": "step", **metrics._asdict(), "time": time.time()})
            if self._boundary():
                return "early"
        self.save()
        return "stopped" if self.stopped() else "done"

    def _boundary(self) -> bool:
        """What is due after a step: save, evaluate, sample. True where patience has run out."""
        c, last = self.config, self.steps == self.total_steps
        if last or self.steps % c.save_every == 0:
            self.save()
        if last or (c.eval_every and self.steps % c.eval_every == 0):
            self.evaluate()
        if last or (c.sample_every and self.steps % c.sample_every == 0):
            self.sample()
        late = self.best_step is not None and self.steps - self.best_step >= c.patience * max(c.eval_every, 1)
        if c.patience and late and not last:
            self.save()
            return True
        return False

    def evaluate(self) -> Evaluation | None:
        found = evaluate(self.model, *self.validation, self.data.bytes_per_token, stopped=self.stopped)
        if found is None:
            return None
        if is_new_best(found.val_loss, self.best_val_loss):
            path = self.save()
            if self.run_dir is not None and path is not None:
                mark_best(self.run_dir.checkpoints, path, found.val_loss, self.best_val_loss)
            self.best_val_loss, self.best_step = found.val_loss, self.steps
        event = {"event": "eval", "step": self.steps, **found._asdict(), "floor": self.data.floor}
        self.on_event({**event, "best": self.best_val_loss, "time": time.time()})
        return found

    def sample(self) -> str:
        """A text that the model continues from the prompt, or from the first validation token."""
        c, tokenizer = self.config, self.data.tokenizer
        prompt = tokenizer.encode(c.sample_prompt) if c.sample_prompt else self.data.val[:1]
        (ids,) = generate(
            self.model,
            [int(i) for i in prompt],
            max_tokens=c.sample_tokens,
            sampling=Sampling(temperature=c.sample_temperature, seed=c.seed),
            vocab_size=tokenizer.vocab_size,
        )
        text = tokenizer.decode([*prompt, *ids])
        if self.run_dir is not None:
            with atomic_write(self.run_dir.samples / f"step-{self.steps:08d}.txt") as file:
                file.write(text.encode())
        self.on_event({"event": "sample", "step": self.steps, "text": text, "time": time.time()})
        return text

    def save(self) -> Path | None:
        """Write a checkpoint of this step, once. Its state is the one before the step's evaluation, so that whoever resumes
        from it comes to the same decisions when it evaluates again."""
        if self.run_dir is None:
            return None
        if self._saved is None or self._saved[0] != self.steps:
            self.before_save()
            path = save_checkpoint(self.run_dir.checkpoints, self.model.params, self.optimizer.named_state(), self._state())
            self._saved = (self.steps, path)
            self.on_event({"event": "checkpoint", "step": self.steps, "path": path.name, "time": time.time()})
            rotate(
                self.run_dir.checkpoints,
                keep_last=self.config.keep_last,
                keep_every=self.config.keep_every,
                protect=() if self.resumed_from is None else (self.resumed_from,),
                on_warning=self._warn,
            )
        return self._saved[1]

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was written."""
        state = checkpoint.state
        restore(self.model.params, checkpoint.params, checkpoint.path)
        for name, views in self.optimizer.named_state().items():
            restore(views, checkpoint.optim.get(name, {}), checkpoint.path)
        self.steps = self.optimizer.t = state["step"]
        self.best_val_loss, self.best_step = state["best_val_loss"], state["best_step"]
        self.resumed_from = self.steps
        self._saved = (self.steps, checkpoint.path)

    def _state(self) -> dict[str, Any]:
        first_sample = self.steps * self.loader.batch_size
        return {
            "step": self.steps,
            "tokens": first_sample * self.seq_len,
            "epoch": self.loader.epoch_of(first_sample),
            "sample_index": first_sample,
            "seed": self.config.seed,
            "best_val_loss": self.best_val_loss,
            "best_step": self.best_step,
            "guard": {},
            "world_size": 1,
        }

    def _warn(self, text: str) -> None:
        self.on_event({"event": "guard", "step": self.steps, "warning": text, "time": time.time()})
