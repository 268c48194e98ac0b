"""Train a tokenizer, or inspect one.

    tapeless tokenizer train my.txt --out tokenizer.json --vocab-size 4096
    tapeless tokenizer info tokenizer.json --text my.txt
    tapeless train new --dataset-path my.txt --tokenizer tokenizer.json

The format is that of Hugging Face `tokenizers`."""

import argparse
from pathlib import Path

from tapeless.cli.data import show, text_field
from tapeless.cli.options import add_fields, add_plugin_argument
from tapeless.config import TOKENIZERS, TRAINED_TOKENIZERS, TrainConfig
from tapeless.errors import ConfigError

HELP = "train a tokenizer, inspect one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = actions.add_parser("train", help="train one on text", description="Train a tokenizer and write tokenizer.json.")
    train.add_argument("source", metavar="SOURCE", help="the text: any --dataset-path of `tapeless train new`")
    train.add_argument("--out", metavar="FILE", type=Path, required=True, help="the tokenizer.json to write")
    train.add_argument("--kind", choices=TOKENIZERS, default="bpe", help=f"{', '.join(TOKENIZERS)} (default bpe)")
    train.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary size of a bpe (default 4096)")
    add_fields(train, "train", TrainConfig, only={"text_field"})
    info = actions.add_parser("info", help="show one", description="Show a tokenizer, and its compression of a text.")
    info.add_argument("tokenizer", metavar="TOKENIZER", help="a tokenizer.json, bytes, or bytes+chat")
    info.add_argument("--text", metavar="SOURCE", help="a text to tokenize with it")
    add_fields(info, "train", TrainConfig, only={"text_field"})
    for action, run, waiting in ((train, run_train, "training a tokenizer"), (info, run_info, "tokenizing")):
        add_plugin_argument(action)
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=run, parser=action, waiting=waiting)


def run_train(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ConfigError(f"--out {args.out} already exists; choose another")

    from tapeless.data.info import text_info, tokenizer_info
    from tapeless.data.read import read_chunks
    from tapeless.data.split import index_documents
    from tapeless.data.tokenizer import make_tokenizer

    field = text_field(args)
    index_documents(read_chunks(args.source, field), args.source)  # raises for an empty source
    tokenizer = make_tokenizer(args.kind, (chunk.text for chunk in read_chunks(args.source, field)), args.vocab_size)
    tokenizer.save(args.out)
    facts = tokenizer_info(tokenizer) | {"text": args.source} | text_info(tokenizer, read_chunks(args.source, field))
    show(facts, as_json=args.json)
    return 0


def run_info(args: argparse.Namespace) -> int:
    from tapeless.data.info import text_info, tokenizer_info
    from tapeless.data.read import read_chunks
    from tapeless.data.tokenizer import load_tokenizer, make_tokenizer

    kind = args.tokenizer
    tokenizer = load_tokenizer(Path(kind)) if kind in TRAINED_TOKENIZERS else make_tokenizer(kind, (), None)
    facts = tokenizer_info(tokenizer)
    if args.text is not None:
        facts |= {"text": args.text} | text_info(tokenizer, read_chunks(args.text, text_field(args)))
    show(facts, as_json=args.json)
    return 0
