"""Optimizers, reporters and file formats of text by name. A name is known without importing the module that implements it.

To add one: a file in optim/, report/ or data/ and a line below. Outside of the package: OPTIMIZERS.register("lion", Lion).
Tested by: tests/optim/test_registry.py, tests/report/test_reporters.py, tests/data/test_read.py."""

import re
from collections.abc import Collection, Iterator
from importlib import import_module
from typing import Any

from tapeless.errors import ConfigError


class Registry(Collection[str]):
    """Names, each with its implementation or with the `module:attribute` to import it from."""

    def __init__(self, entries: dict[str, Any]):
        self._entries = entries

    def register(self, name: str, entry: Any) -> None:
        if not re.fullmatch("[A-Za-z0-9_]+", name):  # report_to is a list of names, config.toml has them as keys
            raise ConfigError(f"the name {name!r} cannot be registered; expected letters, digits and _")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(import_module(module), attribute)
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


OPTIMIZERS = Registry(
    {
        "adamw": "tapeless.optim.adamw:AdamW",
        "adam": "tapeless.optim.adam:Adam",
        "sgd": "tapeless.optim.sgd:SGD",
        "muon": "tapeless.optim.muon:Muon",
    }
)
REPORTERS = Registry(
    {
        "html": "tapeless.report.reporters.html:HtmlReporter",
        "csv": "tapeless.report.reporters.csv:CsvReporter",
        "tensorboard": "tapeless.report.reporters.tensorboard:TensorBoardReporter",
        "wandb": "tapeless.report.reporters.wandb:WandbReporter",
        "trackio": "tapeless.report.reporters.trackio:TrackioReporter",
    }
)
READERS = Registry(  # by the suffix of a file: (path, field) -> the text of each document; other files are one document each
    {
        "jsonl": "tapeless.data.read:read_jsonl",
        "ndjson": "tapeless.data.read:read_jsonl",
        "parquet": "tapeless.data.columns:parquet_texts",
    }
)
ROLES = {"optimizer": OPTIMIZERS, "reporter": REPORTERS, "reader": READERS}


def training_names(optimizer: str, report_to: str) -> set[str]:
    """The optimizer and the reporters of a training as [plugins] of config.toml names them: optimizer-NAME, reporter-NAME."""
    reporters = report_to.split(",") if report_to != "none" else ()
    return {f"optimizer-{optimizer}", *(f"reporter-{name}" for name in reporters)}
