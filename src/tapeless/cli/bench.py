"""Measure a training step against PyTorch, eager and compiled, and transformers, in one run.

    tapeless bench --preset llama-tiny --batch-size 16      a preset; --config FILE takes a TOML file, flags override both
    tapeless bench --contenders ours,eager,floor --dtypes float32
    tapeless bench --preset llama-tiny --cold               also the time to the first step, without compiled kernels
    tapeless bench --preset llama-tiny --generate           tokens per second of generation, against transformers
    tapeless bench --preset llama-tiny --run                the trainer itself: where the time of a whole run goes
    tapeless bench --preset llama-small --scaling           tapeless vs. the floor at growing length and width
    tapeless bench --preset llama-124m --device cuda        on a GPU; --largest-batch finds how many rows fit

Every contender runs in its own process and takes turns with the others. All start from the same weights, and their first losses
are compared. The floor is only the step's matmuls and the optimizer's memory traffic. Method: docs/performance.md.

Exit status: 0 measured, 2 usage error, 3 the contenders' losses differ."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeless.cli.options import add_fields, add_model_arguments, chosen, say
from tapeless.config import TrainConfig, nearest
from tapeless.errors import UsageError
from tapeless.progress import LOADING, busy

if TYPE_CHECKING:
    from tapeless.bench.measure import How
    from tapeless.bench.task import Task

HELP = "measure a training step against PyTorch and transformers"
FAILED = 3
CONTENDERS = ("ours", "deterministic", "eager", "compile", "reduce-overhead", "max-autotune", "hf", "floor")
DTYPES, USUAL_DTYPES = ("float32", "bfloat16", "fp8"), "float32,bfloat16"
FIELDS = ("batch_size", "seq_len", "device", "ops", "recompute", "grad_clip", "weight_decay", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--generate", action="store_true", help="measure generation instead of a training step")
    what.add_argument("--scaling", action="store_true", help="measure tapeless vs. the floor at growing length and width")
    words = "find the largest batch of each contender that fits on a GPU"
    what.add_argument("--largest-batch", action="store_true", help=words)
    what.add_argument("--kernels", action="store_true", help="profile the kernels of a tapeless step on a GPU")
    words = "train for --steps steps, and show where the time of the whole run goes"
    what.add_argument("--run", action="store_true", dest="whole_run", help=words)
    what.add_argument("--cold", action="store_true", help="also time the first step, cold and warm; takes minutes")
    words = f"of {','.join(CONTENDERS)} (default: those that differ on the device)"
    parser.add_argument("--contenders", metavar="NAMES", help=words)
    words = f"some of {', '.join(DTYPES)} (default {USUAL_DTYPES}; fp8: tapeless only)"
    parser.add_argument("--dtypes", default=USUAL_DTYPES, metavar="NAMES", help=words)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each contender (default 5)")
    parser.add_argument("--turn", type=float, default=1.0, metavar="S", help="length of a turn in seconds, about (default 1)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens to generate (default 128)")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="steps of --run (default 1000)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of each contender (default: torch's number)")
    parser.add_argument("--json", metavar="FILE", help="write all measurements as JSON; - is stdout, without the table")
    add_model_arguments(parser)
    add_fields(parser.add_argument_group("step"), "train", TrainConfig, only=FIELDS)
    parser.set_defaults(run=run)


def names(flag: str, text: str, valid: tuple[str, ...]) -> tuple[str, ...]:
    """`ours,eager` as a tuple of known, distinct names."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in found:
        if word not in valid:
            raise UsageError(f"{flag}: unknown {word!r}; {nearest(word, valid)}")
    return found


def run(args: argparse.Namespace) -> int:
    requested = None if args.contenders is None else names("--contenders", args.contenders, CONTENDERS)
    dtypes = names("--dtypes", args.dtypes, DTYPES)
    for flag in ("rounds", "tokens", "threads", "steps"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise UsageError(f"--{flag} must be at least 1, got {getattr(args, flag)}")
    if not 0 < args.turn < float("inf"):
        raise UsageError(f"--turn must be above 0 and finite, got {args.turn}")
    if args.threads is not None and args.threads > (os.cpu_count() or 1):
        raise UsageError(f"--threads {args.threads}, but this machine has {os.cpu_count()}")
    name, model, train = chosen(args)

    with busy(LOADING):
        from tapeless.bench.measure import How
        from tapeless.bench.report import text
        from tapeless.bench.task import USUAL, Task, measured
        from tapeless.training.plan import default_seq_len
        from tapeless.training.process import usable_device

    kind = usable_device(train.device).partition(":")[0]
    contenders = requested or USUAL.get(kind, USUAL["cpu"])
    # --dtypes, --threads and --contenders decide here, whatever a file sets for training.
    train = replace(train, dtype="float32", threads=None, deterministic=False)
    length = train.seq_len or default_seq_len(model)
    task = Task("ours", model, replace(train, seq_len=length) if args.whole_run else measured(train, length))
    result = measure(args, name, task, contenders, How(dtypes, args.rounds, args.turn, args.threads, say))
    args.status = FAILED if result.get("disagreements") else 0  # set before printing, in case the pipe is closed
    if args.json == "-":
        print(json.dumps(result))
    else:
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
        print(text(result))
    return args.status


def measure(args: argparse.Namespace, name: str, task: "Task", contenders: tuple[str, ...], how: "How") -> dict[str, Any]:
    from tapeless.bench.measure import generation, kernels, largest, scaling, training
    from tapeless.bench.whole_run import whole_runs

    if (args.kernels or args.largest_batch) and not task.train.device.startswith("cuda"):
        raise UsageError(f"--{'kernels' if args.kernels else 'largest-batch'} needs a GPU: --device cuda")
    if args.kernels:
        return kernels(name, task, how)
    if args.largest_batch:
        return largest(name, task, contenders, how)
    if args.contenders is not None and (args.generate or args.scaling or args.whole_run):
        only = "--generate measures ours and hf, --scaling ours and the floor, --run ours"
        raise UsageError(f"--contenders is not allowed here: {only}")
    if args.whole_run:
        return whole_runs(name, task, args.steps, how)
    if args.generate:
        return generation(name, task, args.tokens, how)
    if args.scaling:
        return scaling(name, task, how)
    return training(name, task, contenders, how, cold=args.cold)
