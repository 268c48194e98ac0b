"""The directory of a run, or what is in it, is renamed, removed or written into while a process trains in it."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from run_fixtures import MODEL, final_bytes, text_file

import tapeless
from tapeless.cli.main import main
from tapeless.data.token_files import ConcatTokens, as_plain, open_tokens, write_tokens
from tapeless.errors import DataError, LockedError, WriteError
from tapeless.training.checkpoint import checkpoints
from tapeless.training.moved import OpenRun
from tapeless.training.run_config import read_run_config
from tapeless.training.run_dir import RunDir, RunLock

SETTINGS: dict[str, Any] = {"batch_size": 2, "max_steps": 6, "save_every": 2, "eval_every": 6, "sample_every": 0}
SETTINGS |= {"sample_tokens": 3, "verify": False, "ops": "reference", "keep_last": 9, "display": None}

WRITTEN = "checkpoint", 2  # when the first is on the disk, and no other is being written
BETWEEN = "step", 3  # after a step that no checkpoint is of


def trained(
    tmp_path: Path,
    act: Callable[[RunDir], object] = lambda run: None,
    name: str = "run",
    and_then: Any = None,
    at: Any = WRITTEN,
) -> RunDir:
    """A run in which `act` happens at an event."""
    run, data = RunDir(tmp_path / name), tmp_path / "tokens"
    if not data.exists():
        assert main(["data", "prepare", text_file(tmp_path, 700), "--out", str(data)]) == 0

    def on_event(event: dict[str, Any]) -> None:
        if (event["event"], event.get("step")) == at:
            act(run)
        if and_then is not None:
            and_then(event)

    return RunDir(tapeless.train(MODEL, data, out_dir=run.path, callbacks=[on_event], **SETTINGS).path)


def whole(tmp_path: Path, run: RunDir, caplog: pytest.LogCaptureFixture, said: str) -> None:
    """It ended like one that was left alone, with one warning, and can be resumed."""
    assert [text for text in caplog.messages if said in text and "could not be written" not in text][1:] == []
    assert said in caplog.text
    assert final_bytes(run) == final_bytes(trained(tmp_path, name="other"))
    assert main(["train", "verify", str(run.path), "--replay", "1"]) == 0
    assert tapeless.resume(run.path, max_steps=7, display=None).step == 7


def test_a_renamed_directory_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = trained(tmp_path, lambda run: run.path.rename(tmp_path / "renamed"))
    assert run.path == tmp_path / "renamed"
    assert not (tmp_path / "run").exists()
    whole(tmp_path, run, caplog, "was renamed while the run was training: it goes on in")


def test_a_removed_directory_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def still_locked(event: dict[str, Any]) -> None:
        if event["event"] == "end":
            with pytest.raises(LockedError):
                RunLock(tmp_path / "run" / "lock")

    run = trained(tmp_path, lambda run: shutil.rmtree(run.path), and_then=still_locked)
    assert max(checkpoints(run.checkpoints)) == 6
    assert 2 not in checkpoints(run.checkpoints)
    whole(tmp_path, run, caplog, "was removed while the run was training: it is made again, with its configuration")


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_was_begun_in_the_place_of_a_removed_one_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, finished: bool
):
    begun: list[RunDir] = []

    def another(run: RunDir) -> None:
        shutil.rmtree(run.path)
        begun.append(RunDir.create(run.path))
        if finished:
            run.config.write_text("its configuration")
            run.metrics.write_text("its log")
            begun[0].complete()

    run = trained(tmp_path, another)
    assert run.path == tmp_path / "run-1"
    assert not [path for path in begun[0].path.rglob("*.safetensors")]
    assert {path.name for path in begun[0].path.iterdir() if path.is_file()} == (
        {"config.toml", "metrics.jsonl"} if finished else {".unfinished"}
    )
    whole(tmp_path, run, caplog, "it is made again in ")


def test_a_directory_that_cannot_be_made_again_loses_no_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """As if the disk was gone: the last checkpoint is elsewhere, with everything that a resume needs."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))

    def in_the_way(run: RunDir) -> None:
        shutil.rmtree(run.path)
        run.path.write_text("")

    with pytest.raises(WriteError, match=r"the checkpoint of step 6 is in .*; to continue"):
        trained(tmp_path, in_the_way)
    (tmp_path / "run").unlink()
    (found,) = elsewhere.iterdir()
    found.rename(tmp_path / "run")
    assert len([text for text in caplog.messages if "is gone and cannot be made again" in text]) == 1
    assert main(["train", "verify", str(tmp_path / "run")]) == 0
    assert tapeless.resume(tmp_path / "run", max_steps=7, display=None).step == 7


def test_what_could_not_be_made_again_is_not_there_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = trained(tmp_path)
    before, opened = {file: (run.path / file).read_bytes() for file in ("config.toml", "train.bin")}, OpenRun(run)
    shutil.rmtree(run.path)

    def full(source: IO[bytes], target: IO[bytes]) -> None:
        target.write(source.read(8))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", full)
        with pytest.raises(WriteError, match="No space left on device"):
            opened.follow()
    assert "was removed" in str(opened.follow())
    assert before == {file: (run.path / file).read_bytes() for file in before}
    opened.close()


def test_a_directory_that_is_made_again_has_the_settings_of_the_resume(tmp_path: Path):
    run = trained(tmp_path)
    on_event = lambda event: shutil.rmtree(run.path) if (event["event"], event.get("step")) == ("step", 8) else None  # noqa: E731
    tapeless.resume(run.path, max_steps=10, lr=1e-4, display=None, callbacks=[on_event])
    assert read_run_config(run.config).train.lr == 1e-4
    assert tapeless.resume(run.path, display=None).step == 10


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_lost_log_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str):
    def act(run: RunDir) -> None:
        run.metrics.unlink()
        if how == "replaced":
            run.metrics.write_text("something else")

    run = trained(tmp_path, act)
    assert ((run.path / "metrics.jsonl.replaced-1").exists()) == (how == "replaced")
    whole(tmp_path, run, caplog, f"metrics.jsonl was {how}")


def test_a_log_lost_after_the_last_checkpoint_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = RunDir(tmp_path / "run")
    on_event = lambda event: run.metrics.unlink() if event["event"] == "end" else None  # noqa: E731
    tapeless.train(MODEL, text_file(tmp_path, 700), out_dir=run.path, callbacks=[on_event], **SETTINGS)
    assert "its lines are written again" in caplog.text
    assert main(["train", "verify", str(run.path)]) == 0
    assert b'"event": "end"' in run.metrics.read_bytes()


def rewrite(path: Path, change: Callable[[bytearray], object], *, same_times: bool = True) -> None:
    """In place, so that every link to the file sees it."""
    stat, content = os.stat(path), bytearray(path.read_bytes())
    change(content)
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()
    if same_times:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def flip_last(content: bytearray) -> None:
    content[-2] ^= 1


@pytest.mark.parametrize("same_times", [True, False])
def test_data_rewritten_in_place_end_the_run_before_anything_is_saved(tmp_path: Path, same_times: bool):
    source = tmp_path / "tokens" / "train.bin"
    with pytest.raises(DataError, match=r"train.bin: written into while the run was training on it.*nothing was saved since"):
        trained(tmp_path, lambda run: rewrite(source, flip_last, same_times=same_times), at=BETWEEN)
    run = RunDir(tmp_path / "run")
    assert os.path.samefile(source, run.path / "train.bin")
    assert max(checkpoints(run.checkpoints)) == 2
    with pytest.raises(DataError, match=r"dataset_fingerprint|the data changed"):
        tapeless.load(run.path)
    rewrite(source, flip_last)
    assert tapeless.resume(run.path, display=None).reason == "done"
    assert final_bytes(run) == final_bytes(trained(tmp_path, name="other"))


def test_data_that_are_touched_linked_or_replaced_are_what_they_were(tmp_path: Path):
    source = tmp_path / "tokens" / "train.bin"

    def act(run: RunDir) -> None:
        os.link(source, tmp_path / "another")
        os.utime(source)
        (tmp_path / "new").write_bytes(b"no tokens")
        (tmp_path / "new").replace(source)

    assert max(checkpoints(trained(tmp_path, act).checkpoints)) == 6


def test_a_file_cut_short_in_place_is_an_error_where_the_system_would_kill(tmp_path: Path):
    source = tmp_path / "tokens" / "train.bin"
    with pytest.raises(DataError, match=r"train.bin: (cut short while it was being read: 100 bytes|written into)"):
        trained(tmp_path, lambda run: rewrite(source, lambda content: content.__delitem__(slice(100, None))), at=BETWEEN)
    assert max(checkpoints(tmp_path / "run" / "checkpoints")) == 2


@pytest.mark.parametrize("several", [False, True])
def test_every_read_of_tokens_looks_at_the_size_first(tmp_path: Path, several: bool):
    write_tokens(tmp_path / "a.bin", [np.arange(9000) % 7], vocab_size=7, fingerprint="ab" * 32)
    tokens = open_tokens(tmp_path / "a.bin", None)
    read = (lambda: ConcatTokens([tokens, tokens])[np.array([8000])]) if several else (lambda: as_plain(tokens)[8000])
    assert read() == 8000 % 7
    os.truncate(tmp_path / "a.bin", 100)
    with pytest.raises(DataError, match=r"a.bin: cut short while it was being read: 100 bytes, expected 18064"):
        read()
