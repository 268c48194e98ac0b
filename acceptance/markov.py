"""A source whose entropy is known: the trained model's loss beside the true source's own loss on the same tokens."""

from claim import Claims
from training import evaluation, load_average, of_kind, scratch, train

from tapeless.training.run_dir import RunDir

FLAGS = ["--corpus", "markov", "--tokenizer", "char", "--vocab-size", 64, "--num-layers", 2, "--batch-size", 16]
FLAGS += ["--max-steps", 800, "--lr", 4e-3, "--eval-every", 200]
BOUND, MINUTES = 0.01, 3

claims = Claims("markov")
with scratch() as folder:
    run = RunDir(folder / "run")
    done = train(run, *FLAGS)
    found = evaluation(run)
    gap = found["val_loss"] / found["source_loss"] - 1
    print(f"      the model's loss {found['val_loss']:.4f}, the source's own {found['source_loss']:.4f}, on the same tokens")
    print(f"      entropy rate {found['floor']:.4f}, bigram {found['bigram']:.4f}, unigram {found['unigram']:.4f}")
    claims.check(
        f"validation loss {found['val_loss']:.4f} against the true source's own {found['source_loss']:.4f} on the same "
        f"{found['tokens']:,} tokens",
        bound=f"within {100 * BOUND:.0f} %",
        measured=f"{100 * gap:+.2f} %",
        ok=abs(gap) <= BOUND,
    )
    claims.check(
        f"`tapeless train new {' '.join(map(str, FLAGS))}`, start and data included",
        bound=f"{MINUTES} minutes on 2 cores",
        measured=f"{done.seconds:.0f} s at load {load_average()}",
        ok=done.seconds <= 60 * MINUTES,
    )
    curve = [(event["step"], event["val_loss"]) for event in of_kind(run, "eval")]
claims.finish(**found, seconds=round(done.seconds, 1), load_average=load_average(), validation=curve)
