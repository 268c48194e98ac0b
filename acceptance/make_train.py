"""`make train`, once everything is installed: `tapeless train new` without a flag, within about two minutes on two cores."""

import os
import statistics
import subprocess
import sys
import time

from claim import Claims
from training import command, environment, evaluation, load_average, of_kind, scratch, steps

from tapeless.training.run_dir import RunDir

SECONDS = 120
SHARE = 0.85  # "clearly below" the best baseline: this share of it

claims = Claims("make_train")
with scratch() as folder:
    start = time.monotonic()
    done = subprocess.run(
        command("train", "new"), cwd=folder, env=environment(None), capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - start
    print(done.stdout[-2500:])
    if done.returncode:
        sys.exit(done.stderr)
    (path,) = (folder / "runs").iterdir()
    run = RunDir(path)
    load = load_average()
    found = evaluation(run)
    claims.check(
        f"`tapeless train new` on {os.cpu_count()} cores, start, data and gradient check included",
        bound=f"about two minutes: {SECONDS} s",
        measured=f"{seconds:.0f} s at load {load}",
        ok=seconds <= SECONDS,
    )
    names = ("uniform", "unigram", "bigram")
    claims.check(
        f"validation loss {found['val_loss']:.4f}; " + ", ".join(f"{name} {found[name]:.4f}" for name in names),
        bound=f"at most {SHARE} of the lowest",
        measured=f"{found['val_loss'] / found['bigram']:.3f} of it",
        ok=found["val_loss"] <= SHARE * min(found[name] for name in names),
    )
    samples = of_kind(run, "sample")
    saved = (run.checkpoints / "latest").is_file()
    claims.check(
        "samples and a saved run",
        bound="both",
        measured=f"{len(samples)} samples, {'saved' if saved else 'not saved'}",
        ok=bool(samples) and saved,
    )
    facts = {
        **found,
        "seconds": round(seconds, 1),
        "load_average": load,
        "steps": len(steps(run, "loss")),
        "tokens_per_second": round(statistics.median(steps(run, "tokens_per_second"))),
        "sample": samples[-1]["text"],
    }
claims.finish(**facts)
