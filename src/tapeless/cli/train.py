"""Train a model, resume a run, show or verify one.

    tapeless train new                                   the default model on the Python standard library's sources
    tapeless train new --preset tiny --dataset-path my.txt --max-steps 2000
    tapeless train new --init-from runs/imported --dataset-path my.txt
    tapeless train resume runs/default                   continue as if it had not been interrupted
    tapeless train info runs/default
    tapeless train verify runs/default --replay 10       is everything in it as it was recorded?

Exit status: 0 done, 2 usage error, 3 a check failed, 4 diverged, 75 stopped early and resumable."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

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
from tapeless.data.files import unused_path
from tapeless.errors import UsageError
from tapeless.progress import LOADING, busy, erase
from tapeless.start import freeze_imports, may_restart, num_ranks, restarted
from tapeless.training.run_config import FROZEN

HELP = "train a model, resume a run, show or verify a run"
EVENTS = "print every event as a line of JSON"
# Fields with a flag of `train resume`: what may change, if a resume still reads it.
CHANGED_BY_RESUME = {field.name for field in fields(TrainConfig)} - FROZEN - {"init_from", "out_dir", "verify"}
FAILED = 3
STATUS = {"done": 0, "early": 0, "stopped": 75}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="start a run", description="Start a run. Without flags: the default model.")
    add_model_arguments(new)
    add_train_arguments(new)
    words = "start even if the estimate exceeds the free memory or disk space, with a warning"
    advanced(new.add_argument("--skip-resource-check", action="store_true", help=words))
    add_ranks(new)
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
    add_ranks(resume)
    words = "Show the configuration and progress of a run."
    info = actions.add_parser("info", help="show the configuration and progress of a run", description=words)
    add_run_argument(info)
    info.set_defaults(waiting=LOADING)
    resume.set_defaults(interrupted=STATUS["stopped"])  # before its first step
    words = "Compare everything in the directory of a run with what it recorded, and with --replay its computation too."
    verify = actions.add_parser("verify", help="check every file of a run, and that its steps repeat", description=words)
    add_run_argument(verify)
    words = "execute N steps again and compare the bits of losses, gradient norms and weights with those recorded"
    verify.add_argument("--replay", metavar="N", type=positive, help=words)
    words = "the step of the checkpoint that the replay begins with; default the newest with N steps after it"
    verify.add_argument("--checkpoint", metavar="STEP", help=words)
    verify.set_defaults(waiting=LOADING)
    shown = (info, run_info, "print JSON"), (verify, run_verify, "print JSON")
    for action, run, words in ((new, run_new, EVENTS), (resume, run_resume, EVENTS), *shown):
        action.add_argument("--json", action="store_true", help=words)
        action.set_defaults(run=run, parser=action)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    words = "processes on this machine that train together; on several machines use torchrun"
    parser.add_argument("--ranks", metavar="N", type=positive, default=1, help=words)
    parser.set_defaults(on_ranks=True)


def run_new(args: argparse.Namespace) -> int:
    name, found = recipe(args)  # first: usage errors need not wait for torch
    out = found.train.get("out_dir")
    if starts_ranks(args):
        path = Path(out) if out else unused_path(name)
        return run_ranks(args, [*args.given, *([] if out else ["--out-dir", str(path)])], path)
    if may_restart() and not out:
        raise UsageError("torchrun --max-restarts: a restart continues the run in --out-dir: give one")
    if out and restarted() and begun(Path(out), args.given):
        args.interrupted = STATUS["stopped"]
        return continued(args, Path(out))
    args.phases.end("command")

    with busy(LOADING):
        from tapeless.runner import train

        freeze_imports()
    args.phases.end("imports")
    display = "json" if args.json else "auto"
    options = {"name": name, "display": display, "skip_resource_check": args.skip_resource_check, "phases": args.phases}
    return STATUS[train(found, **options).reason]


def begun(run: Path, arguments: list[str]) -> bool:
    """Whether an earlier start of this command has made the run, and not another command whose --out-dir it was."""
    try:
        made = json.loads((run / "env.json").read_text())["argv"][1:]
    except (OSError, ValueError, LookupError):
        return False
    return made == arguments and (run / "config.toml").is_file()


def starts_ranks(args: argparse.Namespace) -> bool:
    """Whether this process starts ranks, and is none itself."""
    if num_ranks() > 1 and args.ranks not in (1, num_ranks()):
        raise UsageError(f"--ranks {args.ranks}, but this is one of {num_ranks()} ranks already (WORLD_SIZE): leave it out")
    return num_ranks() == 1 < int(args.ranks)


def run_ranks(args: argparse.Namespace, arguments: list[str], run: Path) -> int:
    """The same command on args.ranks processes."""
    from tapeless.dist.launch import launch

    def saved() -> str:
        latest = run / "checkpoints" / "latest"
        return latest.read_text() if latest.is_file() else ""

    return launch(arguments, args.ranks, saved=saved)


def run_resume(args: argparse.Namespace) -> int:
    if starts_ranks(args):
        return run_ranks(args, args.given, Path(args.run_dir))
    overrides = dict(setting(f"train.{text}")[1:] for text in args.override) | given(args, "train")
    return continued(args, args.run_dir, fallback=not args.no_fallback, **overrides)


def continued(args: argparse.Namespace, run: Path, **options: Any) -> int:
    args.phases.end("command")

    with busy(LOADING):
        from tapeless.runner import resume

        freeze_imports()
    args.phases.end("imports")
    return STATUS[resume(run, display="json" if args.json else "auto", phases=args.phases, **options).reason]


def run_info(args: argparse.Namespace) -> int:
    from tapeless.training.info import describe, run_facts

    facts = run_facts(args.run_dir)
    print(json.dumps(facts) if args.json else describe(facts))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from tapeless.training.replay import replay_run
    from tapeless.training.run_dir import RunDir
    from tapeless.training.verify_run import Check, verify_run

    if args.checkpoint is not None and args.replay is None:
        raise UsageError("--checkpoint is where a replay begins: add --replay N")
    run, checks = RunDir.open(args.run_dir), list[Check]()

    def show(check: Check) -> None:
        checks.append(check)
        if not args.json:
            erase()
            print(f"{'ok    ' if check.ok else 'FAILED'}  {check.name}: {check.text}", flush=True)

    with busy("reading and hashing"):
        for check in verify_run(run):
            show(check)
    if args.replay is not None and all(check.ok for check in checks):
        with busy(f"executing {args.replay} steps again"):
            show(replay_run(run, args.replay, args.checkpoint))
    failed = sum(not check.ok for check in checks)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [check._asdict() for check in checks]}))
    elif args.replay is not None and failed and not checks[-1].name.startswith("replay"):
        print("not replayed: the files are not what was recorded")
    return FAILED if failed else 0


def positive(text: str) -> int:
    """A number of steps, or of ranks."""
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)
