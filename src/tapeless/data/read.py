"""Your own text: a file, a folder, a glob, or JSONL with a `text` field, as documents.

Bytes are kept as they are (line ends too), only a UTF-8 byte order mark goes. What cannot be text is an error that names the
place: guessing an encoding would train a model on mojibake. In a folder the files with a suffix of TEXT are taken, hidden
ones aside, in the order of their paths; a file without text among several is passed over, alone it is an error.
Judged by: tests/data/test_read.py."""

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tapeless.data.files import is_pickle
from tapeless.errors import (
    BAD_RECORD,
    BINARY_FILE,
    EMPTY_DATA,
    NO_FILES,
    NO_SUCH_PATH,
    NO_TEXT_FIELD,
    NOT_JSON,
    NOT_UTF8,
    ONLY_WHITESPACE,
    OTHER_ENCODING,
    PICKLE,
    UNREADABLE,
    DataError,
)

JSONL = {".jsonl", ".ndjson"}
PROSE = {".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".log", ".csv", ".tsv", ".json", ".html", ".htm", ".xml"}
CODE = {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".zig", ".java", ".kt", ".js", ".ts", ".lua", ".rb"}
CODE |= {".sh", ".sql", ".toml", ".yaml", ".yml", ".ini", ".cfg"}
TEXT = JSONL | PROSE | CODE


class Document(NamedTuple):
    name: str
    text: str


def read_documents(path: str) -> list[Document]:
    files = find_files(path)
    documents = [document for file in files for document in read_file(file) if document.text.strip()]
    if not documents:
        empty = all(os.path.getsize(file) == 0 for file in files)
        raise (EMPTY_DATA if empty else ONLY_WHITESPACE)(path=path)
    return documents


def find_files(path: str) -> list[Path]:
    if os.path.isdir(path):
        files = list(_walk(path))
        if not files:
            fix = "expected suffixes such as .txt, .md, .py or .jsonl"
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


def _walk(folder: str) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() in TEXT:
                yield Path(root, name)


def read_file(path: Path) -> list[Document]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UNREADABLE(path=path, reason=error.strerror) from None
    if is_pickle(data):
        raise PICKLE(path=path, expected="UTF-8 text")
    text = decode(data, str(path))
    return read_jsonl(text, str(path)) if path.suffix.lower() in JSONL else [Document(str(path), text)]


def decode(data: bytes, where: str) -> str:
    for mark, encoding in ((b"\xff\xfe\0\0", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")):
        if data.startswith(mark):
            raise OTHER_ENCODING(path=where, encoding=encoding)
    zero = data.find(b"\0")
    if zero >= 0:
        raise BINARY_FILE(path=where, offset=zero)
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        offset = error.start + 3 * data.startswith(b"\xef\xbb\xbf")
        raise NOT_UTF8(path=where, byte=data[offset], offset=offset, reason=error.reason) from None


def read_jsonl(text: str, where: str) -> list[Document]:
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise NOT_JSON(path=where, line=number, reason=f"{error.msg} at column {error.colno}") from None
        except RecursionError:
            raise BAD_RECORD(path=where, line=number, got="one that is nested too deeply") from None
        if not isinstance(record, dict):
            raise BAD_RECORD(path=where, line=number, got=type(record).__name__)
        if "text" not in record:
            raise NO_TEXT_FIELD(path=where, line=number, got=", ".join(list(record)[:8]) or "an empty object")
        value = record["text"]
        if not isinstance(value, str):
            raise BAD_RECORD(path=where, line=number, got=f"a `text` of type {type(value).__name__}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise BAD_RECORD(path=where, line=number, got="half of a surrogate pair, which is no character")
        documents.append(Document(f"{where}:{number}", value))
    return documents
