"""Files of W&B, in the run's folder wandb/, written offline: no login, no network; `wandb sync` uploads them, if one wants to.

W&B cannot take back a step, so a resume writes a new folder under the run's old id, from the first step on, and then removes
the folder before it: there is one run, with every step once.
Needs the package wandb: pip install 'tapeless[wandb]'.
Judged by: tests/report/test_wandb_files.py."""

import os
import shutil
import uuid
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from tapeless.report.reporters import PROJECT, Event, Reporter, package
from tapeless.report.scalars import scalars
from tapeless.train.run_config import read_run_config
from tapeless.train.run_dir import RunDir

QUIET = {  # the run's events are all that is told: nothing of the machine, the code or the terminal
    "console": "off",
    "silent": True,
    "symlink": False,
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


class WandbFiles(Reporter):
    def __init__(self, run: RunDir):
        self.run, self._folder = run, run.path.resolve() / "wandb"
        self._ended = False
        os.environ.setdefault("WANDB_PROJECT", PROJECT)
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # it would go over the network, offline or not
        os.environ["WANDB_CACHE_DIR"] = str(self._folder / "cache")  # else there is a log of its own in the home directory
        self._wandb = package("wandb")

    def begin(self, history: Iterable[Event]) -> None:
        before = sorted(self._folder.glob("offline-run-*"))
        self._writer = self._open(before[-1].name.rpartition("-")[2] if before else uuid.uuid4().hex[:8])
        super().begin(history)
        for folder in before:
            shutil.rmtree(folder)

    def _open(self, run_id: str) -> Any:
        """Whatever the environment says of the mode, the place or the run."""
        writer = self._wandb.init(
            mode="offline",
            dir=str(self._folder.parent),
            id=run_id,
            resume="never",
            name=self._folder.parent.name,
            config=read_run_config(self.run.config).tables(),
            settings=self._wandb.Settings(**QUIET),
        )
        if not Path(writer.dir).is_relative_to(self._folder):
            raise OSError(f"wandb would write to {writer.dir}, not to {self._folder}")
        return writer

    def event(self, event: Event) -> None:
        self._ended = event["event"] == "end"
        told: dict[str, Any] = dict(scalars(event))
        if event["event"] == "sample":
            told["sample"] = self._wandb.Html(f"<pre>{escape(event['text'])}</pre>", inject=False)
        if told:
            self._writer.log(told | {"_timestamp": event["time"]}, step=event["step"])

    def close(self) -> None:
        self._writer.finish(exit_code=0 if self._ended else 1)
