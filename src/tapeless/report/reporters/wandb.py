"""W&B: online if the user is logged in or WANDB_MODE says so, else offline files in the run's directory, for `wandb sync`.

W&B accepts no step before its last one. A resumed run repeats its steps bit for bit, so those that W&B has are not sent again.
Needs the package wandb: pip install 'tapeless[wandb]'.
Tested by: tests/report/test_wandb.py."""

import os
from html import escape
from typing import Any

from tapeless.report.metrics import Event, scalars
from tapeless.report.reporters import PROJECT, ServiceReporter, log


class WandbReporter(ServiceReporter):
    requires = "wandb"
    _ended = False

    def open(self, run_id: str, name: str, config: dict[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE")
        if not mode:
            mode = "online" if self.package.login(prompt=False, verify=False) else "offline"
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
