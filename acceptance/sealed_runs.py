"""A run whose directory, software or settings are not those that it was trained with: each change is detected or announced.

Every field of config.toml edited, one at a time; a bit flipped in every file of the run; other threads, ops and Numba settings;
the directory moved, copied and archived; data rewritten in place; and what all this costs at a start and at a save."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from claim import Claims
from small_run import Said, command, new, outcome, resume
from training import scratch

from tapeless.data.prepare import open_prepared
from tapeless.training import seal
from tapeless.training.checkpoint import checkpoints
from tapeless.training.run_config import FREE, read_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import make_model

harness.no_waiting_for_the_disk()
claims = Claims("sealed_runs")
OTHER: dict[str, str] = {
    "norm": '"layer"',
    "norm_placement": '"post"',
    "position": '"none"',
    "ffn": '"gelu"',
    "init": '"xavier"',
}
OTHER |= {"optimizer": '"adam"', "lr_schedule": '"constant"', "dtype": '"bfloat16"', "recompute": '"full"', "corpus": '"zipf"'}
OTHER |= {"blocks": '"ffn"', "ops": '"auto"', "device": '"cpu:0"', "max_time": '"9h"', "lora_targets": '"wo"'}
NOT_READ = {"env.json", "report.html", "lock"}  # and samples/: nothing is computed from them


def other(name: str, value: Any) -> str:
    """A different valid value of a field."""
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int | float):
        return repr(value * 2 if value else value + (0.5 if isinstance(value, float) else 1))
    return json.dumps("other" + str(value))


def said_so(said: Said, name: str) -> bool:
    """Refused, with the field; or done, with a warning."""
    if said.status:
        return said.status == 2 and "error[" in said.words and "INTERNAL" not in said.words
    return "was edited after it was written" in said.words or f"{name} was " in said.words


def edits(whole: RunDir, folder: Path) -> None:
    text, problems, refused, count = whole.config.read_text(), list[str](), 0, 0
    tables = tomllib.loads(text)
    for table, fields in tables.items():
        for name, value in fields.items():
            count += 1
            run = RunDir(shutil.copytree(whole.path, folder / "edited"))
            head, _, rest = text.partition(f"[{table}]\n")
            run.config.write_text(
                f"{head}[{table}]\n" + re.sub(rf"(?m)^{name} = .*$", f"{name} = {other(name, value)}", rest, count=1)
            )
            assert run.config.read_text() != text, name
            checked, continued = command("verify", str(run.path)), resume(run)
            free = table == "train" and name in FREE
            if checked.status != 3 or "FAILED  config.toml" not in checked.words:
                problems.append(f"{table}.{name}: verify ended with {checked.status}")
            announced = free or f"{name} was " in continued.words
            if not said_so(continued, name) or (not continued.status and not announced and outcome(run) != outcome(whole)):
                words = continued.words[:400]
                problems.append(f"{table}.{name} = {other(name, value)}: resume ended with {continued.status}: {words}")
            refused += continued.status == 2
            shutil.rmtree(run.path)
    claims.check(
        f"each field of config.toml edited by hand: found by verify; refused by resume ({refused}) or announced, the same bits",
        bound=f"{count} of {count}",
        measured=harness.verdict(problems, count),
        ok=not problems,
    )


def flips(whole: RunDir, folder: Path) -> None:
    problems, count, skipped = list[str](), 0, 0
    for file in sorted(path.relative_to(whole.path) for path in whole.path.rglob("*") if path.is_file()):
        if file.name in NOT_READ or file.parts[0] == "samples":
            skipped += 1
            continue
        size = (whole.path / file).stat().st_size
        places = {0, size // 3, size // 2, size - 1}
        if file.name == "metrics.jsonl":  # what is compared: the losses
            places = {found.start(1) for found in re.finditer(rb'"loss": \d\.(\d)', (whole.path / file).read_bytes())}
        for place in places:
            count += 1
            run = RunDir(shutil.copytree(whole.path, folder / "flipped"))
            with open(run.path / file, "r+b") as damaged:
                damaged.seek(place)
                byte = damaged.read(1)
                damaged.seek(place)
                damaged.write(bytes([byte[0] ^ 1]))
            said = command("verify", str(run.path))
            if said.status == 0 or "INTERNAL" in said.words:
                problems.append(f"{file}, byte {place}: verify ended with {said.status}: {said.words}")
            shutil.rmtree(run.path)
    claims.check(
        f"a bit flipped in every file of the run ({skipped} files that nothing is computed from left out): found by verify",
        bound=f"{count} of {count}",
        measured=harness.verdict(problems, count),
        ok=not problems,
    )


def moves(whole: RunDir, folder: Path) -> None:
    def archived(run: Path) -> Path:
        with tarfile.open(folder / "run.tar", "w") as archive:
            archive.add(run, run.name)
        with tarfile.open(folder / "run.tar") as archive:
            archive.extractall(folder / "archive", filter="data")
        return folder / "archive" / run.name

    ways: dict[str, Callable[[Path], Path]] = {
        "moved": lambda run: run.rename(folder / f"{run.name}-there"),
        "copied": lambda run: Path(shutil.copytree(run, folder / f"{run.name}-there")),
        "archived": archived,
    }
    problems = []
    for lora in (False, True):
        for how, act in ways.items():
            run = RunDir(folder / f"{how}-{lora}-source")
            flags = ("--init-from", str(whole.path), "--lora-rank", "2") if lora else ()
            shape = () if not lora else ("--dataset-path", str(folder / "text.txt"), "--out-dir", str(run.path))
            settings = ("--max-steps", "4", "--save-every", "2", "--sample-tokens", "2", "--no-verify", "--ops", "reference")
            begun = command("new", *flags, *shape, *settings) if lora else new(run, "--max-steps", "4")
            there = RunDir(act(run.path))
            shutil.rmtree(run.path, ignore_errors=True)
            said = command("verify", str(there.path), "--replay", "2"), resume(there, "--max-steps", "6")
            if begun.status or any(s.status for s in said):
                problems.append(f"{how}, {'LoRA' if lora else 'whole'}: {[s.words for s in (begun, *said) if s.status]}")
    count = 2 * len(ways)
    claims.check(
        "a run moved, copied, archived (all weights, and LoRA): verified, replayed and resumed without its source",
        bound=f"{count} of {count}",
        measured=harness.verdict(problems, count),
        ok=not problems,
    )


def process(run: RunDir, *words: str, **environment: str) -> Said:
    """A resume in a process of its own, which Numba's and OpenMP's settings need."""
    told = [sys.executable, "-m", "tapeless", "train", "resume", str(run.path), *words]
    done = subprocess.run(told, env=os.environ | environment, capture_output=True, text=True, check=False)
    return Said(done.returncode, done.stdout + done.stderr)


def software(whole: RunDir, folder: Path) -> None:
    settings: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
        "OPT": ((), {"NUMBA_OPT": "0"}, "numba.OPT was "),
        "the CPU to compile for": ((), {"NUMBA_CPU_NAME": "generic"}, "numba.cpu was "),
        "vectorisation": ((), {"NUMBA_LOOP_VECTORIZE": "0"}, "numba.LOOP_VECTORIZE was 1, is 0"),
        "ops": (("--ops", "reference"), {}, "ops was cpu, is reference"),
        "dtype": (("--dtype", "bfloat16"), {}, "dtype was float32, is bfloat16"),
        "threads": (("--threads", "2"), {}, "threads was 1, is 2"),
        "MKL's code path": ((), {"MKL_CBWR": "COMPATIBLE"}, "env.MKL_CBWR was not set, is COMPATIBLE"),
        "nothing": ((), {}, ""),
    }
    if (os.cpu_count() or 1) < 2:
        del settings["threads"]
    trained, problems = RunDir(folder / "compiled"), []
    begun = new(trained, "--ops", "cpu", "--threads", "1")
    for what, (words, environment, expected) in settings.items():
        run = RunDir(shutil.copytree(trained.path, folder / "settings"))
        said = process(run, *words, **environment)
        found = "the last bits may differ from an uninterrupted run: " in said.words
        if begun.status or said.status or found != bool(expected) or expected not in said.words:
            problems.append(f"{what}: resume ended with {said.status}: {begun.words if begun.status else said.words[-2000:]}")
        shutil.rmtree(run.path)
    claims.check(
        f"a resume with other {', '.join(list(settings)[:-1])} names the difference and its effect, and without any names none",
        bound=f"{len(settings)} of {len(settings)}",
        measured=harness.verdict(problems, len(settings)),
        ok=not problems,
    )


def costs(whole: RunDir) -> None:
    config = read_run_config(whole.config)
    model = make_model(config.model, config.train)
    seal.seal_of(config, model)
    first, later = [], []
    for _ in range(20):
        seal._code.cache_clear()
        seal._cpu.cache_clear()
        for seconds in (first, later):
            start = time.perf_counter()
            sealed = seal.seal_of(config, model)
            seconds.append(time.perf_counter() - start)
    start, size = 1e3 * statistics.median(first), len(json.dumps(sealed, indent=1))
    claims.check("gathering the seal at a start", bound="50 ms", measured=f"{start:.1f} ms", ok=start < 50)
    claims.check("its size in state.json", bound="16 kB", measured=f"{size / 1e3:.1f} kB", ok=size < 16e3)
    data = open_prepared(whole.path)
    begin = time.perf_counter()
    for _ in range(100):
        data.require_unaltered()
    each = 10 * (time.perf_counter() - begin)
    claims.check("comparing the data files at a save", bound="1 ms", measured=f"{each:.3f} ms", ok=each < 1)


with scratch() as folder:
    whole = RunDir(folder / "whole")
    if (said := new(whole, "--keep-last", "9")).status:
        raise SystemExit(said.words)
    assert len(checkpoints(whole.checkpoints)) > 2
    edits(whole, folder)
    flips(whole, folder)
    moves(whole, folder)
    software(whole, folder)
    costs(whole)
claims.finish()
