"""Characters of Shakespeare: nanoGPT's published CPU recipe with our engine, and a preset of ours that gets there sooner.

nanoGPT itself: 1.886 over the whole validation part after 2,000 steps, 131 s in all, about 55 ms a step, measured once on a
machine of this kind (../shared/data/README.md)."""

import statistics

from claim import Claims, skip
from training import SHAKESPEARE, evaluation, load_average, scratch, steps, tapeless, train

from tapeless.training.run_dir import RunDir

RECIPE = ["--tokenizer", "char", "--vocab-size", 65, "--num-layers", 4, "--num-heads", 4, "--hidden-dim", 128]
RECIPE += ["--intermediate-dim", 512, "--max-seq-len", 64, "--norm", "layer", "--position", "learned", "--ffn", "gelu"]
RECIPE += ["--attn-bias", "--ffn-bias", "--norm-bias"]  # as in GPT-2; what they are worth: bench/results/one-off.md
RECIPE += ["--tie-embeddings", "--batch-size", 12, "--max-steps", 2000, "--lr", 1e-3, "--min-lr", 1e-4, "--warmup-steps", 100]
RECIPE += ["--beta2", 0.99, "--weight-decay", 0.1, "--eval-every", 250]
SEEDS, BOUND = (0, 1, 2), 1.90
NANOGPT_LOSS, NANOGPT_SECONDS = 1.886, 131

if not SHAKESPEARE.is_file():
    skip(f"{SHAKESPEARE} is not there")

claims = Claims("shakespeare")
rows = []
with scratch() as folder:
    run = RunDir(folder / "preset")
    done = train(run, "--preset", "shakespeare-char", "--dataset-path", SHAKESPEARE)
    preset = evaluation(run)
    load = load_average()
    claims.check(
        "preset shakespeare-char: loss over the whole validation part",
        bound=f"at most nanoGPT's {NANOGPT_LOSS}",
        measured=f"{preset['val_loss']:.4f}",
        ok=preset["val_loss"] <= NANOGPT_LOSS,
    )
    claims.check(
        "its total time, start, data, evaluations and samples included",
        bound=f"under a quarter of nanoGPT's {NANOGPT_SECONDS} s",
        measured=f"{done.seconds:.0f} s at load {load}",
        ok=done.seconds < NANOGPT_SECONDS / 4,
    )
    ours = {
        "val_loss": preset["val_loss"],
        "seconds": round(done.seconds, 1),
        "load_average": load,
        "steps": len(steps(run, "loss")),
        "milliseconds_per_step": round(1000 * statistics.median(steps(run, "step_seconds")), 1),
        "sample": tapeless("generate", run.path, "--prompt", "ROMEO:", "--max-tokens", 200, "--temperature", 0.8).output,
    }
    for seed in SEEDS:
        run = RunDir(folder / f"recipe-{seed}")
        done = train(run, *RECIPE, "--dataset-path", SHAKESPEARE, "--seed", seed)
        found = evaluation(run)
        median = round(1000 * statistics.median(steps(run, "step_seconds")), 1)
        rows.append({"seed": seed, "val_loss": found["val_loss"], "seconds": round(done.seconds, 1), "median_step_ms": median})
        print(f"      seed {seed}: {found['val_loss']:.4f}, {done.seconds:.0f} s, {median} ms a step", flush=True)
mean = statistics.mean(row["val_loss"] for row in rows)
claims.check(
    f"nanoGPT's CPU recipe: loss over the whole validation part, mean of {len(SEEDS)} seeds",
    bound=f"at most {BOUND:.2f} (nanoGPT {NANOGPT_LOSS})",
    measured=f"{mean:.4f}",
    ok=mean <= BOUND,
)
claims.finish(recipe=rows, recipe_mean=mean, preset=ours, load_average=load_average())
