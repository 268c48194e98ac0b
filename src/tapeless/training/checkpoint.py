"""Checkpoints: written so that a kill at any moment leaves the previous one intact, read only after every byte is verified.

    checkpoints/step-00001000/   model.safetensors  optim.safetensors  state.json  MANIFEST.json
                                 of a large model optim-00000-of-00002.safetensors …, one for each kind of state
    checkpoints/latest, best     text files with the name of a folder
Writing: a `.tmp-` folder -> tensors -> state -> MANIFEST.json (name, size, sha256 taken while writing), each synced to the disk
-> rename -> `latest`. A folder under its final name is therefore complete, and the manifest detects later damage.
Equal weights are equal bytes: names are sorted, and no time, host or version is in the tensor files.
Which checkpoints are deleted: rotation.py.
Tested by: tests/train/test_checkpoint.py, tests/train/test_written_tensors.py, tests/faults/test_checkpoint_kill.py,
tests/faults/test_damage.py."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tapeless.data.files import (
    Threads,
    atomic_write,
    file_sha256,
    readable_json,
    reason,
    sync_folder,
    unused,
    write_synced,
    writing,
)
from tapeless.errors import NEWER_FORMAT, CheckpointError, DamagedError, WriteError
from tapeless.ops.numerics import copy_stream
from tapeless.regular import read_json, regular

FORMAT_VERSION = 1
MODEL, OPTIM, STATE, MANIFEST = "model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
STATE_FIELDS = {"step", "tokens", "epoch", "sample_index", "seed", "best_val_loss", "best_step", "guard", "world_size", "base"}
STATE_FIELDS |= {"functions", "seal"}
ADDED = dict.fromkeys(("base", "functions", "seal"))  # fields added later: None in older checkpoints
PIECE = 2**25  # bytes that are copied from a GPU at a time
AT_ONCE = 2**28  # bytes of tensors from which on files are written at the same time
STEP_NAME = re.compile(r"step-(\d{8,18})")


class Checkpoint(NamedTuple):
    params: dict[str, Tensor]  # by parameter name
    optim: dict[str, dict[str, Tensor]]  # "exp_avg" -> by parameter name
    state: dict[str, Any]
    path: Path


def save_checkpoint(
    folder: Path, params: Mapping[str, Tensor], optim_state: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write a checkpoint of state["step"] and point `latest` to it.

    params: the master weights, in the dtype the optimizer updates. state: STATE_FIELDS; versions and threads are added."""
    if set(state) != STATE_FIELDS:
        raise CheckpointError(f"the state of a checkpoint has the fields {sorted(STATE_FIELDS)}, got {sorted(state)}")
    known = {"format_version": FORMAT_VERSION, "threads": torch.get_num_threads(), "torch_version": torch.__version__}
    target = folder / f"step-{state['step']:08d}"
    tmp = folder / f".tmp-{os.getpid()}-{target.name}"
    try:
        shutil.rmtree(tmp, ignore_errors=True)  # in a container every process may have the same id
        folder.mkdir(exist_ok=True)  # without its parents: the directory of a run may just have been renamed
        tmp.mkdir()
        listed = [
            *_write_tensors(tmp, params, optim_state),
            write_synced(tmp / STATE, [readable_json(known | dict(state))]),
        ]
        write_synced(tmp / MANIFEST, [readable_json({"files": listed})])
        sync_folder(tmp)
        replaced = _move_existing(target)
        os.rename(tmp, target)
        sync_folder(folder)
        point_to(folder, "latest", target)
    except OSError as error:
        raise WriteError(f"{target} could not be written: {reason(error)}; earlier checkpoints are unchanged") from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)  # a resume removes what is left of it
    return target


def _write_tensors(
    folder: Path, params: Mapping[str, Tensor], optim_state: Mapping[str, Mapping[str, Tensor]]
) -> list[dict[str, Any]]:
    """Of a large model several files at the same time, since hashing one keeps one core busy."""
    kinds = [{f"{kind}/{name}": x for name, x in views.items()} for kind, views in sorted(optim_state.items())]
    large = sum(x.nbytes for tensors in (params, *kinds) for x in tensors.values()) >= AT_ONCE
    if not large or not kinds:
        kinds = [{key: x for tensors in kinds for key, x in tensors.items()}]
    files: dict[str, Mapping[str, Tensor]] = {MODEL: params, **dict(zip(optim_names(len(kinds)), kinds, strict=True))}

    def write(name: str) -> dict[str, Any]:
        return write_synced(folder / name, tensor_file(files[name]))

    if not large:
        return [write(name) for name in files]
    with Threads() as threads:
        writing = [threads.submit(write, name) for name in files]
        return [file.result() for file in writing]


def optim_names(count: int) -> list[str]:
    """Of the files with the state of an optimizer."""
    return [OPTIM] if count == 1 else [f"optim-{i:05d}-of-{count:05d}.safetensors" for i in range(count)]


def tensor_file(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, one tensor after the other, so that a checkpoint is hashed while it is written and never
    copied in memory. The package `safetensors` reads them; its own writer hides the operating system's errors.

    length of the header u64 · header, JSON padded with spaces to a multiple of 8 · the tensors, without gaps"""
    names = sorted(tensors)
    header, end = {}, 0
    for name in names:
        x = tensors[name]
        start, end = end, end + x.nbytes
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        flat = tensors[name].contiguous().view(-1).view(torch.uint8)  # (bytes,)
        yield from _of_gpu(flat) if flat.is_cuda else [flat.cpu().numpy().data]


def _of_gpu(flat: Tensor) -> Iterator[memoryview]:  # (bytes,)
    """Through pinned memory, on a stream of its own: beside the kernels of the training, and its copies to pageable memory."""
    host, stream = torch.empty(min(PIECE, len(flat)), dtype=flat.dtype, pin_memory=True), copy_stream(flat.device)
    for piece in flat.split(PIECE):
        with torch.cuda.stream(stream):
            host[: len(piece)].copy_(piece, non_blocking=True)
        stream.synchronize()
        yield host[: len(piece)].numpy().data


def load_checkpoint(
    folder: Path, *, on_warning: Callable[[str], None], which: str = "latest", fallback: bool = True
) -> Checkpoint:
    """The checkpoint that `latest` (or `best`) names; if that is damaged, the one before it, with a warning.

    Another process may be training the run and delete what is being read here. The name then points elsewhere, and loading
    starts over."""
    while True:
        warnings: list[str] = []
        name = _content(folder / which)
        found: Checkpoint | CheckpointError
        try:
            found = _load(folder, which, fallback, warnings.append)
        except CheckpointError as error:
            found = error
        if (warnings or isinstance(found, CheckpointError)) and _content(folder / which) != name:
            continue
        for text in warnings:
            on_warning(text)
        if isinstance(found, CheckpointError):
            raise found
        return found


def _content(file: Path) -> bytes | None:
    try:
        return regular(file).read_bytes()
    except OSError:
        return None


def _load(folder: Path, which: str, fallback: bool, on_warning: Callable[[str], None]) -> Checkpoint:
    first = _first(folder, which, fallback, on_warning)
    steps = checkpoints(folder)
    newer = [step for step in steps if which == "latest" and step > first]
    if newer:  # after a kill before `latest` was written, or a resume from an older checkpoint
        text = f"names step {first}, although there are newer checkpoints: {_listed(newer)}; using {first}"
        on_warning(f"{folder / which} {text}")
    for step in (first, *sorted(set(steps) - {first}, key=lambda step: (step > first, -step))):
        try:
            checkpoint = read_checkpoint(steps.get(step, folder / f"step-{step:08d}"))
        except DamagedError as error:
            if not fallback:
                raise
            on_warning(str(error))
        else:
            if step != first:
                on_warning(f"using {checkpoint.path} instead, {abs(first - step)} steps away")
            return checkpoint
    raise CheckpointError(f"{folder}: all {len(steps)} checkpoints are damaged")


def _first(folder: Path, which: str, fallback: bool, on_warning: Callable[[str], None]) -> int:
    """The step to try first. A kill before the first `latest` was written leaves one checkpoint and no such file."""
    try:
        step = pointed(folder, which)
        steps = checkpoints(folder)
        if not steps:
            raise CheckpointError(f"{folder}: no checkpoint here")
        if step is not None and step not in steps:
            raise DamagedError(f"{folder / which} names step-{step:08d}, which does not exist; there are {_listed(steps)}")
        if step is None and which != "latest":
            raise CheckpointError(f"{folder}: no checkpoint is marked {which}; there are {_listed(steps)}")
        if step is None and len(steps) > 1:
            raise DamagedError(f"{folder / which} is missing: expected the name of one of step {_listed(steps)}")
        return max(steps) if step is None else step
    except DamagedError as error:
        if not fallback:
            raise
        on_warning(str(error))
        return max(checkpoints(folder), default=0)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def read_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint, verified first."""
    names = verify(path)
    optim: dict[str, dict[str, Tensor]] = {}
    try:
        state = ADDED | read_json(path / STATE)
        if state["format_version"] > FORMAT_VERSION:
            raise NEWER_FORMAT(path=path, version=state["format_version"], known=FORMAT_VERSION)
        parts = sorted(name for name in names if name.startswith("optim"))
        if MODEL not in names or not parts or parts != optim_names(len(parts)) or not state.keys() >= STATE_FIELDS:
            raise DamagedError(f"{path} is damaged: expected {MODEL}, {OPTIM} and {STATE} with {_listed(sorted(STATE_FIELDS))}")
        named = STEP_NAME.match(path.name)
        if named and int(named[1]) != state["step"]:
            raise DamagedError(f"{path} is damaged: expected step {int(named[1])}, got step {state['step']} in {STATE}")
        for part in parts:
            for key, x in load_file(path / part).items():
                kind, _, name = key.partition("/")
                optim.setdefault(kind, {})[name] = x
        return Checkpoint(load_file(path / MODEL), optim, state, path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        # The manifest's hashes matched, so the disk is failing, or the folder is being deleted.
        raise DamagedError(f"{path} is damaged and left unchanged: cannot be read: {error}") from error


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The state of the checkpoint that `latest` names, without its tensors; None if there is none, or it is damaged."""
    try:
        return read_state(checkpoints(folder)[_first(folder, "latest", True, lambda text: None)])
    except (CheckpointError, OSError, LookupError, ValueError, TypeError):
        return None


def read_state(path: Path) -> dict[str, Any]:
    """The state of one checkpoint, without its tensors."""
    verify(path, only=STATE)
    return ADDED | read_json(path / STATE)


def verify(path: Path, *, hashes: bool = True, only: str | None = None) -> set[str]:
    """Compare size and sha256 of every file with the manifest: returns the files' names, or raises and names what is damaged.
    hashes: False compares sizes only, for a checkpoint that this process has just hashed and synced. only: one of the files."""
    if not path.is_dir():
        got = "a file" if path.exists() else "nothing"
        raise DamagedError(f"{path} is damaged: expected the folder of a checkpoint, got {got}")
    try:
        content = regular(path / MANIFEST).read_bytes()
        listed = {str(f["name"]): (f["size"], f["sha256"]) for f in json.loads(content)["files"]}
        if STATE not in listed or any(Path(name).name != name for name in listed):
            raise ValueError(f"the names {list(listed)}")
        if content != readable_json(json.loads(content)):  # bytes added or removed at the end
            raise ValueError(f"{len(content)} bytes, not those that were written")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        text = f"{path} is damaged and left unchanged: {MANIFEST}: expected a list of files, got {error!r}"
        raise DamagedError(text) from error
    compared = {name: expected for name, expected in listed.items() if only in (None, name)}
    wrong = [problem for name, expected in compared.items() if (problem := _problem(path / name, *expected, hashes))]
    if wrong:
        raise DamagedError(f"{path} is damaged and left unchanged, its files differ from {MANIFEST}: {'; '.join(wrong)}")
    return set(listed)


def _problem(file: Path, size: int, sha256: str, hashes: bool) -> str | None:
    try:
        if (got := file.stat().st_size) != size:
            return f"{file.name}: expected {size} bytes, got {got}"
        if hashes and (digest := file_sha256(file)) != sha256:
            return f"{file.name}: expected sha256 {sha256}, got {digest}"
    except OSError as error:
        return f"{file.name}: expected {size} bytes, got {reason(error)}"
    return None


def restore(views: Mapping[str, Tensor], saved: Mapping[str, Tensor], where: Path) -> None:
    """Copy saved tensors into a model's parameters, or an optimizer's state, of the same names and shapes."""
    wrong = [f"{name} is missing" for name in views if name not in saved]
    wrong += [f"{name} is unexpected" for name in saved if name not in views]
    for name in views.keys() & saved.keys():
        if views[name].shape != saved[name].shape:
            wrong.append(f"{name} is {tuple(saved[name].shape)}, expected {tuple(views[name].shape)}")
    if wrong:
        raise CheckpointError(f"{where} does not fit: {'; '.join(sorted(wrong))}")
    for name, view in views.items():
        view.copy_(saved[name])


def checkpoints(folder: Path) -> dict[int, Path]:
    """By step, ascending. A kill while a checkpoint of the same step was being replaced may leave only the old one, `.old`."""
    found = {}
    for path in sorted(folder.glob("step-*"), reverse=True):  # step-N.old comes first, and step-N replaces it
        if match := STEP_NAME.fullmatch(path.name.removesuffix(".old")):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def pointed(folder: Path, which: str) -> int | None:
    """The step that `latest` or `best` names; None if there is no such file."""
    try:
        name = regular(folder / which).read_text(encoding="utf-8", errors="replace").rstrip("\r\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{folder / which} is damaged: expected the name of a checkpoint, got {reason(error)}") from error
    match = STEP_NAME.fullmatch(name)
    if not match:
        raise DamagedError(f"{folder / which} is damaged: expected the name of a checkpoint, got {name[:40]!r}")
    return int(match[1])


def point_to(folder: Path, which: str, target: Path) -> None:
    with writing(folder / which):
        os.stat(folder)  # an error if the run was just renamed: a file is written into a folder that is made for it
    with atomic_write(folder / which) as file:
        file.write(f"{target.name}\n".encode())


def _move_existing(target: Path) -> Path | None:
    """Move an earlier checkpoint of the same step out of the way: a damaged one is kept, a good one is returned, to be deleted
    once the new one is in place."""
    if not target.exists():
        return None
    try:
        verify(target)
    except DamagedError:
        os.rename(target, unused(target.with_name(f"{target.name}.damaged")))
        return None
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(target, old)
    return old
