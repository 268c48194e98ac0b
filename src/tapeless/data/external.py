"""Token files of others, read as they are: nanoGPT's (uint16, no header), llm.c's (256 int32: 20240520, 1, count; then uint16).

A folder or a pattern of them has files for both parts, whose names say which: train.bin and val.bin, or those of llm.c, which
may be many: fineweb_train_000001.bin, fineweb_train_000002.bin … are one stream in the order of their names (joined.py). They
name no tokenizer, so one has to be given; nanoGPT's meta.pkl is a pickle, and nothing here ever unpickles.
Tested by: tests/data/test_external.py."""

import glob
import hashlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tapeless.data.files import file_sha256
from tapeless.data.joined import Tokens, joined
from tapeless.data.shards import CHUNK, MAGIC, check_all
from tapeless.errors import BAD_TOKEN_FILE, UNREADABLE, DataError

LLM_C = struct.Struct("<3i")  # the beginning of the header
LLM_C_HEADER, LLM_C_MAGIC, LLM_C_VERSION = 1024, 20240520, 1


def token_files(path: Path) -> dict[str, list[Path]] | None:  # by part: train, val
    """The token files of a folder that has no other data in it, or of a pattern; None where it is no such thing."""
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
    """Several files are one text only where llm.c wrote them: under one name, with a number each."""
    if len(files) == 1:
        return
    names = sorted({re.sub(r"_?\d+$", "", file.stem) for file in files})
    if len(names) > 1:
        raise DataError(f"{path}: the token files for {part} are of several sets: {', '.join(names)}; name one by a pattern")
    for file in files:
        if (kind := read_header(file)[0]) != "llm.c":
            raise DataError(f"{path}: {len(files)} files for {part}, but {file.name} is of {kind}; only llm.c's are joined")


def open_joined(files: list[Path], vocab_size: int) -> Tokens:  # (count,) uint16, read-only
    return joined([open_foreign(file, vocab_size) for file in files])


def kept_files(folder: Path, part: str) -> list[Path]:
    """One, or those of several that were taken over, in their order."""
    return sorted(folder.glob(f"{part}-[0-9]*.bin")) or [folder / f"{part}.bin"]


def hash_of_files(files: Mapping[str, list[Path]]) -> str:
    """Of token files by part. Where a part has several, it says which part begins where."""
    several = any(len(of_part) > 1 for of_part in files.values())
    words = [word for part, of_part in files.items() for word in ([part] * several + [file_sha256(file) for file in of_part])]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def largest_id(path: Path) -> int:
    _, count = read_header(path)
    tokens = np.memmap(path, "<u2", "r", path.stat().st_size - 2 * count, (count,))
    return max(int(tokens[first : first + CHUNK].max()) for first in range(0, count, CHUNK))


def open_foreign(path: Path, vocab_size: int) -> np.memmap:  # (count,) uint16, read-only
    kind, count = read_header(path)
    tokens = np.memmap(path, "<u2", "r", LLM_C_HEADER if kind == "llm.c" else 0, (count,))
    check_all(path, tokens, vocab_size)
    return tokens


def read_header(path: Path) -> tuple[str, int]:  # llm.c | nanogpt, tokens
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(LLM_C.size)
    except OSError as error:
        raise UNREADABLE(path=path, reason=error.strerror) from None
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
