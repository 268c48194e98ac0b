"""The worth of averaged weights, and --max-time: what each option must show. Kills -9 of a run with both: torture.py."""

from claim import Claims
from training import fingerprint, lines, of_kind, scratch, tapeless, to_the_end, train

from tapeless.training.checkpoint import pointed
from tapeless.training.run_dir import RunDir

TINY = ["--preset", "tiny", "--corpus", "arithmetic", "--batch-size", 2, "--seq-len", 32, "--eval-windows", 16]
FLAGS = [*TINY, "--max-steps", 300, "--grad-accum", 2, "--save-every", 20, "--eval-every", 30, "--sample-every", 100]
FLAGS += ["--dropout", 0.1, "--optimizer", "muon", "--ema-decay", 0.99]
CONSTANT = [*TINY, "--max-steps", 800, "--batch-size", 8, "--lr-schedule", "constant", "--lr", 6e-3, "--eval-windows", 0]
CONSTANT += ["--eval-every", 0, "--sample-every", 0, "--ema-decay", 0.99]
TIMED = [*TINY, "--max-steps", 900, "--save-every", 1000, "--eval-every", 300, "--sample-every", 0]
LIMIT, LATE = 2.0, 3.0  # seconds that a process may train for, and may take longer than that, its save included

claims = Claims("training_options")
with scratch() as folder:
    run = RunDir(folder / "constant")
    train(run, *CONSTANT, threads=1)
    found = of_kind(run, "eval")[-1]
    claims.check(
        f"constant rate, 800 steps: validation loss of the averaged weights; of the last ones {found['val_loss']:.4f}",
        bound="below that of the last ones",
        measured=f"{found['ema_val_loss']:.4f}",
        ok=found["ema_val_loss"] < found["val_loss"],
    )

    unbroken, run = RunDir(folder / "untimed"), RunDir(folder / "timed")
    to_the_end("new", *TIMED, "--out-dir", unbroken.path)
    done = tapeless("train", "new", *TIMED, "--out-dir", run.path, "--max-time", f"{LIMIT:g}s", threads=1)
    codes, times, saved = [done.code], [], []
    while codes[-1] == 75:
        began, ended = of_kind(run, "start" if len(codes) == 1 else "resume")[-1], of_kind(run, "end")[-1]
        times.append(ended["time"] - began["time"])
        saved.append(
            pointed(run.checkpoints, "latest") == ended["step"] and f"its max_time of {LIMIT:g}s is over" in done.output
        )
        done = tapeless("train", "resume", run.path, threads=1)
        codes.append(done.code)
    same = fingerprint(run) == fingerprint(unbroken) and lines(run, "step", "eval") == lines(unbroken, "step", "eval")
    claims.check(
        f"--max-time {LIMIT:g}s: {len(codes)} processes until done, each stopped one saves, logs it and exits with 75; "
        "same bytes and learning rates as without a limit",
        bound="2 processes and more, equal",
        measured=f"exit 75 {codes.count(75)} times, then {codes[-1]}, {'equal' if same else 'DIFFERENT'}",
        ok=len(codes) > 1 and set(codes[:-1]) == {75} and codes[-1] == 0 and all(saved) and same,
    )
    claims.check(
        "the longest of them trained for",
        bound=f"at most {LIMIT + LATE:g} s",
        measured=f"{max(times, default=0.0):.2f} s",
        ok=bool(times) and max(times) <= LIMIT + LATE,
    )
claims.finish(averaged=found, seconds_of_stopped_processes=times)
