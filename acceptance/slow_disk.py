"""Disks and memory that checkpoints in the background have to cope with: a disk slower than the interval between checkpoints,
a stop while training waits for it, a disk that is full for one checkpoint or for good, and no memory for a copy.

Each run is compared with an undisturbed one: every checkpoint that was due, its final state and its lines. What is slow or
fails are the calls of the thread that writes."""

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import harness
from claim import Claims
from forked import Child
from small_run import Said, content, new, outcome, resume
from training import of_kind, scratch
from watched_disk import Point, in_writer_thread, watched

from tapeless.training import checkpoint_writer
from tapeless.training.checkpoint import checkpoints, pointed
from tapeless.training.run_dir import RunDir

SLOW = 0.005  # seconds for each of the 30 calls or so of a checkpoint; a step takes some milliseconds
EVERY = ["--max-steps", "12", "--save-every", "1", "--keep-last", "99"]
STOPPED = 75  # exit status
NO_MEMORY = "no memory for a copy of the"
LINES = ("step", "eval", "sample", "checkpoint")

Act = Callable[[Point], None]


def slow(point: Point) -> None:
    if in_writer_thread():
        time.sleep(SLOW)


def full(first: int, last: int) -> Act:
    """No room for the tensors of the checkpoints of these steps."""

    def act(point: Point) -> None:
        found = re.search(r"step-(\d+)/\w+\.safetensors", point.name)
        if found and first <= int(found[1]) <= last and point.call == "write the rest of":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return act


def played(run: RunDir, act: Act | None = None) -> Said:
    with nullcontext() if act is None else watched(run.path, act):
        return new(run, *EVERY)


def warnings(run: RunDir) -> list[str]:
    return [event["warning"] for event in of_kind(run, "guard")]


def differences(run: RunDir, expected: RunDir) -> list[str]:
    found = [] if outcome(run, LINES) == outcome(expected, LINES) else ["another final state, or other lines"]
    return found + ([] if content(run) == content(expected) else ["other checkpoints"])


def check_stop(claims: Claims, folder: Path, expected: RunDir) -> None:
    """In processes of their own, forked while this one has computed nothing."""
    problems, seconds = [], []
    for signals, status in ((1, STOPPED), (2, -signal.SIGTERM)):
        run = RunDir(folder / f"stopped-{signals}")
        child = Child(lambda run=run: played(run, slow).status)
        while not (run.checkpoints / "latest").exists():
            time.sleep(0.002)
        asked = time.monotonic()
        for _ in range(signals):
            os.kill(child.pid, signal.SIGTERM)
            time.sleep(0.02)
        code = child.wait()
        seconds.append(time.monotonic() - asked)
        if code != status:
            problems.append(f"exit status {code} after {signals} signals")
        if signals == 1 and pointed(run.checkpoints, "latest") != of_kind(run, "step")[-1]["step"]:
            problems.append("the last step is not saved")
        if Child(lambda run=run: resume(run).status).wait():
            problems.append("the resume failed")
        problems += differences(run, expected)
    claims.check(
        "a SIGTERM while training waits for a slow disk: the step saved, exit 75; a second one ends the process at once; "
        "resumed to the same final state",
        bound="no failure",
        measured="; ".join(problems) or f"no failure, after {seconds[0]:.2f} s and {seconds[1]:.2f} s",
        ok=not problems,
    )


def check_slow(claims: Claims, folder: Path, expected: RunDir) -> None:
    run = RunDir(folder / "slow")
    said = played(run, slow)
    told, problems = warnings(run), differences(run, expected)
    slowest = of_kind(run, "time_spent")[-1]["seconds"]
    claims.check(
        f"a disk slower than the steps, a checkpoint due at each of {len(checkpoints(expected.checkpoints))} steps: every one "
        "written with the bytes of the undisturbed run; the same final state and lines",
        bound="exit 0, no difference",
        measured=f"exit {said.status}, {'; '.join(problems) or 'no difference'}; {slowest['checkpoints']:.1f} s of waiting, "
        f"{slowest['step']:.2f} s of steps",
        ok=said.status == 0 and not problems and slowest["checkpoints"] > slowest["step"],
    )
    claims.check(
        "one warning reports it, with numbers",
        bound="one warning",
        measured="; ".join(told),
        ok=len(told) == 1 and re.match(r"step \d+: training has waited \d+\.\d s for", told[0]) is not None,
    )


def check_full(claims: Claims, folder: Path, expected: RunDir) -> None:
    run = RunDir(folder / "full-once")
    said = played(run, full(5, 5))
    told = [warning for warning in warnings(run) if "training has waited" not in warning]  # of a busy machine's disk
    steps = sorted(checkpoints(run.checkpoints))
    claims.check(
        "a disk that is full for the checkpoint of step 5: a warning that names it, training continues, the next is written",
        bound="exit 0, one warning, steps 4 and 6 there, the same final state",
        measured=f"exit {said.status}, {'; '.join(told).replace(str(folder), '…')}; steps {', '.join(map(str, steps))}",
        ok=said.status == 0
        and len(told) == 1
        and "step-00000005 could not be written: No space left on device" in told[0]
        and steps == [step for step in range(1, 13) if step != 5]
        and outcome(run) == outcome(expected),
    )
    run = RunDir(folder / "full-for-good")
    said = played(run, full(10, 12))
    last = said.words.strip().splitlines()[-1].replace(str(folder), "…")
    latest = pointed(run.checkpoints, "latest")
    again = resume(run)
    claims.check(
        "a disk that is full from step 10 on: the run ends with an error about its last checkpoint, and a resume continues",
        bound="exit 1, latest is step 9, then the same final state",
        measured=f"exit {said.status}, {last}; latest is step {latest}; resume exit {again.status}",
        ok=(said.status, latest, again.status) == (1, 9, 0)
        and "error[WRITE]" in said.words
        and "step-00000012 could not be written: No space left on device" in said.words
        and not differences(run, expected),
    )


def check_memory(claims: Claims, folder: Path, expected: RunDir) -> None:
    """In processes of their own too: the log goes where the first command of a process found stderr."""

    def refused(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    ways: dict[str, AbstractContextManager[object]] = {
        "too little is free": patch.object(checkpoint_writer, "available_bytes", lambda device: 10_000),
        "the allocation fails": patch.object(checkpoint_writer, "_copy_to", refused),
    }
    for number, (way, patched) in enumerate(ways.items()):
        run, words = RunDir(folder / f"memory-{number}"), folder / f"words-{number}"

        def short_of_memory(run: RunDir = run, words: Path = words, patched: AbstractContextManager[object] = patched) -> int:
            with patched:
                said = played(run)
            words.write_text(said.words)
            return said.status

        status = Child(short_of_memory).wait()
        told, problems = words.read_text().count(NO_MEMORY), differences(run, expected)
        claims.check(
            f"no memory for a copy ({way}): said once, checkpoints are written while training waits, the same bytes",
            bound="exit 0, 1 line, no difference",
            measured=f"exit {status}, {told} line, {'; '.join(problems) or 'no difference'}",
            ok=(status, told) == (0, 1) and not problems,
        )


if __name__ == "__main__":
    harness.no_waiting_for_the_disk()
    claims = Claims("slow_disk")
    with scratch() as folder:
        expected = RunDir(folder / "undisturbed")
        if Child(lambda: played(expected).status).wait():
            raise SystemExit("the undisturbed run failed")
        check_stop(claims, folder, expected)
        check_memory(claims, folder, expected)
        check_slow(claims, folder, expected)
        check_full(claims, folder, expected)
    claims.finish()
