"""Estimate what a run needs before it starts: parameters, memory by part, FLOPs, time and disk space.

    tapeless estimate --preset small --batch-size 4        a preset; --config FILE takes a TOML file, flags override both
    tapeless estimate --preset llama-124m --no-calibrate   everything except the time, without computing anything
    tapeless estimate --preset llama-124m --json           as JSON, in bytes, seconds and floating-point operations
    tapeless estimate --preset llama-124m --device h100 --dtype bfloat16      for a GPU that is not here
    tapeless estimate --preset llama-1b --memory 24GB --dtype bfloat16        for a GPU of which only the memory is known

Memory is counted by running the step on tensors that have a shape but no storage. The time is measured in a few seconds of
steps: those of the run itself if they are short, else with fewer layers, rows and tokens. `tapeless train
new` makes the same memory and disk check before it starts.

Of a GPU that is named the time is computed and not measured: from the FLOPs and bytes of a step, the peak and the bandwidth of
the GPU, and the shares of both that an H200 reached (docs/training.md has the formula and its errors). The largest batch that
fits is found too. --memory is what is free: 24GB are 24 x 10^9 bytes. Without --device it is that of a GPU.

Exit status: 0 it fits, 2 it does not fit into the free memory or disk space, or a usage error."""

import argparse
import json
from pathlib import Path

from tapeless.cli.options import add_model_arguments, add_train_arguments, recipe
from tapeless.config.hardware import GPUS
from tapeless.progress import LOADING, busy

HELP = "estimate the memory, time and disk space of a run, here or on a GPU that is not here"
DOES_NOT_FIT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_train_arguments(parser)
    parser._option_string_actions["--device"].help = f"torch device, or a GPU that is not here: {', '.join(GPUS)} (default cpu)"
    words = "estimate for a machine with so much free memory, such as 24GB or 22.5GiB, instead of for this one"
    parser.add_argument("--memory", metavar="SIZE", help=words)
    parser.add_argument("--no-calibrate", action="store_true", help="skip the time, which has to be measured")
    parser.add_argument("--json", action="store_true", help="print the estimate as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    name, found_recipe = recipe(args)

    with busy(LOADING):
        from tapeless.data.files import unused_path
        from tapeless.estimate.calibrate import MEASURING
        from tapeless.estimate.record import add_time, estimate
        from tapeless.estimate.report import text, time_text
        from tapeless.estimate.target import target_of
        from tapeless.training.init_from import resolve_recipe
        from tapeless.training.process import process_settings
        from tapeless.training.runs import resolve_defaults
        from tapeless.training.vocabulary import infer_vocab_size

    config, train = resolve_recipe(found_recipe)
    train = train.accumulated()
    config, _ = infer_vocab_size(found_recipe, config, train)
    if train.init_from:
        name = Path(train.init_from).resolve().name
    train, target = target_of(train, args.memory, device_is_given="device" in found_recipe.train)
    with process_settings(train):
        out_dir = Path(train.out_dir) if train.out_dir else unused_path(name)
        with busy("counting the memory of a step"):
            train = resolve_defaults(config, train, here=target is None)
            found, memory = estimate(name, config, train, out_dir, target)
        if not args.json:
            print(text(found, config, train), flush=True)
        if not args.no_calibrate:
            with busy(MEASURING if target is None else "computing the time of a step"):
                add_time(found, memory, config, train, target)
    print(json.dumps(found) if args.json else time_text(found))
    return DOES_NOT_FIT if found["resource_errors"] else 0
