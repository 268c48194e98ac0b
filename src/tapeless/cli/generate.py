"""Continue a text with the model of a run.

    tapeless generate runs/default --prompt "def main(" --max-tokens 200 --temperature 0.7 --top-k 40

It ends at the end of text of the model, at --stop, or after --max-tokens. The same seed gives the same text, whatever the
number of samples."""

import argparse
import json
from itertools import chain, islice
from typing import Any

from tapeless.cli.options import (
    add_fields,
    add_machine_arguments,
    add_saved_model_arguments,
    add_stop_argument,
    given,
    load_settings,
    warn,
)
from tapeless.config import MAX_TOKENS, Sampling, require
from tapeless.errors import UsageError
from tapeless.progress import LOADING, busy

HELP = "continue a text with a trained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_saved_model_arguments(parser)
    words = "the text to continue; default: the first token of the validation text"
    parser.add_argument("--prompt", default="", metavar="TEXT", help=words)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"tokens to add (default {MAX_TOKENS})")
    add_stop_argument(parser)
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="number of texts (default 1)")
    parser.add_argument("--json", action="store_true", help="print the samples as JSON")
    add_fields(parser.add_argument_group("sampling"), "sampling", Sampling)
    add_machine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with busy(LOADING):
        from tapeless.generate.engine import SLOTS, Engine
        from tapeless.generate.text import TextStream
        from tapeless.training.imported import generation_of
        from tapeless.training.run_dir import RunDir
        from tapeless.training.runs import load

    require(args.num_samples >= 1, "num_samples", "at least 1", args.num_samples)
    with busy(f"loading {args.run_dir}"):
        model, data, *_ = load(args.run_dir, **load_settings(args), on_warning=warn)
    tokenizer, generation = data.tokenizer, generation_of(RunDir(args.run_dir), data.tokenizer)
    prompt = [int(i) for i in (tokenizer.encode_prompt(args.prompt) if args.prompt else data.beginning())]
    if not prompt:
        raise UsageError(f"{args.run_dir} was imported and has no text to start from; pass --prompt")
    late: list[str] = []  # warnings, printed after the text that is being streamed
    slots, capacity = min(args.num_samples, SLOTS), len(prompt) + args.max_tokens
    engine = Engine(model, slots=slots, capacity=capacity, vocab_size=tokenizer.vocab_size, on_warning=late.append)
    sampling = Sampling(**{**generation.non_default(), **given(args, "sampling")})
    options: dict[str, Any] = {"max_tokens": args.max_tokens, "sampling": sampling, "stop": generation.eos_ids}
    streams = [engine.submit(prompt, **options, sample=i) for i in range(args.num_samples)]
    texts = [TextStream(stream, tokenizer, prompt, args.stop) for stream in streams]
    if args.json:
        samples = ["".join([text.prompt, *text]) for text in texts]
        print(json.dumps({"prompt": args.prompt, "samples": samples, "finish_reasons": [text.finish_reason for text in texts]}))
    else:
        for i, text in enumerate(texts):  # all run at once; what the later ones have is printed when it is their turn
            # The first two pieces wait for kernels to be compiled, and a line about that would be in the middle of the text.
            first = [text.prompt, *islice(text, 2)]
            if args.num_samples > 1:
                print(f"{chr(10) if i else ''}--- sample {i + 1}")
            for piece in chain(["".join(first)], text):
                print(piece, end="", flush=True)
            print(flush=True)
    for words in late:
        warn(words)
    return 0
