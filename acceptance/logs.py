"""Runs logged to W&B (offline) and Trackio, killed and resumed: the losses there are those of metrics.jsonl, in one run there,
nothing connects to a network, and a failing reporter does not end a run.

python acceptance/logs.py [STEPS]
Needs a Python with tapeless' dependencies, wandb and trackio: this one, or the one that TAPELESS_LOGS_PYTHON names. Connections
are counted by strace; without it, that claim is left out aloud."""

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
READ = """
import json, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
from wandb_records import wandb_records
for found in wandb_records(Path(sys.argv[1])):
    record = Record.FromString(found)
    if record.HasField("history"):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        print(json.dumps(items))
"""


def environment(folder: Path) -> dict[str, str]:
    """A home of its own, W&B offline, and the sources of this checkout."""
    paths = [str(HOME.parent / "src"), str(HOME), os.environ.get("PYTHONPATH", "")]
    own = {"HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return os.environ | own | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio-data")}


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
    command = [PYTHON, "-c", READ, str(wandb_file(run))]
    done = subprocess.run(command, env=environment(run.path.parent), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def trackio_rows(run: RunDir) -> list[dict[str, Any]]:
    """By SQL, without Trackio."""
    with sqlite3.connect(run.path.parent / "trackio-data" / "tapeless.db") as database:
        found = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
    return [{"run_id": name, "step": step, **json.loads(metrics)} for name, step, metrics in found]


def by_step(rows: list[dict[str, Any]], step: str, name: str) -> list[tuple[int, float]]:
    """Trackio has steps after the last checkpoint twice if the process is killed: with equal values, or both are listed."""
    return sorted({(row[step], row[name]) for row in rows if name in row})


def logged(run: RunDir) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """For each reporter, the losses and validation losses by step."""
    with open(run.path / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    places = {"wandb": (wandb_rows(run), "_step"), "trackio": (trackio_rows(run), "step")}
    found = {
        place: {name: by_step(rows, step, name) for name in ("loss/train", "loss/validation")}
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


def check_resume(claims: Claims, folder: Path, count: int) -> None:
    """Killed between two checkpoints, then resumed."""
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
        bound="exit status 0, only JSON on stdout, no reporter stopped",
        measured=f"exit status {process.returncode}, {'a' if 'report_to' in err else 'no'} reporter stopped",
        ok=process.returncode == 0 and "report_to" not in err and all(line.startswith("{") for line in out.splitlines()),
    )
    check_equal(claims, run, f"killed at step {killed_at} and resumed")
    names = {row["run_id"] for row in trackio_rows(run)}
    claims.check(
        "the run's id after the resume, in W&B and in Trackio",
        bound=f"{first}, one run",
        measured=f"{wandb_file(run).name}, {len(names)} run",
        ok=wandb_file(run).name == first and len(names) == 1,
    )
    check_connects(claims, trace)


def check_connects(claims: Claims, trace: Path) -> None:
    if not STRACE:
        print("left out: connections, since there is no strace here", flush=True)
        return
    calls = trace.read_text().splitlines()
    local = sum("AF_UNIX" in call for call in calls)
    network = [call for call in calls if "AF_INET" in call]
    claims.check(
        "connections of the resumed run and all its processes, W&B offline and Trackio local",
        bound="0 over a network",
        measured=f"{len(network)} over a network, {local} within the machine",
        ok=not network and local > 0,
    )


def core_of(process: subprocess.Popen[str]) -> int:
    done = subprocess.run(["pgrep", "-P", str(process.pid), "wandb-core"], capture_output=True, text=True, check=True)
    return int(done.stdout)


def break_wandb(process: subprocess.Popen[str], run: RunDir) -> None:
    os.kill(core_of(process), signal.SIGKILL)


def break_trackio(process: subprocess.Popen[str], run: RunDir) -> None:
    shutil.rmtree(run.path.parent / "trackio-data")
    (run.path.parent / "trackio-data").write_text("not a directory")


BREAKS: dict[str, tuple[str, Callable[[subprocess.Popen[str], RunDir], None]]] = {
    "W&B's process is killed": ("wandb", break_wandb),
    "Trackio's folder becomes a file": ("trackio", break_trackio),  # last: no later run can use it
}


def check_failures(claims: Claims, folder: Path, count: int) -> None:
    for number, (what, (name, breaks)) in enumerate(BREAKS.items()):
        run = RunDir(folder / f"broken-{number}")
        process = new(folder, run, 8 * count, "csv,wandb,trackio")
        after_steps(run, process, 20)
        breaks(process, run)
        _, err = process.communicate()
        warnings = [line for line in err.splitlines() if "report_to" in line]
        with open(run.path / "metrics.csv", newline="") as file:
            rows = sum(1 for _ in csv.DictReader(file))
        claims.check(
            f"{what} during a run of {8 * count} steps",
            bound=f"exit status 0, at most one warning, of {name}, no traceback, {8 * count} rows in metrics.csv",
            measured=f"exit status {process.returncode}, {'; '.join(warnings) or 'no warning'}, "
            f"{err.count('Traceback')} tracebacks, {rows} rows".replace(str(folder), "…"),
            ok=process.returncode == 0
            and len(warnings) <= 1
            and all(f"report_to {name} stopped" in line for line in warnings)
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
        check_resume(claims, folder, count)
        check_failures(claims, folder, count)
        check_missing(claims, folder)
        claims.finish(**found)


if __name__ == "__main__":
    main()
