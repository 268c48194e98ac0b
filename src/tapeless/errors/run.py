"""Errors of run directories, checkpoints, disk and memory.

Tested by: tests/test_catalogue.py."""

from tapeless.errors.base import Known, TapelessError
from tapeless.errors.config import ConfigError


class CheckpointError(TapelessError):
    """A checkpoint that cannot be written or gone on from."""

    code = "CHECKPOINT"
    exit_status = 2
    fix = "choose another of the run's checkpoints"


class DamagedError(CheckpointError):
    """A checkpoint whose files are not the ones that were written."""

    code = "DAMAGED"
    fix = "without `--no-fallback` the checkpoint before it is used"


class LockedError(TapelessError):
    """A run directory that another live process writes to."""

    code = "LOCKED"
    exit_status = 2
    fix = "wait for that process, or stop it"


class DiskError(TapelessError, OSError):
    """A disk that cannot take what a run writes."""

    code = "DISK"
    exit_status = 2
    fix = "free some space, or choose an `--out-dir` on another disk"


class WriteError(DiskError):
    """A file that the disk did not take: it is full, failing or read-only. What was there before stays."""

    code = "WRITE"
    exit_status = 1
    fix = "make room, or look at the disk; then `tapeless train resume RUN` goes on from the last checkpoint"


class TooLargeError(TapelessError, MemoryError):
    """A run that needs more memory than is free, known before it begins."""

    code = "MEMORY"
    exit_status = 2
    fix = "make the batch or the model smaller; `tapeless estimate` shows what takes the memory"


RUN_NOT_EMPTY = Known(
    "RUN_NOT_EMPTY",
    ConfigError,
    "out_dir {path} is not empty, it holds {holds}",
    "an `--out-dir` that something is in already; a new run never writes over anything",
    "choose another, or go on with that run: tapeless train resume {path}",
)
NOT_A_RUN = Known(
    "NOT_A_RUN",
    ConfigError,
    "{path} is not the directory of a run: expected config.toml in it",
    "a path with nothing there to resume, or the parent of a run",
    "give a directory that `tapeless train new` made, such as runs/tiny",
)
RUN_LOCKED = Known(
    "RUN_LOCKED",
    LockedError,
    "{path} is in use by {holder}",
    "two processes may not write to one run",
    "wait for it, or stop it first",
)
CHANGED = Known(
    "CHANGED",
    ConfigError,
    "the run cannot go on with another configuration: {changes}",
    "architecture, tokenizer or data are not those the run was begun with, or the schedule changed without an override",
    "restore what is fixed, name the rest by --override, or begin a new run",
)
NEWER_FORMAT = Known(
    "NEWER_FORMAT",
    CheckpointError,
    "{path} has format version {version}, this tapeless reads up to {known}; it was written by a newer one",
    "a checkpoint of a later tapeless, whose fields this one cannot know",
    "upgrade tapeless",
)
DISK_FULL = Known(
    "DISK_FULL",
    DiskError,
    "{path}: not enough room on the disk: {detail}",
    "less room than the run's tokens and checkpoints will take; said before the first step, not after hours",
    "free some space, choose an --out-dir on another disk, or keep fewer checkpoints (--keep-last)",
)
TOO_LARGE = Known(
    "TOO_LARGE",
    TooLargeError,
    "the {phase} needs {need} of memory, {room} are free on {device}{parts}",
    "a model or batch for a larger machine, or memory that others hold; said before anything is made, not by a kill on the way",
    "{fits}; --skip-resource-check begins nevertheless",
)
NOT_MEASURABLE = Known(
    "NOT_MEASURABLE",
    TooLargeError,
    "to measure the time of this run takes {need} of memory, even with {rows} and few layers, and {room} are free",
    "`tapeless estimate` times real steps, and even the smallest that tell anything are too large here",
    "--no-calibrate estimates everything else",
)
