"""The flags that say which model is meant and how it is trained, generated from the fields of the classes in config/.

Precedence: defaults < --preset < --config < --set table.key=value < flags.
Tested by: tests/cli/test_options.py."""

import argparse
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from tapeless.cli.unused_options import refuse_unused
from tapeless.config import (
    KINDS,
    WEIGHTS,
    AnyModelConfig,
    ModelConfig,
    TrainConfig,
    checked,
    nearest,
    preset_names,
    preset_recipe,
    read_recipe,
)
from tapeless.errors import ConfigError, UsageError

# Spellings that people bring along from elsewhere.
ALIASES = {
    "grad_clip": ["--gradient-clip"],
    "save_every": ["--checkpoint-interval"],
    "keep_last": ["--max-checkpoints"],
    "log_every": ["--log-interval"],
    "out_dir": ["--checkpoint-path"],
}


class Chosen(NamedTuple):
    name: str  # for people to read
    model: AnyModelConfig
    train: TrainConfig


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", metavar="NAME", help=f"a named model: {', '.join(preset_names())}")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML file: a table [model] or [simplelm], and [train]")
    words = "one value of such a file, as train.lr=1e-3; may be repeated"
    parser.add_argument("--set", metavar="TABLE.KEY=VALUE", action="append", default=[], help=words)
    add_fields(parser.add_argument_group("model"), "model", ModelConfig)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser.add_argument_group("training"), "train", TrainConfig)


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="latest", metavar="WHICH", help="latest, best, or a step (default latest)")


def add_saved_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which weights of which run: what runs.load() takes."""
    add_run_argument(parser)
    add_checkpoint_argument(parser)
    words = "the trained weights, or their moving average, where the run keeps one with ema_decay (default raw)"
    parser.add_argument("--weights", choices=WEIGHTS, default="raw", help=words)
    add_no_fallback(parser)


def add_no_fallback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-fallback", action="store_true", help="refuse a damaged checkpoint instead of taking the one before"
    )


def add_fields(group: Any, table: str, config: Any, *, only: Collection[str] | None = None) -> None:
    """A flag for each field of a configuration, or for some, its value under `table.name`; what is not given is not there."""
    for field in fields(config):
        if only is not None and field.name not in only:
            continue
        help, kind = field.metadata["help"].replace("%", "%%"), field_type(field)
        if field.default not in (None, ""):
            help += f" (default {str(field.default).lower() if kind is bool else field.default})"
        flags = [f"--{field.name.replace('_', '-')}", *ALIASES.get(field.name, [])]
        options: dict[str, Any] = {"dest": f"{table}.{field.name}", "help": help, "default": argparse.SUPPRESS}
        if kind is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        elif field.metadata["choices"]:
            group.add_argument(*flags, choices=field.metadata["choices"], **options)
        else:
            metavar = {int: "N", float: "X", str: "TEXT"}[kind]
            group.add_argument(*flags, type=kind, metavar=metavar, **options)


def field_type(field: Any) -> type:
    """int of `int` and of `int | None`."""
    return next(t for t in getattr(field.type, "__args__", (field.type,)) if t is not type(None))


def chosen(args: argparse.Namespace) -> Chosen:
    """What the preset, the file, the settings and the flags mean together."""
    name, (kind, model, train) = args.preset or "default", preset_recipe(args.preset or "default")
    if args.config is not None:
        name, recipe = str(args.config), read_recipe(args.config)
        if args.preset and recipe.kind != kind:
            raise ConfigError(f"{args.config} describes a [{recipe.kind}], preset {args.preset} a [{kind}]; use one of them")
        kind, model, train = recipe.kind, {**model, **recipe.model}, {**train, **recipe.train}
    values = {kind: dict(model), "train": dict(train)}
    for table, key, value in [*map(setting, args.set), *_flags(args)]:
        if table == "model" and kind != "model":
            valid = [field.name for field in fields(KINDS[kind])]
            if key not in valid:
                raise ConfigError(f"{name} is a SimpleLM, which has no {key}; it has {', '.join(valid)}")
            table = kind  # flags speak of "the model", whichever kind it is
        if table not in values:
            raise UsageError(f"--set {table}.{key}: unknown table; {nearest(table, values)}")
        values[table][key] = value
    found = Chosen(name, checked(kind, values[kind], name), checked("train", values["train"], name))
    refuse_unused(found.train)
    return found


def chosen_run(args: argparse.Namespace) -> Chosen:
    """As chosen, with the model and the tokenizer of the run that it begins with, where it begins with one."""
    found = chosen(args)  # first: a mistake is said at once, without waiting for torch
    if not found.train.init_from:
        return found
    from tapeless.train.init_from import inherited

    return Chosen(Path(found.train.init_from).resolve().name, *inherited(found.train, model_changes(args)))


def model_changes(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a model that were asked for: by a preset, a file, a setting or a flag."""
    recipes = [preset_recipe(args.preset)] if args.preset else []
    recipes += [read_recipe(args.config)] if args.config is not None else []
    asked = {key: value for recipe in recipes for key, value in recipe.model.items()}
    return asked | {key: value for table, key, value in [*map(setting, args.set), *_flags(args)] if table in KINDS}


def given(args: argparse.Namespace, table: str) -> dict[str, Any]:
    """The flags of one configuration that were given."""
    return {key.partition(".")[2]: value for key, value in vars(args).items() if key.startswith(f"{table}.")}


def _flags(args: argparse.Namespace) -> list[tuple[str, str, Any]]:
    return [(table, key, value) for table in ("model", "train") for key, value in given(args, table).items()]


def setting(text: str) -> tuple[str, str, Any]:
    """`train.lr=1e-3` as its table, key and value; the value is TOML, or else text as it stands."""
    name, equals, value = text.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot):
        raise UsageError(f"{text}: expected TABLE.KEY=VALUE, such as train.lr=1e-3")
    import tomllib

    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return table, key, parsed
