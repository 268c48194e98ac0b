"""What a run says of its memory."""

import torch

from tapeless.training.resources import device_bytes, format_bytes, resident_bytes


def test_memory_that_is_taken_is_counted():
    before = resident_bytes()
    taken = torch.ones(2**26)  # 256 MiB
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert 0.9 * 2**28 <= after - before <= 1.2 * 2**28
    assert taken[0] == 1


def test_a_cpu_is_no_device():
    assert device_bytes(torch.device("cpu")) is None


def test_in_words():
    assert [format_bytes(size) for size in (461_000_000, 9_990_000_000, 12_340_000_000)] == ["461 MB", "9,990 MB", "12.3 GB"]
