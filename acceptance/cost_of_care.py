"""What watching over a run costs: guards, metrics, the report and a checkpoint every 100 steps, on llama-small.

All but the guards happens between steps, so it is the time of the run from the end of its first step to its last checkpoint
less the time inside of its steps: no second run, whose noise would be larger than what is looked for. The guards, inside,
are timed by themselves."""

from claim import Claims
from guards import guards_seconds
from training import scratch, train

from tapeless.training.metrics_log import read_metrics
from tapeless.training.run_dir import RunDir

STEPS, EVERY, BOUND = 300, 100, 0.02
RUN = ["--preset", "llama-small", "--corpus", "arithmetic", "--batch-size", 4, "--seq-len", 512, "--max-steps", STEPS]
RUN += ["--save-every", EVERY, "--eval-every", 0, "--sample-every", 0, "--sample-tokens", 1, "--eval-windows", 1, "--no-verify"]


def main() -> None:
    claims = Claims("cost_of_care")
    with scratch() as folder:
        run = RunDir(folder / "run")
        train(run, *RUN)
        events = list(read_metrics(run.metrics))
    steps = [event for event in events if event["event"] == "step"]
    saved = [event for event in events if event["event"] == "checkpoint"]
    later = steps[1:]
    inside = sum(event["step_seconds"] for event in later)
    between = saved[-1]["time"] - steps[0]["time"] - inside
    guards = guards_seconds() * len(later)
    each = f"{between:.2f} s between the steps and {1e3 * guards:.1f} ms in them, of {inside:.1f} s"
    claims.check(
        f"guards, metrics, report and {len(saved)} checkpoints in {STEPS} steps of llama-small, 4x512, by the steps' own time",
        bound=f"under {BOUND:.0%}",
        measured=f"{(between + guards) / inside:.2%}: {each}",
        ok=len(saved) == STEPS // EVERY and between + guards < BOUND * inside,
    )
    claims.finish()


if __name__ == "__main__":
    main()
