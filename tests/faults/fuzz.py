"""Mutated files through the commands that read them. Whatever is in a file, the command ends with one line of error, or does
its work; it neither crashes nor hangs, and it does not take changed bytes of a run for those that were written.

A number is a case, always the same one: `python tests/faults/fuzz.py 4711` shows it. Inputs that once found a defect are in
corpus/, and tests/faults/test_campaign.py reads them all."""

import contextlib
import io
import json
import mmap
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))  # run_fixtures
sys.path.append(str(Path(__file__).resolve().parents[1] / "interop"))  # interop_fixtures

from forked import Child
from mutators import base_directories, mutate
from run_fixtures import events, text_of
from small_run import FLAGS, outcome
from writers import spoken_problems

from tapeless.cli.main import main
from tapeless.training.run_dir import RunDir

LIMIT = 10  # seconds that one input may take
MEMORY = 3 << 30  # bytes that a worker may take on top of what it begins with
BATCH = 1000  # inputs of one worker
TRAIN = shlex.join(FLAGS)
TINY = "--max-steps 1 --no-verify --batch-size 1 --seq-len 4 --sample-tokens 2 --ops reference --eval-windows 1"


class Subject(NamedTuple):
    """A folder to mutate, and commands to read it: {} is the folder, {out} a path that is free."""

    folder: str
    weight: int  # how often
    commands: tuple[str, ...]
    exact: bool = False  # exit status 0 without a warning promises the result of the unchanged folder


FOREIGN = "Hugging Face"
SAMPLED = "generate {} --max-tokens 4 --json --ops reference"
WINDOWS = "data sample {} --count 1 --tokens 8"
WITH_TOKENIZER = "data prepare {}/text.txt --tokenizer {}/tokenizer.json --processes 1 --out {out}"
FROM_SETTINGS = f"train new --config {{}}/settings.toml {TINY} --dataset-path {{}}/text.txt --out-dir {{out}}"
PREPARED = "data prepare {file} --processes 1 --out {out}"
SUBJECTS = {
    "run": Subject("run", 4, ("eval {} --json --ops reference", SAMPLED, "export {} --to gguf --out {out}"), exact=True),
    "run, resumed": Subject("stopped", 1, ("train resume {}",), exact=True),
    "run, shown": Subject("run", 4, ("train info {}", "report {} --out {out}", "data info {}", WINDOWS)),
    "chat": Subject("chat", 2, ("chat {} --once hello --max-tokens 4 --ops reference",)),
    FOREIGN: Subject("models", 6, ("import {} --out {out}",)),
    "tokenizer": Subject("tokenizer", 4, ("tokenizer info {}/tokenizer.json --text {}/text.txt", WITH_TOKENIZER)),
    "settings": Subject("settings", 1, (FROM_SETTINGS,)),
    "texts": Subject("texts", 8, (PREPARED, "data info {file}", "tokenizer train {file} --kind char --out {out}")),
    "token files": Subject("tokens", 2, ("data info {}", WINDOWS)),
}


class Outcome(NamedTuple):
    number: int
    subject: str
    done: str  # what was changed
    command: str
    end: str  # done, an error's code, or defect
    seconds: float
    problems: list[str]
    configuration: bool  # whether config.toml of a run was changed and nobody noticed


def prepare_subjects(folder: Path) -> None:
    """The healthy folders, made in a child: this process must not compute before it forks."""
    errors = folder / "said"
    if Child(lambda: make_subjects(folder), errors, errors).wait():
        sys.exit(f"the folders to mutate could not be made: {errors.read_text()}")


def make_subjects(folder: Path) -> int:
    from tapeless.data.bpe import train_bpe

    def must(words: str) -> None:
        if main(shlex.split(words)):
            raise SystemExit(words)

    texts = folder / "texts"
    texts.mkdir()
    plain = text_of(700)
    (texts / "plain.txt").write_text(plain)
    records = [{"text": text_of(60, seed), "id": seed} for seed in range(20)]
    pairs = [{"prompt": f"{seed} + 2 =", "completion": f" {seed + 2}"} for seed in range(20)]
    talks = [
        {"messages": [{"role": "user", "content": f"{seed} + 2?"}, {"role": "assistant", "content": str(seed + 2)}]}
        for seed in range(20)
    ]
    for name, rows in (("records", records), ("pairs", pairs), ("talks", talks)):
        (texts / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compress(texts)
    for name in ("settings", "tokenizer"):
        (folder / name).mkdir()
        (folder / name / "text.txt").write_text(plain)
    must(f"train new {TRAIN} --keep-last 9 --dataset-path {texts}/records.jsonl --out-dir {folder}/run")
    must(
        f"train new {TRAIN} --tokenizer bytes+chat --dataset-path {texts}/talks.jsonl --max-seq-len 32 --out-dir {folder}/chat"
    )
    shutil.copytree(folder / "run", folder / "stopped")
    shutil.rmtree(folder / "stopped" / "checkpoints" / "step-00000006")
    (folder / "stopped" / "checkpoints" / "latest").write_text("step-00000004\n")
    shutil.copy(folder / "run" / "config.toml", folder / "settings" / "settings.toml")
    bpe = train_bpe([plain * 3], 290)
    bpe.save(folder / "tokenizer" / "tokenizer.json")
    base_directories(folder / "models", bpe)
    make_token_files(folder / "tokens")
    return 0


def compress(texts: Path) -> None:
    """The texts as .gz, .zst and Parquet, where the packages are here."""
    import gzip

    (texts / "packed.txt.gz").write_bytes(gzip.compress((texts / "plain.txt").read_bytes(), mtime=0))
    with contextlib.suppress(ImportError):
        import zstandard

        (texts / "packed.jsonl.zst").write_bytes(zstandard.compress((texts / "records.jsonl").read_bytes()))
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        columns: dict[str, Any] = {"text": [text_of(60, seed) for seed in range(20)], "id": list(range(20))}
        pyarrow.parquet.write_table(pyarrow.table(columns), texts / "table.parquet")
        columns["text"] = [[text] if n % 2 else None for n, text in enumerate(columns["text"])]
        pyarrow.parquet.write_table(pyarrow.table(columns), texts / "lists.parquet")


def make_token_files(folder: Path) -> None:
    """As llm.c writes them."""
    folder.mkdir()
    for part in ("train", "val"):
        header = struct.pack("<256i", 20240520, 1, 200, *[0] * 253)
        (folder / f"mine_{part}_000000.bin").write_bytes(header + struct.pack("<200H", *(n % 250 for n in range(200))))


class World:
    """The healthy folders, and what the commands say of them."""

    def __init__(self, folder: Path):
        self.folder, self.mutant, self.out = folder, folder / "mutant", folder / "out"
        self.healthy: dict[str, Any] = {}

    def learn(self) -> None:
        for subject in SUBJECTS.values():
            if subject.exact:
                for command in subject.commands:
                    self.fresh(self.folder / subject.folder)
                    status, words, printed = self.play(self.argv(command))
                    assert status == 0, words
                    self.healthy[command] = self.result(command, printed)

    def fresh(self, source: Path) -> None:
        for path in (self.mutant, self.out):
            remove(path)
        shutil.copytree(source, self.mutant, symlinks=True)

    def argv(self, command: str, file: str = "") -> list[str]:
        return [
            word.replace("{out}", str(self.out)).replace("{file}", file).replace("{}", str(self.mutant))
            for word in shlex.split(command)
        ]

    def play(self, argv: list[str]) -> tuple[int, str, str]:
        """Exit status, what was said on both streams, and on stdout alone."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(argv)
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                status = 70
                traceback.print_exc(file=err)
        return status, out.getvalue() + err.getvalue(), out.getvalue()

    def result(self, command: str, printed: str) -> Any:
        if command.startswith("train resume"):
            run = RunDir(self.mutant)
            latest = outcome(run, ())
            return latest | {"lines": [event for event in events(run, ("step", "eval", "sample")) if event["step"] > 4]}
        if command.startswith("export"):
            return self.out.read_bytes()
        return re.sub(r'"[a-z_]*seconds[a-z_]*": [0-9.e-]+|"[a-z_]*per_second": [0-9.e-]+', "", printed).replace(
            str(self.mutant), ""
        )

    def draw(self, number: int) -> tuple[str, str, str, list[str]]:
        """The case of a number: its subject, what was changed, the command, and its words."""
        draw = random.Random(number)
        name = draw.choices(list(SUBJECTS), [subject.weight for subject in SUBJECTS.values()])[0]
        subject = SUBJECTS[name]
        source = self.folder / subject.folder
        if name == FOREIGN:
            source = draw.choice(sorted(source.iterdir()))
        self.fresh(source)
        file = ""
        if name == "texts":
            file = str(draw.choice(sorted(self.mutant.iterdir())))
            for other in self.mutant.iterdir():
                if str(other) != file:
                    other.unlink()
        done = "; ".join(mutate(self.mutant, draw, special=name == FOREIGN) for _ in range(draw.choice((1, 1, 1, 2, 3))))
        command = draw.choice(subject.commands)
        return name, done, command, self.argv(command, file)

    def case(self, number: int) -> Outcome:
        subject, done, command, argv = self.draw(number)
        config = "config.toml" in done
        began = time.monotonic()
        status, words, printed = self.play(argv)
        seconds = time.monotonic() - began
        problems = spoken_problems(status, words)
        unnoticed = False
        if status == 0 and not problems and SUBJECTS[subject].exact and "warning: " not in words:
            try:
                unnoticed = self.result(command, printed) != self.healthy[command]
            except Exception as error:
                problems.append(f"no result to be read: {error!r}")
        if unnoticed and not config:
            problems.append("silently another result")
        found = re.search(r"error\[(\w+)\]", words)
        end = "defect" if problems else found[1] if found else "done"
        return Outcome(number, subject, done, shlex.join(argv), end, seconds, problems, unnoticed and config)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


NOW = mmap.mmap(-1, 8)  # the number that a worker is at, shared with it


def worker(world: World, numbers: range, results: Path, memory: int) -> int:
    if memory:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process: no Python is needed to die
    with open(results, "a", buffering=1) as file:
        for number in numbers:
            NOW[:] = number.to_bytes(8, "little")
            signal.setitimer(signal.ITIMER_REAL, LIMIT)
            found = world.case(number)
            signal.setitimer(signal.ITIMER_REAL, 0)
            file.write(json.dumps(found) + "\n")
    return 0


def fuzz(folder: Path, numbers: range, memory: int = MEMORY) -> Iterator[Outcome]:
    """The outcome of each case. A worker that dies is a defect of the case it was at, and the next one goes on behind it."""
    world, results, errors = World(folder), folder / "results", folder / "native"

    def begin(numbers: range) -> int:
        world.learn()
        return worker(world, numbers, results, memory)

    at = numbers.start
    while at < numbers.stop:
        batch = range(at, min(at + BATCH, numbers.stop))
        for path in (results, errors):
            path.unlink(missing_ok=True)
        status = Child(lambda batch=batch: begin(batch), errors, errors).wait()
        native = errors.read_text(errors="replace") if errors.exists() else ""
        for line in results.read_text().splitlines() if results.exists() else []:
            yield Outcome(*json.loads(line))
        at = batch.stop
        if status:
            number = int.from_bytes(NOW[:], "little")
            name, done, _, argv = world.draw(number)
            what = f"it takes longer than {LIMIT} s" if status == -signal.SIGALRM else f"exit status {status}: {native[-300:]}"
            yield Outcome(number, name, done, shlex.join(argv), "defect", float(LIMIT), [what], False)
            at = number + 1


def real_commands(folder: Path, numbers: range) -> Iterator[Outcome]:
    """The same cases as processes of their own."""
    world = World(folder)
    for number in numbers:
        name, done, _, argv = world.draw(number)
        began = time.monotonic()
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "tapeless", *argv],
                capture_output=True,
                timeout=60,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            words = (ended.stdout + ended.stderr).decode(errors="replace")
            problems = spoken_problems(ended.returncode, words)
        except subprocess.TimeoutExpired:
            words, problems = "", ["it takes longer than 60 s"]
        found = re.search(r"error\[(\w+)\]", words)
        end = "defect" if problems else found[1] if found else "done"
        yield Outcome(number, name, done, shlex.join(argv), end, time.monotonic() - began, problems, False)


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with TemporaryDirectory(prefix="tapeless-") as scratch:
        prepare_subjects(Path(scratch))
        ends: Counter[tuple[str, str]] = Counter()
        for found in fuzz(Path(scratch), range(first, first + count)):
            ends[found.subject, found.end] += 1
            if found.problems or count == 1 or found.configuration:
                print(json.dumps(found._asdict(), indent=1), flush=True)
        for (subject, end), n in sorted(ends.items()):
            print(f"{subject:14} {end:20} {n}")
