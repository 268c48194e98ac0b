"""TensorBoard event files, in the run's directory tensorboard/; `tensorboard --logdir runs` finds them.

Needs the package tensorboard: pip install 'tapeless[tensorboard]'.
Tested by: tests/report/test_tensorboard.py."""

import shutil

from tapeless.report.metrics import Event, as_markdown, scalars
from tapeless.report.reporters import Reporter, package
from tapeless.training.run_dir import RunDir


class TensorBoardReporter(Reporter):
    requires = "tensorboard"

    def __init__(self, run: RunDir):
        writer = package("tensorboard", "torch.utils.tensorboard").SummaryWriter
        folder = run.path / "tensorboard"
        if folder.exists():
            shutil.rmtree(folder)  # of the process before a resume: everything is written again
        self._writer = writer(str(folder))

    def event(self, event: Event) -> None:
        if event["event"] == "sample":
            self._writer.add_text("sample", as_markdown(event["text"]), event["step"], walltime=event["time"])
        for tag, value in scalars(event).items():
            self._writer.add_scalar(tag, value, event["step"], walltime=event["time"])
        if event["event"] == "checkpoint":
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
