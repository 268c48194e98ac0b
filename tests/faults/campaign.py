"""Kills, failing calls, damage and fuzzing of everything that writes and reads, in parts that may each be run alone:

    python tests/faults/campaign.py 0.01 kills failures     a hundredth of what `make torture` does

`make torture` runs all of it for hours and stores what it found (acceptance/torture.py); the suite runs a fixed share."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import ANY

import syscalls
from damage import damage, good_files
from damage import problems as damage_problems
from forked import Child
from fuzz import Outcome, fuzz, prepare_subjects, real_commands
from mutators import cut_off, exchange, flip_bits, put_in
from run_fixtures import text_file
from small_run import FLAGS, content, new, outcome, resume
from syscalls import FAIL, WAYS, Way
from writers import (
    LONG_RUNS,
    SAID,
    WRITERS,
    Writer,
    command,
    difference,
    fresh,
    killed,
    prepare_inputs,
    survives,
    to_the_end,
    undisturbed,
)

from tapeless.training.run_dir import RunDir

SEED = 19
KILLS, FUZZED, REAL, DAMAGED, COLD, SOAK = 1000, 100_000, 500, 2000, 8, 1800.0  # at size 1; SOAK: seconds


class Part(NamedTuple):
    """What a part did and what it found."""

    what: str
    cases: int
    problems: list[str]
    counts: dict[str, int] = {}  # noqa: RUF012


class Progress:
    """A line every ten seconds, so that hours are not silent."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done, self.found, self.last = what, total, 0, 0, time.monotonic()

    def __call__(self, problems: list[str]) -> None:
        self.done, self.found = self.done + 1, self.found + bool(problems)
        for problem in problems:
            print(f"      {problem}"[:600], flush=True)
        if time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            print(f"      {self.what}: {self.done:,} of {self.total:,}, {self.found} problems", flush=True)


def scaled(count: int, size: float) -> int:
    return max(1, round(count * size))


def kills(folder: Path, size: float, writers: Mapping[str, Writer] = WRITERS | LONG_RUNS) -> Iterator[Part]:
    """At random moments of every command that writes, and of trainings of every kind, each command until it is through."""
    inputs, case, draw, count = folder / "inputs", folder / "case", random.Random(SEED), scaled(KILLS, size)
    progress, problems, blocked, by_command = Progress("kills", count), [], [], Counter[str]()
    healthy: dict[str, tuple[Any, float]] = {}
    left, order = count, list(writers)
    draw.shuffle(order)
    while left > 0:
        for name in order if left > 0 else []:
            if name not in healthy:
                expected, _, _ = undisturbed(writers[name], inputs, case)  # the first time a model is computed takes longer
                _, _, seconds = undisturbed(writers[name], inputs, case)
                healthy[name] = expected, seconds
            expected, seconds = healthy[name]
            ended, writing = killed(writers[name], inputs, case, expected, draw, seconds, left)
            found = [f"{name}, killed {ended.kills} times: {problem}" for problem in ended.problems]
            problems += found
            blocked += [name] if ended.in_the_way else []
            by_command[name] += ended.kills
            by_command["while a checkpoint was written"] += writing
            left -= ended.kills
            progress(found)
            if left <= 0:
                break
    yield Part(
        "kills -9 at random moments of commands that write: the result of the undisturbed one", count, problems, by_command
    )
    yield Part("after them the same command continues, or says how to: nothing has to be removed by hand", count, blocked)


def failures(folder: Path, size: float, writers: Mapping[str, Writer] = WRITERS) -> Iterator[Part]:
    """Every call on files of every command that writes, or a share of them, in every way that applies to it."""
    inputs, case, draw = folder / "inputs", folder / "case", random.Random(SEED)
    for name, writer in writers.items():
        expected, points, _ = undisturbed(writer, inputs, case)
        cases = [
            (label, point)
            for label, way in WAYS.items()
            for point in points
            if way.applies_to(point) and not (way.lasting and point.name == SAID)
        ]
        chosen = draw.sample(cases, round(len(cases) * size))
        progress, problems, streams, blocked, absent = Progress(name, len(chosen)), [], [], [], 0
        for label, point in chosen:
            ended = survives(writer, inputs, case, expected, WAYS[label], point)
            found = [f"{name}: {label} at {point}: {problem}" for problem in ended.problems]
            (streams if point.name == SAID else problems).extend(found)
            blocked += [f"{label} at {point}"] if ended.in_the_way else []
            absent += not ended.happened
            progress(found)
        calls = sum(point.name != SAID for _, point in chosen)
        about = f"of the {len(points)} calls on files of `{name}`"
        counts = {"points": len(points), "never came": absent}
        yield Part(
            f"{about}, failing ones: one line of error at most, no traceback, then the same result", calls, problems, counts
        )
        yield Part(f"{about}, failing ones of its output: the same", len(chosen) - calls, streams)
        yield Part(f"{about}: after a failure nothing has to be removed by hand", len(chosen), blocked)


def share(folder: Path, size: float) -> Iterator[Part]:
    """What the suite runs."""
    few = {name: WRITERS[name] for name in ("train new", "train resume", "export", "import")}
    yield from kills(folder, size, few)
    yield from failures(folder, size, few)


def damaged(folder: Path, size: float) -> Iterator[Part]:
    """Checkpoints that are not what was written: found, named, survived, left as they are. In a process that computes."""
    count, results = scaled(DAMAGED, size), folder / "damaged"

    def work() -> int:
        os.fsync = lambda descriptor: None
        whole, copy, problems = RunDir(folder / "whole-run"), folder / "copy", []
        assert new(whole, "--keep-last", "9").status == 0
        good, end = good_files(whole.checkpoints), outcome(whole)
        for number in range(count):
            run = RunDir(shutil.copytree(whole.path, copy))
            case = damage(run.checkpoints, number)
            try:
                wrong = damage_problems(run.checkpoints, case, good)
                if number % 10 == 0 and not wrong:
                    said = resume(run)
                    if said.status or "warning: " not in said.words or outcome(run) != end:
                        wrong = [f"resumed: exit status {said.status}: {said.words}"]
            except Exception as error:
                wrong = [f"{type(error).__name__}: {error}"]
            problems += [f"case {number}, {case.words}: {'; '.join(wrong)}"] if wrong else []
            shutil.rmtree(copy)
        results.write_text("\n".join(problems))
        return 0

    status = Child(work, folder / SAID).wait()
    problems = results.read_text().splitlines() if not status else [f"exit status {status}: {(folder / SAID).read_text()}"]
    yield Part("damaged checkpoints: detected, named, refused or skipped, left unchanged; each tenth resumed", count, problems)


def fuzzed(folder: Path, size: float) -> Iterator[Part]:
    count, real = scaled(FUZZED, size), scaled(REAL, size)
    prepare_subjects(folder)
    yield _judged("mutated files in process: an error code or a correct result, within 10 s", count, fuzz(folder, range(count)))
    numbers = range(0, count, max(1, count // real))[:real]
    yield _judged("of these, as commands of their own", len(numbers), real_commands(folder, numbers))


def _judged(what: str, count: int, outcomes: Iterator[Outcome]) -> Part:
    problems, counts, progress = [], Counter[str](), Progress(what, count)
    for found in outcomes:
        text = [f"case {found.number}, {found.subject}, {found.done}: {found.command}: {text}" for text in found.problems]
        problems += text
        counts[found.end] += 1
        counts["config.toml of a run changed and nobody noticed"] += found.configuration
        progress(text)
    return Part(what, count, problems, counts)


def emptied(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def zeroed(path: Path, draw: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def deleted(path: Path, draw: random.Random) -> None:
    path.unlink()


def made_a_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


CACHE_DAMAGE = (flip_bits, cut_off, put_in, exchange, emptied, zeroed, deleted, made_a_folder)
CACHED: dict[str, Callable[[list[Path]], list[Path]]] = {  # files by size
    "the smallest file": lambda files: files[:1],
    "the largest file": lambda files: files[-1:],
    "every file": lambda files: files,
}


def trained(out: Path, cache: Path) -> subprocess.Popen[bytes]:
    words = [*FLAGS, "--ops", "cpu", "--dataset-path", str(text_of_runs(cache)), "--out-dir", str(out)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    return subprocess.Popen([sys.executable, "-m", "tapeless", "train", "new", *words], env=environment, **streams)  # type: ignore[call-overload]


def text_of_runs(cache: Path) -> Path:
    path = cache.parent / "text.txt"
    return path if path.exists() else Path(text_file(cache.parent, 700))


def wrong_run(process: subprocess.Popen[bytes], out: Path, expected: Any) -> list[str]:
    words = process.communicate(timeout=600)[0].decode(errors="replace")
    if process.returncode:
        return [f"exit status {process.returncode}: {words.strip()[-300:]}"]
    return [] if outcome(RunDir(out)) == expected else ["another result"]


def cache(folder: Path, size: float) -> Iterator[Part]:
    """The compiled CPU kernels on disk: damaged, and compiled by several processes at once."""
    warm, out, draw = folder / "warm", folder / "run", random.Random(SEED)
    process = trained(out, warm)
    words = process.communicate()[0].decode()
    assert process.returncode == 0, words
    expected = outcome(RunDir(out))
    kinds = [(change, which) for change in CACHE_DAMAGE for which in CACHED]
    problems, progress = [], Progress("damage of the kernel cache", len(kinds))
    for change, which in draw.sample(kinds, scaled(len(kinds), size)):
        shutil.rmtree(out)
        shutil.rmtree(folder / "cache", ignore_errors=True)
        copy = shutil.copytree(warm, folder / "cache")
        files = sorted((path for path in copy.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        for path in CACHED[which](files):
            change(path, draw)
        found = [f"{change.__name__}, {which}: {text}" for text in wrong_run(trained(out, copy), out, expected)]
        problems += found
        progress(found)
    yield Part("kinds of damage of the kernel cache: a training with the same result", scaled(len(kinds), size), problems)

    count = max(2, scaled(COLD, size))
    outs = [folder / f"cold-{n}" for n in range(count)]
    running = [trained(path, folder / "cold-cache") for path in outs]
    problems = [text for process, path in zip(running, outs, strict=True) for text in wrong_run(process, path, expected)]
    yield Part("trainings at once on an empty kernel cache: the same result", count, problems)


def soak(folder: Path, size: float) -> Iterator[Part]:
    """A training whose calls on files fail now and then, one a second, in turn by a full disk, a failing one, an interruption,
    a read-only disk and a short call. The undisturbed one runs beside it."""
    inputs, case, seconds = folder / "inputs", folder / "case", max(4.0, SOAK * size)
    healthy = folder / "healthy"
    long = Writer(
        WRITERS["train new"].words + " --max-steps {steps} --save-every 200 --keep-last 2", "out", ("text.txt",), run=True
    )

    def of(steps: int) -> Writer:
        return long._replace(words=long.words.replace("{steps}", str(steps)))

    tried = 2000
    _, _, took = undisturbed(of(tried), inputs, case)
    writer = of(round(tried * seconds / took))
    fresh(writer, inputs, healthy)
    undisturbed_run = Child(lambda: command(writer.argv(healthy)), healthy / SAID)
    fired = folder / "fired"

    def faulty(work: Callable[[], int], output: Path) -> int | None:
        def failing() -> int:
            syscalls.arm(case, Way(FAIL, ()), every=1.0)
            try:
                return work()
            finally:
                with open(fired, "a") as file:
                    file.write(f"{syscalls.fired_count()}\n")

        return Child(failing, output, output).wait_for(10 * seconds)

    fresh(writer, inputs, case)
    ended = to_the_end(writer, case, folder / SAID, ANY, faulty, faulty)
    if status := undisturbed_run.wait():
        raise RuntimeError(f"exit status {status}: {(healthy / SAID).read_text()}")
    problems, found, expected = list(ended.problems), writer.result(case), writer.result(healthy)
    if not problems and found != expected:
        problems.append(f"another result: {difference(found, expected)}")
    if not problems and content(RunDir(case / "out")).keys() & content(RunDir(healthy / "out")).keys() == set():
        problems.append("no checkpoint of the undisturbed run")
    faults = sum(map(int, fired.read_text().split()))
    what = "s of training with a failing call a second"
    what += f", {faults} of them in {len(ended.statuses)} processes: the same final bits and losses"
    yield Part(what, round(seconds), problems)


ON_INPUTS = {"share", "kills", "failures", "soak"}
PARTS: dict[str, Callable[[Path, float], Iterator[Part]]] = {
    "kills": kills,
    "failures": failures,
    "damaged": damaged,
    "fuzzed": fuzzed,
    "cache": cache,
    "soak": soak,
}


def campaign(size: float, names: list[str]) -> Iterator[Part]:
    """Needs the shim loaded: `with_shim`."""
    parts = PARTS | {"share": share}
    for name in names or PARTS:
        with TemporaryDirectory(prefix="tapeless-") as scratch:
            folder = Path(scratch)
            if name in ON_INPUTS:
                (folder / "inputs").mkdir()
                prepare_inputs(folder / "inputs")
            yield from parts[name](folder, size)


def with_shim() -> None:
    """Begin this program again with the shim loaded, unless it is."""
    if "shim.so" in os.environ.get("LD_PRELOAD", ""):
        return
    with TemporaryDirectory(prefix="tapeless-") as scratch:
        library = syscalls.compiled(Path(scratch))
        if library is None:
            sys.exit("needs Linux and a C compiler, cc")
        done = subprocess.run([sys.executable, *sys.argv], env=syscalls.environment(library), check=False)
    sys.exit(done.returncode)


def main(arguments: list[str]) -> int:
    found = 0
    for part in campaign(float(arguments[0]), arguments[1:]):
        print(f"{len(part.problems)} problems in {part.cases:,} {part.what} {dict(part.counts) or ''}", flush=True)
        found += len(part.problems)
    return 1 if found else 0


if __name__ == "__main__":
    with_shim()
    sys.exit(main(sys.argv[1:]))
