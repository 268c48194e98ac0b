"""Run the tasks of EleutherAI's lm-eval on the model of a run.

    tapeless lm-eval runs/default --tasks capitals --include_path tasks --batch_size 8

RUN comes in front of all flags. What is not listed here goes to lm-eval as it stands; `lm-eval run --help` lists it."""

import argparse
import json
import sys

from tapeless.cli.options import add_saved_model_arguments
from tapeless.errors import UsageError

HELP = "evaluate a trained model on the tasks of EleutherAI's lm-eval"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_saved_model_arguments(parser)
    parser.set_defaults(run=run, passed_on=[])


def run(args: argparse.Namespace) -> int:
    from tapeless.tasks.lm import NAME
    from tapeless.train.run_config import read_run_config
    from tapeless.train.run_dir import RunDir

    from lm_eval.__main__ import cli_evaluate  # isort: skip  the line above says what is missing where it is not there

    ours = {"run": str(args.run_dir), "checkpoint": args.checkpoint, "weights": args.weights, "fallback": not args.no_fallback}
    if "--model" in args.passed_on:
        raise UsageError("the model is the run's: leave --model out; --model_args max_length=… prefix_token_id=… may be given")
    device = read_run_config(RunDir.open(args.run_dir).config).train.device  # lm-eval's own default is a GPU
    before = sys.argv
    sys.argv = ["lm-eval", "run", "--model", NAME, "--model_args", json.dumps(ours), "--device", device, *args.passed_on]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
