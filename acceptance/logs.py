"""Runs told to W&B offline and to Trackio, killed and resumed: the losses in their files are those of metrics.jsonl, nothing is
written outside of the run's directory, and no process connects to any address.

python acceptance/logs.py [STEPS]
Needs a Python with tapeless' dependencies, wandb and trackio: this one, or the one that TAPELESS_LOGS_PYTHON names. That no
process connects is seen by strace; without it, that claim is left out aloud."""

import csv
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from claim import HOME, Claims, skip
from training import library_text, of_kind, scratch, steps

from tapeless.training.run_dir import RunDir

PYTHON = os.environ.get("TAPELESS_LOGS_PYTHON", sys.executable)
STRACE = shutil.which("strace")
SMALL = ["--hidden-dim", 16, "--num-layers", 1, "--num-heads", 2, "--intermediate-dim", 32, "--max-seq-len", 32]
SMALL += ["--batch-size", 2, "--eval-every", 50, "--save-every", 50, "--layer-stats-every", 25, "--sample-every", 100]
SMALL += ["--sample-tokens", 8, "--eval-windows", 4, "--ops", "reference", "--no-verify"]
# What would send a run elsewhere, if it were listened to.
HOSTILE = {"WANDB_MODE": "online", "WANDB_RESUME": "must", "WANDB_RUN_ID": "other", "WANDB_API_KEY": "0" * 40}
HOSTILE |= dict.fromkeys(("WANDB_BASE_URL", "HF_ENDPOINT"), "http://127.0.0.1:9")  # should one be: not into the world
HOSTILE |= {"TRACKIO_SPACE_ID": "someone/space", "TRACKIO_SERVER_URL": "http://127.0.0.1:9", "HF_TOKEN": "hf_none"}
READ = """
import json, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
from tapeless.report.wandb_records import wandb_records
for found in wandb_records(Path(sys.argv[1])):
    record = Record.FromString(found)
    if record.HasField("history"):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        print(json.dumps(items))
"""


def environment(folder: Path) -> dict[str, str]:
    """A home of its own, to see what is left in it, and the sources beside this script."""
    away = {name: str(folder / "away") for name in ("WANDB_DIR", "TRACKIO_DIR")}
    paths = [str(HOME.parent / "src"), os.environ.get("PYTHONPATH", "")]
    own = {"HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return os.environ | HOSTILE | away | own


def begun(folder: Path, *arguments: object, trace: Path | None = None) -> subprocess.Popen[str]:
    """The command, in a group of processes of its own."""
    front = [STRACE, "-f", "-qq", "-e", "trace=connect", "-o", str(trace)] if trace and STRACE else []
    return subprocess.Popen(
        [*front, PYTHON, "-m", "tapeless", *map(str, arguments)],
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def new(folder: Path, run: RunDir, count: int, reporters: str, trace: Path | None = None) -> subprocess.Popen[str]:
    words = ["--dataset-path", folder / "text.txt", "--out-dir", run.path, "--max-steps", count, "--report-to", reporters]
    return begun(folder, "train", "new", *SMALL, *words, "--json", trace=trace)


def after_steps(run: RunDir, process: subprocess.Popen[str], count: int) -> None:
    """Wait until the run has come so far."""
    while process.poll() is None and not (run.metrics.exists() and len(steps(run, "step")) >= count):
        time.sleep(0.05)
    if process.poll() is not None:
        sys.exit(f"{process.stderr and process.stderr.read()}\nthe run ended before step {count}")


def wandb_file(run: RunDir) -> Path:
    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    return file


def wandb_rows(run: RunDir) -> list[dict[str, Any]]:
    done = subprocess.run(
        [PYTHON, "-c", READ, str(wandb_file(run))], env=environment(run.path.parent), capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def trackio_rows(run: RunDir) -> list[dict[str, Any]]:
    """By SQL, without Trackio: the file is what it is."""
    with sqlite3.connect(run.path / "trackio" / "tapeless.db") as database:
        found = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
    return [{"run_id": name, "step": step, **json.loads(metrics)} for name, step, metrics in found]


def logged(run: RunDir) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Of each place, the losses and validation losses, by their steps and in their order."""
    with open(run.path / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    places = {"wandb": (wandb_rows(run), "_step"), "trackio": (trackio_rows(run), "step")}
    found = {
        place: {name: [(row[step], row[name]) for row in rows if name in row] for name in ("loss/train", "loss/validation")}
        for place, (rows, step) in places.items()
    }
    names = {"loss/train": "loss", "loss/validation": "val_loss"}
    found["csv"] = {tag: [(int(row["step"]), float(row[name])) for row in table if row[name]] for tag, name in names.items()}
    return found


def check_equal(claims: Claims, run: RunDir, when: str) -> None:
    ours = {
        "loss/train": [(event["step"], event["loss"]) for event in of_kind(run, "step")],
        "loss/validation": [(event["step"], event["val_loss"]) for event in of_kind(run, "eval")],
    }
    for place, found in logged(run).items():
        equal = {name: sum(a == b for a, b in zip(found[name], ours[name], strict=False)) for name in ours}
        claims.check(
            f"{place}, {when}: steps with their training and validation losses, against metrics.jsonl",
            bound=f"{len(ours['loss/train'])} and {len(ours['loss/validation'])} equal, no more",
            measured=f"{equal['loss/train']} and {equal['loss/validation']} equal of "
            f"{len(found['loss/train'])} and {len(found['loss/validation'])}",
            ok=found == ours,
        )


def check_resume(claims: Claims, folder: Path, count: int) -> RunDir:
    """Killed between two checkpoints, then gone on with: what was told of the steps behind the checkpoint is told anew."""
    run, trace = RunDir(folder / "run"), folder / "connects.txt"
    process = new(folder, run, count, "html,wandb,trackio,csv")
    after_steps(run, process, count // 2 + 20)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    first, killed_at = wandb_file(run).name, steps(run, "step")[-1]
    process = begun(folder, "train", "resume", run.path, "--json", trace=trace)
    out, err = process.communicate()
    claims.check(
        f"killed at step {killed_at}, resumed, with html, wandb, trackio and csv at once",
        bound="exit status 0, only JSON on stdout, nothing given up",
        measured=f"exit status {process.returncode}, {'something' if 'given up' in err else 'nothing'} given up",
        ok=process.returncode == 0 and "given up" not in err and all(line.startswith("{") for line in out.splitlines()),
    )
    check_equal(claims, run, f"killed at step {killed_at} and resumed")
    names = {row["run_id"] for row in trackio_rows(run)}
    claims.check(
        "the run's id after the resume, in W&B and in Trackio",
        bound=f"{first}, one run",
        measured=f"{wandb_file(run).name}, {len(names)} run",
        ok=wandb_file(run).name == first and names == {"run"},
    )
    check_connects(claims, trace)
    return run


def check_connects(claims: Claims, trace: Path) -> None:
    if not STRACE:
        print("left out: connections, since there is no strace here", flush=True)
        return
    calls = trace.read_text().splitlines()
    local = sum("AF_UNIX" in call for call in calls)
    network = [call for call in calls if "AF_INET" in call]
    claims.check(
        "connections of the resumed run and all its processes, with an environment that names a server, a Space and keys",
        bound="0 over a network",
        measured=f"{len(network)} over a network, {local} within the machine",
        ok=not network and local > 0,
    )


def check_places(claims: Claims, folder: Path, run: RunDir) -> None:
    left = [path for name in ("home", "away") for path in (folder / name).rglob("*") if path.is_file()]
    foreign = [path for path in left if "tapeless" not in path.relative_to(folder).parts]
    inside = sum(path.is_file() for name in ("wandb", "trackio") for path in (run.path / name).rglob("*"))
    claims.check(
        "files of W&B and Trackio outside of the run's directory, in the home directory and where the environment points",
        bound="0",
        measured=f"{len(foreign)}, and {inside} inside",
        ok=not foreign and inside > 0,
    )


def core_of(process: subprocess.Popen[str]) -> int:
    done = subprocess.run(["pgrep", "-P", str(process.pid), "wandb-core"], capture_output=True, text=True, check=True)
    return int(done.stdout)


def break_wandb(process: subprocess.Popen[str], run: RunDir) -> None:
    os.kill(core_of(process), signal.SIGKILL)


def fill_the_disk_of_wandb(process: subprocess.Popen[str], run: RunDir) -> None:
    size = wandb_file(run).stat().st_size
    subprocess.run(["prlimit", f"--fsize={size + 10_000}", "--pid", str(core_of(process))], check=True)


def break_trackio(process: subprocess.Popen[str], run: RunDir) -> None:
    shutil.rmtree(run.path / "trackio")
    (run.path / "trackio").write_text("no folder")


BREAKS: dict[str, tuple[str, Callable[[subprocess.Popen[str], RunDir], None]]] = {
    "W&B's process is killed": ("wandb", break_wandb),
    "W&B's file cannot grow": ("wandb", fill_the_disk_of_wandb),
    "Trackio's folder becomes a file": ("trackio", break_trackio),
}


def check_failures(claims: Claims, folder: Path, count: int) -> None:
    for number, (what, (name, breaks)) in enumerate(BREAKS.items()):
        run = RunDir(folder / f"broken-{number}")
        process = new(folder, run, 8 * count, "csv,wandb,trackio")
        after_steps(run, process, 20)
        breaks(process, run)
        _, err = process.communicate()
        told = [line for line in err.splitlines() if "given up" in line]
        with open(run.path / "metrics.csv", newline="") as file:
            rows = sum(1 for _ in csv.DictReader(file))
        claims.check(
            f"{what} during a run of {8 * count} steps",
            bound=f"exit status 0, {name} given up in one line, no traceback, {8 * count} rows in metrics.csv",
            measured=f"exit status {process.returncode}, {'; '.join(told) or 'nothing said'}, "
            f"{err.count('Traceback')} tracebacks, {rows} rows".replace(str(folder), "…"),
            ok=process.returncode == 0
            and [f"report_to {name} is given up" in line for line in told] == [True]
            and "Traceback" not in err
            and rows == 8 * count == len(steps(run, "loss")),
        )


def check_missing(claims: Claims, folder: Path) -> None:
    """In a Python in which they cannot be found."""
    hide = "import sys; sys.modules[sys.argv.pop(1)] = None; from tapeless.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for name in ("wandb", "trackio"):
        words = ["train", "new", *SMALL, "--dataset-path", folder / "text.txt", "--out-dir", folder / name]
        done = subprocess.run(
            [PYTHON, "-c", hide, name, *map(str, [*words, "--max-steps", 5, "--report-to", f"csv,{name}"])],
            env=environment(folder),
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"error[MISSING]: report_to {name}: the package {name} is not installed; pip install 'tapeless[{name}]'"
        claims.check(
            f"a run that reports to {name}, which is not installed",
            bound="exit status 2 with the way to install it, and no directory",
            measured=f"exit status {done.returncode}, {done.stderr.strip()}, "
            f"{'a' if (folder / name).exists() else 'no'} directory",
            ok=done.returncode == 2 and said in done.stderr and not (folder / name).exists(),
        )


def versions() -> dict[str, str] | None:
    code = "import json, wandb, trackio; print(json.dumps({'wandb': wandb.__version__, 'trackio': trackio.__version__}))"
    done = subprocess.run([PYTHON, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def main() -> None:
    found = versions()
    if found is None:
        skip("no packages wandb and trackio here; TAPELESS_LOGS_PYTHON names a Python that has them")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    claims = Claims("logs")
    with scratch() as folder:
        (folder / "text.txt").write_text(library_text(60_000))
        (folder / "home").mkdir()
        run = check_resume(claims, folder, count)
        check_places(claims, folder, run)
        check_failures(claims, folder, count)
        check_missing(claims, folder)
        claims.finish(**found)


if __name__ == "__main__":
    main()
