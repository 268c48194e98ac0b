"""Several processes on one run: those that want to write, of which one may, and those that only read. As a program:
python tests/faults/rivals.py 4"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))  # run_fixtures

from forked import Child
from small_run import new, outcome

from tapeless.cli.main import main as tapeless_main
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import load

SAVING = ["--max-steps", "40", "--save-every", "1", "--eval-every", "10", "--keep-last", "1"]


def writers(folder: Path, rivals: int) -> list[str]:
    """A run that is stopped, and gone on with by several at once: one does it, the others are told who."""
    expected, run = RunDir(folder / "expected"), RunDir(folder / "run")
    Child(lambda: new(expected, *SAVING).status).wait()
    first = Child(lambda: new(run, *SAVING).status)
    while not (run.checkpoints / "latest").exists():
        time.sleep(0.002)
    first.kill()
    first.wait()
    errors = folder / "errors"
    children = [Child(lambda: tapeless_main(["train", "resume", str(run.path)]), errors) for _ in range(rivals)]
    statuses = sorted(child.wait() for child in children)
    words = errors.read_text()
    problems = [] if statuses == [0] + [2] * (rivals - 1) else [f"exit statuses {statuses}"]
    if words.count("error[RUN_LOCKED]: ") != rivals - 1 or words.count("is in use by process") != rivals - 1:
        problems.append(f"said was {words}")
    return problems + ([] if outcome(run) == outcome(expected) else ["another end"])


def readers(folder: Path, count: int) -> list[str]:
    """A run that saves and deletes at every step, and others that load its newest weights all the while."""
    run, errors = RunDir(folder / "read"), folder / "reader-errors"
    trainer = Child(lambda: new(run, *SAVING).status)
    while not (run.checkpoints / "latest").exists():
        time.sleep(0.002)

    def read() -> int:
        while load(run.path, fallback=False, on_warning=lambda text: None).checkpoint.state["step"] < 40:
            tapeless_main(["train", "info", str(run.path)])
        return 0

    children = [Child(read, errors) for _ in range(count)]
    statuses = [child.wait() for child in [trainer, *children]]
    words = errors.read_text()
    return [] if not any(statuses) and not words else [f"exit statuses {statuses}: {words}"]


def main(count: int) -> int:
    with TemporaryDirectory(prefix="tapeless-") as scratch:
        problems = writers(Path(scratch), count) + readers(Path(scratch), count)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
