"""Which checkpoints are kept: the last k, every n-th, the best, the latest, and the one resumed from; `latest` and `best`.

Tested by: tests/train/test_checkpoint_rotation.py."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tapeless.data.files import reason, writing
from tapeless.errors import DamagedError
from tapeless.training.checkpoint import checkpoints, point_to, pointed, verify


def is_new_best(val_loss: float, best_val_loss: float | None) -> bool:
    """NaN and infinity are never the best."""
    return math.isfinite(val_loss) and (best_val_loss is None or val_loss < best_val_loss)


def repair_names(folder: Path, step: int, best_step: int | None, *, on_warning: Callable[[str], None]) -> None:
    """Point `latest` to the step that a run resumes from, and `best` to the one in its state. They may be damaged, or, if the
    newest checkpoints were damaged, name later steps."""
    steps = checkpoints(folder)
    if named_step(folder, "latest") != step:  # the load has warned already
        point_to(folder, "latest", folder / f"step-{step:08d}")
    named = named_step(folder, "best", on_warning=on_warning)
    if best_step is not None and best_step in steps and named != best_step:
        if named != step:  # this step's evaluation will mark it again
            on_warning(f"{folder / 'best'} is stale: expected step {best_step}, got step {named}")
        point_to(folder, "best", steps[best_step])
    elif best_step is None or named is None or named > step:
        with writing(folder / "best"):
            (folder / "best").unlink(missing_ok=True)


def named_step(folder: Path, which: str, *, on_warning: Callable[[str], None] = lambda text: None) -> int | None:
    """The step that `latest` or `best` names; None if it names none, or with a warning if it is damaged."""
    try:
        return pointed(folder, which)
    except DamagedError as error:
        on_warning(str(error))
        return None


def rotate(
    folder: Path,
    *,
    keep_last: int,
    keep_every: int = 0,
    protect: int | None = None,  # the step that this process resumed from
    written: int | None = None,  # the step that this process has just written
    on_warning: Callable[[str], None],
) -> list[Path]:
    """Delete what is neither among the last k, nor a multiple of n, nor latest, best or protected; returns what was deleted.

    What cannot be deleted stays, with a warning. Nothing is deleted unless `latest` is intact. If this process has just written
    it, its bytes were hashed on their way to the disk and synced, and its sizes are compared; any other is read back and
    hashed. Steps beyond `latest`, left by a resume from an older checkpoint, stay until training replaces them."""
    try:
        steps = checkpoints(folder)
        latest, best = pointed(folder, "latest"), pointed(folder, "best")
        if latest is None:
            return []
        verify(steps.get(latest, folder / f"step-{latest:08d}"), hashes=latest != written)
    except DamagedError as error:
        on_warning(f"{error}; no older checkpoint is deleted")
        return []
    except OSError as error:
        on_warning(f"{folder} cannot be listed: {reason(error)}; no older checkpoint is deleted")
        return []
    past = [step for step in steps if step <= latest]
    keep = {*past[-keep_last:], latest, best, protect} | {step for step in past if keep_every and step % keep_every == 0}
    deleted = []
    for path in [steps[step] for step in past if step not in keep]:
        going = folder / f".tmp-{os.getpid()}-deleted-{path.name}"
        try:
            os.rename(path, going)  # first, so that a kill never leaves an incomplete checkpoint under its name
            shutil.rmtree(going)
        except OSError as error:
            on_warning(f"{path} could not be deleted: {reason(error)}; it only takes up space")
        else:
            deleted.append(path)
    return deleted


def remove_stale(folder: Path, *, on_warning: Callable[[str], None]) -> None:
    """Remove what killed processes left. Only for the process that holds the run's lock."""
    try:
        for path in folder.glob(".tmp-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in folder.glob("step-*.old"):
            if path.with_suffix("").exists():
                shutil.rmtree(path)
            else:
                os.rename(path, path.with_suffix(""))
    except OSError as error:
        on_warning(f"{folder} could not be cleaned up after an earlier process: {reason(error)}")
