"""What a person sees of a run: plain lines, or lines of JSON for machines."""

import json
import sys
from typing import Any


class Display:
    def __init__(self, *, json_lines: bool, log_every: int):
        self.json_lines, self.log_every = json_lines, log_every

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def event(self, event: dict[str, Any]) -> None:
        if self.json_lines:
            print(json.dumps(event), flush=True)
        elif event["event"] == "step":
            if event["step"] % self.log_every == 0:
                print(
                    f"step {event['step']} loss {event['loss']:.4f} norm {event['grad_norm']:.2f} lr {event['lr']:.2e} {event['tokens_per_second']:.0f} tok/s",
                    flush=True,
                )
        else:
            print(event, flush=True)

    def warn(self, text):
        print("warning:", text, file=sys.stderr)

    def introduce(self, run, trainer, resumed):
        print(run.path, trainer.total_steps, trainer.model.num_params)

    def verified(self, findings):
        print(*findings, sep="\n")

    def close(self, run, trainer, ending):
        print(ending)
