"""Train a model, resume a run, or show one.

    tapeless train new                                   the default model on the Python standard library's sources
    tapeless train new --preset tiny --dataset-path my.txt --max-steps 2000
    tapeless train new --init-from runs/imported --dataset-path my.txt
    tapeless train resume runs/default                   continue as if it had not been interrupted
    tapeless train info runs/default

Exit status: 0 done, 2 usage error, 3 the gradient check failed, 4 diverged, 75 stopped early and resumable."""

import argparse
import json
from dataclasses import fields

from tapeless.cli.options import (
    add_model_arguments,
    add_no_fallback,
    add_run_argument,
    add_train_arguments,
    add_train_fields,
    advanced,
    given,
    recipe,
    setting,
)
from tapeless.cli.parser import HelpAll
from tapeless.config import TrainConfig
from tapeless.progress import LOADING, busy
from tapeless.start import freeze_imports
from tapeless.training.run_config import FROZEN

HELP = "train a model, resume a run, show a run"
EVENTS = "print every event as a line of JSON"
# Fields with a flag of `train resume`: what may change, if a resume still reads it.
CHANGED_BY_RESUME = {field.name for field in fields(TrainConfig)} - FROZEN - {"init_from", "out_dir", "verify"}
STATUS = {"done": 0, "early": 0, "stopped": 75}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="start a run", description="Start a run. Without flags: the default model.")
    add_model_arguments(new)
    add_train_arguments(new)
    words = "start even if the estimate exceeds the free memory or disk space, with a warning"
    advanced(new.add_argument("--skip-resource-check", action="store_true", help=words))
    words = "Continue a run from its newest checkpoint."
    resume = actions.add_parser("resume", help="continue a run", description=words)
    add_run_argument(resume)
    resume.usage = f"{resume.prog} RUN [--FLAG VALUE ...]"
    words = "change a field of [train] by its name, for example lr=1e-4; may be repeated"
    resume.add_argument("--override", metavar="KEY=VALUE", action="append", default=[], help=words)
    resume.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options")
    common = resume.add_argument_group("common options", "changes, recorded in the run; default: as it was trained so far")
    add_train_fields(resume, only=CHANGED_BY_RESUME, show_default=False, common=common)
    add_no_fallback(resume)
    words = "Show the configuration and progress of a run."
    info = actions.add_parser("info", help="show the configuration and progress of a run", description=words)
    add_run_argument(info)
    info.set_defaults(waiting=LOADING)
    resume.set_defaults(interrupted=STATUS["stopped"])  # before its first step
    for action, run, words in (new, run_new, EVENTS), (resume, run_resume, EVENTS), (info, run_info, "print JSON"):
        action.add_argument("--json", action="store_true", help=words)
        action.set_defaults(run=run, parser=action)


def run_new(args: argparse.Namespace) -> int:
    name, found = recipe(args)  # first: usage errors need not wait for torch
    args.phases.end("command")

    with busy(LOADING):
        from tapeless.runner import train

        freeze_imports()
    args.phases.end("imports")
    display = "json" if args.json else "auto"
    options = {"name": name, "display": display, "skip_resource_check": args.skip_resource_check, "phases": args.phases}
    return STATUS[train(found, **options).reason]


def run_resume(args: argparse.Namespace) -> int:
    args.phases.end("command")

    with busy(LOADING):
        from tapeless.runner import resume

        freeze_imports()
    args.phases.end("imports")
    overrides = dict(setting(f"train.{text}")[1:] for text in args.override) | given(args, "train")
    options = {"display": "json" if args.json else "auto", "fallback": not args.no_fallback, "phases": args.phases}
    return STATUS[resume(args.run_dir, **options, **overrides).reason]


def run_info(args: argparse.Namespace) -> int:
    from tapeless.training.info import describe, run_facts

    facts = run_facts(args.run_dir)
    print(json.dumps(facts) if args.json else describe(facts))
    return 0
