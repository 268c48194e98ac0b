"""Settings that belong to the whole process: the device, the number of CPU threads, deterministic algorithms.

Training applies them for its own duration and restores what was set before. A loaded model applies its number of threads
around each of its calls.
Tested by: tests/train/test_process_settings.py."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from threading import Lock
from typing import Any

import torch

from tapeless.config import TrainConfig
from tapeless.errors import ConfigError
from tapeless.kernels.determinism import enable_determinism
from tapeless.model.build import AnyModel


def usable_device(name: str) -> str:
    """The device, if torch can compute on it."""
    try:
        if torch.empty(0, device=name).is_meta:
            raise NotImplementedError("its tensors have no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a bad name, a build without it, no driver
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used here: {reason}; --device cpu always can") from None
    return name


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """torch (and with it the CPU kernels) uses `count` threads inside the block; None changes nothing."""
    cores, before = os.cpu_count() or 1, torch.get_num_threads()
    if count is not None and count > cores:
        raise ConfigError(f"threads = {count}, but this machine has {cores}; use threads = {cores} or fewer")
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Determinism:
    """Deterministic algorithms while at least one user needs them: trainings in several threads end in any order."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = Lock(), 0, (False, True)

    def __enter__(self) -> None:
        settings: Any = torch.utils.deterministic
        with self._lock:
            if not self._users:
                self._before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
                enable_determinism()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        settings: Any = torch.utils.deterministic
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.use_deterministic_algorithms(self._before[0])
                settings.fill_uninitialized_memory = self._before[1]


_determinism = _Determinism()


@contextmanager
def process_settings(train: TrainConfig) -> Iterator[None]:
    """Threads and determinism as a configuration asks for; restored at the end."""
    with num_threads(train.threads), _determinism if train.repeatable else nullcontext():
        yield


def limit_threads(model: AnyModel, count: int | None) -> None:
    """Every public method of this model runs with `count` threads and restores the previous number; None changes nothing."""
    if count is None:
        return
    with num_threads(count):
        pass  # raises if the machine has fewer

    def limited(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            with num_threads(count):
                return method(*args, **options)

        return call

    for name, _ in inspect.getmembers(type(model), inspect.isfunction):
        if not name.startswith("_"):
            setattr(model, name, limited(getattr(model, name)))
