"""SimpleLM sees one byte and predicts the next: trained, it must be about as good as counting pairs, and no better."""

from claim import Claims
from training import evaluation, load_average, scratch, steps, tapeless, train

from tapeless.training.run_dir import RunDir

STEPS, LENGTH, LR = 2000, 32, 1e-3
PROMPTS = ["def ", "import ", "    return "]
BOUND = 0.05

claims = Claims("simplelm_training")
with scratch() as folder:
    run = RunDir(folder / "run")
    done = train(run, "--preset", "simplelm", "--max-steps", STEPS, "--seq-len", LENGTH, "--lr", LR, "--eval-every", 0)
    found = evaluation(run)
    gap = found["val_loss"] / found["bigram"] - 1
    claims.check(
        f"simplelm, {STEPS:,} steps of length {LENGTH}, lr {LR}: validation loss {found['val_loss']:.4f} against the data's "
        f"bigram entropy {found['bigram']:.4f}",
        bound=f"within {100 * BOUND:.0f} %",
        measured=f"{100 * gap:+.2f} %",
        ok=abs(gap) <= BOUND,
    )
    samples = {}
    for prompt in PROMPTS:
        said = tapeless("generate", run.path, "--prompt", prompt, "--max-tokens", 60, "--temperature", 0.7)
        samples[prompt] = said.output
        claims.check(
            f"generation from the prompt {prompt!r}",
            bound="exit 0, the prompt continued",
            measured=repr(said.output[:50]),
            ok=said.code == 0 and said.output.startswith(prompt) and len(said.output) > len(prompt) + 30,
        )
    losses = steps(run, "loss")
claims.finish(
    val_loss=found["val_loss"],
    bigram=found["bigram"],
    unigram=found["unigram"],
    uniform=found["uniform"],
    first_loss=losses[0],
    samples=samples,
    seconds=round(done.seconds, 1),
    load_average=load_average(),
)
