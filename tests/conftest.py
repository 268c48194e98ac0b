"""Standing here puts tests/ on the path, so that `from contract import check_op` works in every folder below."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """A test that draws without a seed of its own draws the same whichever tests ran before it."""
    torch.manual_seed(0)
