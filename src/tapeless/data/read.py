"""Text sources, as documents in chunks: a file, a folder, a glob, JSONL, each also as .gz or .zst; Parquet and Hugging Face
datasets are read by columns.py. A .json file is text, unless it is a list of objects, which are then read like lines of JSONL.

Bytes are not changed, except that a UTF-8 byte order mark is removed. What is not text is an error that names the place:
guessing an encoding would train a model on mojibake. From a folder the files with a suffix of PROSE, CODE or READERS are read
in the order of their paths, without hidden ones. Only the current chunk is in memory.
Tested by: tests/data/test_read.py."""

import codecs
import glob
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import isinf
from pathlib import Path
from typing import IO, Any

from tapeless.config import READERS
from tapeless.data.chunks import Chunk, document_chunks
from tapeless.data.files import is_pickle
from tapeless.data.packages import require_package
from tapeless.errors import (
    BAD_RECORD,
    BINARY_FILE,
    EXPANDS,
    LONG_LINE,
    NO_FILES,
    NO_SUCH_PATH,
    NO_TEXT_FIELD,
    NOT_JSON,
    NOT_UTF8,
    NOT_WHOLE,
    OTHER_ENCODING,
    PICKLE,
    UNREADABLE,
    DataError,
)
from tapeless.regular import regular

JSONL, LIST = {".jsonl", ".ndjson"}, ".json"
PACKED = {".gz", ".zst"}
PROSE = {".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".log", ".csv", ".tsv", ".json", ".html", ".htm", ".xml"}
CODE = {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".zig", ".java", ".kt", ".js", ".ts", ".lua", ".rb"}
CODE |= {".sh", ".sql", ".toml", ".yaml", ".yml", ".ini", ".cfg"}
BLOCK = 1 << 20  # bytes read at a time
MAX_LINE = 1 << 26  # bytes of a record
RATIO, UNPACKED = 200, 1 << 28  # times the size of a packed file, and bytes that any may have; text is a tenth of that


def read_chunks(path: str, field: str = "text") -> Iterator[Chunk]:
    """Every document of a source. field: of a record or row, the one that holds its text."""
    from tapeless.data import columns

    if columns.is_dataset(path):
        for text in columns.dataset_texts(path, field):
            yield from document_chunks([text])
        return
    for file in find_files(path):
        kind = suffix_of(file)[1:]
        reader = READERS[kind] if kind in READERS else read_jsonl if field in first_object(file) else None
        if reader:
            for text in reader(file, field):
                yield from document_chunks([text])
        else:
            yield from read_text(file)


def find_files(path: str) -> list[Path]:
    if os.path.isdir(path):
        files = [file for file in _walk(path) if _is_text(file)]
        if not files:
            fix = "expected suffixes such as .txt, .md, .py, .jsonl or .parquet"
            raise NO_FILES(path=path, what="no text files in this folder", fix=fix)
        return files
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.lexists(path):
        raise DataError(f"{path}: neither a file nor a folder; give a file, a folder, a glob, or JSONL")
    if not glob.has_magic(path):
        raise NO_SUCH_PATH(path=path, folder=os.getcwd())
    files = [Path(match) for match in sorted(glob.glob(path, recursive=True)) if os.path.isfile(match)]
    if not files:
        what = f"no file matches this pattern (looked in {os.getcwd()})"
        raise NO_FILES(path=path, what=what, fix="check it with ls")
    return files


def skipped_files(path: str) -> Counter[str]:
    """How many files of a folder are not read, by suffix; hidden ones do not count."""
    return Counter(file.suffix.lower() or "no suffix" for file in _walk(path) if not _is_text(file))


def _is_text(path: Path) -> bool:
    suffix = suffix_of(path)
    return suffix in PROSE | CODE or suffix[1:] in READERS


def suffix_of(path: Path) -> str:
    """Of the content: .jsonl for a.jsonl and a.jsonl.gz."""
    packed = path.suffix.lower() in PACKED
    return Path(path.stem if packed else path.name).suffix.lower()


def _walk(folder: str) -> Iterator[Path]:
    """Its files without hidden ones, in the order of their paths."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in sorted(names) if not name.startswith("."))


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, decompressed while it is read; errors name the file."""
    openers: dict[str, Any] = {".gz": gzip.open, ".zst": _open_zstandard}
    try:
        with openers.get(path.suffix.lower(), open)(regular(path), "rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise NOT_WHOLE(path=path, form="gzip", reason=error) from None
    except OSError as error:
        raise UNREADABLE(path=path, reason=error.strerror or error) from None


@contextmanager
def _open_zstandard(path: Path, mode: str) -> Iterator[IO[bytes]]:
    zstandard = require_package("zstandard", path)
    try:
        with zstandard.open(path, mode) as file:
            yield io.BufferedReader(file)  # the package's reader cannot iterate over lines
    except zstandard.ZstdError as error:
        raise NOT_WHOLE(path=path, form="zstandard", reason=error) from None


def unpacked_limit(path: Path, *, packed: bool = False) -> float:
    """Bytes that a file may unpack to: a megabyte of zeros is a kilobyte, and would fill the disk with tokens."""
    return RATIO * path.stat().st_size + UNPACKED if packed or path.suffix.lower() in PACKED else float("inf")


def read_text(path: Path) -> Iterator[Chunk]:
    """One document; a file of 0 bytes has none."""
    with opened(path) as file:
        first = file.read(BLOCK)
        if first:
            yield from document_chunks(_decoded(first, file, path))


def _decoded(block: bytes, file: IO[bytes], path: Path) -> Iterator[str]:
    where, most = str(path), unpacked_limit(path)
    offset, held = _after_mark(block, where), b""
    block = block[offset:]
    while block:
        held += block
        block = file.read(BLOCK)
        text, used = decode(held, where, offset, final=not block)
        yield text
        held, offset = held[used:], offset + used
        if offset > most:
            raise EXPANDS(path=where, size=offset >> 20, ratio=RATIO)


def _after_mark(head: bytes, where: str) -> int:
    """Where the text begins, after a UTF-8 byte order mark."""
    if is_pickle(head):
        raise PICKLE(path=where, expected="UTF-8 text")
    for mark, encoding in ((b"\xff\xfe\0\0", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")):
        if head.startswith(mark):
            raise OTHER_ENCODING(path=where, encoding=encoding)
    return 3 * head.startswith(b"\xef\xbb\xbf")


def decode(data: bytes, where: str, offset: int, final: bool = True) -> tuple[str, int]:
    """The text of the bytes at `offset`, and how many were decoded: the last character may be incomplete."""
    zero = data.find(b"\0")
    if zero >= 0:
        raise BINARY_FILE(path=where, offset=offset + zero)
    try:
        return codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise NOT_UTF8(path=where, byte=byte, offset=offset + error.start, reason=error.reason) from None


def read_jsonl(path: Path, field: str) -> Iterator[str]:
    for number, record in read_records(path, field):
        yield _record_text(record, str(path), number, field)


def first_object(path: Path) -> dict[str, Any]:
    """Of a .json file that is a list of objects the first one, if it ends within the first BLOCK; else an empty one."""
    if suffix_of(path) != LIST:
        return {}
    with opened(path) as file:
        head = file.read(BLOCK)
    text = head[_after_mark(head, str(path)) :].decode(errors="ignore").lstrip()
    try:
        found = json.JSONDecoder().raw_decode(text[1:].lstrip())[0] if text.startswith("[") else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_records(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """The values of a JSONL file with their line numbers, or those of a JSON list with their positions. field: named in
    errors."""
    where, offset, most = str(path), 0, unpacked_limit(path)
    if suffix_of(path) == LIST:
        with opened(path) as file:
            content = file.read(-1 if isinf(most) else int(most) + 1)
        if len(content) > most:
            raise EXPANDS(path=where, size=len(content) >> 20, ratio=RATIO)
        skipped = _after_mark(content, where)
        records = _parsed(decode(content[skipped:], where, skipped)[0], where, 1, field)
        yield from enumerate(records if isinstance(records, list) else [records], 1)
        return
    with opened(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise LONG_LINE(path=where, line=number, most=MAX_LINE >> 20)
            if offset > most:
                raise EXPANDS(path=where, size=offset >> 20, ratio=RATIO)
            skipped = _after_mark(line, where) if number == 1 else 0
            text, _ = decode(line[skipped:], where, offset + skipped)
            offset += len(line)
            if text.strip():
                yield number, _parsed(text.rstrip(), where, number, field)


def _parsed(text: str, where: str, line: int, field: str) -> Any:
    """The JSON value of a text that begins in this line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise NOT_JSON(path=where, line=line + error.lineno - 1, reason=f"{error.msg} at column {error.colno}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise NOT_JSON(path=where, line=line, reason=str(error).partition(";")[0]) from None
    except RecursionError:
        raise BAD_RECORD(path=where, line=line, field=field, got="one that is nested too deeply") from None


def _record_text(record: Any, where: str, number: int, field: str) -> str:
    def bad(got: str) -> Exception:
        return BAD_RECORD(path=where, line=number, field=field, got=got)

    if not isinstance(record, dict):
        raise bad(type(record).__name__)
    if field not in record:
        got = ", ".join(list(record)[:8]) or "an empty object"
        raise NO_TEXT_FIELD(path=where, line=number, field=field, got=got)
    value = record[field]
    if not isinstance(value, str):
        raise bad(f"a `{field}` of type {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad("half of a surrogate pair, which is not a character") from None
    return value
