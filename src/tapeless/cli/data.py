"""Tokenize text once for many runs, and inspect the result.

    tapeless data prepare my.txt --out data/mine --tokenizer bpe --vocab-size 4096
    tapeless train new --dataset-path data/mine
    tapeless data info data/mine
    tapeless data sample data/mine --count 3

A source is a file, a directory or a glob of text, JSONL (each also as .gz or .zst) or Parquet, or a Hugging Face dataset."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from tapeless.cli.options import add_fields, add_plugin_argument, given
from tapeless.config import TrainConfig, checked
from tapeless.errors import ConfigError

HELP = "tokenize text for training, inspect it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    prepare = actions.add_parser("prepare", help="tokenize text", description="Tokenize text once for many runs.")
    prepare.add_argument("source", metavar="SOURCE", help="the text: any --dataset-path of `tapeless train new`")
    prepare.add_argument("--out", metavar="DIR", type=Path, required=True, help="output directory; new or empty")
    add_fields(prepare, "train", TrainConfig, only={"val_path", "text_field", "tokenizer"})
    prepare.add_argument(
        "--vocab-size", type=int, metavar="N", help="vocabulary size of a new BPE (default 4096); for others, the maximum"
    )
    prepare.add_argument("--processes", type=int, metavar="N", help="number of tokenizing processes; default: one per core")
    info = actions.add_parser("info", help="show statistics", description="Show statistics of tokens or text.")
    info.add_argument("source", metavar="SOURCE", type=Path, help="prepared data, token files, or text")
    add_fields(info, "train", TrainConfig, only={"text_field"})
    sample = actions.add_parser("sample", help="show samples as text", description="Show windows of prepared data as text.")
    sample.add_argument("source", metavar="DIR", type=Path, help="prepared data, or a run directory")
    sample.add_argument("--part", choices=("train", "val"), default="train", help="which part (default train)")
    sample.add_argument("--count", type=int, default=3, metavar="N", help="number of windows (default 3)")
    sample.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens per window (default 64)")
    sample.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds give equal windows (default 0)")
    for action in (prepare, info):
        add_plugin_argument(action)
    for action, run in ((prepare, run_prepare), (info, run_info), (sample, run_sample)):
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=run, parser=action, waiting="reading the data")


def run_prepare(args: argparse.Namespace) -> int:
    config = checked("train", {**given(args, "train"), "dataset_path": args.source}, "tapeless data prepare")
    if args.processes is not None and args.processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {args.processes}")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"--out {args.out} already exists and is not empty; choose another")

    from tapeless.data.info import prepared_info
    from tapeless.data.prepare import prepare

    try:
        data = prepare(config, args.vocab_size, args.out, processes=args.processes)
    except BaseException:  # also Ctrl-C: incomplete output would block the next attempt
        shutil.rmtree(args.out, ignore_errors=True)
        raise
    show(prepared_info(data, args.out), as_json=args.json)
    return 0


def run_info(args: argparse.Namespace) -> int:
    from tapeless.data.info import data_info

    show(data_info(args.source, text_field(args)), as_json=args.json)
    return 0


def run_sample(args: argparse.Namespace) -> int:
    if min(args.count, args.tokens) < 1:
        raise ConfigError(f"--count and --tokens must be at least 1, got {args.count} and {args.tokens}")

    from tapeless.data.info import sample_windows
    from tapeless.data.prepare import open_prepared

    windows = sample_windows(open_prepared(args.source), args.part, args.count, args.tokens, args.seed)
    print(json.dumps(windows, ensure_ascii=False) if args.json else "\n────\n".join(windows))
    return 0


def text_field(args: argparse.Namespace) -> str:
    return given(args, "train").get("text_field", TrainConfig.text_field)


def show(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        text = f"{value:,}" if type(value) is int else value
        if _three(value):
            text = f"shortest {value[0]:,}, median {value[1]:,}, longest {value[2]:,}"
        print(f"{name.replace('_', ' '):<{width}}{text}")


def _three(value: Any) -> bool:
    """Shortest, median and longest."""
    return isinstance(value, list) and len(value) == 3 and all(type(x) is int for x in value)
