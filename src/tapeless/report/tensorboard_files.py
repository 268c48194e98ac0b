"""Event files for TensorBoard, in the run's folder tensorboard/; `tensorboard --logdir runs` finds them.

Needs the package tensorboard: pip install 'tapeless[tensorboard]'.
Judged by: tests/report/test_tensorboard_files.py."""

import shutil
from typing import Any

from tapeless.errors import MissingError
from tapeless.report.reporters import Event, Reporter
from tapeless.train.run_dir import RunDir

STEP = {"loss": "loss/train", "lr": "step/lr", "grad_norm": "step/grad_norm", "tokens_per_second": "step/tokens_per_second"}
EVAL = {"val_loss": "loss/validation", "bits_per_byte": "loss/bits_per_byte"}
WATCH = {"memory_bytes": "memory/process", "device_memory_bytes": "memory/device"}


def summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingError(f"report_to tensorboard: {error}; pip install 'tapeless[tensorboard]'") from None
    return SummaryWriter(folder)


class TensorBoardFiles(Reporter):
    def __init__(self, run: RunDir):
        folder = run.path / "tensorboard"
        if folder.exists():
            shutil.rmtree(folder)  # of the process before a resume: everything is told again
        self._writer = summary_writer(str(folder))

    def event(self, event: Event) -> None:
        kind = event["event"]
        if kind == "sample":
            text = "".join(f"    {line}\n" for line in event["text"].splitlines())  # indented, Markdown takes it as it stands
            self._writer.add_text("sample", text, event["step"], walltime=event["time"])
        elif kind == "watch":
            for table in ("grad_norm", "update_ratio"):
                for group, value in event[table].items():
                    self._add(f"{table}/{group}", value, event)
        for name, tag in {"step": STEP, "eval": EVAL, "watch": WATCH}.get(kind, {}).items():
            if event[name] is not None:
                self._add(tag, event[name], event)
        if kind == "checkpoint":
            self._writer.flush()

    def _add(self, tag: str, value: float | str, event: Event) -> None:
        self._writer.add_scalar(tag, float(value), event["step"], walltime=event["time"])  # float: NaN is text in the log

    def close(self) -> None:
        self._writer.close()
