"""The errors a user can meet: one catalogue of codes, messages, causes and fixes, and the classes they are raised as.

A message says what, where, expected and got, and how to fix it, in one line. A class is a kind of error, with a code of its own
and the exit status that the command line ends with; a `Known` error is one of a kind that has a code, a cause and a fix of
its own: `raise EMPTY_DATA(path=path)`. docs/errors.md is generated from this file.
Tested by: tests/test_catalogue.py."""

from dataclasses import dataclass
from typing import Any, Self


class TapelessError(Exception):
    """A failure while running."""

    code = "FAILED"
    exit_status = 1
    fix = "the message says what was expected"

    def at(self, where: object) -> Self:
        """The same error, with the place it was met at in front of its message."""
        placed = type(self)(f"{where}: {self}")
        placed.code = self.code
        return placed


class UsageError(TapelessError):
    """A command line that cannot be understood."""

    code = "USAGE"
    exit_status = 2
    fix = "add `--help` to the command to see what it takes"


class ConfigError(TapelessError, ValueError):
    """A configuration that no model or run can be built from."""

    code = "CONFIG"
    exit_status = 2
    fix = "change the field that the message names, by its flag, by `--set`, or in the file"


class InputError(TapelessError, ValueError):
    """Tokens, targets or tensors that do not fit the model."""

    code = "INPUT"
    exit_status = 2
    fix = "hand in what the message expects"


class OrderError(TapelessError, RuntimeError):
    """Calls in an order that has no meaning, such as backward before forward."""

    code = "ORDER"
    exit_status = 2
    fix = "call in the order that the message says"


class NonFiniteError(TapelessError, ArithmeticError):
    """NaN or infinity where only numbers may be: a loss, a gradient or a weight. Nothing was updated."""

    code = "NONFINITE"
    exit_status = 4
    fix = "resume from the last good checkpoint, with a smaller lr; the dump in the run's directory names the first bad tensor"


class InvariantError(TapelessError, ArithmeticError):
    """An identity that holds for every right gradient does not hold for this model's (`--check-invariants-every`)."""

    code = "IDENTITY"
    exit_status = 3
    fix = "run `tapeless gradcheck` on the model; try `--ops reference`, and test the memory of the machine"


class GradientError(TapelessError, ArithmeticError):
    """The gradients of this model are wrong on its first batch. Nothing was trained."""

    code = "GRADIENTS"
    exit_status = 3
    fix = "run `tapeless gradcheck` on the model; try `--ops reference`"


class MissingError(TapelessError, ImportError):
    """An optional package or kernel set was asked for by name and is not there."""

    code = "MISSING"
    exit_status = 2
    fix = "install the package, or choose what needs none"


class DataError(TapelessError, ValueError):
    """Text, token files or tokenizers that cannot be trained on."""

    code = "DATA"
    exit_status = 2
    fix = "mend the file at the place that the message names"


class CheckpointError(TapelessError):
    """A checkpoint that cannot be written or gone on from."""

    code = "CHECKPOINT"
    exit_status = 2
    fix = "choose another of the run's checkpoints"


class DamagedError(CheckpointError):
    """A checkpoint whose files are not the ones that were written."""

    code = "DAMAGED"
    fix = "without `--no-fallback` the checkpoint before it is used"


class WorkerError(TapelessError):
    """A contender of the benchmark that cannot be measured, with the reason."""

    code = "BENCH"
    fix = "leave it out, or install what the message names"


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


class TooLargeError(TapelessError, MemoryError):
    """A run that needs more memory than is free, known before it begins."""

    code = "MEMORY"
    exit_status = 2
    fix = "make the batch or the model smaller; `tapeless estimate` shows what takes the memory"


class WriteError(DiskError):
    """A file that the disk did not take: it is full, failing or read-only. What was there before stays."""

    code = "WRITE"
    exit_status = 1
    fix = "make room, or look at the disk; then `tapeless train resume RUN` goes on from the last checkpoint"


class UntrustedFileError(TapelessError, ValueError):
    """A file of another make that is broken, would lead outside of its directory, or holds what no model does."""

    code = "FOREIGN"
    exit_status = 2
    fix = "get the directory again from where it came, or have transformers write it anew by save_pretrained"


@dataclass(frozen=True)
class Known:
    """One error with everything there is to say of it. `message` and `fix` name facts in braces, given when it is raised."""

    code: str
    kind: type[TapelessError]
    message: str
    cause: str
    fix: str

    def __call__(self, **facts: Any) -> TapelessError:
        error = self.kind(f"{self.message}; {self.fix}".format(**facts))
        error.code = self.code
        return error


UNKNOWN_FLAG = Known(
    "UNKNOWN_FLAG",
    UsageError,
    "unknown flag {flag}",
    "a flag that the command does not have; nothing is ignored, and nothing abbreviated",
    "{nearest} (see {program} --help)",
)
WRONG_TYPE = Known(
    "WRONG_TYPE",
    ConfigError,
    "{name} must be {expected}, got {got!r}",
    "a value of another type than the field's, such as text where a number is meant",
    "give {name} a value of that type",
)
UNKNOWN_KEY = Known(
    "UNKNOWN_KEY",
    ConfigError,
    "unknown key {key}",
    "a key in a file, in `--set` or in `--override` that no field has",
    "{nearest}",
)
OUT_OF_RANGE = Known(
    "OUT_OF_RANGE",
    ConfigError,
    "{name} must be {expected}, got {got}",
    "a number outside of what makes sense, such as an lr that is NaN, negative or 0",
    "give {name} a value in that range",
)
INDIVISIBLE = Known(
    "INDIVISIBLE",
    ConfigError,
    "{name} {value} is not divisible by {by} {divisor}",
    "sizes that do not go into each other: heads are equal parts of the width, and key heads serve equally many query heads",
    "{fix}",
)
WARMUP_TOO_LONG = Known(
    "WARMUP_TOO_LONG",
    ConfigError,
    "warmup_steps {warmup} is beyond {total}",
    "an explicit warm-up that would not be over when the run is; the default one always is",
    "give --warmup-steps {most} or less, or more steps",
)
NO_SUCH_PATH = Known(
    "NO_SUCH_PATH",
    DataError,
    "{path}: no such file or folder (looked in {folder})",
    "a `--dataset-path` that leads nowhere",
    "check the spelling, or give the whole path",
)
NO_FILES = Known(
    "NO_FILES",
    DataError,
    "{path}: {what}",
    "a folder or pattern in which there is no file with a suffix of text",
    "{fix}",
)
UNREADABLE = Known(
    "UNREADABLE",
    DataError,
    "{path}: cannot be read: {reason}",
    "a file that the operating system does not let this user read, or that a disk fails to deliver",
    "look at its owner and permissions",
)
EMPTY_DATA = Known(
    "EMPTY_DATA",
    DataError,
    "{path} is empty: there is nothing to train on",
    "a file of 0 bytes, or only such files",
    "give a file with text",
)
ONLY_WHITESPACE = Known(
    "ONLY_WHITESPACE",
    DataError,
    "{path} holds only whitespace: there is nothing to train on",
    "spaces and line ends, and nothing else",
    "give a file with text",
)
TOO_FEW_TOKENS = Known(
    "TOO_FEW_TOKENS",
    DataError,
    "the {part} part has {count} tokens, but one window of seq_len {seq_len} needs {needed}",
    "less text than one training window, or a held-out tenth that is shorter than one",
    "give more text or set --seq-len to {most} or less",
)
NOT_UTF8 = Known(
    "NOT_UTF8",
    DataError,
    "{path}: byte 0x{byte:02x} at offset {offset} is not UTF-8 ({reason})",
    "text in another encoding, or a damaged file; guessing would train a model on mojibake",
    "convert it, for example: iconv -f LATIN1 -t UTF-8",
)
OTHER_ENCODING = Known(
    "OTHER_ENCODING",
    DataError,
    "{path}: is {encoding}, expected UTF-8",
    "a byte order mark of UTF-16 or UTF-32, which some editors write",
    "convert it: iconv -f {encoding} -t UTF-8",
)
BINARY_FILE = Known(
    "BINARY_FILE",
    DataError,
    "{path}: byte {offset} is NUL, so this is a binary file",
    "an image, an archive, a program or weights where text is meant",
    "give UTF-8 text",
)
PICKLE = Known(
    "PICKLE",
    DataError,
    "{path}: is a pickle, which can run any code when it is read",
    "a file of `torch.save` or `pickle.dump`; nothing here ever unpickles",
    "give {expected}",
)
NOT_JSON = Known(
    "NOT_JSON",
    DataError,
    "{path}:{line}: not JSON: {reason}",
    "a line of a `.jsonl` file that is not one JSON value",
    "mend or remove the line",
)
NO_TEXT_FIELD = Known(
    "NO_TEXT_FIELD",
    DataError,
    "{path}:{line}: no field `{field}`, got {got}",
    "a line of a `.jsonl` file whose text has another name, or none",
    "name the field with --text-field, or remove the line",
)
BAD_RECORD = Known(
    "BAD_RECORD",
    DataError,
    "{path}:{line}: expected an object with a string `{field}`, got {got}",
    "a line of a `.jsonl` file or a row of a table whose `text`, or whatever `--text-field` names, is no text",
    "mend or remove it, or name another with --text-field",
)
NO_COLUMN = Known(
    "NO_COLUMN",
    DataError,
    "{path}: no column `{field}`, got {got}",
    "a Parquet file or a dataset whose text has another name, or none",
    "name the column with --text-field",
)
NOT_WHOLE = Known(
    "NOT_WHOLE",
    DataError,
    "{path}: not a whole {form} file: {reason}",
    "a table, a `.gz` or a `.zst` file that was cut short, or that only has the name of one",
    "get the file again",
)
BAD_TOKEN_FILE = Known(
    "BAD_TOKEN_FILE",
    DataError,
    "{path}: {got}, expected {expected}",
    "a token file of a kind or version that is not read here, or one that was cut short",
    "get the file again; those of tapeless, of llm.c (magic 20240520, version 1) and of nanoGPT (plain uint16) are read",
)
NO_TOKENIZER = Known(
    "NO_TOKENIZER",
    DataError,
    "{path}: token files say nothing of their tokenizer{pickle}",
    "token files of nanoGPT or llm.c, and no `--tokenizer`; guessing one would show wrong text and wrong bits per byte",
    "give --tokenizer FILE; `tapeless tokenizer train TEXT --kind char --out FILE` makes the one of nanoGPT's characters",
)
BEYOND_VOCABULARY = Known(
    "BEYOND_VOCABULARY",
    DataError,
    "{path}: token {index} is {token}, outside of the vocabulary of {vocab_size}",
    "a token file that was altered, or made by another tokenizer; an id is never clamped",
    "tokenize with the tokenizer that belongs to it",
)
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

KINDS: list[type[TapelessError]] = [
    kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, TapelessError)
]
CATALOGUE: list[Known] = [known for known in list(globals().values()) if isinstance(known, Known)]
