"""Text in columns: Parquet, and datasets of Hugging Face, saved to disk or by name (`hf:owner/name`, `hf:owner/name#split`).

Parquet and what `save_to_disk` wrote (Arrow files) are read by the package `pyarrow`, a batch of rows at a time; a dataset by
name is loaded by the package `datasets`, which downloads and caches it. Both packages are optional.
Tested by: tests/data/test_columns.py."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tapeless.data.packages import require_package
from tapeless.data.read import RATIO, unpacked_limit
from tapeless.data.worker import Limits, Worker
from tapeless.errors import BAD_RECORD, EXPANDS, NO_COLUMN, NOT_WHOLE, DataError
from tapeless.regular import read_json

BY_NAME = "hf:"
ROWS = 1000  # at a time
BATCH = 1 << 22  # bytes of text in an answer
SECONDS, MEMORY = 60.0, 2 << 30  # for the next texts; besides four times the size of the file


def is_dataset(path: str) -> bool:
    """Whether a source is a dataset of Hugging Face: by name, or a folder that `save_to_disk` wrote."""
    has = {name: os.path.isfile(os.path.join(path, f"{name}.json")) for name in ("dataset_dict", "dataset_info", "state")}
    return path.startswith(BY_NAME) or has["dataset_dict"] or (has["state"] and has["dataset_info"])


def dataset_texts(path: str, field: str) -> Iterator[str]:
    if path.startswith(BY_NAME):
        return _named_texts(path, field)
    return _saved_texts(Path(path), field)


def parquet_texts(path: Path, field: str) -> Iterator[str]:
    return _guarded_texts("parquet", path, field)


def _guarded_texts(form: str, path: Path, field: str) -> Iterator[str]:
    """The texts of a file that pyarrow reads, in a process with limits: a page of a megabyte may unpack to any size, and a
    damaged file may end the process that reads it."""
    require_package("pyarrow", path)
    limits = Limits(SECONDS, memory=MEMORY + 4 * path.stat().st_size)
    arguments = form.encode(), os.fsencode(path), field.encode()
    with closing(Worker("tapeless.data.columns:answers", *arguments, what=str(path), limits=limits)) as worker:
        size, most = 0, unpacked_limit(path, packed=True)
        while texts := worker.ask():
            yield from (text.decode() for text in texts)
            size += sum(map(len, texts))
            if size > most:
                raise EXPANDS(path=path, size=size >> 20, ratio=RATIO)


def answers(form: bytes, path: bytes, field: bytes) -> Callable[[], list[bytes]]:
    """Of the process that reads a file: the next texts; none at its end."""
    texts = FORMS[form.decode()](Path(os.fsdecode(path)), field.decode())

    def answer() -> list[bytes]:
        found: list[bytes] = []
        size = 0
        for text in texts:
            found.append(text.encode())
            size += len(found[-1])
            if size >= BATCH:
                break
        return found

    return answer


def _parquet_texts(path: Path, field: str) -> Iterator[str]:
    arrow = require_package("pyarrow", path)
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            _check_column(path, field, file.schema_arrow.names)
            batches = file.iter_batches(batch_size=ROWS, columns=[field])
            yield from _texts(path, field, (value for batch in batches for value in batch.column(0).to_pylist()))
    except (arrow.ArrowException, OSError) as error:
        raise NOT_WHOLE(path=path, form="Parquet", reason=_first_line(error)) from None


def _saved_texts(folder: Path, field: str) -> Iterator[str]:
    if (folder / "dataset_dict.json").is_file():
        splits = _listed(folder / "dataset_dict.json", "splits")
        raise DataError(
            f"{folder}: holds the splits {', '.join(splits)}; give one, such as {folder / splits[0]}, and another as --val-path"
        )
    for name in _listed(folder / "state.json", "_data_files"):
        yield from _guarded_texts("arrow", folder / name, field)


def _listed(file: Path, field: str) -> list[str]:
    """The names in a JSON file that `save_to_disk` wrote, one at least; without folders, so that they are next to it."""
    try:
        entries = read_json(file)[field]
        first, *others = [Path(entry["filename"] if isinstance(entry, dict) else entry).name for entry in entries]
        return [first, *others]
    except (ValueError, LookupError, TypeError) as error:
        raise NOT_WHOLE(path=file, form="dataset", reason=f"{type(error).__name__}: {error}") from None


def _arrow_texts(path: Path, field: str) -> Iterator[str]:
    arrow = require_package("pyarrow", path)
    import pyarrow.ipc as ipc

    try:
        with arrow.memory_map(str(path)) as file, ipc.open_stream(file) as reader:
            _check_column(path, field, reader.schema.names)
            yield from _texts(path, field, (value for batch in reader for value in batch.column(field).to_pylist()))
    except (arrow.ArrowException, OSError) as error:
        raise NOT_WHOLE(path=path, form="Arrow", reason=_first_line(error)) from None


def _named_texts(path: str, field: str) -> Iterator[str]:
    datasets = require_package("datasets", path)
    name, _, split = path.removeprefix(BY_NAME).partition("#")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the package's errors have no common kind
        raise DataError(f"{path}: the package `datasets` cannot load it: {str(error).splitlines()[0]}") from None
    _check_column(path, field, rows.column_names)
    yield from _texts(path, field, (row[field] for row in rows.select_columns([field])))


def _check_column(path: Path | str, field: str, names: list[str]) -> None:
    if field not in names:
        raise NO_COLUMN(path=path, field=field, got=", ".join(names) or "none")


def _texts(path: Path | str, field: str, values: Iterable[Any]) -> Iterator[str]:
    for number, value in enumerate(values):
        if not isinstance(value, str):
            got = "nothing" if value is None else type(value).__name__
            raise BAD_RECORD(path=path, line=f"row {number}", field=field, got=got)
        yield value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


FORMS: dict[str, Callable[[Path, str], Iterator[str]]] = {"parquet": _parquet_texts, "arrow": _arrow_texts}
