"""Say what a run will need before it runs: parameters, memory by part, arithmetic, time and disk.

    tapeless estimate --preset small --batch-size 4        a preset; --config FILE takes a TOML file, flags override both
    tapeless estimate --preset llama-124m --no-calibrate   everything but the time, without computing anything
    tapeless estimate --preset llama-124m --json           as JSON, in bytes, seconds and floating-point operations

Memory is counted by running the step on tensors that have a shape and no bytes. The time comes from a few seconds of steps: the
run's own where they are short, else of fewer layers and rows. `tapeless train new` asks the same before it begins.

Exit status: 0 it fits, 2 it does not fit into the memory or onto the disk that are free, or the question was wrong."""

import argparse
import json
import sys
from pathlib import Path

from tapeless.cli.options import add_model_arguments, add_train_arguments, chosen_run

HELP = "what a run will need: memory by part, arithmetic, time, disk"
DOES_NOT_FIT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_train_arguments(parser)
    parser.add_argument("--no-calibrate", action="store_true", help="leave the time out, which has to be measured")
    parser.add_argument("--json", action="store_true", help="print the estimate as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    name, config, train = chosen_run(args)

    from tapeless.estimate.record import estimate
    from tapeless.estimate.report import text
    from tapeless.train.runs import fresh_name, prepare_process, resolved

    train = resolved(config, train)
    prepare_process(train)
    if not (args.no_calibrate or args.json):
        print("measuring a few steps …", file=sys.stderr, flush=True)
    out_dir = Path(train.out_dir) if train.out_dir else fresh_name(name)
    found = estimate(name, config, train, out_dir, calibrated=not args.no_calibrate)
    print(json.dumps(found) if args.json else text(found, config, train))
    return DOES_NOT_FIT if found["resource_errors"] else 0
