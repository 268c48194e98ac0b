"""Whether a run fits into the memory and onto the disk that are free now, and what would.

Tested by: tests/estimate/test_fit.py."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from tapeless.config import AnyModelConfig, ModelConfig, TrainConfig
from tapeless.config.hardware import GIB
from tapeless.errors import DISK_FULL, TOO_LARGE, TapelessError
from tapeless.estimate.disk import Disk
from tapeless.estimate.memory import Memory, memory_of, room_of
from tapeless.estimate.target import Target
from tapeless.model.build import num_params
from tapeless.model.params import DTYPES
from tapeless.model.sublayer import RECOMPUTE
from tapeless.training.resources import free_disk

NARROW = "bfloat16"
MOST = 2**16  # rows that are tried
Fields = dict[str, Any]  # of TrainConfig, with their new values


class Change(NamedTuple):
    """A change of the configuration under which the run would fit."""

    flags: str
    peak: int  # bytes


def resource_errors(
    config: AnyModelConfig,
    train: TrainConfig,
    memory: Memory,
    disk: Disk,
    out_dir: Path,
    target: Target | None = None,
    *,
    ranks: int = 1,
) -> list[TapelessError]:
    """Why the run cannot start here and now, or on another machine, whose disk is not known; empty if it can. ranks: that share
    the memory, each with a buffer for gradients of the others."""
    found: list[TapelessError] = []
    received = DTYPES[train.dtype][0].itemsize * num_params(config) if ranks > 1 else 0
    room = (room_of(train, target) - received) // ranks
    if memory.peak > room:
        found.append(too_large(memory, room, changes_that_fit(config, train, room, target)))
    if target is None and disk.most > (free := free_disk(out_dir)):
        found.append(disk_full(disk, free, out_dir))
    return found


def largest_batch(config: AnyModelConfig, train: TrainConfig, room: int, target: Target | None = None) -> int:
    """The most rows of a micro-batch that fit; 0 if not even one does."""

    def fits(rows: int) -> bool:
        return memory_of(config, replace(train, batch_size=rows), target).peak <= room

    good, bad = 0, 1
    while bad <= MOST and fits(bad):
        good, bad = bad, 2 * bad
    while good and bad <= MOST and bad - good > 1:
        rows = (good + bad) // 2
        good, bad = (rows, bad) if fits(rows) else (good, rows)
    return good


def changes_that_fit(config: AnyModelConfig, train: TrainConfig, room: int, target: Target | None = None) -> list[Change]:
    """The least change of each kind alone; if none of them is enough, the least of all together."""

    def first(candidates: Iterable[Fields]) -> list[Change]:
        for fields in candidates:
            peak = memory_of(config, replace(train, **fields), target).peak
            if peak <= room:
                return [Change(_flags(fields), peak)]
        return []

    policies = RECOMPUTE[RECOMPUTE.index(train.recompute) + 1 :] if isinstance(config, ModelConfig) else ()
    recompute: list[Fields] = [{"recompute": policy} for policy in policies]
    dtype: list[Fields] = [{"dtype": NARROW}] if train.dtype == "float32" else []
    verify: list[Fields] = [{"verify": False}] if train.verify else []
    batches = list(_smaller_batches(train))
    alone = [change for kind in (recompute, batches, dtype, verify) for change in first(kind)]
    return alone or first(_together([recompute, dtype, verify], batches))


def _smaller_batches(train: TrainConfig) -> Iterator[Fields]:
    """The same step in more micro-batches."""
    small = [k for k in range(1, isqrt(train.batch_size) + 1) if train.batch_size % k == 0]
    for rows in sorted({*small, *(train.batch_size // k for k in small)} - {train.batch_size}, reverse=True):
        yield {"batch_size": rows, "grad_accum": train.grad_accum * train.batch_size // rows}


def _together(kinds: Sequence[Sequence[Fields]], batches: Sequence[Fields]) -> Iterator[Fields]:
    """One kind after the other is added, each with its strongest change, and tried with every smaller batch: that costs the
    least time."""
    base: Fields = {}
    for strongest in (kind[-1] for kind in kinds if kind):
        base = base | strongest
        yield from (base | rows for rows in batches)
        yield base


def _flags(fields: Fields) -> str:
    return " ".join("--no-verify" if name == "verify" else f"--{name.replace('_', '-')} {fields[name]}" for name in fields)


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
