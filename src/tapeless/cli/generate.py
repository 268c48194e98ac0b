"""Continue a text with the model of a run.

    tapeless generate runs/default --prompt "def main(" --max-tokens 200 --temperature 0.7 --top-k 40

The same seed gives the same text, whatever the number of samples."""

import argparse
import json

from tapeless.cli.options import add_fields, add_machine_arguments, add_saved_model_arguments, given, load_settings, warn
from tapeless.config import Sampling
from tapeless.errors import UsageError
from tapeless.progress import LOADING, busy

HELP = "continue a text with a trained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_saved_model_arguments(parser)
    words = "the text to continue; default: the first token of the validation text"
    parser.add_argument("--prompt", default="", metavar="TEXT", help=words)
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to add (default 200)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="number of texts (default 1)")
    parser.add_argument("--json", action="store_true", help="print the samples as JSON")
    add_fields(parser.add_argument_group("sampling"), "sampling", Sampling)
    add_machine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with busy(LOADING):
        from tapeless.generate.engine import generate
        from tapeless.training.imported import generation_of
        from tapeless.training.run_dir import RunDir
        from tapeless.training.runs import load

    with busy(f"loading {args.run_dir}"):
        model, data, *_ = load(args.run_dir, **load_settings(args), on_warning=warn)
    tokenizer, generation = data.tokenizer, generation_of(RunDir(args.run_dir))
    prompt = [int(i) for i in (tokenizer.encode_prompt(args.prompt) if args.prompt else data.beginning())]
    if not prompt:
        raise UsageError(f"{args.run_dir} was imported and has no text to start from; pass --prompt")
    stream = None if args.json or args.num_samples > 1 else tokenizer.stream()
    # The first two tokens wait for kernels to be compiled, and a line about that would be in the middle of the text.
    text: list[str] = [] if stream is None else [stream.push(token) for token in prompt]
    held = len(prompt) + 1

    def show(piece: str) -> None:
        nonlocal held
        text.append(piece)
        if len(text) > held:
            print("".join(text), end="", flush=True)
            text.clear()
            held = 0

    late: list[str] = []  # warnings, printed after the text that is being streamed
    samples = generate(
        model,
        prompt,
        max_tokens=args.max_tokens,
        num_samples=args.num_samples,
        sampling=Sampling(**{**generation.non_default(), **given(args, "sampling")}),
        vocab_size=tokenizer.vocab_size,
        stop=generation.eos_ids,
        on_token=None if stream is None else lambda _, token: show(stream.push(token)),
        on_warning=late.append if stream is not None else warn,
    )
    texts = [tokenizer.decode([*prompt, *ids]) for ids in samples]
    if args.json:
        print(json.dumps({"prompt": args.prompt, "samples": texts}))
    elif stream is not None:
        print("".join(text) + stream.finish(), flush=True)
        for warning in late:
            warn(warning)
    else:
        print("\n\n".join(f"--- sample {i + 1}\n{sample}" for i, sample in enumerate(texts)))
    return 0
