"""Files of W&B, in the run's folder wandb/, written offline: no login, no network; `wandb sync` uploads them, if one wants to.

W&B cannot take back a step, so a resume writes a new folder under the run's old id, from the first step on, and then removes
the folder before it: there is one run, with every step once. What is told goes to a process of W&B's, which tells nobody
when the disk does not take it; so the steps in the file are counted at the end.
Needs the package wandb: pip install 'tapeless[wandb]'.
Tested by: tests/report/test_wandb_files.py."""

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any

from tapeless.report.reporters import PROJECT, Event, Reporter, package
from tapeless.report.scalars import scalars
from tapeless.report.wandb_records import wandb_records
from tapeless.training.run_config import read_run_config
from tapeless.training.run_dir import RunDir

ASIDE = "told-again-"  # in front of the name of a folder while its successor is written
QUIET = {  # the run's events are all that is told: no statistics of the machine, no code, no console output
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
        self._ended, self._steps = False, set[int]()
        os.environ.setdefault("WANDB_PROJECT", PROJECT)
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # of its own errors, over the network
        os.environ["WANDB_CACHE_DIR"] = str(self._folder / "cache")  # else there is a log of its own in the home directory
        self._wandb = package("wandb")

    def begin(self, history: Iterable[Event]) -> None:
        before = [self._set_aside(folder) for folder in self._folder.glob("*offline-run-*")]
        with self._letting_go():
            self._writer = self._open(before[-1].name.rpartition("-")[2] if before else uuid.uuid4().hex[:8])
        super().begin(history)
        for folder in before:
            shutil.rmtree(folder)

    def _set_aside(self, folder: Path) -> Path:
        """A folder's name has the second it was begun in, which may be this one."""
        return folder if folder.name.startswith(ASIDE) else folder.rename(folder.with_name(ASIDE + folder.name))

    def _open(self, run_id: str) -> Any:
        """Whatever the environment says of the mode, the place or the run."""
        writer = self._wandb.init(
            mode="offline",
            dir=str(self._folder.parent),
            id=run_id,
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
            with self._letting_go():
                self._writer.log(told | {"_timestamp": event["time"]}, step=event["step"])
            self._steps.add(event["step"])

    def close(self) -> None:
        with self._letting_go():
            self._writer.finish(exit_code=0 if self._ended else 1)
            self._wandb.teardown()  # waits for its process: finish may return before the last of the file is there
        path = Path(self._writer.dir).parent / f"run-{self._writer.id}.wandb"
        record = package("wandb", "wandb.proto.wandb_internal_pb2").Record
        kept = sum(record.FromString(found).HasField("history") for found in wandb_records(path))
        if kept != len(self._steps):
            raise OSError(f"{path} holds {kept} of {len(self._steps)} steps, as where a disk is full")

    @contextmanager
    def _letting_go(self) -> Iterator[None]:
        """Of W&B, where it fails: else it would try once more when Python ends, and fail there with a traceback."""
        try:
            yield
        except Exception:
            with suppress(Exception):
                self._wandb.teardown(exit_code=1)
            raise
