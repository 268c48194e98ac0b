"""A kill -9 before and after every call of a run that changes its folder: each write, half-way through it too, sync, rename
and deletion of saving, rotating, logging and sampling. The run that goes on comes to the end of the one that was let be."""

import harness
from claim import Claims
from killing import kills_at_points
from training import scratch

claims = Claims("kill_points")
with scratch() as folder:
    moments, problems, writing, training = [], [], 0, 0
    for killed in kills_at_points(folder, harness.argument(10_000)):
        moments.append(killed.moment)
        writing += killed.writing
        training += killed.training
        if killed.problem:
            problems.append(f"{killed.moment}: {killed.problem}")
            print(f"      {problems[-1]}", flush=True)
    claims.check(
        f"kills -9 before and after each of {len(moments) - 1} calls that write, sync, rename or delete: the same final state",
        bound=f"{len(moments)} of {len(moments)}",
        measured=f"{len(moments) - len(problems)} of {len(moments)}",
        ok=not problems,
    )
    claims.check(
        "of these calls, those of the writer thread",
        bound="most, and the training thread runs on in some",
        measured=f"{writing} of {len(moments) - 1}, training ran on in {training}",
        ok=writing > len(moments) / 2 and training > 0,
    )
claims.finish(moments=sorted(set(moments)))
