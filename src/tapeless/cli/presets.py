"""List the presets: parameters, shape, the memory to train each as it is, and where that fits.

    tapeless presets            on this machine's CPU in float32, and on GPUs in bfloat16
    tapeless presets --json     in bytes

Memory is that of `tapeless estimate --preset NAME --no-verify` with the preset's own batch, counted anew for every line. Other
batches, `--recompute` and other GPUs: `tapeless estimate`."""

import argparse
import json

from tapeless.progress import LOADING, busy

HELP = "list the presets: parameters, memory, and where they fit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with busy(LOADING):
        from tapeless.estimate.presets import described, text
    with busy("counting the memory of each preset"):
        found = described()
    print(json.dumps(found) if args.json else text(found))
    return 0
