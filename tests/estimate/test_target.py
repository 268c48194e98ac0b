"""A run on a machine that is not this one: names, sizes, and errors that help."""

from dataclasses import replace

import pytest

from tapeless.config import TrainConfig
from tapeless.config.hardware import GIB, GPUS, parse_memory
from tapeless.errors import ConfigError, MissingError
from tapeless.estimate.target import target_of

TRAIN = TrainConfig()


@pytest.mark.parametrize(("text", "size"), [("24GB", 24 * 10**9), ("22.5GiB", 22.5 * GIB), ("500 MB", 5 * 10**8)])
def test_sizes(text: str, size: int):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["24", "GB", "0GB", "-1GB", "24gb", "1e3GB", "24KB"])
def test_what_is_no_size(text: str):
    with pytest.raises(ConfigError, match="such as 24GB"):
        parse_memory(text)


def test_a_gpu_by_its_name():
    train, target = target_of(replace(TRAIN, device="H100", dtype="auto"), None, device_is_given=True)
    assert (train.device, train.dtype) == ("cuda", "bfloat16")
    assert target == ("h100", GPUS["h100"].free, GPUS["h100"])
    _, smaller = target_of(replace(TRAIN, device="h100"), "40GB", device_is_given=True)
    assert smaller == ("h100 with 40GB", 40 * 10**9, GPUS["h100"])


def test_memory_alone_is_that_of_a_gpu_unless_another_device_is_named():
    train, target = target_of(TRAIN, "24GB", device_is_given=False)
    assert (train.device, target) == ("cuda", ("a GPU with 24GB", 24 * 10**9, None))
    assert target_of(replace(TRAIN, device="cuda"), "24GB", device_is_given=True) == (train, target)
    here, target = target_of(TRAIN, "24GB", device_is_given=True)
    assert (here.device, target) == ("cpu", ("cpu with 24GB", 24 * 10**9, None))


def test_this_machine():
    assert target_of(TRAIN, None, device_is_given=True) == (TRAIN, None)


@pytest.mark.parametrize("memory", [None, "24GB"])
def test_a_misspelt_name(memory: str | None):
    with pytest.raises(ConfigError, match="unknown device 'h10'; did you mean 'h100'"):
        target_of(replace(TRAIN, device="h10"), memory, device_is_given=True)


def test_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"name it .*h100.* or its memory"):
        target_of(replace(TRAIN, device="cuda"), None, device_is_given=True)


def test_fp8_where_there_is_none():
    with pytest.raises(MissingError, match="a100 is none"):
        target_of(replace(TRAIN, device="a100", dtype="fp8"), None, device_is_given=True)


def test_the_table():
    """A GPU with fp8 does it faster; memory and bandwidth are in the right units."""
    for gpu in GPUS.values():
        assert 10 < gpu.gib < 300
        assert 1e11 < gpu.bandwidth < 1e13
        assert gpu.fp8 is None or 1.9 < gpu.fp8 / gpu.bf16 < 2.1
