"""Two thousand damaged checkpoints: cut short, flipped, overwritten, swapped, missing, stale, the name in `latest` too. Each is
found and named, `--no-fallback` refuses it, otherwise what is loaded is a whole checkpoint, and the damaged one stays as it is.
Every tenth goes through `tapeless train resume`, to the same end as the run that was let be.

One kind cannot be refused: a `latest` that names an older checkpoint which is whole. It decides, aloud, and costs steps."""

import shutil
from collections import Counter

import harness
from claim import Claims
from damage import damage, good_files, problems
from small_run import new, outcome, resume
from training import scratch

from tapeless.training.run_dir import RunDir

CASES = harness.argument(2000)
RESUMED = max(1, CASES // 10)

harness.no_waiting_for_the_disk()
claims = Claims("corruptions")
kinds: Counter[str] = Counter()
with scratch() as folder:
    whole = RunDir(folder / "whole")
    if (said := new(whole, "--keep-last", "9")).status:
        raise SystemExit(said.words)
    good = good_files(whole.checkpoints)

    found = []
    copy = folder / "copy"
    for number in range(CASES):
        shutil.copytree(whole.checkpoints, copy)
        case = damage(copy, number)
        kinds[case.named] += 1
        try:
            wrong = problems(copy, case, good)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        found += [f"case {number}, {case.words}: {'; '.join(wrong)}"] if wrong else []
        shutil.rmtree(copy)
    claims.check(
        f"{CASES:,} damaged checkpoints: detected, named, refused or skipped, left unchanged, never a traceback",
        bound=f"{CASES} of {CASES}",
        measured=harness.verdict(found, CASES),
        ok=not found,
    )

    found, end = [], outcome(whole)
    for number in range(CASES, CASES + RESUMED):
        run = RunDir(shutil.copytree(whole.path, folder / "run"))
        case = damage(run.checkpoints, number)
        said = resume(run)
        if said.status or "warning: " not in said.words or outcome(run) != end:
            found.append(f"case {number}, {case.words}: exit status {said.status}: {said.words}")
        shutil.rmtree(run.path)
    claims.check(
        f"{RESUMED} more, through `train resume`: a warning, and the final state of the uninterrupted run",
        bound=f"{RESUMED} of {RESUMED}",
        measured=harness.verdict(found, RESUMED),
        ok=not found,
    )
claims.finish(cases_by_what_is_named=dict(kinds))
