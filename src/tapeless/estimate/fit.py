"""Whether a run fits into the memory and onto the disk that are free now, and what would.

Tested by: tests/estimate/test_fit.py."""

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import NamedTuple

from tapeless.config import AnyModelConfig, ModelConfig, TrainConfig
from tapeless.errors import DISK_FULL, TOO_LARGE, TapelessError
from tapeless.estimate.disk import Disk
from tapeless.estimate.memory import Memory, memory_of
from tapeless.model.sublayer import RECOMPUTE
from tapeless.training.resources import available_bytes, free_disk

GIB = 2**30
NARROW = "bfloat16"


class Change(NamedTuple):
    """A change of the configuration under which the run would fit."""

    flags: str
    peak: int  # bytes


def resource_errors(
    config: AnyModelConfig, train: TrainConfig, memory: Memory, disk: Disk, out_dir: Path
) -> list[TapelessError]:
    """Why the run cannot be begun here and now; empty where it can."""
    found: list[TapelessError] = []
    room = available_bytes(train.device)
    if memory.peak > room:
        found.append(too_large(memory, room, changes_that_fit(config, train, room)))
    free = free_disk(out_dir)
    if disk.most > free:
        found.append(disk_full(disk, free, out_dir))
    return found


def changes_that_fit(config: AnyModelConfig, train: TrainConfig, room: int) -> list[Change]:
    """The least change of each kind alone; where none of them is enough, the least of all together."""

    def first(candidates: Iterator[tuple[str, TrainConfig]]) -> list[Change]:
        for flags, changed in candidates:
            peak = memory_of(config, changed).peak
            if peak <= room:
                return [Change(flags, peak)]
        return []

    kinds = (recomputing(config, train), smaller_batches(train), narrower(train), unchecked(train))
    return [change for kind in kinds for change in first(kind)] or first(together(config, train))


def recomputing(config: AnyModelConfig, train: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    if isinstance(config, ModelConfig):
        for policy in RECOMPUTE[RECOMPUTE.index(train.recompute) + 1 :]:
            yield f"--recompute {policy}", replace(train, recompute=policy)


def smaller_batches(train: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """The same step in more micro-batches."""
    small = [k for k in range(1, isqrt(train.batch_size) + 1) if train.batch_size % k == 0]
    for rows in sorted({*small, *(train.batch_size // k for k in small)} - {train.batch_size}, reverse=True):
        parts = train.grad_accum * train.batch_size // rows
        yield f"--batch-size {rows} --grad-accum {parts}", replace(train, batch_size=rows, grad_accum=parts)


def narrower(train: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    if train.dtype == "float32":
        yield f"--dtype {NARROW}", replace(train, dtype=NARROW)


def unchecked(train: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    if train.verify:
        yield "--no-verify", replace(train, verify=False)


def together(config: AnyModelConfig, train: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """One kind on top of the other, each at its most; the batch, which costs the least time, by all of its steps."""
    flags, base = "", train
    for kind in (recomputing(config, train), narrower(train), unchecked(train)):
        for more, changed in [*kind][-1:]:
            word = more.split()[0].removeprefix("--no-").removeprefix("--")
            flags, base = f"{flags} {more}".strip(), replace(base, **{word: getattr(changed, word)})
            for rows, smaller in smaller_batches(base):
                yield f"{flags} {rows}", smaller
            yield flags, base


def too_large(memory: Memory, room: int, changes: list[Change]) -> TapelessError:
    phase = max(memory.phases, key=lambda name: memory.phases[name])
    largest = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    of = f": {', '.join(f'{name} {gib(size)}' for name, size in largest)} …" if phase == "training step" else ""
    fits = "; ".join(f"{change.flags} ({gib(change.peak)})" for change in changes)
    hint = f"would fit: {fits}" if fits else "no batch size, recompute policy or dtype makes it fit: choose a smaller model"
    return TOO_LARGE(phase=phase, need=gib(memory.peak), room=gib(room), device=memory.device, parts=of, fits=hint)


def disk_full(disk: Disk, free: int, out_dir: Path) -> TapelessError:
    needs = f"{disk.at_once} checkpoints of {gib(disk.checkpoint)} take {gib(disk.most)}"
    return DISK_FULL(path=out_dir, detail=f"{gib(free)} are free, {needs} (--skip-resource-check begins nevertheless)")


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size < 10 * GIB else f"{size / GIB:.1f} GiB"
