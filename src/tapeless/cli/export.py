"""Export the model of a run for transformers (hf) or llama.cpp (gguf).

    tapeless export runs/default --to hf --out my-model
    tapeless export runs/default --to gguf --dtype q8_0

The tokenizer is exported too, with its special tokens and the chat template. An architecture that the target does not support
is an error that names the nearest one."""

import argparse
import re
from pathlib import Path

from tapeless.cli.options import add_ops_and_threads, add_saved_model_arguments, warn
from tapeless.errors import ConfigError, InputError, UsageError

HELP = "export a model for transformers or llama.cpp"
SHARD = "5GB"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_saved_model_arguments(parser)
    parser.add_argument("--to", required=True, choices=("hf", "gguf"), help="a Hugging Face directory, or a GGUF file")
    parser.add_argument("--out", metavar="PATH", type=Path, help="the directory or file; default inside the run directory")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float16", "bfloat16", "q8_0"),
        help="dtype of the matrices in the file; q8_0 (GGUF only): 8 bits with a scale for every 32 values (default float32)",
    )
    parser.add_argument("--shard-size", metavar="SIZE", help=f"hf: the largest file, such as 500MB (default {SHARD})")
    group = parser.add_argument_group("machine", "where the model is loaded: its logits must be finite, or it is not exported")
    group.add_argument("--device", metavar="TEXT", default="cpu", help="cpu, cuda, mps (default cpu)")
    add_ops_and_threads(group, ops="reference")
    parser.set_defaults(run=run, waiting="exporting")


def run(args: argparse.Namespace) -> int:
    shard_bytes = size_in_bytes(args.shard_size or SHARD)
    if args.shard_size and args.to == "gguf":
        raise UsageError("--shard-size is for a Hugging Face directory; a GGUF is one file: leave it out")

    import torch

    from tapeless.config import ModelConfig
    from tapeless.data.chat import read_template
    from tapeless.data.tokenizer import load_tokenizer
    from tapeless.interop.families import family_of
    from tapeless.interop.gguf_export import export_gguf
    from tapeless.interop.hf_export import export_hugging_face
    from tapeless.training.imported import generation_of
    from tapeless.training.process import num_threads
    from tapeless.training.run_dir import RunDir
    from tapeless.training.runs import inference_model, load_weights, select_weights, usable_config

    run = RunDir.open(args.run_dir)
    config = usable_config(run).model
    family = family_of(config)
    assert isinstance(config, ModelConfig)
    tokenizer, generation, template = load_tokenizer(run.tokenizer), generation_of(run), read_template(run.path)
    with num_threads(args.threads):
        checkpoint = load_weights(run, which=args.checkpoint, fallback=not args.no_fallback, on_warning=warn)
        params = select_weights(checkpoint, args.weights)
        model = inference_model(config, params, checkpoint.path, device=args.device, ops=args.ops)
        exported = config, model.params, tokenizer, generation
        if not torch.isfinite(model.logits(torch.tensor([[0]], device=model.device))).all():
            raise InputError(f"{checkpoint.path}: not exported, its logits are not finite on {model.device}, ops {args.ops}")
        if args.to == "hf":
            if args.dtype == "q8_0":
                raise ConfigError("q8_0 exists in GGUF only; use --to gguf, or another --dtype")
            out = args.out or run.path / "hf"
            notes = export_hugging_face(out, *exported, chat_template=template, dtype=args.dtype, shard_bytes=shard_bytes)
        else:
            out = args.out or run.path / f"{run.path.resolve().name}-{args.dtype}.gguf"
            notes = export_gguf(out, *exported, chat_template=template, dtype=args.dtype)
    for note in notes:
        warn(note)
    print(f"{out}: {family.name}, {args.dtype}, step {checkpoint.state['step']:,}")
    return 0


def size_in_bytes(text: str) -> int:
    """`500MB` in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)", text.strip(), re.I)
    if not found or not (size := int(float(found[1]) * UNITS[found[2].upper()])):
        raise UsageError(f"--shard-size {text}: expected a size such as 500MB or 5GB")
    return size
