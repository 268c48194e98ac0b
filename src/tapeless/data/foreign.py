"""Token files of others, read as they are: nanoGPT's (uint16, no header), llm.c's (256 int32: 20240520, 1, count; then uint16).

A folder of them has one file for each part, whose name says which: train.bin and val.bin, or tiny_shakespeare_train.bin … They
name no tokenizer, so one has to be given; nanoGPT's meta.pkl is a pickle, and nothing here ever unpickles.
Judged by: tests/data/test_foreign.py."""

import struct
from pathlib import Path

import numpy as np

from tapeless.data.shards import MAGIC, check_all
from tapeless.errors import BAD_TOKEN_FILE, UNREADABLE, DataError

LLM_C = struct.Struct("<3i")  # the beginning of the header
LLM_C_HEADER, LLM_C_MAGIC, LLM_C_VERSION = 1024, 20240520, 1


def token_files(folder: Path) -> dict[str, Path] | None:  # by part: train, val
    """The two token files of a folder that has no other data in it; None where it is no such folder."""
    binaries = sorted(folder.glob("*.bin")) if folder.is_dir() else []
    found = {part: [path for path in binaries if part in path.stem.lower()] for part in ("train", "val")}
    if not all(found.values()) or (folder / "data.json").exists():
        return None
    for part, paths in found.items():
        if len(paths) > 1:
            raise DataError(f"{folder}: {len(paths)} token files for {part}, expected one; join them, or give a folder of two")
    return {part: paths[0] for part, paths in found.items()}


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
