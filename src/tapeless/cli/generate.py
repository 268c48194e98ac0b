"""Continue a text with the model of a run.

    tapeless generate runs/default --prompt "def main(" --max-tokens 200 --temperature 0.7 --top-k 40

It ends at the end of text of the model, at --stop, or after --max-tokens. The same seed gives the same text, whatever the
number of samples."""

import argparse
import json
from typing import Any

from tapeless.cli.generation import add_generation_arguments, load_generator, print_stream
from tapeless.cli.options import warn
from tapeless.config import MAX_TOKENS, require
from tapeless.errors import UsageError

HELP = "continue a text with a trained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_generation_arguments(parser)
    words = "the text to continue; default: the first token of the validation text"
    parser.add_argument("--prompt", default="", metavar="TEXT", help=words)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"tokens to add (default {MAX_TOKENS})")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="number of texts (default 1)")
    parser.add_argument("--json", action="store_true", help="print the samples as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require(args.num_samples >= 1, "num_samples", "at least 1", args.num_samples)
    model, data, eos_ids, sampling = load_generator(args)
    from tapeless.generate.engine import SLOTS, Engine
    from tapeless.generate.text import TextStream

    tokenizer = data.tokenizer
    prompt = [int(i) for i in (tokenizer.encode_prompt(args.prompt) if args.prompt else data.beginning())]
    if not prompt:
        raise UsageError(f"{args.run_dir} was imported and has no text to start from; pass --prompt")
    late: list[str] = []  # warnings, printed after the text that is being streamed
    slots, capacity = min(args.num_samples, SLOTS), len(prompt) + args.max_tokens
    engine = Engine(model, slots=slots, capacity=capacity, vocab_size=tokenizer.vocab_size, on_warning=late.append)
    options: dict[str, Any] = {"max_tokens": args.max_tokens, "sampling": sampling, "stop": eos_ids}
    streams = [engine.submit(prompt, **options, sample=i) for i in range(args.num_samples)]
    texts = [TextStream(stream, tokenizer, prompt, args.stop) for stream in streams]
    if args.json:
        samples = ["".join([text.prompt, *text]) for text in texts]
        print(json.dumps({"prompt": args.prompt, "samples": samples, "finish_reasons": [text.finish_reason for text in texts]}))
    else:
        for i, text in enumerate(texts):  # all run at once; what the later ones have is printed when it is their turn
            title = f"{chr(10) if i else ''}--- sample {i + 1}\n" if args.num_samples > 1 else ""
            print_stream(text, before=title + text.prompt)
    for words in late:
        warn(words)
    return 0
