"""Merge the adapters of a run into their base model; the result is a run like an imported one.

    tapeless train new --init-from runs/imported --lora-rank 8 --dataset-path my.jsonl --out-dir runs/adapted
    tapeless merge runs/adapted --out runs/merged

generate, eval and export also accept a run with adapters, and merge them on loading; the merged run does not need its base."""

import argparse
import sys
from pathlib import Path

from tapeless.cli.options import add_checkpoint_argument, add_run_argument, warn
from tapeless.errors import ConfigError

HELP = "merge LoRA adapters into their base model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the directory of the merged run")
    add_checkpoint_argument(parser)
    parser.set_defaults(run=run, waiting="merging")


def run(args: argparse.Namespace) -> int:
    from tapeless.config import ModelConfig
    from tapeless.data.chat import read_template
    from tapeless.data.tokenizer import load_tokenizer
    from tapeless.training.imported import generation_of, write_run
    from tapeless.training.run_dir import RunDir
    from tapeless.training.runs import load_weights, usable_config

    run = RunDir.open(args.run_dir)
    config = usable_config(run)
    if config.train.lora is None:
        raise ConfigError(f"{run.path} has no adapters: its checkpoints hold the model itself")
    assert isinstance(config.model, ModelConfig)
    checkpoint = load_weights(run, which=args.checkpoint, on_warning=warn)
    tokenizer = load_tokenizer(run.tokenizer)
    write_run(args.out, config.model, checkpoint.params, tokenizer, generation_of(run), read_template(run.path), sys.argv)
    print(f"{args.out}: step {checkpoint.state['step']:,} of {run.path}, adapters of rank {config.train.lora_rank} merged")
    return 0
