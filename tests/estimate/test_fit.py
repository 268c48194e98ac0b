"""What does not fit is refused with the numbers and with what would fit, by the same estimate."""

from dataclasses import replace
from pathlib import Path

import pytest

from tapeless.config import ModelConfig, SimpleLMConfig, TrainConfig
from tapeless.errors import DiskError, TooLargeError
from tapeless.estimate import fit
from tapeless.estimate.disk import Disk, disk_of
from tapeless.estimate.fit import changes_that_fit, largest_batch, resource_errors
from tapeless.estimate.memory import memory_of
from tapeless.estimate.target import Target

pytest.importorskip("numba")

MODEL = ModelConfig(vocab_size=300, hidden_dim=64, num_layers=8, num_heads=4, intermediate_dim=256, max_seq_len=64)
TRAIN = TrainConfig(batch_size=64, seq_len=64, verify=False, ops="cpu")  # whose doubles are quick


def peak(**changes: object) -> int:
    return memory_of(MODEL, replace(TRAIN, **changes)).peak


def flags(room: int, train: TrainConfig = TRAIN, model: ModelConfig = MODEL) -> list[str]:
    found = changes_that_fit(model, train, room)
    assert all(change.peak <= room for change in found)
    return [change.flags for change in found]


def test_the_least_change_of_each_kind():
    assert flags(peak() - 1) == ["--recompute cheap", "--batch-size 32 --grad-accum 2", "--dtype bfloat16"]
    assert flags(peak(recompute="cheap") - 1)[0] == "--recompute full"


def test_the_step_stays_the_same():
    (change,) = [
        change for change in changes_that_fit(MODEL, replace(TRAIN, grad_accum=3), peak() - 1) if "batch" in change.flags
    ]
    assert change.flags == "--batch-size 32 --grad-accum 6"


def test_where_no_change_alone_is_enough_they_are_taken_together():
    room = peak(batch_size=1, grad_accum=64) - 1
    (found,) = flags(room)
    assert found.startswith("--recompute full --dtype bfloat16") or found.startswith("--recompute full --batch-size")


def test_the_gradient_check_can_be_left_out():
    model, train = replace(MODEL, hidden_dim=256, intermediate_dim=1024), replace(TRAIN, batch_size=1, verify=True)
    room = memory_of(model, train).peak - 1
    assert flags(room, train, model) == ["--no-verify"]


def test_nothing_fits_into_nothing():
    assert changes_that_fit(MODEL, TRAIN, 0) == []
    assert changes_that_fit(SimpleLMConfig(), TRAIN, 0) == []


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "room_of", lambda *where: 2**40)
    monkeypatch.setattr(fit, "free_disk", lambda path: 2**40)


def test_what_fits_meets_no_obstacle(plenty: None, tmp_path: Path):
    memory = memory_of(MODEL, TRAIN)
    assert resource_errors(MODEL, TRAIN, memory, disk_of(memory.checkpoint, TRAIN, 100), tmp_path) == []


def test_too_large_says_the_numbers_and_what_would_fit(plenty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    memory = memory_of(MODEL, TRAIN)
    monkeypatch.setattr(fit, "room_of", lambda *where: memory.peak - 1)
    (found,) = resource_errors(MODEL, TRAIN, memory, Disk(1, 1, 1), tmp_path)
    assert isinstance(found, TooLargeError)
    assert (found.code, found.exit_status) == ("TOO_LARGE", 2)
    for words in (
        "the training step needs",
        "are free on cpu",
        "saved activations",
        "would fit: --recompute cheap",
        "--skip-resource-check",
    ):
        assert words in str(found)
    monkeypatch.setattr(fit, "room_of", lambda *where: 1000)
    (found,) = resource_errors(MODEL, TRAIN, memory, Disk(1, 1, 1), tmp_path)
    assert "choose a smaller model" in str(found)


def test_a_full_disk(plenty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    memory = memory_of(MODEL, TRAIN)
    disk = disk_of(memory.checkpoint, TRAIN, 1000)
    monkeypatch.setattr(fit, "free_disk", lambda path: disk.most - 1)
    (found,) = resource_errors(MODEL, TRAIN, memory, disk, tmp_path)
    assert isinstance(found, DiskError)
    assert (found.code, found.exit_status) == ("DISK_FULL", 2)
    assert "4 checkpoints of" in str(found)


def test_the_largest_batch_fits_and_one_row_more_does_not():
    train = replace(TRAIN, device="cuda", dtype="bfloat16", ops="triton")
    room, gpu = 200 * 2**20, Target("a GPU", 10**12)
    rows = largest_batch(MODEL, train, room, gpu)
    fits, more = (memory_of(MODEL, replace(train, batch_size=n), gpu).peak for n in (rows, rows + 1))
    assert fits <= room < more
    assert largest_batch(MODEL, train, 1000, Target("a GPU", 1000)) == 0


def test_the_disk_of_another_machine_is_not_judged(plenty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(fit, "free_disk", lambda path: 0)
    memory = memory_of(MODEL, TRAIN)
    assert resource_errors(MODEL, TRAIN, memory, Disk(1, 1, 1), tmp_path, Target("cpu with 24GB", 10**12)) == []
