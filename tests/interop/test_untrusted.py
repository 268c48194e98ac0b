"""Only regular files directly in the directory, up to a size."""

import os
from pathlib import Path

import pytest

from tapeless.errors import UntrustedFileError
from tapeless.interop.untrusted import check_name, exists, open_plain, parse_json, read_json


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "C:x", "a\0b", "a\nb", "\ud800", "a" * 256, 3, None, ["x"]],
    ids=repr,
)
def test_only_plain_names(name: object, tmp_path: Path):
    with pytest.raises(UntrustedFileError, match="is not a plain file name"):
        check_name(name, "here")
    if isinstance(name, str):
        with pytest.raises(UntrustedFileError):
            open_plain(tmp_path, name)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "ü.json", "..x", "a b"])
def test_ordinary_names_pass(name: str):
    assert check_name(name, "here") == name


def test_symlinks_are_refused_even_within(tmp_path: Path):
    (tmp_path / "real.json").write_text("{}")
    for name, target in (("inside.json", "real.json"), ("outside.json", "/etc/passwd"), ("nowhere.json", "gone")):
        (tmp_path / name).symlink_to(target)
        assert exists(tmp_path, name)
        with pytest.raises(UntrustedFileError, match=r"^[^:]* is a symlink, which could point anywhere"):
            open_plain(tmp_path, name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_pipes_and_folders_are_refused_without_waiting(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(UntrustedFileError, match=r"^[^:]* is not a regular file$"):
            open_plain(tmp_path, name)


def test_a_missing_file(tmp_path: Path):
    assert not exists(tmp_path, "x.json")
    with pytest.raises(UntrustedFileError, match=r"cannot read .*: No such file"):
        open_plain(tmp_path, "x.json")


def test_sizes_are_checked_first(tmp_path: Path):
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(1 << 40)  # a sparse terabyte
    with pytest.raises(UntrustedFileError, match=r"1,099,511,627,776 bytes; large\.json may have at most 1,000"):
        read_json(tmp_path, "large.json", 1000)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' occurs twice"),
        (b'{"x": {"a": 1, "a": 1}}', "'a' occurs twice"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
    ids=["half", "deep", "deep tables", "bytes", "twice", "twice below", "list", "long number"],
)
def test_invalid_json(content: bytes, says: str):
    with pytest.raises(UntrustedFileError, match=says) as found:
        parse_json(content, "here")
    assert "\n" not in str(found.value)


def test_valid_json(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"a": [1, 2.5, null]}')
    assert read_json(tmp_path, "a.json", 100) == {"a": [1, 2.5, None]}
