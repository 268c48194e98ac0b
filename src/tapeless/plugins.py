"""Extensions defined outside the package: loading their file, and recording which file a model needs.

A plugin is a Python file that registers something: a kind of sublayer (model/sublayer.py), an optimizer, a reporter or a
reader of files (config/registry.py). It runs only when the user names it, by an import or by --plugin FILE; a run records the
name and hash of the files that define its own, and nothing inside a run directory is ever executed. Readers are not recorded:
a run has its own copy of the tokens.
Tested by: tests/test_plugins.py."""

import hashlib
import importlib.util
import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tapeless.config import ROLES, AnyModelConfig, ModelConfig, TrainConfig, training_names
from tapeless.errors import ConfigError
from tapeless.model import sublayer as registry
from tapeless.model.block import sublayer_class  # which registers the built-in kinds

LOADED: dict[str, str] = {}  # path of a file -> its module


def load_plugin(path: str | Path) -> None:
    """Run a Python file that registers sublayers, optimizers, reporters or families; at most once in a process."""
    file = Path(path).resolve()
    name = f"tapeless_plugin_{file.stem}_{len(LOADED)}"
    if str(file) in LOADED:
        return
    if not file.is_file():
        raise ConfigError(f"plugin {path}: no such file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugin {path}: not a Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name], kinds = module, dict(registry._KINDS)
    entries = {role: dict(known._entries) for role, known in ROLES.items()}
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        registry._KINDS = kinds  # nothing of it stays, so that it can be repaired and loaded
        for role, known in ROLES.items():
            known._entries = entries[role]
        raise (
            error if isinstance(error, ConfigError) else ConfigError(f"plugin {path}: {type(error).__name__}: {error}")
        ) from error
    LOADED[str(file)] = name


def required_plugins(model: AnyModelConfig, train: TrainConfig) -> dict[str, str]:
    """What a run uses and the package does not define -> "FILE sha256:HASH" of the file that does: kinds of sublayers, and
    training_names()."""
    kinds = {kind for layer in model.block_pattern for kind, _ in layer} if isinstance(model, ModelConfig) else set()
    found = {}
    for name in sorted(kinds | training_names(train.optimizer, train.report_to)):
        definition = _definition(name)
        if not definition.__module__.startswith("tapeless."):
            file = registry.source_file(definition)
            source = file.read_bytes() if file else b""
            found[name] = f"{file.name if file else definition.__module__} sha256:{hashlib.sha256(source).hexdigest()}"
    return found


def _definition(name: str) -> Any:
    """The class behind a name; ConfigError or KeyError if there is none."""
    role, _, registered = name.partition("-")
    return ROLES[role][registered] if registered else sublayer_class(name)


def require_plugins(recorded: Mapping[str, str], run: Path, training: Collection[str] = ()) -> None:
    """Raise if a plugin that a run recorded is not loaded. training: the training_names() that are needed as well; a model
    without its training needs none."""
    for name, file in recorded.items():
        role, _, registered = name.partition("-")
        if registered and name not in training:
            continue
        try:
            _definition(name)
        except (ConfigError, KeyError):
            what = f"{role} {registered!r}" if registered else f"sublayer {name!r}"
            path, _, digest = file.rpartition(" ")
            raise ConfigError(
                f"{run} needs the plugin {path}, which defines the {what} and is not loaded; pass --plugin FILE, "
                f"or import it before; its {digest}"
            ) from None


def plugin_flags(recorded: Mapping[str, str], *, training: bool) -> str:
    """For a command that loads a run, or resumes its training: ` --plugin FILE` for each file that it needs. A run records only
    their names; of those loaded here the path is known."""
    files = dict.fromkeys(file.rpartition(" ")[0] for name, file in recorded.items() if training or "-" not in name)
    here = Path.cwd()
    loaded = (Path(path) for path in LOADED)
    paths = {path.name: path.relative_to(here) if path.is_relative_to(here) else path for path in loaded}
    return "".join(f" --plugin {shlex.quote(str(paths.get(file, file)))}" for file in files)


def changed_plugins(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names whose file differs from the one that a run recorded; now: required_plugins() of what is used."""
    return [name for name in recorded if name in now and now[name].rpartition(" ")[2] != recorded[name].rpartition(" ")[2]]
