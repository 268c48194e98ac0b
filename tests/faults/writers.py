"""The commands that write, each ready to be run in a folder of its own, as often as it takes: what it needs, what it makes, and
what must be so after anything went wrong with it. Used by faults.py."""

import json
import random
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))  # run_fixtures
sys.path.append(str(Path(__file__).resolve().parents[1] / "interop"))  # interop_fixtures

from forked import KILLED, Child, killed_at_random
from interop_fixtures import exported
from killing import MARKS, WRITING, marked
from run_fixtures import text_file, text_of
from small_run import FLAGS, outcome
from syscalls import HAPPENED, KILL, LIMIT, Point, Way, arm, in_child, list_points

from tapeless.cli.main import main
from tapeless.data.files import file_sha256
from tapeless.training import trainer
from tapeless.training.run_dir import RunDir

trainer.RETRIES = tuple(0.0 for _ in trainer.RETRIES)  # seconds before attempts to write: no failure here ends by itself
ANYTIME = {"env.json", "lock", "metrics.jsonl", "said", ".unfinished"}  # hold times and process ids
# In the warnings of commands whose result is another one, because they could not read a checkpoint, or env.json.
SAID_SO = (" instead, ", "the report leaves out the environment")
SAID = "said"  # stdout and stderr of a command, in its folder: a stream that may fail too


class Writer(NamedTuple):
    words: str  # the command, {} being its folder
    makes: str  # below it
    needs: tuple[str, ...]  # below the folder of `prepare_inputs`
    run: bool = False  # whether it trains

    def argv(self, folder: Path) -> list[str]:
        return [word.format(folder) for word in shlex.split(self.words)]

    def result(self, folder: Path) -> Any:
        """What has to be equal in the end; None as long as there is nothing."""
        made = folder / self.makes
        if self.run:
            return outcome(RunDir(made)) if (made / "checkpoints" / "latest").exists() else None
        if made.suffix == ".html" and made.is_file():
            return re.sub(r"(?<=Written by tapeless at )[-0-9]+ [-+:0-9]+", "", made.read_text())
        if made.is_file():
            return file_sha256(made)
        files = {str(path.relative_to(made)): path for path in sorted(made.rglob("*")) if path.is_file()}
        found = {name: file_sha256(path) for name, path in files.items() if path.name not in ANYTIME | {"data.json"}}
        if "data.json" in files:  # which also has times of files
            found["data.json"] = json.loads(files["data.json"].read_bytes())["fingerprint"]
        return found or None


KINDS = {
    "float32": "",
    "bfloat16 and dropout": "--dtype bfloat16 --dropout 0.1 --grad-accum 2",
    "SGD": "--optimizer sgd --lr 0.1 --seed 3",
    "Muon and averaged weights": "--optimizer muon --ema-decay 0.9",
    "epochs": "--epochs 2 --batch-size 4 --max-steps 1000",
    "a checkpoint at each step": "--save-every 1 --ema-decay 0.9",
    "large checkpoints": "--save-every 2 --hidden-dim 128 --intermediate-dim 384 --num-layers 2",
}
LONGER = "--max-steps 60 --save-every 3 --eval-every 10 --sample-every 25 --keep-last 2"
TRAIN = f"{shlex.join(FLAGS)} --dataset-path {{}}/text.txt --out-dir {{}}/out"
WRITERS = {
    "train new": Writer(f"train new {TRAIN}", "out", ("text.txt",), run=True),
    "train resume": Writer("train resume {}/stopped", "stopped", ("stopped", "text.txt"), run=True),
    "data prepare": Writer("data prepare {}/texts.jsonl --out {}/out --processes 1", "out", ("texts.jsonl",)),
    "tokenizer train": Writer("tokenizer train {}/text.txt --out {}/out.json --vocab-size 280", "out.json", ("text.txt",)),
    "export": Writer("export {}/base --to hf --out {}/out", "out", ("base",)),
    "export to GGUF": Writer("export {}/whole --to gguf --out {}/out.gguf", "out.gguf", ("whole",)),
    "import": Writer("import {}/llama --out {}/out", "out", ("llama",)),
    "merge": Writer("merge {}/adapted --out {}/out", "out", ("adapted",)),
    "report": Writer("report {}/whole --out {}/out.html", "out.html", ("whole",)),
}
LONG_RUNS = {
    f"train new, {kind}": Writer(f"train new {TRAIN} {LONGER} {flags}", "out", ("text.txt",), run=True)
    for kind, flags in KINDS.items()
}


def prepare_inputs(folder: Path) -> None:
    """What the commands need: texts, a directory of Hugging Face, runs that are whole, stopped, imported and with adapters."""
    text_file(folder, 700)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text_of(60, seed)}) + "\n" for seed in range(40)))
    Child(lambda: int(exported(folder, "llama") is None)).wait()  # this process must not compute before it forks
    (folder / "letters.txt").write_text("abcdefghijklmnopqrstuvw" * 40)
    adapt = f"train new --init-from {folder}/base --lora-rank 2 --dataset-path {folder}/letters.txt --out-dir {folder}/adapted"
    for words in (
        f"import {folder}/llama --out {folder}/base",
        f"{adapt} --max-steps 2 --batch-size 2 --no-verify --ops reference",
    ):
        in_process(shlex.split(words), folder)
    in_process(WRITERS["train new"].argv(folder), folder)
    (folder / "out").rename(folder / "whole")

    def stopped() -> int:
        arm(folder, Way(KILL, ()), Point("rename", "out/checkpoints/.tmp-step-00000004", 0))
        return command(WRITERS["train new"].argv(folder))

    assert Child(stopped).wait() == KILLED, "the run was not stopped"
    (folder / "out").rename(folder / "stopped")


def command(argv: list[str]) -> int:
    """As a process of its own runs it."""
    sys.argv = ["tapeless", *argv]
    try:
        return main()
    except SystemExit as end:  # of argparse
        return int(end.code or 0)


def in_process(argv: list[str], folder: Path) -> None:
    if status := Child(lambda: command(argv), folder / SAID, folder / SAID).wait():
        sys.exit(f"{shlex.join(argv)}: exit status {status}: {(folder / SAID).read_text()}")


def fresh(writer: Writer, inputs: Path, case: Path) -> Path:
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    for name in writer.needs:
        source = inputs / name
        shutil.copytree(source, case / name, symlinks=True) if source.is_dir() else shutil.copy2(source, case / name)
    return case


def spoken_problems(status: int | None, words: str) -> list[str]:
    """With how a command ended and what it printed, whatever went wrong: an exit status that --help has, one line about it."""
    if status == KILLED:
        return []
    problems = [f"exit status {status}"] if status not in (0, 1, 2, 3, 4, 75) else []
    problems += [f"{word}: {words.strip()[-400:]}" for word in ("error[INTERNAL]", "Traceback", "panicked at") if word in words]
    if status and not problems and words.count("error[") != 1:
        problems.append(f"exit status {status} with {words.count('error[')} errors: {words.strip()[-400:]!r}")
    return problems


class Ended(NamedTuple):
    happened: bool  # whether the call that was to fail came
    kills: int
    statuses: list[int | None]
    problems: list[str]  # none, if all is well
    in_the_way: bool  # what was left had to be removed before the command would begin again


Play = Callable[
    [Callable[[], int], Path], int | None
]  # work and where its output goes -> exit status, KILLED, or None: it hung


def play(work: Callable[[], int], output: Path) -> int | None:
    return Child(work, output, output).wait_for(LIMIT)


def to_the_end(writer: Writer, folder: Path, output: Path, expected: Any, first: Play, later: Play = play) -> Ended:
    """A command, and what a person types next: the same command; or, if that says so, a resume, or the same after what is in
    the way was removed. output: where stdout and stderr go. first, later: how the first process and all others are played."""
    argv, statuses, problems, in_the_way, removed = writer.argv(folder), [], [], False, False
    inputs = contents(writer, folder)
    while True:
        output.unlink(missing_ok=True)
        status = (later if statuses else first)(lambda argv=argv: command(argv), output)
        words = output.read_text(errors="replace") if output.exists() else ""
        statuses.append(status)
        problems += ["it hangs"] if status is None else spoken_problems(status, words)
        if contents(writer, folder) != inputs:
            problems.append("its inputs have changed")
        if (
            status == 0 and any(text in words for text in SAID_SO) and not writer.run
        ):  # as it said, so it is not the result; now the disk is well again
            remove(folder / writer.makes)
        elif status == 0 or problems:
            break
        if status == KILLED or len(statuses) == 1:
            argv, removed = writer.argv(folder), False
        elif not writer.run and writer.result(folder) == expected and ("already exists" in words or "is not empty" in words):
            break  # it was killed, or its last call failed, after its work was done
        elif "tapeless train resume" in words and (folder / writer.makes / "config.toml").is_file():
            argv = ["train", "resume", str(folder / writer.makes)]
        elif removed or writer.makes in writer.needs:
            problems.append(f"a dead end: {words.strip()}")
            break
        else:
            argv, removed, in_the_way = writer.argv(folder), True, True
            remove(folder / writer.makes)
    if not problems and (found := writer.result(folder)) != expected:
        problems.append(f"another result: {difference(found, expected)}")
    return Ended(bool(HAPPENED[0]), statuses.count(KILLED), statuses, problems, in_the_way)


def difference(found: Any, expected: Any) -> str:
    """Where two results differ: names of files, and the lines of metrics that only one has."""
    if not isinstance(found, dict) or not isinstance(expected, dict):
        return "nothing was made" if found is None else "its bytes"
    names = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
    lines = [one.get("lines", []) for one in (found, expected)]
    only = [[line for line in a if line not in b] for a, b in (lines, lines[::-1])]
    return f"{', '.join(sorted(names))}; lines {only[0][:3]}, expected {only[1][:3]}"


def contents(writer: Writer, folder: Path) -> dict[str, str]:
    """Of the inputs that nothing may change. A run that is read gets a lock, and what it need not compute again."""
    paths = [path for name in writer.needs if name != "stopped" for path in [folder / name, *(folder / name).rglob("*")]]
    return {str(path): file_sha256(path) for path in paths if path.is_file() and path.name not in ANYTIME | {"data.json"}}


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def survives(writer: Writer, inputs: Path, case: Path, expected: Any, way: Way, point: Point) -> Ended:
    """One call fails in this way. On a disk that stays full is everything but the output, which people see in a terminal."""
    fresh(writer, inputs, case)
    output = (case.parent if way.lasting else case) / SAID
    return to_the_end(writer, case, output, expected, lambda work, output: in_child(case, work, output, way, point))


def killed(
    writer: Writer, inputs: Path, case: Path, expected: Any, draw: random.Random, seconds: float, at_most: int
) -> tuple[Ended, int]:
    """Killed at random moments, until one process comes through, or after so many kills. Also how many of them found a
    checkpoint being written."""
    kills = writing = 0

    def until_killed(work: Callable[[], int], output: Path) -> int | None:
        nonlocal kills, writing
        if kills == at_most:
            return play(work, output)
        MARKS[:] = bytes(2)
        status = killed_at_random(lambda: marked(work), draw, seconds, output)
        kills += status == KILLED
        writing += status == KILLED and MARKS[WRITING]
        return status

    fresh(writer, inputs, case)
    return to_the_end(writer, case, case / SAID, expected, until_killed, until_killed), writing


def undisturbed(writer: Writer, inputs: Path, case: Path) -> tuple[Any, list[Point], float]:
    """Its result, its calls, and how long it takes."""
    fresh(writer, inputs, case)
    began = time.monotonic()
    points = list_points(case, lambda: command(writer.argv(case)), case / SAID)
    return writer.result(case), points, time.monotonic() - began
