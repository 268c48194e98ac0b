"""A run needs no more memory at step 2,000 than at step 200."""

from pathlib import Path

from claim import Claims
from training import scratch

from tapeless.config import TrainConfig, load_preset
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import Recorder, create_run, make_model
from tapeless.training.trainer import Trainer

FIRST, LAST, BOUND = 200, 2000, 0.01


def resident() -> int:
    """Bytes of this process in memory, as the operating system counts them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure(folder: Path) -> dict[int, int]:  # step -> bytes
    """Everything that a run does: evaluations, samples, checkpoints, lines of metrics."""
    train = TrainConfig(batch_size=4, seq_len=64, max_steps=LAST, eval_every=100, save_every=100, sample_every=100)
    run, config, data = create_run(load_preset("tiny"), train, folder, [])
    sizes: dict[int, int] = {}

    def note(event: dict) -> None:
        if event["event"] == "step" and event["step"] % FIRST == 0:
            sizes[event["step"]] = resident()

    with Recorder(run, note) as record:
        Trainer(make_model(config.model, train), train, data, run=RunDir(folder), on_event=record).run(display=None)
    return sizes


claims = Claims("memory_steady")
with scratch() as folder:
    sizes = measure(folder / "run")
growth = sizes[LAST] / sizes[FIRST] - 1
claims.check(
    f"resident memory at step {LAST:,}: {sizes[LAST] / 2**20:.1f} MiB, at step {FIRST}: {sizes[FIRST] / 2**20:.1f} MiB",
    bound=f"within {100 * BOUND:.0f} %",
    measured=f"{100 * growth:+.2f} %",
    ok=abs(growth) <= BOUND,
)
claims.finish(resident_bytes=sizes)
