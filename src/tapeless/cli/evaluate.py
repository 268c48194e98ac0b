"""Evaluate the model of a run on its whole validation text, or on another text.

    tapeless eval runs/default --checkpoint best
    tapeless eval runs/imported --dataset-path my.txt

Losses are in nats per token. The baselines are ln V (uniform), and unigrams and bigrams of the run's training data."""

import argparse
import json

from tapeless.cli.generate import warn
from tapeless.cli.options import add_machine_arguments, add_saved_model_arguments, machine_settings
from tapeless.errors import UsageError

HELP = "evaluate a trained model on its validation text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_saved_model_arguments(parser)
    parser.add_argument("--dataset-path", metavar="TEXT", help="evaluate on this text instead; any source of `train new`")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_machine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tapeless.data.baselines import baselines
    from tapeless.data.batches import validation_batch
    from tapeless.data.loader import IGNORED
    from tapeless.data.prepare import with_text
    from tapeless.training.evaluate import accuracy, evaluate
    from tapeless.training.runs import load

    which = {"which": args.checkpoint, "weights": args.weights, "fallback": not args.no_fallback}
    model, data, config, checkpoint = load(args.run_dir, **which, **machine_settings(args), on_warning=warn)
    if args.dataset_path:
        data = with_text(data, args.dataset_path)
    elif config.imported:
        raise UsageError(f"{args.run_dir} was imported and has no validation text; pass --dataset-path")
    starts = data.val_starts if config.train.document_attention else None
    tokens, targets, *ids = validation_batch(data, config.train.seq_len or 1, starts=starts)
    documents = ids[0] if ids else None
    found = evaluate(model, tokens, targets, data.bytes_per_token, documents=documents)
    assert found is not None
    compared = {} if config.imported else baselines(*data.counted(), data.tokenizer.vocab_size)._asdict()
    facts = {
        "step": checkpoint.state["step"],
        "tokens": int((targets != IGNORED).sum()),
        **found._asdict(),
        "accuracy": accuracy(model, tokens, targets, documents),
        **{name: float(x) for name, x in compared.items()},
        "floor": data.floor,
        "source_loss": data.source_loss(tokens, targets),
    }
    if args.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            if value is not None:
                print(
                    f"{name.replace('_', ' '):<16} {value:,}"
                    if isinstance(value, int)
                    else f"{name.replace('_', ' '):<16} {value:.4f}"
                )
    return 0
