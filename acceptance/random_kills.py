"""Five hundred kills -9 at random moments of runs of several kinds, each run killed and gone on with until it is through: the
final hashes and every line of the metrics are those of the run that was let be. A tenth of the kills at least find the writer
thread in the middle of a checkpoint.

acceptance/torture.py kills every command that writes; this one also counts which kills found that thread at work while
training ran on."""

import harness
from claim import Claims
from killing import KINDS, random_kills
from training import scratch

KILLS = harness.argument(500)
SEED = 500

claims = Claims("random_kills")
with scratch() as folder:
    ended = []
    for run in random_kills(folder, KILLS, SEED):
        ended.append(run)
        print(
            f"      {run.kind}: {run.kills} kills, {run.writing} writing, {'equal' if run.equal else 'DIFFERENT'}", flush=True
        )
    kills, equal = sum(run.kills for run in ended), sum(run.equal for run in ended)
    claims.check(
        f"{KILLS} kills -9 at random moments over {len(ended)} runs ({', '.join(KINDS)}): every final hash equal to that of "
        "the uninterrupted run, every metrics line once",
        bound=f"{KILLS} kills, {len(ended)} of {len(ended)} equal",
        measured=f"{kills} kills, {equal} of {len(ended)} equal",
        ok=kills == KILLS and equal == len(ended),
    )
    writing, training = sum(run.writing for run in ended), sum(run.training for run in ended)
    claims.check(
        "of these kills, how many came while the writer thread was writing, rotating or deleting",
        bound=f"at least {KILLS // 10}",
        measured=f"{writing}, {training} of them while training ran on",
        ok=writing >= KILLS // 10 and training > 0,
    )
claims.finish(
    kinds={
        kind: {
            "runs": len(runs := [run for run in ended if run.kind == kind]),
            **{name: sum(getattr(run, name) for run in runs) for name in ("kills", "writing", "training", "equal")},
        }
        for kind in KINDS
    }
)
