"""Checkpoints: written so that a kill at any moment leaves the one before it whole, read only after every byte is checked.

    checkpoints/step-00001000/   model.safetensors  optim.safetensors  state.json  MANIFEST.json
    checkpoints/latest, best     text files with the name of a folder
Writing: a `.tmp-` folder beside the others -> tensors -> state -> MANIFEST.json (name, size, sha256), each synced to the disk
-> rename -> `latest`. A folder under its final name is therefore complete, and its manifest tells later damage from that.
Equal weights are equal bytes: names are sorted, and no time, host or version is in the tensor files.
Which of them stay: rotation.py. Judged by: tests/train/test_checkpoint.py, tests/train/test_checkpoint_kill.py."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapeless.data.files import atomic_write, file_sha256, write_json
from tapeless.errors import NEWER_FORMAT, CheckpointError, DamagedError

FORMAT_VERSION = 1
MODEL, OPTIM, STATE, MANIFEST = "model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json"
STATE_FIELDS = {"step", "tokens", "epoch", "sample_index", "seed", "best_val_loss", "best_step", "guard", "world_size"}
STEP_NAME = re.compile(r"step-(\d{8,})")


class Checkpoint(NamedTuple):
    params: dict[str, Tensor]  # by parameter name
    optim: dict[str, dict[str, Tensor]]  # "exp_avg" -> by parameter name
    state: dict[str, Any]
    path: Path


def save_checkpoint(
    folder: Path,
    params: Mapping[str, Tensor],
    optim_state: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
) -> Path:
    """Write a checkpoint of state["step"] and let `latest` name it.

    params: the masters, in the dtype the optimizer updates. state: STATE_FIELDS; what is known here is added."""
    if set(state) != STATE_FIELDS:
        raise CheckpointError(f"the state of a checkpoint has the fields {sorted(STATE_FIELDS)}, got {sorted(state)}")
    known = {"format_version": FORMAT_VERSION, "threads": torch.get_num_threads(), "torch_version": torch.__version__}
    target = folder / f"step-{state['step']:08d}"
    tmp = folder / f".tmp-{os.getpid()}-{target.name}"
    try:
        shutil.rmtree(tmp, ignore_errors=True)  # in a container every process may have the same id
        tmp.mkdir(parents=True)
        _write_tensors(tmp / MODEL, params)
        _write_tensors(tmp / OPTIM, {f"{key}/{name}": x for key, views in optim_state.items() for name, x in views.items()})
        write_json(tmp / STATE, known | dict(state))
        listed = [{"name": n, "size": (tmp / n).stat().st_size, "sha256": file_sha256(tmp / n)} for n in (MODEL, OPTIM, STATE)]
        write_json(tmp / MANIFEST, {"files": listed})
        replaced = _make_way(target)
        os.rename(tmp, target)
        _sync(folder)
        point_to(folder, "latest", target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}; earlier checkpoints are as they were") from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    if replaced:
        shutil.rmtree(replaced)
    return target


def load_checkpoint(
    folder: Path, *, on_warning: Callable[[str], None], which: str = "latest", fallback: bool = True
) -> Checkpoint:
    """The checkpoint that `latest` (or `best`) names; where that is damaged, the one before it, and on_warning is told.

    A kill before the first `latest` was written leaves complete checkpoints without one: then the newest counts."""
    steps = checkpoints(folder)
    if not steps:
        raise CheckpointError(f"{folder}: no checkpoint here")
    try:
        first = pointed(folder, which)
    except DamagedError as error:
        if not fallback:
            raise
        on_warning(str(error))
        first = None
    if first is None:
        if which != "latest":
            raise CheckpointError(f"{folder}: no checkpoint is marked {which}; there are {', '.join(map(str, steps))}")
        first = max(steps)
    others = sorted(set(steps) - {first}, key=lambda step: (step > first, -step))
    for step in (first, *others):
        try:
            checkpoint = read_checkpoint(steps.get(step, folder / f"step-{step:08d}"))
        except DamagedError as error:
            if not fallback:
                raise
            on_warning(str(error))
        else:
            if step != first:
                on_warning(f"going on from {checkpoint.path} instead, {abs(first - step)} steps away")
            return checkpoint
    raise CheckpointError(f"{folder}: all {len(steps)} checkpoints are damaged")


def read_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint, verified first."""
    names = verify(path)
    state = json.loads((path / STATE).read_bytes())
    if state["format_version"] > FORMAT_VERSION:
        raise NEWER_FORMAT(path=path, version=state["format_version"], known=FORMAT_VERSION)
    if not {MODEL, OPTIM} <= names:
        raise DamagedError(f"{path} is damaged: {MANIFEST} does not list {MODEL} and {OPTIM}")
    named = STEP_NAME.match(path.name)
    if named and int(named[1]) != state["step"]:
        raise DamagedError(f"{path} is damaged: expected step {int(named[1])}, got step {state['step']} in {STATE}")
    optim: dict[str, dict[str, Tensor]] = {}
    for key, x in load_file(path / OPTIM).items():
        kind, _, name = key.partition("/")
        optim.setdefault(kind, {})[name] = x
    return Checkpoint(load_file(path / MODEL), optim, state, path)


def verify(path: Path) -> set[str]:
    """Size and sha256 of every file against the manifest: the files' names, or an error that says which is damaged, and how."""
    try:
        listed = {str(f["name"]): (f["size"], f["sha256"]) for f in json.loads((path / MANIFEST).read_bytes())["files"]}
        if STATE not in listed or any(Path(name).name != name for name in listed):
            raise ValueError(f"the names {list(listed)}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedError(
            f"{path} is damaged and stays as it is: {MANIFEST}: expected a list of files, got {error!r}"
        ) from error
    wrong = [problem for name, expected in listed.items() if (problem := _problem(path / name, *expected))]
    if wrong:
        raise DamagedError(f"{path} is damaged and stays as it is: {'; '.join(wrong)}")
    return set(listed)


def _problem(file: Path, size: int, sha256: str) -> str | None:
    try:
        if (got := file.stat().st_size) != size:
            return f"{file.name}: expected {size} bytes, got {got}"
        if (digest := file_sha256(file)) != sha256:
            return f"{file.name}: expected sha256 {sha256}, got {digest}"
    except OSError as error:
        return f"{file.name}: expected {size} bytes, got {error.strerror}"
    return None


def restore(views: Mapping[str, Tensor], saved: Mapping[str, Tensor], where: Path) -> None:
    """Copy saved tensors into a model's parameters, or an optimizer's state, of the same names and shapes."""
    wrong = [f"{name} is missing" for name in views if name not in saved]
    wrong += [f"{name} is unknown here" for name in saved if name not in views]
    for name in views.keys() & saved.keys():
        if views[name].shape != saved[name].shape:
            wrong.append(f"{name} is {tuple(saved[name].shape)}, expected {tuple(views[name].shape)}")
    if wrong:
        raise CheckpointError(f"{where} does not fit: {'; '.join(sorted(wrong))}")
    for name, view in views.items():
        view.copy_(saved[name])


def checkpoints(folder: Path) -> dict[int, Path]:
    """By step, ascending. A save of the same step that was killed while it replaced another left only the other's `.old`."""
    found = {}
    for path in sorted(folder.glob("step-*"), reverse=True):  # step-N.old comes before step-N, which then takes its place
        if match := STEP_NAME.fullmatch(path.name.removesuffix(".old")):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def pointed(folder: Path, which: str) -> int | None:
    """The step that `latest` or `best` names; None where there is no such file."""
    try:
        name = (folder / which).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    match = STEP_NAME.fullmatch(name)
    if not match:
        raise DamagedError(f"{folder / which} is damaged: expected the name of a checkpoint, got {name[:40]!r}")
    return int(match[1])


def point_to(folder: Path, which: str, target: Path) -> None:
    with atomic_write(folder / which) as file:
        file.write(f"{target.name}\n".encode())


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors writes for the owner's eyes alone; do as the umask says
    _sync(path)


def _make_way(target: Path) -> Path | None:
    """Move what an earlier save of the same step left at `target`: a damaged one is kept, a good one returned, to be deleted
    when its successor stands."""
    if not target.exists():
        return None
    try:
        verify(target)
    except DamagedError:
        kept = next(path for n in range(1, 1000) if not (path := target.with_name(f"{target.name}.damaged-{n}")).exists())
        os.rename(target, kept)
        return None
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(target, old)
    return old


def _sync(path: Path) -> None:
    """To the disk, a file or a folder's entries."""
    if path.is_dir() and os.name != "posix":
        return  # a folder cannot be opened there
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
