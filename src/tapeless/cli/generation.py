"""What `generate` and `chat` share: their flags, the model they load, and how a text is printed while it is generated.
Tested by: tests/cli/test_generate.py, tests/cli/test_chat.py."""

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tapeless.cli.options import (
    add_fields,
    add_machine_arguments,
    add_saved_model_arguments,
    given,
    load_settings,
    warn,
)
from tapeless.config import Sampling
from tapeless.progress import LOADING, busy

if TYPE_CHECKING:
    from tapeless.data.prepare import Dataset


class Loaded(NamedTuple):
    model: Any
    data: "Dataset"
    eos_ids: tuple[int, ...]
    sampling: Sampling  # the model's own, changed by flags


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    add_saved_model_arguments(parser)
    words = "end the text before this string; may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=words)
    add_fields(parser.add_argument_group("sampling"), "sampling", Sampling)
    add_machine_arguments(parser)


def load_generator(args: argparse.Namespace) -> Loaded:
    with busy(LOADING):
        from tapeless.training.imported import generation_of
        from tapeless.training.run_dir import RunDir
        from tapeless.training.runs import load

    with busy(f"loading {args.run_dir}"):
        model, data, *_ = load(args.run_dir, **load_settings(args), on_warning=warn)
    generation = generation_of(RunDir(args.run_dir), data.tokenizer)
    sampling = Sampling(**{**generation.non_default(), **given(args, "sampling")})
    return Loaded(model, data, generation.eos_ids, sampling)


def print_stream(pieces: Iterator[str], *, before: str = "") -> None:
    """The first two pieces wait for kernels to be compiled, and a line about that would be in the middle of the text."""
    with busy("generating"):
        begin = before + "".join(islice(pieces, 2))
    print(begin, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
