"""Token files of other programs: nanoGPT's (uint16, no header), llm.c's (256 int32: 20240520, 1, count; then uint16).

A folder or a pattern has files for both parts, by their names: train.bin and val.bin, or those of llm.c, which may
be many: fineweb_train_000001.bin, fineweb_train_000002.bin … are one sequence in the order of their names (ConcatTokens). They
name no tokenizer, so one has to be given; nanoGPT's meta.pkl is a pickle, and nothing here ever unpickles.
Tested by: tests/data/test_external.py."""

import glob
import hashlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tapeless.data.token_files import MAGIC, read_head
from tapeless.errors import BAD_TOKEN_FILE, DataError

LLM_C = struct.Struct("<3i")  # the beginning of the header
LLM_C_HEADER, LLM_C_MAGIC, LLM_C_VERSION = 1024, 20240520, 1


def token_files(path: Path) -> dict[str, list[Path]] | None:  # by part: train, val
    """The token files of a folder that has no other data in it, or of a pattern; None if it is neither."""
    found = [Path(name) for name in sorted(glob.glob(str(path)))] if glob.has_magic(str(path)) and not path.exists() else []
    if path.is_dir():
        found = sorted(path.glob("*.bin"))
    if not found or any(file.suffix != ".bin" for file in found) or (path / "data.json").exists():
        return None
    parts = {part: [file for file in found if part in file.stem.lower()] for part in ("train", "val")}
    if not all(parts.values()):
        if path.is_dir():
            return None
        raise DataError(f"{path}: {len(found)} token files, but none with train or none with val in its name; give both parts")
    for part, files in parts.items():
        _check_one_set(path, part, files)
    return parts


def _check_one_set(path: Path, part: str, files: list[Path]) -> None:
    """Several files are one text only if llm.c wrote them: under one name, with a number each."""
    if len(files) == 1:
        return
    names = sorted({re.sub(r"_?\d+$", "", file.stem) for file in files})
    if len(names) > 1:
        raise DataError(f"{path}: the token files for {part} are of several sets: {', '.join(names)}; name one by a pattern")
    for file in files:
        if (kind := read_header(file)[0]) != "llm.c":
            raise DataError(
                f"{path}: {len(files)} files for {part}, but {file.name} is of {kind}; only llm.c's are concatenated"
            )


def part_files(folder: Path, part: str) -> list[Path]:
    """The token files of a prepared part: one, or several external ones in their order."""
    return sorted(folder.glob(f"{part}-[0-9]*.bin")) or [folder / f"{part}.bin"]


def hash_of_files(digests: Mapping[str, list[str]]) -> str:
    """Of the SHA-256 of token files by part. If a part has several files, part names mark where each begins."""
    several = any(len(of_part) > 1 for of_part in digests.values())
    words = [word for part, of_part in digests.items() for word in ([part] * several + of_part)]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def open_external(path: Path) -> np.memmap:  # (count,) uint16, read-only
    """Checks the header, not the ids."""
    kind, count = read_header(path)
    return np.memmap(path, "<u2", "r", LLM_C_HEADER if kind == "llm.c" else 0, (count,))


def read_header(path: Path) -> tuple[str, int]:  # llm.c | nanogpt, tokens
    size, head = read_head(path, LLM_C.size)
    if head.startswith(MAGIC):
        raise BAD_TOKEN_FILE(
            path=path, got="begins with the header of tapeless", expected="plain ids: its data.json is missing"
        )
    magic, version, count = LLM_C.unpack(head) if len(head) == LLM_C.size else (0, 0, 0)
    whole = LLM_C_HEADER + 2 * count
    if magic == LLM_C_MAGIC:
        if version != LLM_C_VERSION:
            raise BAD_TOKEN_FILE(
                path=path, got=f"begins with llm.c's magic and version {version}", expected=f"version {LLM_C_VERSION}"
            )
        if count < 1 or size != whole:
            raise BAD_TOKEN_FILE(path=path, got=f"{size} bytes", expected=f"{whole} for the {count} tokens of its header")
        return "llm.c", count
    if count > 0 and size == whole:  # a header, of another kind: as plain ids it would be 512 wrong ones
        raise BAD_TOKEN_FILE(path=path, got=f"begins with magic {magic}", expected=f"llm.c's {LLM_C_MAGIC}")
    if size == 0 or size % 2:
        raise BAD_TOKEN_FILE(path=path, got=f"{size} bytes", expected="two for each token, and at least one token")
    return "nanogpt", size // 2
