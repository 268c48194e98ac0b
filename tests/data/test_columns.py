"""Text in columns, read by pyarrow, and datasets by name, read by a stand-in for the package."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tapeless.data.read import read_chunks
from tapeless.errors import DataError

TEXTS = [f"document {i}" for i in range(2500)]


def texts(path: object, field: str = "text") -> list[str]:
    return [chunk.text for chunk in read_chunks(str(path), field)]


def code_of(path: object, field: str = "text") -> tuple[str, str]:
    with pytest.raises(DataError) as caught:
        texts(path, field)
    return caught.value.code, str(caught.value)


def test_parquet(tmp_path: Path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"id": range(2500), "text": TEXTS}), tmp_path / "a.parquet", row_group_size=300)
    assert texts(tmp_path / "a.parquet") == texts(tmp_path) == TEXTS
    code, message = code_of(tmp_path / "a.parquet", "body")
    assert code == "NO_COLUMN"
    assert "no column `body`, got id, text; name the column with --text-field" in message
    assert code_of(tmp_path / "a.parquet", "id")[0] == "BAD_RECORD"
    parquet.write_table(arrow.table({"text": ["a", None]}), tmp_path / "b.parquet")
    assert "b.parquet:row 1: expected an object with a string `text`, got nothing" in code_of(tmp_path / "b.parquet")[1]
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    assert code_of(tmp_path / "a.parquet")[0] == "NOT_WHOLE"


def saved_dataset(folder: Path) -> None:
    """As `Dataset.save_to_disk` writes it."""
    import pyarrow as arrow

    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (TEXTS[:1500], TEXTS[1500:]), strict=True):
        table = arrow.table({"text": part, "n": range(len(part))})
        with arrow.OSFile(str(folder / name), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=200)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_dataset_on_disk(tmp_path: Path):
    pytest.importorskip("pyarrow")
    saved_dataset(tmp_path / "mine" / "train")
    assert texts(tmp_path / "mine" / "train") == TEXTS
    assert code_of(tmp_path / "mine" / "train", "body")[0] == "NO_COLUMN"
    (tmp_path / "mine" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    _, message = code_of(tmp_path / "mine")
    assert f"holds the splits train, test; give one, such as {tmp_path / 'mine' / 'train'}" in message
    (tmp_path / "mine" / "train" / "data-00001-of-00002.arrow").write_bytes(b"short")
    assert code_of(tmp_path / "mine" / "train")[0] == "NOT_WHOLE"


class Rows(list):
    column_names = ("text", "n")

    def select_columns(self, names: list[str]) -> list[dict[str, str]]:
        return [{name: row[name] for name in names} for row in self]


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"splits": [], "_data_files": []}', '{"splits": 1, "_data_files": [1]}'])
def test_a_damaged_dataset_on_disk_is_named(tmp_path: Path, name: str, content: str):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name}: not a complete dataset file"):
        list(read_chunks(str(tmp_path)))


def test_a_dataset_by_name(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_dataset(name: str, split: str) -> Rows:
        asked.append((name, split))
        if name == "missing":
            raise RuntimeError("no such dataset\nlong story")
        return Rows({"text": text, "n": 1} for text in TEXTS[:3])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert texts("hf:owner/name") == texts("hf:owner/name#validation") == TEXTS[:3]
    assert asked == [("owner/name", "train"), ("owner/name", "validation")]
    assert code_of("hf:owner/name", "body")[0] == "NO_COLUMN"
    assert code_of("hf:owner/name", "n")[0] == "BAD_RECORD"
    assert code_of("hf:missing")[1] == "hf:missing: the package `datasets` cannot load it: no such dataset"
