"""Which checkpoints stay: the last k, every n-th, the best, the latest, and the one resumed from; and the names of two.

Tested by: tests/train/test_checkpoint_rotation.py."""

import math
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from tapeless.data.files import reason, writing
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


def repair_names(folder: Path, step: int, best_step: int | None, *, on_warning: Callable[[str], None]) -> None:
    """Let `latest` name the step that a run goes on from, and `best` the one its state says. They may be damaged; and where
    the newest checkpoints were, both may name steps that are still to come, or under an override never will."""
    steps = checkpoints(folder)
    if _named(folder, "latest", on_warning=lambda text: None) != step:  # whoever loaded the step has told
        point_to(folder, "latest", folder / f"step-{step:08d}")
    named = _named(folder, "best", on_warning=on_warning)
    if best_step is not None and best_step in steps and named != best_step:
        if named != step:  # what this step's evaluation marked, it will mark again
            on_warning(f"{folder / 'best'} is stale: expected step {best_step}, got step {named}")
        point_to(folder, "best", steps[best_step])
    elif best_step is None or named is None or named > step:
        with writing(folder / "best"):
            (folder / "best").unlink(missing_ok=True)


def _named(folder: Path, which: str, *, on_warning: Callable[[str], None]) -> int | None:
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
    protect: Collection[int] = (),  # steps: the one this process resumed from
    on_warning: Callable[[str], None],
) -> list[Path]:
    """Delete what is neither among the last k, nor a multiple of n, nor latest, best or protected; what was deleted.

    What cannot be deleted stays, and on_warning is told: that is no reason to end a training.
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
    deleted = []
    for path in [steps[step] for step in past if step not in keep]:
        going = folder / f".tmp-{os.getpid()}-deleted-{path.name}"
        try:
            os.rename(path, going)  # first: a kill in mid-deletion must not leave half a checkpoint under a good name
            shutil.rmtree(going)
        except OSError as error:
            on_warning(f"{path} could not be deleted: {reason(error)}; it takes up space, nothing else")
        else:
            deleted.append(path)
    return deleted


def remove_stale(folder: Path, *, on_warning: Callable[[str], None]) -> None:
    """Clear what killed processes left. Only for the one process that holds the run's lock."""
    try:
        for path in folder.glob(".tmp-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in folder.glob("step-*.old"):
            if path.with_suffix("").exists():
                shutil.rmtree(path)
            else:
                os.rename(path, path.with_suffix(""))
    except OSError as error:
        on_warning(f"{folder} could not be cleared of what an earlier process left: {reason(error)}")
