"""W&B: online if the user is logged in or WANDB_MODE says so, else offline files in the run's directory, for `wandb sync`.

A server accepts no step before its last one; a resumed run repeats its steps bit for bit, so those that the server has are
not sent. Offline, a killed process may leave an incomplete file, so a resumed process writes all steps again and removes it.
Needs the package wandb: pip install 'tapeless[wandb]'.
Tested by: tests/report/test_wandb.py."""

import os
import shutil
from html import escape
from pathlib import Path
from typing import Any

from tapeless.report.metrics import Event, scalars
from tapeless.report.reporters import PROJECT, ServiceReporter, log


class WandbReporter(ServiceReporter):
    requires = "wandb"
    _ended = False

    def open(self, run_id: str, name: str, config: dict[str, Any]) -> int:
        mode = os.environ.get("WANDB_MODE")
        if not mode:
            mode = "online" if self.package.login(prompt=False, verify=False) else "offline"
        before = list(self.run.path.glob(f"wandb/offline-run-*-{run_id}"))
        self._run = self.package.init(
            mode=mode,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(self.run.path.resolve()),
            id=run_id,
            name=name,
            config=config,
            resume="allow" if mode == "online" else None,
            settings=self.package.Settings(console="off", silent=True),
        )
        log.info("W&B, %s: %s", mode, self._run.url or self._run.dir)
        for folder in before if mode == "offline" else ():
            if not Path(self._run.dir).is_relative_to(folder.resolve()):
                shutil.rmtree(folder)
        return 0

    def send(self, event: Event) -> None:
        self._ended = event["event"] == "end"
        values: dict[str, Any] = dict(scalars(event))
        if event["event"] == "sample":
            values["sample"] = self.package.Html(f"<pre>{escape(event['text'])}</pre>", inject=False)
        if values and event["step"] >= self._run.step:
            self._run.log(values, step=event["step"])

    def close(self) -> None:
        try:
            self._run.finish(exit_code=0 if self._ended else 1)
            self._save()
        finally:
            self.package.teardown()  # without it a failed process of W&B's would raise once more when Python exits
