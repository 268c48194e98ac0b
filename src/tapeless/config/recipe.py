"""TOML files and presets: a table of model fields, [model] (a transformer) or [simplelm], and an optional table [train].

Tested by: tests/test_config.py."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from tapeless.config.fields import nearest
from tapeless.config.model import AnyModelConfig, ModelConfig, SimpleLMConfig
from tapeless.config.other_names import ALIASES, other_name
from tapeless.config.train import TrainConfig
from tapeless.errors import UNKNOWN_KEY, ConfigError
from tapeless.regular import regular

PRESETS = Path(__file__).parents[1] / "presets"
KINDS: dict[str, type[ModelConfig] | type[SimpleLMConfig]] = {"model": ModelConfig, "simplelm": SimpleLMConfig}
TABLES: dict[str, Any] = {**KINDS, "train": TrainConfig}


def checked(table: str, values: Mapping[str, Any], where: str = "") -> Any:
    """The configuration of one table, with unknown keys and invalid values refused. where: goes into the error."""
    valid = [f.name for f in fields(TABLES[table])]
    for key in values:
        if key not in valid:
            raise UNKNOWN_KEY(key=f"{table}.{key}", nearest=_right_name(key, valid)).at(where)
    try:
        return TABLES[table](**values)
    except ConfigError as error:
        raise error.at(where) from None


def _right_name(key: str, valid: list[str]) -> str:
    for field, names in ALIASES.items():
        if key in names and field in valid:
            return f"did you mean {field!r}?"
    return other_name(key) or nearest(key, valid)


class Recipe(NamedTuple):
    """What a preset or a file sets: the kind of model, its fields, and those of the training."""

    kind: str  # model | simplelm
    model: dict[str, Any]
    train: dict[str, Any]


def read_recipe(path: Path) -> Recipe:
    """A TOML file with one of the tables [model] and [simplelm], and optionally [train]."""
    import tomllib  # 3 ms of every `--help` otherwise

    try:
        tables = tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of an integer of thousands of digits
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    for name, values in tables.items():
        if name not in TABLES:
            raise ConfigError(f"{path}: unknown table [{name}]; {nearest(name, TABLES)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {name} must be a table, [{name}]")
        checked(name, values, str(path))
    kinds = [name for name in tables if name in KINDS]
    if len(kinds) != 1:
        raise ConfigError(f"{path}: exactly one of the tables [model] and [simplelm] is needed, got {len(kinds)}")
    return Recipe(kinds[0], tables[kinds[0]], tables.get("train", {}))


def load_config(path: Path) -> AnyModelConfig:
    """The model that a TOML file describes."""
    recipe = read_recipe(path)
    return KINDS[recipe.kind](**recipe.model)


def preset_names() -> list[str]:
    return ["default", *sorted(path.stem for path in PRESETS.glob("*.toml"))]


def preset_recipe(name: str) -> Recipe:
    if name not in preset_names():
        flag = "--config" if name.endswith(".toml") else "--init-from"
        hint = f"did you mean {flag} {name}?" if Path(name).exists() else nearest(name, preset_names())
        raise ConfigError(f"unknown preset {name!r}; {hint}")
    return Recipe("model", {}, {}) if name == "default" else read_recipe(PRESETS / f"{name}.toml")


@overload
def load_preset(name: Literal["simplelm"]) -> SimpleLMConfig: ...  # type: ignore[overload-overlap]
@overload
def load_preset(name: str) -> ModelConfig: ...
def load_preset(name: str) -> AnyModelConfig:
    """The model of a preset, by its name, such as tiny or llama-124m."""
    recipe = preset_recipe(name)
    return KINDS[recipe.kind](**recipe.model)
