"""The flags that say which model is meant, generated from the fields of ModelConfig.

Precedence: defaults < --preset or --config < flags."""

import argparse
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tapeless.config import AnyModelConfig, ModelConfig, SimpleLMConfig, load_config, load_preset, preset_names
from tapeless.errors import ConfigError


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", metavar="NAME", help=f"a named model: {', '.join(preset_names())}")
    source.add_argument("--config", metavar="FILE", type=Path, help="a TOML file with a [model] or a [simplelm] table")
    group = parser.add_argument_group("model", "Each overrides the preset or the file.")
    for field in fields(ModelConfig):
        flag, help = f"--{field.name.replace('_', '-')}", field.metadata["help"]
        if field.default is not None:
            help += f" (default {str(field.default).lower() if field.type is bool else field.default})"
        options: dict[str, Any] = {"dest": f"model.{field.name}", "help": help, "default": argparse.SUPPRESS}
        if field.type is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif field.metadata["choices"]:
            group.add_argument(flag, choices=field.metadata["choices"], **options)
        else:
            kind = float if field.type is float else int
            group.add_argument(flag, type=kind, metavar="X" if kind is float else "N", **options)


def chosen_model(args: argparse.Namespace) -> tuple[str, AnyModelConfig]:
    """The model that the flags mean, and its name for people to read."""
    if args.config is not None:
        name, config = str(args.config), load_config(args.config)
    else:
        name = args.preset or "default"
        config = load_preset(name)
    flags = {key.removeprefix("model."): value for key, value in vars(args).items() if key.startswith("model.")}
    if not flags:
        return name, config
    if isinstance(config, SimpleLMConfig):
        raise ConfigError(f"--{next(iter(flags)).replace('_', '-')} is a flag for transformers, and {name} is a SimpleLM")
    values = asdict(config)
    if config.num_kv_heads == config.num_heads:  # both defaults follow the number of heads and the width, unless they
        values["num_kv_heads"] = None  # were set to something else
    if config.head_dim * config.num_heads == config.hidden_dim:
        values["head_dim"] = None
    return f"{name} with " + ", ".join(f"{k} = {v}" for k, v in flags.items()), ModelConfig(**(values | flags))
