"""Train a model, go on with a run, or look at one.

    tapeless train new                                   the default model on this Python's own sources
    tapeless train new --preset tiny --dataset-path my.txt --max-steps 2000
    tapeless train new --init-from runs/imported --dataset-path my.txt
    tapeless train resume runs/default                   exactly as if it had never stopped
    tapeless train info runs/default

Exit status: 0 done, 2 a mistake in the question, 3 the gradient check failed, 4 diverged, 75 stopped early and resumable."""

import argparse
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeless.cli.options import (
    add_model_arguments,
    add_no_fallback,
    add_run_argument,
    add_train_arguments,
    chosen_run,
    given,
    setting,
)

if TYPE_CHECKING:
    from tapeless.config import AnyModelConfig, TrainConfig
    from tapeless.data.prepare import Dataset
    from tapeless.errors import TapelessError
    from tapeless.train.display import Display
    from tapeless.train.run_config import RunConfig
    from tapeless.train.run_dir import RunDir
    from tapeless.train.trainer import Trainer

HELP = "train a model, resume a run, look at one"
STATUS = {"done": 0, "early": 0, "stopped": 75}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="begin a run", description="Begin a run. Without flags: the default model.")
    add_model_arguments(new)
    add_train_arguments(new)
    new.add_argument(
        "--skip-resource-check",
        action="store_true",
        help="begin although memory or disk will not suffice by the estimate, with a warning",
    )
    new.add_argument("--json", action="store_true", help="print every event as a line of JSON")
    resume = actions.add_parser("resume", help="go on with a run", description="Go on where the newest checkpoint was written.")
    add_run_argument(resume)
    words = "change a field of [train], as lr=1e-4; may be repeated; recorded in the run"
    resume.add_argument("--override", metavar="KEY=VALUE", action="append", default=[], help=words)
    limit = "when this process is to save and stop, as of `train new`; default as the run was begun"
    resume.add_argument("--max-time", dest="train.max_time", metavar="TEXT", default=argparse.SUPPRESS, help=limit)
    add_no_fallback(resume)
    resume.add_argument("--json", action="store_true", help="print every event as a line of JSON")
    info = actions.add_parser(
        "info", help="what a run is and how far it came", description="What a run is and how far it came."
    )
    add_run_argument(info)
    info.add_argument("--json", action="store_true", help="print it as JSON")
    for action, run in ((new, run_new), (resume, run_resume), (info, run_info)):
        action.set_defaults(run=run, parser=action)


def run_new(args: argparse.Namespace) -> int:
    name, model_config, train_config = chosen_run(args)

    from tapeless.report.reporters import check_packages
    from tapeless.train.display import make_display
    from tapeless.train.runs import begin, fresh_name, has_begun, resolved

    check_packages(train_config.report_to)
    display = make_display(json_lines=args.json, log_every=train_config.log_every)
    out_dir = Path(train_config.out_dir) if train_config.out_dir else fresh_name(name)
    train_config = resolved(model_config, train_config)
    for obstacle in resource_errors_of(model_config, train_config, out_dir):
        if not args.skip_resource_check:
            raise obstacle
        display.warn(str(obstacle))
    run, config, data = begin(model_config, train_config, out_dir, sys.argv)
    try:
        return train(run, config, data, display, verify=train_config.verify)
    except Exception:
        if not has_begun(run):
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def resource_errors_of(config: "AnyModelConfig", train: "TrainConfig", out_dir: Path) -> "list[TapelessError]":
    """Why the memory and the disk that are free will not do, known before anything is made."""
    from tapeless.estimate.disk import disk_of
    from tapeless.estimate.fit import resource_errors
    from tapeless.estimate.memory import memory_of
    from tapeless.train.plan import total_steps

    memory = memory_of(config, train)
    steps = total_steps(train, 0) if train.epochs is None else train.max_steps
    return resource_errors(config, train, memory, disk_of(memory.checkpoint, train, steps), out_dir)


def run_resume(args: argparse.Namespace) -> int:
    from tapeless.data.prepare import open_prepared
    from tapeless.report.reporters import check_packages
    from tapeless.train.display import make_display
    from tapeless.train.run_dir import RunDir
    from tapeless.train.runs import resumed_configuration

    run = RunDir.open(args.run_dir)
    overrides = dict(setting(f"train.{text}")[1:] for text in args.override)
    config, changes = resumed_configuration(run, overrides | given(args, "train"))
    check_packages(config.train.report_to)
    display = make_display(json_lines=args.json, log_every=config.train.log_every)
    told = {f"{change.name}": [change.old, change.new] for change in changes}
    data = open_prepared(run.path)
    return train(run, config, data, display, resume=True, fallback=not args.no_fallback, changes=told)


def train(
    run: "RunDir",
    config: "RunConfig",
    data: "Dataset",
    display: "Display",
    *,
    verify: bool = False,
    resume: bool = False,
    fallback: bool = True,
    changes: dict[str, Any] | None = None,
) -> int:
    from tapeless.cli.output import ignore_write_errors
    from tapeless.report.reporters import Reporters
    from tapeless.train.init_from import load_initial_weights
    from tapeless.train.run_config import write_run_config
    from tapeless.train.runs import Recorder, make_model, restore_trainer
    from tapeless.train.signals import StopSignals
    from tapeless.train.trainer import Trainer

    with ignore_write_errors(), StopSignals() as stop, Recorder(run, display.event) as record, ExitStack() as closing:
        model = make_model(config.model, config.train)
        load_initial_weights(model, run, config, on_warning=display.warn)
        trainer = Trainer(
            model,
            config.train,
            data,
            run=run,
            on_event=record,
            before_save=record.log.sync,
            stopped=stop.requested,
            base=config.data.get("base_sha256") if config.train.lora else None,
        )
        if resume:
            restore_trainer(trainer, record, fallback=fallback, on_warning=display.warn)
            if changes:
                write_run_config(run.config, config)
        record.listeners.append(closing.enter_context(Reporters(run, config.train.report_to)).event)
        beaten = data.baselines()
        display.introduce(run.path, trainer, beaten)
        if verify and not check_first_batch(trainer, display):
            return 3
        kind = "resume" if resume else "start"
        record(
            {
                "event": kind,
                "step": trainer.steps,
                "parameters": model.num_params,
                "total_steps": trainer.total_steps,
                "baselines": beaten._asdict(),
                "floor": data.floor,
                "changes": changes or {},
                "time": time.time(),
            }
        )
        with display:
            ending = trainer.run()
        record({"event": "end", "step": trainer.steps, "reason": ending, "time": time.time()})
        display.close(run.path, trainer, ending)
    return STATUS[ending]


def check_first_batch(trainer: "Trainer", display: "Display") -> bool:
    from tapeless.verify.first_batch import first_batch_findings

    findings = list(first_batch_findings(trainer.model, *trainer.next_batch()))
    display.verified(findings)
    return all(finding.ok for finding in findings)


def run_info(args: argparse.Namespace) -> int:
    from tapeless.train.info import describe, run_facts

    facts = run_facts(args.run_dir)
    if args.json:
        import json

        print(json.dumps(facts))
    else:
        print(describe(facts))
    return 0
