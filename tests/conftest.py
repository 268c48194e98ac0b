"""Standing here puts tests/ on the path, so that `from contract import check_op` works in every folder below."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton's kernels are defined

KERNELS = {"kernels", "bench", "test_choose.py"}  # folders and files whose tests are about what `auto` chooses


@pytest.fixture(autouse=True)
def _plain_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is tested with the reference ops, the law that the kernels are held to: compiling them in every process
    would take longer than the tests. Commands that run in a process of their own have what their users have."""
    if KERNELS.isdisjoint(request.path.relative_to(Path(__file__).parent).parts):
        monkeypatch.setattr("tapeless.kernels.choose._AUTOMATIC", {})


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """A test that draws without a seed of its own draws the same whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a busy machine warns of it, and the machine that runs the tests may be one."""
    monkeypatch.setattr("tapeless.training.threads.load_average", lambda: 0.0)
