"""Every call of a run that changes its folder fails once, by ENOSPC, EIO and EROFS; and a disk that stays full from any of
them on. The checkpoints stay whole, nobody sees a traceback, and the run comes to the end of the unbroken one.

The run saves, rotates, evaluates, marks its best and samples; its calls are those of its whole life, from the first folder to
the last line of metrics.jsonl. What ends it is told by name and reason; then the same command, or a resume, goes on."""

import errno
import shutil

import harness
from claim import Claims
from failing_writes import points_of, survive, unbroken
from training import scratch
from watched_disk import Point

from tapeless.training.run_dir import RunDir

WAYS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}

harness.no_waiting_for_the_disk()
claims = Claims("failing_disk")
with scratch() as folder:
    expected = unbroken(folder)
    points = points_of(RunDir(folder / "points"))
    chosen = points[:: max(1, len(points) // harness.argument(len(points)))]
    run = RunDir(folder / "run")
    ended: dict[str, int] = {}
    writing: set[Point] = set()  # calls that failed in the writer thread

    def all_of(name: str, number: int, *, lasting: bool) -> list[str]:
        problems = []
        for point in chosen:
            found = survive(run, expected, point, number, lasting=lasting)
            if found.point != point or found.problems:
                problems.append(f"{name} at {point}: {'; '.join(found.problems) or 'never came'}")
            writing.update([point] if found.writing else [])
            ended[name] = ended.get(name, 0) + (found.status != 0)
            shutil.rmtree(run.path, ignore_errors=True)
        return problems

    for name, number in WAYS.items():
        problems = all_of(name, number, lasting=False)
        claims.check(
            f"each of {len(points)} calls of a run fails once with {name}: checkpoints intact, no traceback, same final state",
            bound=f"{len(chosen)} of {len(chosen)}",
            measured=f"{harness.verdict(problems, len(chosen))}, {len(chosen) - ended[name]} without ending the run",
            ok=not problems,
        )
    problems = all_of("a full disk", errno.ENOSPC, lasting=True)
    claims.check(
        f"the disk is full from any of the {len(points)} calls on: checkpoints intact, no traceback, resume to the same final "
        "state",
        bound=f"{len(chosen)} of {len(chosen)}",
        measured=harness.verdict(problems, len(chosen)),
        ok=not problems,
    )
    claims.check(
        "of these calls, those of the writer thread, whose failure training learns later",
        bound="most",
        measured=f"{len(writing)} of {len(chosen)}",
        ok=len(writing) > len(chosen) / 2,
    )
claims.finish(calls=sorted({str(point) for point in points}), ended=ended)
