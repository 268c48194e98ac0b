"""Extensions defined outside the package: loading their file, and recording which file a model needs.

A plugin is a Python file that registers something, such as a kind of sublayer (model/sublayer.py). It runs only when the user
names it, by an import or by --plugin FILE; a run records the name and hash of the files that define its sublayers, and nothing
inside a run directory is ever executed.
Tested by: tests/test_plugins.py."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path

from tapeless.config import AnyModelConfig, ModelConfig
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
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        registry._KINDS = kinds  # nothing of it stays, so that it can be repaired and loaded
        raise (
            error if isinstance(error, ConfigError) else ConfigError(f"plugin {path}: {type(error).__name__}: {error}")
        ) from error
    LOADED[str(file)] = name


def required_plugins(config: AnyModelConfig) -> dict[str, str]:
    """Kind of sublayer -> "FILE sha256:HASH" of the file that defines it, for every kind that is not built in."""
    if not isinstance(config, ModelConfig):
        return {}
    found = {}
    for kind in sorted({kind for layer in config.block_pattern for kind, _ in layer}):
        cls = sublayer_class(kind)
        if not cls.__module__.startswith("tapeless.model."):
            file = inspect.getsourcefile(cls)
            source = Path(file).read_bytes() if file and Path(file).is_file() else b""
            found[kind] = f"{Path(file or cls.__module__).name} sha256:{hashlib.sha256(source).hexdigest()}"
    return found


def require_plugins(recorded: Mapping[str, str], run: Path) -> None:
    """Raise if a plugin that a run recorded is not loaded."""
    for kind, file in recorded.items():
        try:
            sublayer_class(kind)
        except ConfigError:
            name, _, digest = file.rpartition(" ")
            raise ConfigError(
                f"{run} needs the plugin {name}, which defines the sublayer {kind!r} and is not loaded; pass --plugin FILE, "
                f"or import it before; its {digest}"
            ) from None


def changed_plugins(config: AnyModelConfig, recorded: Mapping[str, str], run: Path) -> list[str]:
    """Warnings about plugins whose file differs from the one that a run was trained with."""
    now = required_plugins(config)
    return [
        f"{run} was trained with another version of its plugin: {file} then, {now[kind]} now; results may differ"
        for kind, file in recorded.items()
        if kind in now and now[kind].rpartition(" ")[2] != file.rpartition(" ")[2]
    ]
