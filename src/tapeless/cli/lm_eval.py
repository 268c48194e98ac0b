"""Run the tasks of EleutherAI's lm-eval on the model of a run.

    tapeless lm-eval runs/default --tasks capitals --include_path tasks --batch_size 8

RUN comes before all flags. Flags that are not listed here are passed to lm-eval unchanged; `lm-eval run --help` lists them."""

import argparse
import json
import sys

from tapeless.cli.options import add_machine_arguments, add_saved_model_arguments, load_settings
from tapeless.errors import UsageError
from tapeless.progress import busy

HELP = "run EleutherAI lm-eval tasks on a trained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_saved_model_arguments(parser)
    add_machine_arguments(parser)
    parser.set_defaults(run=run, passed_on=[])


def run(args: argparse.Namespace) -> int:
    with busy("loading PyTorch and lm-eval"):
        from tapeless.tasks.lm import NAME
        from tapeless.training.process import default_device

        from lm_eval.__main__ import cli_evaluate  # isort: skip  the import above reports a missing package

    ours = {name: value for name, value in load_settings(args).items() if value is not None}
    ours |= {"run": str(args.run_dir), "checkpoint": ours.pop("which")}
    device = ours.pop("device", None) or default_device()
    if "--model" in args.passed_on:
        raise UsageError("the model is the run's: leave out --model; --model_args max_length=… prefix_token_id=… is allowed")
    before = sys.argv
    sys.argv = ["lm-eval", "run", "--model", NAME, "--model_args", json.dumps(ours), "--device", device, *args.passed_on]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
