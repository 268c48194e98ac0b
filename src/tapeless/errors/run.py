"""Errors of run directories, checkpoints, disk and memory.

Tested by: tests/test_catalogue.py."""

from tapeless.errors.base import Known, TapelessError
from tapeless.errors.config import ConfigError


class CheckpointError(TapelessError):
    """A checkpoint that cannot be written or resumed from."""

    code = "CHECKPOINT"
    exit_status = 2
    fix = "choose another of the run's checkpoints"


class DamagedError(CheckpointError):
    """A checkpoint whose files have changed since they were written."""

    code = "DAMAGED"
    fix = "without `--no-fallback` the checkpoint before it is used"


class LockedError(TapelessError):
    """A run directory that another live process writes to."""

    code = "LOCKED"
    exit_status = 2
    fix = "wait for that process, or stop it"


class DiskError(TapelessError, OSError):
    """Not enough disk space for a run."""

    code = "DISK"
    exit_status = 2
    fix = "free some space, or choose an `--out-dir` on another disk"


class WriteError(DiskError):
    """A file that could not be written: the disk is full, failing or read-only. The file before it is unchanged."""

    code = "WRITE"
    exit_status = 1
    fix = "free some space or check the disk, then resume from the last checkpoint: `tapeless train resume RUN`"


class TooLargeError(TapelessError, MemoryError):
    """A run that needs more memory than is free, found before it starts."""

    code = "MEMORY"
    exit_status = 2
    fix = "make the batch or the model smaller; `tapeless estimate` shows what needs the memory"


class RanksError(TapelessError):
    """A rank that could not exchange data with the others: one of them has ended, or does not answer."""

    code = "RANKS"
    exit_status = 1
    fix = "see the error of the rank that ended first; `tapeless train resume RUN --ranks 2` continues from the last checkpoint"


RUN_NOT_EMPTY = Known(
    ConfigError,
    "out_dir {path} is not empty, it holds {holds}",
    "an `--out-dir` that is not empty; a new run never overwrites anything",
    "choose another, or resume that run: tapeless train resume {path}",
)
NOT_A_RUN = Known(
    ConfigError,
    "{path} is not the directory of a run: expected config.toml in it",
    "a path that is not a run, such as the parent of one",
    "give a directory that `tapeless train new` made, such as {such}",
)
RUN_LOCKED = Known(
    LockedError,
    "{path} is in use by {holder}",
    "two processes may not write to one run",
    "wait for it, or stop it first",
)
CHANGED = Known(
    ConfigError,
    "the run cannot resume with a different configuration: {changes}",
    "architecture, tokenizer or data differ from those of the run, or the schedule changed without an override",
    "restore what cannot change, pass the rest by --override, or start a new run",
)
EDITED = Known(
    ConfigError,
    "{where} is not what its checkpoint of step {step} was trained with: {fields}",
    "config.toml, the data or the tokenizer of a run were changed after it was trained: its weights belong to other values",
    "restore the expected values",
)
NEWER_FORMAT = Known(
    CheckpointError,
    "{path} has format version {version}, this tapeless reads up to {known}; it was written by a newer one",
    "a checkpoint of a later version of tapeless",
    "upgrade tapeless",
)
DISK_FULL = Known(
    DiskError,
    "{path}: not enough space on the disk: {detail}",
    "less free space than the run's tokens and checkpoints will need; checked before the first step",
    "free some space, choose an --out-dir on another disk, or keep fewer checkpoints (--keep-last)",
)
TOO_LARGE = Known(
    TooLargeError,
    "the {phase} needs {need} of memory, {room} are free on {device}{parts}",
    "a model or batch for a larger machine, or memory used by others; checked before the run starts",
    "{fits}; --skip-resource-check starts anyway",
)
NOT_MEASURABLE = Known(
    TooLargeError,
    "measuring the time of this run takes {need} of memory, even with {rows} and few layers, and {room} are free",
    "`tapeless estimate` times real steps, and even the smallest useful ones are too large for this machine",
    "--no-calibrate estimates everything else",
)
