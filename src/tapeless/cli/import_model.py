"""Import a model from a Hugging Face directory as a run, for generate, eval, export and train new --init-from.

    tapeless import Qwen3-0.6B --out runs/qwen3
    tapeless generate runs/qwen3 --prompt "The "

LlamaForCausalLM, Qwen3ForCausalLM and GPT2LMHeadModel, from safetensors. No code in the directory is executed."""

import argparse
import sys
from pathlib import Path

from tapeless.cli.options import warn

HELP = "import a model from a Hugging Face directory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="DIR", type=Path, help="the directory: config.json, safetensors, tokenizer.json")
    parser.add_argument("--out", metavar="DIR", type=Path, help="the run directory; default runs/ and an unused name")
    parser.add_argument("--tokenizer", metavar="TEXT", help="bytes, or a tokenizer.json, if the directory has none")
    parser.set_defaults(run=run, waiting="importing")


def run(args: argparse.Namespace) -> int:
    from tapeless.data.files import unused_path
    from tapeless.training.imported import import_model
    from tapeless.training.summary import count

    out = args.out or unused_path(args.source.resolve().name.replace(".", "-"))
    found = import_model(args.source, out, sys.argv, tokenizer=args.tokenizer)
    for note in found.model.notes:
        warn(note)
    config, parameters = found.model.config, sum(w.numel() for w in found.model.params.values())
    print(
        f"{out}: {found.model.family.name}, {count(parameters, 'parameter')}, "
        f"{count(config.num_layers, 'layer')} of width {config.hidden_dim}, "
        f"vocabulary {config.vocab_size:,}, {config.max_seq_len:,} positions, tokenizer {found.tokenizer.kind}"
    )
    return 0
