"""Threads that wait for cores others use are noticed, on a busy machine alone, and nothing is changed."""

import os

import pytest
import torch

from tapeless.training import threads


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def seconds(monkeypatch: pytest.MonkeyPatch, *, together: float, alone: float, load: float) -> None:
    monkeypatch.setattr(threads, "load_average", lambda: load)
    monkeypatch.setattr(threads, "clock", lambda work, device: alone if torch.get_num_threads() == 1 else together)


def test_a_busy_machine_is_noticed(two: None, monkeypatch: pytest.MonkeyPatch):
    seconds(monkeypatch, together=0.03, alone=0.01, load=100.0)
    text = threads.slower_threads("cpu")
    assert text is not None
    assert "(load 100.0): 2 threads are 3.0 times slower than one now; until they end, --threads 1 is faster" in text
    assert torch.get_num_threads() == 2


def test_no_word_otherwise(two: None, monkeypatch: pytest.MonkeyPatch):
    seconds(monkeypatch, together=0.01, alone=0.015, load=100.0)
    assert threads.slower_threads("cpu") is None
    seconds(monkeypatch, together=0.03, alone=0.01, load=0.0)
    assert threads.slower_threads("cpu") is None
    seconds(monkeypatch, together=0.03, alone=0.01, load=100.0)
    torch.set_num_threads(1)
    assert threads.slower_threads("cpu") is None


LOAD_AVERAGE = threads.load_average  # the tests' own machine counts as quiet (conftest.py)


def test_a_system_without_a_load(monkeypatch: pytest.MonkeyPatch):
    assert LOAD_AVERAGE() == os.getloadavg()[0]
    monkeypatch.delattr("os.getloadavg")
    assert LOAD_AVERAGE() == 0.0
