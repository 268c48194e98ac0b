"""Flags for the model and its training, generated from the configuration's fields, and flags that commands share.

Precedence: defaults < --preset < --config < --set table.key=value < flags.
Tested by: tests/cli/test_options.py."""

import argparse
import sys
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from tapeless.cli.parser import EXACT, HelpAll
from tapeless.config import (
    KINDS,
    WEIGHTS,
    AnyModelConfig,
    ModelConfig,
    Recipe,
    TrainConfig,
    checked,
    nearest,
    preset_names,
    preset_recipe,
    read_recipe,
)
from tapeless.config.other_names import accepted
from tapeless.errors import ConfigError, UsageError
from tapeless.progress import erase
from tapeless.text import printable
from tapeless.training.unused_options import refuse_unused

# Titles in --help-all for the fields of TrainConfig, by the first field of each group.
GROUPS = {
    "dataset_path": "data",
    "init_from": "fine-tuning",
    "seq_len": "batches and steps",
    "optimizer": "optimizer and schedule",
    "spike_z": "guards and averaging",
    "seed": "device and numerics",
    "out_dir": "evaluation and output",
}


def say(text: str) -> None:
    erase()
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    say(f"warning: {printable(text)}")


class Chosen(NamedTuple):
    name: str  # for display
    model: AnyModelConfig
    train: TrainConfig


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    common = parser.add_argument_group("common options")
    add_with_aliases(common, "preset", metavar="NAME", default=None, help=f"a named model: {', '.join(preset_names())}")
    words = "a TOML file with tables [model] or [simplelm], and [train]"
    common.add_argument("--config", metavar="FILE", type=Path, help=words)
    words = "set one value of such a file, for example train.lr=1e-3; may be repeated"
    advanced(parser.add_argument("--set", metavar="TABLE.KEY=VALUE", action="append", default=[], help=words))
    advanced(add_plugin_argument(parser))
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options")
    add_fields(parser.add_argument_group("model"), "model", ModelConfig, common=common)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [--preset NAME] [--config FILE] [--FLAG VALUE ...]"  # all flags would be 45 lines
    add_train_fields(parser, common=common_group(parser))


def add_train_fields(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Flags for fields of TrainConfig, in GROUPS. options: of add_fields()."""
    names = [field.name for field in fields(TrainConfig)]
    starts = [names.index(first) for first in GROUPS]
    only = options.pop("only", names)
    for title, start, end in zip(GROUPS.values(), starts, [*starts[1:], None], strict=True):
        in_group = [name for name in names[start:end] if name in only]
        add_fields(parser.add_argument_group(title), "train", TrainConfig, only=in_group, **options)


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run directory")
    add_plugin_argument(parser)


def common_group(parser: argparse.ArgumentParser) -> Any:
    return next(group for group in parser._action_groups if group.title == "common options")


def advanced(action: argparse.Action) -> None:
    """Shown by --help-all only."""
    action.advanced = True  # type: ignore[attr-defined]


def add_plugin_argument(parser: argparse.ArgumentParser) -> argparse.Action:
    words = "a Python file that registers a sublayer, an optimizer, a reader …; it is executed; may be repeated"
    return parser.add_argument("--plugin", metavar="FILE", type=Path, action="append", default=[], help=words)


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="latest", metavar="WHICH", help="latest, best, or a step (default latest)")


def add_saved_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which weights of which run to load."""
    add_run_argument(parser)
    add_checkpoint_argument(parser)
    words = "the trained weights, or their moving average if the run has one (ema_decay) (default raw)"
    parser.add_argument("--weights", choices=WEIGHTS, default="raw", help=words)
    add_no_fallback(parser)


def add_no_fallback(parser: argparse.ArgumentParser) -> None:
    words = "fail on a damaged checkpoint instead of using the one before it"
    parser.add_argument("--no-fallback", action="store_true", help=words)


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Where and how to run a loaded model."""
    group = parser.add_argument_group("machine", "independent of the settings that the run was trained with")
    group.add_argument("--device", metavar="TEXT", help="cpu, cuda, mps (default cuda if there is a GPU, else cpu)")
    words = "dtype of the computation: auto, float32, bfloat16, fp8, float64 (default that of the saved weights, float32)"
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "fp8", "float64"), help=words, metavar="TEXT")
    add_ops_and_threads(group)


def add_ops_and_threads(group: Any, ops: str = "auto") -> None:
    words = f"kernels: auto, reference, cpu, triton, or a registered set (default {ops})"
    group.add_argument("--ops", metavar="TEXT", default=ops, help=words)
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's number)")


def load_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of runs.load(): those of add_saved_model_arguments() and add_machine_arguments()."""
    machine = {name: getattr(args, name) for name in ("device", "dtype", "ops", "threads")}
    return {"which": args.checkpoint, "weights": args.weights, "fallback": not args.no_fallback, **machine}


def add_fields(
    group: Any, table: str, config: Any, *, only: Collection[str] | None = None, show_default: bool = True, common: Any = None
) -> None:
    """A flag for each field of a configuration, or for those in `only`, stored as `table.name`; absent if not given. common:
    the group of the fields that are marked as common; the others are then advanced."""
    for field in fields(config):
        if only is not None and field.name not in only:
            continue
        help, kind = field.metadata["help"].replace("%", "%%"), field_type(field)
        if show_default and field.default not in (None, ""):
            help += f" (default {str(field.default).lower() if kind is bool else field.default})"
        options: dict[str, Any] = {"dest": f"{table}.{field.name}", "help": help, "default": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif field.metadata["choices"]:
            options["choices"] = field.metadata["choices"]
        else:
            options |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
        of_all = common is not None and field.metadata["common"]
        action = add_with_aliases(common if of_all else group, field.name, **options)
        if common is not None and not of_all:
            advanced(action)


def add_with_aliases(group: Any, name: str, **options: Any) -> argparse.Action:
    """A flag with the other names that are accepted for it, which --help leaves out."""
    flag = f"--{name.replace('_', '-')}"
    action = group.add_argument(flag, **options)
    others = [other for other in accepted(name) if other != flag]
    if others:
        group.add_argument(*others, **{"dest": name, **options, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS})
    return action


def field_type(field: Any) -> type:
    """int of `int` and of `int | None`."""
    return next(t for t in getattr(field.type, "__args__", (field.type,)) if t is not type(None))


def recipe(args: argparse.Namespace) -> tuple[str, Recipe]:
    """The fields set by the preset, the file, --set and flags together, checked, and a name for them."""
    name, (kind, model, train) = args.preset or "default", preset_recipe(args.preset or "default")
    if args.config is not None:
        name, found = str(args.config), read_recipe(args.config)
        if args.preset and found.kind != kind:
            raise ConfigError(f"{args.config} describes a [{found.kind}], preset {args.preset} a [{kind}]; use one of them")
        kind, model, train = found.kind, {**model, **found.model}, {**train, **found.train}
    values = {kind: dict(model), "train": dict(train)}
    flags = [(table, key, value) for table in ("model", "train") for key, value in given(args, table).items()]
    for table, key, value in [*map(setting, args.set), *flags]:
        if table == "model" and kind != "model":
            valid = [field.name for field in fields(KINDS[kind])]
            if key not in valid:
                raise ConfigError(f"{name} is a SimpleLM, which has no {key}; it has {', '.join(valid)}")
            table = kind  # model flags apply to either kind
        if table not in values:
            raise UsageError(f"--set {table}.{key}: unknown table; {nearest(table, values)}")
        values[table][key] = value
    checked(kind, values[kind])
    refuse_unused(checked("train", values["train"]))
    return name, Recipe(kind, values[kind], values["train"])


def chosen(args: argparse.Namespace) -> Chosen:
    """The configurations that recipe() describes."""
    name, (kind, model, train) = recipe(args)
    return Chosen(name, checked(kind, model), checked("train", train))


def given(args: argparse.Namespace, table: str) -> dict[str, Any]:
    """The flags of one table that were given."""
    return {key.partition(".")[2]: value for key, value in vars(args).items() if key.startswith(f"{table}.")}


def setting(text: str) -> tuple[str, str, Any]:
    """`train.lr=1e-3` as table, key and value; the value is TOML, or else plain text."""
    name, equals, value = text.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot):
        raise UsageError(f"{text}: expected TABLE.KEY=VALUE, such as train.lr=1e-3")
    import tomllib

    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except ValueError:
        parsed = value.strip()
    if isinstance(parsed, float) and parsed.is_integer() and abs(parsed) <= EXACT:
        parsed = int(parsed)  # max_steps=1e3; a field that is a float takes it too
    return table, key, parsed
