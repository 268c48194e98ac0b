"""Batches and learning rates of the caller's own, in place of prepared data and of a named schedule.

    batches      step -> (tokens, targets), or an iterable of them         lr_schedule      step -> learning rate
step is 0 before the first update. Both are asked once per step. A function of the step needs nothing else to be resumed. An
iterable is started again, which is the next epoch, and a resume skips what the run has seen. That they still give what the run
was trained with is not assumed: a checkpoint holds the hash of its last batch and its last learning rate; a resume asks for
both again, and ends if they are others. Before the first step a function is asked twice for its first batch.
Tested by: tests/train/test_caller_functions.py."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tapeless.config import FUNCTION, TrainConfig
from tapeless.errors import ConfigError, InputError
from tapeless.model.check import check_targets, check_tokens

Batch = Sequence[Tensor]  # tokens, targets (rows, T) int64, and document_ids if masked
Batches = Callable[[int], Batch] | Iterable[Batch]
Schedule = Callable[[int], float]
END = object()


def check_functions(train: TrainConfig, batches: Batches | None, lr_schedule: Schedule | None) -> None:
    """Raise before anything is written if a run needs a function that was not given, or has settings that contradict one."""
    if train.lr_schedule == FUNCTION and lr_schedule is None:
        raise ConfigError(
            "lr_schedule 'function' is a function of the step: pass it from Python, as lr_schedule=FUNCTION of tapeless.train "
            "or tapeless.resume"
        )
    if lr_schedule is not None and not callable(lr_schedule):
        raise ConfigError(f"lr_schedule is {lr_schedule!r}; expected the name of a schedule, or a function step -> rate")
    if batches is None:
        return
    if isinstance(batches, str | dict | Tensor) or not (callable(batches) or isinstance(batches, Iterable)):
        raise ConfigError(
            f"batches is a {type(batches).__name__}; expected a function step -> (tokens, targets), or an iterable of pairs"
        )
    if train.epochs is not None:
        raise ConfigError("epochs are passes over prepared data, and batches of your own have no known number: give max_steps")


class OwnBatches:
    """What the trainer asks for batches, where it has no loader."""

    num_windows = 0  # per epoch: not known

    def __init__(self, given: Batches, config: TrainConfig, seq_len: int, vocab_size: int, device: torch.device):
        self.config, self.seq_len, self.vocab_size, self.device = config, seq_len, vocab_size, device
        self.batch_size = config.batch_size * config.grad_accum
        self._given, self._passes = given, 0
        self._iterator: Iterator[Any] = iter(())
        self._taken = self._last_epoch = 0  # of an iterable: batches, and those of the pass before
        self._cached: dict[int, Batch] = {}  # by step: the newest two

    def epoch_of(self, sample: int) -> int:
        """Of an iterable, the passes before the current one."""
        return max(0, self._passes - 1)

    def at(self, step: int) -> tuple[Tensor, ...]:
        return tuple(x.to(self.device) for x in self._host(step))

    def fingerprint(self, step: int) -> str:
        found = hashlib.sha256()
        for x in self._host(step):
            found.update(repr(tuple(x.shape)).encode())
            found.update(x.contiguous().cpu().numpy().data)
        return found.hexdigest()

    def check_first(self) -> None:
        """That a function of the step is one."""
        first = self.fingerprint(0)
        if callable(self._given):
            self._cached = {}
            if self.fingerprint(0) != first:
                raise InputError(
                    "batches(0) gave two different batches in two calls, so no resume could be exact; draw from the step: "
                    "torch.Generator().manual_seed(step)"
                )

    def _host(self, step: int) -> Batch:
        if step not in self._cached:
            before = {n: batch for n, batch in self._cached.items() if n == step - 1}
            self._cached = before | {step: self._checked(self._ask(step), step)}
        return self._cached[step]

    def _ask(self, step: int) -> Any:
        if callable(self._given):
            return self._given(step)
        item: Any = END
        while self._taken <= step:
            item = next(self._iterator, END)
            if item is END:
                self._next_pass(step)
            else:
                self._taken += 1
        if item is END:
            raise InputError(f"batches is an iterable and past step {step + 1} already; pass a new one")
        return item

    def _next_pass(self, step: int) -> None:
        again = iter(self._given)  # type: ignore[arg-type]  # an iterable, since it is no function
        if self._passes and (again is self._iterator or self._taken == self._last_epoch):
            raise InputError(
                f"batches ended after {self._taken}, and step {step + 1} needs another: pass what can be iterated again, "
                "such as a list, or a smaller max_steps"
            )
        self._iterator, self._last_epoch = again, self._taken
        self._passes += 1

    def _checked(self, item: Any, step: int) -> Batch:
        """Within the shape that the configuration states, for which memory was checked, and with ids of the vocabulary: the
        model would find others in the middle of a step."""
        names = ("tokens", "targets", "documents")[: 2 + self.config.document_attention]
        expected = f"batches: step {step + 1}: expected ({', '.join(names)}), int64 tensors of one shape (rows, tokens)"
        if not isinstance(item, tuple | list) or len(item) != len(names):
            raise InputError(f"{expected}, got {type(item).__name__}{f' of {len(item)}' if hasattr(item, '__len__') else ''}")
        try:
            batch = tuple(torch.as_tensor(x) for x in item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{expected}, got what torch.as_tensor refuses: {error}") from None
        if any(x.dtype != torch.int64 or x.dim() != 2 or x.shape != batch[0].shape for x in batch):
            raise InputError(f"{expected}, got {', '.join(f'{str(x.dtype)[6:]} {tuple(x.shape)}' for x in batch)}")
        rows, T = batch[0].shape
        if not (0 < rows <= self.batch_size and 0 < T <= self.seq_len):
            raise InputError(
                f"batches: step {step + 1} has {rows} rows of {T} tokens; expected at most {self.batch_size} of "
                f"{self.seq_len}, for which memory was checked: set batch_size and seq_len"
            )
        if rows % self.config.num_micro_batches:
            raise InputError(
                f"batches: step {step + 1} has {rows} rows, which are not {self.config.num_micro_batches} equal micro-batches "
                "(micro_batches, or grad_accum)"
            )
        try:
            check_tokens(batch[0], self.vocab_size, batch[0].device)
            check_targets(batch[1], batch[0], self.vocab_size)
        except InputError as error:
            raise InputError(f"batches: step {step + 1}: {error}") from None
        return batch


class OwnSchedule:
    def __init__(self, given: Schedule):
        self._given = given
        self._cached: tuple[int, float] | None = None

    def __call__(self, step: int) -> float:
        if self._cached is None or self._cached[0] != step:
            rate: Any = self._given(step)
            if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= float(rate) < math.inf:
                raise ConfigError(f"lr_schedule({step}) is {rate!r}; expected a finite number of 0 or more")
            self._cached = step, float(rate)
        return self._cached[1]
