"""Tests of files do not wait for the disk: a killed process loses nothing that the operating system already has. The one test
about power cuts watches the calls of fsync instead."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
