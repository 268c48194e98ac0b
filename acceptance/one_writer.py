"""Several processes on one run: of those that would write one does, and the others are told who it is; those that read load
whole weights, while every step saves a checkpoint and deletes the one before."""

import harness
from claim import Claims
from rivals import readers, writers
from training import scratch

ROUNDS = harness.argument(10)
WRITERS, READERS = 6, 3

claims = Claims("one_writer")
with scratch() as folder:
    for what, act, count, words in (
        (
            "writers",
            writers,
            WRITERS,
            f"{WRITERS} resumes of a run at once: one continues, {WRITERS - 1} are refused with an error",
        ),
        (
            "readers",
            readers,
            READERS,
            f"{READERS} readers of a run that saves and deletes at every step: always complete weights",
        ),
    ):
        problems = []
        for n in range(ROUNDS):
            (place := folder / f"{what}-{n}").mkdir()
            problems += act(place, count)
        claims.check(
            f"{words}, {ROUNDS} times",
            bound="no failure",
            measured=f"{len(problems)} failures" if harness.verdict(problems, ROUNDS) and problems else "no failure",
            ok=not problems,
        )
claims.finish()
