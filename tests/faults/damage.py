"""Checkpoints that are not what was written: cut short, flipped, overwritten, swapped, missing, stale. Drawn by number, so that
any case can be had again. Each must be found, named and survived, and must stay as it is."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tapeless.errors import DamagedError
from tapeless.training.checkpoint import load_checkpoint

FILES = ("model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json")


class Case(NamedTuple):
    words: str
    named: str  # what an error has to name


Damage = Callable[[Path, random.Random], Case]  # of a folder of checkpoints


def newest(folder: Path) -> Path:
    return max(folder.glob("step-????????"))


def another(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(folder.glob("step-????????"))[:-1])


def some_file(folder: Path, draw: random.Random) -> Path:
    return newest(folder) / draw.choice(FILES)


def truncated(folder: Path, draw: random.Random) -> Case:
    file = some_file(folder, draw)
    size = draw.randrange(file.stat().st_size)
    file.write_bytes(file.read_bytes()[:size])
    return Case(f"{file.name} cut to {size} bytes", file.name)


def flipped(folder: Path, draw: random.Random) -> Case:
    file = some_file(folder, draw)
    content = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return Case(f"bit {bit} of {file.name} flipped", file.name)


def overwritten(folder: Path, draw: random.Random) -> Case:
    """As a disk does that loses a block: zeros, or something else."""
    file = some_file(folder, draw)
    content = bytearray(file.read_bytes())
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice((1, 16, 512, 4096)))
    block = draw.choice((bytes(end - start), draw.randbytes(end - start)))
    if content[start:end] == block:
        block = bytes(255 - byte for byte in block)
    content[start:end] = block
    file.write_bytes(content)
    return Case(f"bytes {start} to {end} of {file.name} overwritten", file.name)


def longer(folder: Path, draw: random.Random) -> Case:
    file = some_file(folder, draw)
    more = draw.choice((b"\n", b"\0", b" ", draw.randbytes(64)))
    file.write_bytes(file.read_bytes() + more)
    return Case(f"{file.name} longer by {len(more)} bytes", file.name)


def missing(folder: Path, draw: random.Random) -> Case:
    file = some_file(folder, draw)
    file.unlink()
    return Case(f"{file.name} missing", file.name)


def replaced_by_a_folder(folder: Path, draw: random.Random) -> Case:
    file = some_file(folder, draw)
    file.unlink()
    file.mkdir()
    return Case(f"a folder instead of {file.name}", file.name)


def swapped_with_another_step(folder: Path, draw: random.Random) -> Case:
    file = some_file(folder, draw)
    other = another(folder, draw) / file.name
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return Case(f"{file.name} swapped with that of {other.parent.name}", file.name)


def stale(folder: Path, draw: random.Random) -> Case:
    """One file of an older checkpoint, as a backup that was restored in part."""
    file, other = some_file(folder, draw), another(folder, draw)
    shutil.copyfile(other / file.name, file)
    return Case(f"{file.name} is that of {other.name}", file.name)


def swapped_in_itself(folder: Path, draw: random.Random) -> Case:
    a, b = (newest(folder) / name for name in draw.sample(FILES, 2))
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    return Case(f"{a.name} and {b.name} swapped", FILES[3] if FILES[3] in (a.name, b.name) else a.name)


def stale_whole(folder: Path, draw: random.Random) -> Case:
    """All of an older checkpoint under the newest one's name."""
    path, other = newest(folder), another(folder, draw)
    shutil.rmtree(path)
    shutil.copytree(other, path)
    return Case(f"{path.name} is a copy of {other.name}", path.name)


def gone(folder: Path, draw: random.Random) -> Case:
    path = newest(folder)
    shutil.rmtree(path)
    return Case(f"{path.name} missing", "latest")


def latest_flipped(folder: Path, draw: random.Random) -> Case:
    file = folder / "latest"
    content = bytearray(file.read_bytes())
    bit = draw.randrange(8 * (len(content) - 1))  # the line end is nobody's business
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return Case(f"bit {bit} of latest flipped", "latest")


def latest_truncated(folder: Path, draw: random.Random) -> Case:
    file = folder / "latest"
    size = draw.randrange(file.stat().st_size - 1)
    file.write_bytes(file.read_bytes()[:size])
    return Case(f"latest cut to {size} bytes", "latest")


def latest_missing(folder: Path, draw: random.Random) -> Case:
    (folder / "latest").unlink()
    return Case("latest missing", "latest")


def latest_stale(folder: Path, draw: random.Random) -> Case:
    other = another(folder, draw)
    (folder / "latest").write_text(f"{other.name}\n")
    return Case(f"latest names {other.name}", "latest")


OFTEN: list[Damage] = [flipped, flipped, truncated, overwritten, stale, swapped_with_another_step]
DAMAGES: list[Damage] = [*OFTEN, longer, missing, replaced_by_a_folder, swapped_in_itself, stale_whole, gone]
DAMAGES += [latest_flipped, latest_truncated, latest_missing, latest_stale]


def damage(folder: Path, number: int) -> Case:
    """Damage a folder of checkpoints by the case of this number."""
    return DAMAGES[number % len(DAMAGES)](folder, random.Random(number))


def problems(folder: Path, case: Case, good: dict[int, dict[str, bytes]]) -> list[str]:
    """What is wrong with how the damage is met; nothing, if all is well. good: the files of every checkpoint, by step."""
    found, before = [], snapshot(folder)
    refused: list[str] = []
    try:
        load_checkpoint(folder, fallback=False, on_warning=refused.append)
    except DamagedError as error:
        refused.append(str(error))
    if not any(case.named in text for text in refused):
        found.append(f"{case.named} is not named in {refused}")
    warnings: list[str] = []
    used = load_checkpoint(folder, on_warning=warnings.append)
    if not any(case.named in text for text in warnings):
        found.append(f"{case.named} is not named in {warnings}")
    if {name: (used.path / name).read_bytes() for name in FILES} != good[used.state["step"]]:
        found.append(f"what was loaded is not step {used.state['step']}")
    if snapshot(folder) != before:
        found.append("looking at it has changed it")
    return found


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def good_files(folder: Path) -> dict[int, dict[str, bytes]]:
    return {
        int(path.name.removeprefix("step-")): {name: (path / name).read_bytes() for name in FILES}
        for path in folder.glob("step-????????")
    }
