"""Evaluate the model of a run on its whole validation text, or on another text.

    tapeless eval runs/default --checkpoint best
    tapeless eval runs/imported --dataset-path my.txt

Losses are in nats per token. The baselines are ln V (uniform), and unigrams and bigrams of the run's training data."""

import argparse
import json

from tapeless.cli.options import add_machine_arguments, add_saved_model_arguments, load_settings, warn
from tapeless.errors import UsageError
from tapeless.progress import LOADING, busy

HELP = "evaluate a trained model on its validation text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_saved_model_arguments(parser)
    parser.add_argument("--dataset-path", metavar="TEXT", help="evaluate on this text instead; any source of `train new`")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_machine_arguments(parser)
    parser.set_defaults(run=run, waiting=LOADING)


def run(args: argparse.Namespace) -> int:
    from tapeless.data.loader import validation_set
    from tapeless.data.prepare import with_text
    from tapeless.training.evaluate import accuracy, evaluate
    from tapeless.training.runs import load

    with busy(f"loading {args.run_dir}"):
        model, data, config, checkpoint = load(args.run_dir, **load_settings(args), on_warning=warn)
    if args.dataset_path:
        data = with_text(data, args.dataset_path)
    elif config.imported:
        raise UsageError(f"{args.run_dir} was imported and has no validation text; pass --dataset-path")
    starts = data.val_starts if config.train.document_attention else None
    windows = validation_set(data, config.train.seq_len or 1, starts=starts)
    with busy("evaluating on the whole validation text"):
        found = evaluate(model, windows, data.bytes_per_token)
        assert found is not None
        share, num_targets = accuracy(model, windows)
    facts = {
        "step": checkpoint.state["step"],
        "tokens": num_targets,
        **found._asdict(),
        "accuracy": share,
        **({} if config.imported else data.baselines()._asdict()),
        "floor": data.floor,
        "source_loss": data.source_loss(windows),
    }
    if args.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            if value is not None:
                print(f"{name.replace('_', ' '):<16} {value:{',' if isinstance(value, int) else '.4f'}}")
    return 0
