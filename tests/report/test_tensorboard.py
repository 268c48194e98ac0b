"""Event files, read back by TensorBoard's own reader; and the error where it is not installed."""

import sys
import warnings
from pathlib import Path

import pytest
from report_fixtures import course, empty_run, loss_at

from tapeless.errors import MissingError
from tapeless.report.reporters.tensorboard import TensorBoardReporter

pytestmark = pytest.mark.filterwarnings("ignore")  # of its own dependencies


def test_where_it_is_missing_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(MissingError, match=r"pip install 'tapeless\[tensorboard\]'"):
        TensorBoardReporter(empty_run(tmp_path / "run"))


def test_every_value_once_also_after_a_resume(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tensorboard", reason="needs the package tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run = empty_run(tmp_path / "run")
    for steps in (120, 100):
        files = TensorBoardReporter(run)
        files.begin(course(steps))
        files.close()
    found = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    losses = found.Scalars("loss/train")
    assert [point.step for point in losses] == [*range(1, 101)]
    assert [point.value for point in losses] == pytest.approx([loss_at(step) for step in range(1, 101)])
    assert {"loss/validation", "step/lr", "grad_norm/blocks.0.attn", "update_ratio/head", "memory/process"} <= set(
        found.Tags()["scalars"]
    )
    assert "memory/device" not in found.Tags()["scalars"]
