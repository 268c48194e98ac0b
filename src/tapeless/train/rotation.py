"""Which checkpoints stay: the last k, every n-th, the best, the latest, and the one resumed from.

Judged by: tests/train/test_checkpoint_rotation.py."""

import math
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from tapeless.errors import DamagedError
from tapeless.train.checkpoint import checkpoints, point_to, pointed, verify


def is_new_best(val_loss: float, best_val_loss: float | None) -> bool:
    """NaN is never best, and nothing beats a number by not being one."""
    return math.isfinite(val_loss) and (best_val_loss is None or val_loss < best_val_loss)


def mark_best(folder: Path, checkpoint: Path, val_loss: float, best_val_loss: float | None) -> bool:
    """Let `best` name this checkpoint if its loss is the best so far; whether it is."""
    if is_new_best(val_loss, best_val_loss):
        point_to(folder, "best", checkpoint)
        return True
    return False


def rotate(
    folder: Path,
    *,
    keep_last: int,
    keep_every: int = 0,
    protect: Collection[int] = (),  # steps: the one this process resumed from
    on_warning: Callable[[str], None],
) -> list[Path]:
    """Delete what is neither among the last k, nor a multiple of n, nor latest, best or protected; what was deleted.

    Nothing goes before `latest` has been read back and verified. Steps beyond `latest` are another future, left by a resume
    from further back: they stay until training comes by and replaces them."""
    steps = checkpoints(folder)
    try:
        latest, best = pointed(folder, "latest"), pointed(folder, "best")
        if latest is None:
            return []
        verify(steps.get(latest, folder / f"step-{latest:08d}"))
    except DamagedError as error:
        on_warning(f"{error}; no older checkpoint is deleted")
        return []
    past = [step for step in steps if step <= latest]
    keep = {*past[-keep_last:], latest, best, *protect} | {step for step in past if keep_every and step % keep_every == 0}
    doomed = [steps[step] for step in past if step not in keep]
    for path in doomed:
        going = folder / f".tmp-{os.getpid()}-deleted-{path.name}"
        os.rename(path, going)  # first: a kill in mid-deletion must not leave half a checkpoint under a good name
        shutil.rmtree(going)
    return doomed


def remove_stale(folder: Path) -> None:
    """Clear what killed processes left. Only for the one process that holds the run's lock."""
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in folder.glob("step-*.old"):
        if path.with_suffix("").exists():
            shutil.rmtree(path)
        else:
            os.rename(path, path.with_suffix(""))
