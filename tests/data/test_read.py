"""Own data: what is read, in which order, and an error with its place for everything that is not text."""

import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapeless.config import READERS
from tapeless.data import chunks, read, split
from tapeless.data.read import read_chunks, skipped_files
from tapeless.errors import DataError, MissingError


def write(path: Path, content: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def read_documents(path: str, field: str = "text") -> list[str]:
    """Whole documents, and as in training an error where there is no text."""
    split.index_documents(read_chunks(path, field), path)
    documents, text = [], ""
    for chunk in read_chunks(path, field):
        text += chunk.text
        if chunk.last:
            documents.append(text)
            text = ""
    return documents


def test_a_file_keeps_its_bytes(tmp_path: Path):
    text = "one\r\ntwo\n\n äöü 🙂 \t"
    path = write(tmp_path / "a.anything", text)
    assert read_documents(path) == [text]


def test_a_byte_order_mark_goes(tmp_path: Path):
    assert read_documents(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]


def test_a_folder_is_read_by_path(tmp_path: Path):
    for name in ("b.txt", "a/z.md", "a/b/c.py", "B.TXT", "image.png", ".hidden.txt", ".git/config.txt", "empty.txt"):
        write(tmp_path / name, "" if name == "empty.txt" else f"this is {name}\n")
    documents = read_documents(str(tmp_path))
    assert [document.split()[-1] for document in documents] == ["B.TXT", "b.txt", "a/z.md", "a/b/c.py"]


def test_a_registered_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By its suffix, also compressed and in a folder, where it is not skipped."""

    def lines(path: Path, field: str) -> Iterator[str]:
        with read.opened(path) as file:
            yield from (f"{field} {line.decode().strip()}" for line in file)

    monkeypatch.setattr(READERS, "_entries", {**READERS._entries, "lines": lines})
    write(tmp_path / "a.lines", "one\ntwo\n")
    write(tmp_path / "b.lines.gz", gzip.compress(b"three\n"))
    write(tmp_path / "c.png", "no text")
    assert read_documents(str(tmp_path), "a") == ["a one", "a two", "a three"]
    assert skipped_files(str(tmp_path)) == {".png": 1}


def test_a_glob_is_sorted_and_recursive(tmp_path: Path):
    for name in ("2.txt", "1.txt", "deep/er/3.txt", "4.md"):
        write(tmp_path / name, name)
    (tmp_path / "folder.txt").mkdir()
    assert read_documents(str(tmp_path / "*.txt")) == ["1.txt", "2.txt"]
    assert len(read_documents(str(tmp_path / "**" / "*.txt"))) == 3


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path):
    assert read_documents(write(tmp_path / "notes[1].txt", "here")) == ["here"]


def test_jsonl(tmp_path: Path):
    lines = ['{"text": "first\\nline", "id": 1}', "", '{"text": ""}', '{"text": "zweite \\u00fc \u2028 Zeile"}', ""]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert read_documents(path) == ["first\nline", "", "zweite ü \u2028 Zeile"]


def test_a_json_list_of_texts(tmp_path: Path):
    records = [{"text": "first\nline", "id": 1}, {"text": "zweite ü"}]
    path = write(tmp_path / "a.json", "\ufeff " + json.dumps(records, indent=2))
    assert read_documents(path) == ["first\nline", "zweite ü"]
    for text in ('{"text": "x"}', '["text"]', "[" * 5000, '[{"id": 1}]', "[1, 2"):  # any other is a text
        assert read_documents(write(tmp_path / "b.json", text)) == [text]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "a"},\n{"text": 1}]', "a.json:2: expected an object with a string `text`"),
        ("a.json", '[{"text": "a"},\n{"text": ]', "a.json:2: not JSON: Expecting value at column 10"),
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b" \n\t\r\n ", "a.txt holds only whitespace"),
        ("a.txt", b"abc\xe9def", "a.txt: byte 0xe9 at offset 3 is not UTF-8"),
        ("a.txt", b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5 is not UTF-8"),
        ("a.txt", "abc🙂".encode()[:-1], "byte 0xf0 at offset 3 is not UTF-8"),
        ("a.txt", "hello".encode("utf-16"), "a.txt: is UTF-16, expected UTF-8"),
        ("a.txt", b"\xfe\xff\0h\0i", "is UTF-16, expected UTF-8"),
        ("a.txt", "hello".encode("utf-32"), "is UTF-32, expected UTF-8"),
        ("a.txt", b"\x89PNG\0\0", "byte 4 is NUL, so this is a binary file"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', "a.jsonl:2: not JSON: "),
        ("a.jsonl", '\n\n{"txt": "a", "id": 3}', "a.jsonl:3: no field `text`, got txt, id"),
        ("a.jsonl", "{}", "a.jsonl:1: no field `text`, got an empty object"),
        ("a.jsonl", '{"text": 3}', "a.jsonl:1: expected an object with a string `text`, got a `text` of type int"),
        ("a.jsonl", '["text"]', "a.jsonl:1: expected an object with a string `text`, got list"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: expected an object with a string `text`, got one that is nested too deeply"),
        ("a.jsonl", '{"text": "\\ud83d"}', "a.jsonl:1: expected an object with a string `text`, got half of a surrogate pair"),
        ("a.jsonl", '{"text": ""}', "a.jsonl holds only whitespace"),
    ],
)
def test_what_is_not_text(tmp_path: Path, name: str, content: bytes | str, message: str):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        read_documents(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_bad_file_in_a_folder_is_named(tmp_path: Path):
    write(tmp_path / "good.txt", "good")
    bad = write(tmp_path / "sub" / "bad.md", b"\xff")
    with pytest.raises(DataError, match=f"^{bad}: byte 0xff at offset 0"):
        read_documents(str(tmp_path))


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^missing.txt: no such file or folder \(looked in "):
        read_documents("missing.txt")
    with pytest.raises(DataError, match=r"^\*.txt: no file matches this pattern"):
        read_documents("*.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"^folder: no text files in this folder"):
        read_documents("folder")
    os.symlink("nowhere", "dangling")
    with pytest.raises(DataError, match=r"^dangling: neither a file nor a folder"):
        read_documents("dangling")


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a.txt", "text")

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(read, "open", refuse, raising=False)  # a mode of 000 does not stop root
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        read_documents(path)


def test_another_field(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", '{"body": "this", "text": 3}')
    assert read_documents(path, "body") == ["this"]
    with pytest.raises(DataError, match=r"a.jsonl:1: no field `title`, got body, text; name the field with --text-field"):
        read_documents(path, "title")


@pytest.mark.parametrize("block", [4, 7, 64])
def test_blocks_and_chunks_do_not_change_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(read, "BLOCK", block)
    monkeypatch.setattr(chunks, "CHUNK", 50)
    text = "naïve 漢字 🙂\nline two\r\n\n   indented\n" * 20
    path = write(tmp_path / "a.txt", "\ufeff" + text)
    assert len(list(read_chunks(path))) > 5
    assert read_documents(path) == [text]
    broken = write(tmp_path / "b.txt", text.encode() + b"\xff")
    with pytest.raises(DataError, match=f"byte 0xff at offset {len(text.encode())} is not UTF-8"):
        read_documents(broken)


def test_gzip(tmp_path: Path):
    lines = "\n".join(json.dumps({"text": f"document {i}"}) for i in range(50))
    write(tmp_path / "b.jsonl.gz", gzip.compress(lines.encode()))
    write(tmp_path / "a.txt.gz", gzip.compress(b"plain"))
    assert read_documents(str(tmp_path)) == ["plain", *(f"document {i}" for i in range(50))]
    write(tmp_path / "b.jsonl.gz", gzip.compress(lines.encode())[:-9])
    with pytest.raises(DataError, match=r"b.jsonl.gz: not a complete gzip file: .*; get the file again") as caught:
        read_documents(str(tmp_path))
    assert caught.value.code == "NOT_WHOLE"
    write(tmp_path / "b.jsonl.gz", b"{}")
    with pytest.raises(DataError, match="not a complete gzip file: Not a gzipped file"):
        read_documents(str(tmp_path))


def test_a_packed_list_is_not_unpacked_beyond_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its values are parsed together, so all of it is in memory."""
    monkeypatch.setattr(read, "UNPACKED", 1000)
    spaces = b" " * 200_000
    packed = gzip.compress(b'[{"text": "one"},' + spaces + b'{"text": "two"}]')
    with pytest.raises(DataError, match=r"a.json.gz: .*unpacks to more than"):
        read_documents(write(tmp_path / "a.json.gz", packed))
    monkeypatch.setattr(read, "UNPACKED", len(spaces) + 100)
    assert read_documents(write(tmp_path / "a.json.gz", packed)) == ["one", "two"]


def test_zstandard(tmp_path: Path):
    package = pytest.importorskip("zstandard")
    lines = "\n".join(json.dumps({"text": f"document {i}"}) for i in range(50))
    packed = package.ZstdCompressor().compress(lines.encode())
    path = write(tmp_path / "a.jsonl.zst", packed)
    assert read_documents(path) == [f"document {i}" for i in range(50)]
    write(tmp_path / "a.jsonl.zst", b"{}" * 20)
    with pytest.raises(DataError, match=r"a.jsonl.zst: not a complete zstandard file"):
        read_documents(path)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("a.jsonl.zst", "zstandard", "tables"), ("a.parquet", "pyarrow", "tables"), ("hf:owner/name", "datasets", "datasets")],
)
def test_an_optional_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str):
    monkeypatch.setitem(sys.modules, package, None)
    path = name if package == "datasets" else write(tmp_path / name, b"x")
    with pytest.raises(MissingError, match=rf"needs the package `{package}`: pip install 'tapeless\[{extra}\]'"):
        read_documents(path)


def test_skipped_files_are_counted(tmp_path: Path):
    for name in ("a.txt", "b.PNG", "c.png", ".hidden", "d", "e.jsonl.gz", "sub/f.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert skipped_files(str(tmp_path)) == {".png": 2, "no suffix": 1, ".pdf": 1}
