"""The configuration of a run: config.toml, read again by resume and compared.

    [model] or [simplelm]   every field, resolved; a field that is None is absent
    [train]                 likewise
    [plugins]               the files that define sublayers, optimizer or reporters outside the package, if there are any
    [data]                  fingerprints of the data and of the tokenizer
Its second line is the hash of the rest, so that an edit by hand is noticed; the checkpoints know the values (seal.py).
What a resume may change, in three classes: frozen fields never (weights and data position would lose their meaning); schedule
fields, which change the coming steps, only by an explicit override; free fields at will.
Tested by: tests/train/test_run_config.py."""

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tapeless.config import FUNCTION, KINDS, ROLES, AnyModelConfig, TrainConfig, checked
from tapeless.data.files import atomic_write
from tapeless.errors import CHANGED, ConfigError
from tapeless.regular import regular

# Free fields of [train]; all that are neither free nor frozen are the schedule. Path and corpus are free because the content of
# [data] is frozen: a file may move if its content is the same.
FROZEN = {"tokenizer", "freeze", "lora_rank", "lora_alpha", "lora_targets"}
FREE = {"dataset_path", "val_path", "text_field", "corpus", "max_time", "threads", "deterministic", "out_dir", "report_to"}
FREE |= {"eval_every", "save_every", "keep_last", "keep_every", "log_every", "layer_stats_every", "check_invariants_every"}
FREE |= {"sample_every", "sample_tokens", "sample_prompt", "sample_temperature", "verify"}
# (table, field): where files lay when the run began. What counts is their content, of which [data] has the hashes; the last one
# is of a record that names such a path.
PATHS = {("train", "tokenizer"), ("train", "init_from"), ("data", "base_checkpoint"), ("data", "data_sha256")}
SEALED = "# sha256 of the lines below: "


@dataclass(frozen=True)
class RunConfig:
    model: AnyModelConfig
    train: TrainConfig
    # By name: fingerprints (tokenizer_hash, dataset_fingerprint), the base of adapters (base.py), and `batches` if FUNCTION.
    data: Mapping[str, str]
    plugins: Mapping[str, str] = field(default_factory=dict)  # name -> the file that defines it, with its hash (plugins.py)

    @property
    def imported(self) -> bool:
        """Imported: it has a tokenizer, but no training data."""
        return "dataset_fingerprint" not in self.data

    @property
    def functions(self) -> list[str]:
        """The arguments of tapeless.resume that hold the caller's functions, and that a resume needs."""
        own = {"batches": self.data.get("batches"), "lr_schedule": self.train.lr_schedule}
        return [name for name, value in own.items() if value == FUNCTION]

    def tables(self) -> dict[str, dict[str, Any]]:
        kind = next(kind for kind, cls in KINDS.items() if type(self.model) is cls)
        plugins = {"plugins": dict(self.plugins)} if self.plugins else {}
        return {kind: asdict(self.model), "train": asdict(self.train), "data": dict(self.data), **plugins}


class Change(NamedTuple):
    table: str
    name: str
    old: Any
    new: Any
    kind: str  # frozen | schedule | free


def write_run_config(path: Path, config: RunConfig) -> None:
    body = toml(config.tables()).encode()
    head = f"# Written by tapeless; read again by `tapeless train resume`.\n{SEALED}{hashlib.sha256(body).hexdigest()}\n"
    with atomic_write(path) as file:
        file.write(head.encode() + body)


def is_edited(path: Path) -> bool | None:
    """Whether a config.toml was changed after it was written; None if it does not have the hash that tells, as older ones."""
    head, found, rest = path.read_bytes().partition(SEALED.encode())
    digest, _, body = rest.partition(b"\n")
    if not found:
        return None
    return head.count(b"\n") != 1 or digest.decode(errors="replace") != hashlib.sha256(body).hexdigest()


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for table, values in tables.items():
        lines += ["", f"[{table}]"]
        lines += [f"{name} = {_toml(name, value)}" for name, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def read_run_config(path: Path) -> RunConfig:
    try:
        tables = tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; is {path.parent} the directory of a run?") from None
    except (OSError, ValueError, RecursionError) as error:  # of TOML, of UTF-8, of an integer of thousands of digits
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    kinds = [kind for kind in KINDS if kind in tables]
    whole = len(kinds) == 1 and set(tables) - {"plugins"} == {*kinds, "train", "data"}
    if not whole or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{path}: expected [model] or [simplelm], [train] and [data], got {', '.join(map(repr, tables))}")
    model, plugins = checked(kinds[0], tables[kinds[0]], str(path)), tables.get("plugins", {})
    return RunConfig(model, train_config(tables["train"], plugins, str(path)), tables["data"], plugins)


def train_config(values: dict[str, Any], plugins: Mapping[str, str], where: str) -> TrainConfig:
    """[train]. An optimizer or reporter of a plugin that is not loaded stays unchecked: only a resume needs it, and requires
    it (require_plugins)."""
    unchecked = {}
    for key, role in (("optimizer", "optimizer"), ("report_to", "reporter")):
        names = str(values.get(key)).split(",")
        if any(f"{role}-{name}" in plugins and name not in ROLES[role] for name in names):
            unchecked[key] = values[key]
    train = checked("train", {key: value for key, value in values.items() if key not in unchecked}, where)
    for key, value in unchecked.items():
        object.__setattr__(train, key, value)
    return train


def check_resume(
    run: RunConfig, now: RunConfig, overrides: Collection[str] = (), trained: Mapping[str, Any] | None = None
) -> list[Change]:
    """What differs between a run and the configuration to resume with; an error if it may not change.

    overrides: the names given as --override name=value, whose values are already in `now`. trained: values by `table.field`
    that the run was trained with, if its config.toml has others."""
    changes = _changes(run, now, trained or {})
    refused = [c for c in changes if c.kind == "frozen" or (c.kind == "schedule" and c.name not in overrides)]
    if refused:
        hints = {"frozen": "fixed for the run", "free": "may change"}
        lines = [
            f"{c.table}.{c.name}: {c.old!r} in the run, {c.new!r} now "
            f"({hints.get(c.kind, f'needs --override {c.name}={c.new}')})"
            for c in [*refused, *(c for c in changes if c not in refused)]
        ]
        raise CHANGED(changes="; ".join(lines))
    return changes


def _changes(run: RunConfig, now: RunConfig, trained: Mapping[str, Any]) -> list[Change]:
    old = {(table, name): value for table, values in run.tables().items() for name, value in values.items()}
    old |= {(table, name): value for key, value in trained.items() for table, _, name in [key.partition(".")]}
    new = {(table, name): value for table, values in now.tables().items() for name, value in values.items()}
    return [
        Change(table, name, old.get((table, name)), new.get((table, name)), _kind(table, name))
        for table, name in {**old, **new}
        if old.get((table, name)) != new.get((table, name))
    ]


def _kind(table: str, name: str) -> str:
    if table != "train" or name in FROZEN:
        return "frozen"
    return "free" if name in FREE else "schedule"


def _toml(name: str, value: bool | int | float | str) -> str:
    """A value in TOML; Python's repr of a float reads back to the same bits."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # allowed in JSON, not in TOML
    return repr(value)
