"""For users of Python: a model loaded or trained continues texts, in pieces and with an end; optimizers whose arguments can be
seen; batches, learning rates and callbacks of one's own with the trainer's guarantees, or a refusal; public names that are
typed, documented, and no others."""

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness  # noqa: F401  puts tests/ on the path
import torch
from claim import Claims
from torch import Tensor
from training import environment, fingerprint, lines, scratch, tapeless

import tapeless as package
from tapeless.errors import TapelessError
from tapeless.training.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]
STEPS = 30
SETTINGS: dict[str, Any] = {
    "batch_size": 4,
    "seq_len": 32,
    "max_steps": STEPS,
    "eval_every": 10,
    "eval_windows": 8,
    "save_every": 7,
    "sample_tokens": 8,
    "threads": 1,
    "display": None,
}
KINDS = ("step", "eval", "sample", "checkpoint")


def batches(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(97, 123, (4, 33), generator=torch.Generator().manual_seed(step))
    return x[:, :-1], x[:, 1:]


def rate(step: int) -> float:
    return 1e-2 / (1 + step / 10)


def generator() -> Iterator[tuple[Tensor, Tensor]]:
    return map(batches, range(STEPS))


def stop_at(step: int) -> Callable[[dict[str, Any]], object]:
    return lambda event: package.STOP if event["event"] == "step" and event["step"] == step else None


def check_text(claims: Claims, folder: Path, text: Path) -> None:
    result = package.train("tiny", text, out_dir=folder / "text", **{**SETTINGS, "max_steps": 300, "lr": 5e-3})
    model = package.load(result.path, threads=1)
    whole = model.generate("every ", max_tokens=60)
    pieces = list(model.stream("every ", max_tokens=60))
    done = tapeless("generate", result.path, "--prompt", "every ", "--max-tokens", 60, "--json", threads=1)
    (by_command,) = json.loads(done.output.splitlines()[-1])["samples"]
    same = {whole, "every " + "".join(pieces), result.model.generate("every ", max_tokens=60), by_command}
    claims.check(
        "different texts of load(run).generate, the pieces of stream, the model that train() returned, and the command",
        bound=1,
        measured=len(same),
        ok=len(same) == 1 and len(pieces) > 1,
    )
    default = model.generate("every ")
    claims.check(
        "generate(text) without other arguments",
        bound="the prompt and more",
        measured=repr(default[:30]),
        ok=default.startswith("every ") and len(default) > 6,
    )
    stream = model.stream("every ", max_tokens=200)
    next(stream)
    stream.cancel()
    count = len(stream.tokens)
    ok = stream.finish_reason == "cancelled" and len("".join(stream)) <= 1 and len(stream.tokens) == count < 200
    claims.check("a stream that is cancelled after a piece", bound="no further token", measured=f"{count} of 200 tokens", ok=ok)
    stop = whole[20:23]
    ended = model.generate("every ", max_tokens=60, stop=stop)
    wanted = "every " + whole[6 : 6 + whole[6:].index(stop)]
    claims.check("generate(…, stop=text)", bound=repr(wanted), measured=repr(ended), ok=ended == wanted)
    decoded = model.tokenizer.decode(model.tokenizer.encode("né"))
    claims.check("model.tokenizer: text to ids and back", bound="né", measured=decoded, ok=decoded == "né")


def check_optimizers(claims: Claims) -> None:
    hidden, moved = [], []
    for name in ("SGD", "Adam", "AdamW", "Muon"):
        kind = getattr(package.optim, name)
        hidden += [f"{name}.{p}" for p in inspect.signature(kind).parameters.values() if p.kind == p.VAR_KEYWORD]
        model = package.Transformer(package.load_preset("tiny"), ops="reference")
        opt = kind(model.params, model.grads, lr=1e-2)
        before = model.store.flat.clone()
        model.forward(*batches(0))
        model.backward()
        opt.step()
        opt.step(1e-3)
        moved.append(opt.lr == 1e-3 and not model.store.flat.equal(before))
    claims.check("arguments of optimizers that no signature shows", bound=0, measured=len(hidden), ok=not hidden)
    claims.check("opt.step(), then opt.step(lr): optimizers that train", bound=4, measured=sum(moved), ok=all(moved))


def equal(run: RunDir, expected: RunDir, stopped_at: int) -> bool:
    found = lines(run, *KINDS)
    others = [event for event in found if not (event["event"] == "checkpoint" and event["step"] == stopped_at)]
    return fingerprint(run) == fingerprint(expected) and others == lines(expected, *KINDS)


def check_own(claims: Claims, folder: Path, text: Path) -> None:
    whole = RunDir(folder / "whole")
    package.train("tiny", text, out_dir=whole.path, batches=batches, lr_schedule=rate, **SETTINGS)
    used = [event["lr"] for event in lines(whole, "step")]
    wanted = [rate(step) for step in range(STEPS)]
    claims.check("the rates of a run are those of its function", bound=STEPS, measured=len(used), ok=used == wanted)
    forms: dict[str, Callable[[], Any]] = {
        "a function": lambda: batches,
        "a list": lambda: [batches(step) for step in range(STEPS)],
        "a generator": generator,
    }
    for name, make in forms.items():
        run = RunDir(folder / name)
        callbacks = [stop_at(17)]
        package.train("tiny", text, out_dir=run.path, batches=make(), lr_schedule=rate, callbacks=callbacks, **SETTINGS)
        package.resume(run.path, batches=make(), lr_schedule=rate, display=None)
        same = equal(run, whole, 17)
        claims.check(
            f"own batches as {name}, own rates, stopped by a callback at step 17, resumed: weights, moments, state, lines",
            bound="those of the unbroken run",
            measured="equal" if same else "DIFFERENT",
            ok=same,
        )


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import tapeless
from python_users import SETTINGS, batches, rate

def kill(event):
    if event["event"] == "step" and event["step"] == 17:
        os.kill(os.getpid(), signal.SIGKILL)

tapeless.train("tiny", sys.argv[2], out_dir=sys.argv[3], batches=batches, lr_schedule=rate, callbacks=[kill], **SETTINGS)
"""


def check_losses(claims: Claims, folder: Path, text: Path) -> None:
    whole, run = RunDir(folder / "whole"), RunDir(folder / "killed")
    words = [sys.executable, "-c", KILLED, str(ROOT / "acceptance"), str(text), str(run.path)]
    code = subprocess.run(words, env=environment(1), check=False, capture_output=True).returncode
    package.resume(run.path, batches=batches, lr_schedule=rate, display=None)
    same = code == -signal.SIGKILL and fingerprint(run) == fingerprint(whole)
    claims.check(
        "own batches and rates, kill -9 at step 17, resumed",
        bound="the unbroken run's bits",
        measured="equal" if same else f"DIFFERENT (exit {code})",
        ok=same,
    )
    for name in ("batches", "lr_schedule"):
        functions: dict[str, Any] = {"batches": batches, "lr_schedule": rate}
        run = RunDir(folder / f"failed-{name}")

        def fail(step: int, function: Any = functions[name]) -> Any:
            return function(step) if step < 17 else 1 / 0

        raised = "nothing"
        try:
            package.train("tiny", text, out_dir=run.path, **{**functions, name: fail}, **SETTINGS)
        except ZeroDivisionError:
            raised = "ZeroDivisionError"
        latest = (run.checkpoints / "latest").read_text().strip()
        package.resume(run.path, **functions, display=None)
        ok = raised == "ZeroDivisionError" and latest == "step-00000017" and equal(run, whole, 17)
        claims.check(
            f"an exception in {name} at step 18 is raised, after a checkpoint; resumed: the unbroken run's bits",
            bound="ZeroDivisionError, step-00000017",
            measured=f"{raised}, {latest}",
            ok=ok,
        )


def check_refusals(claims: Claims, folder: Path, text: Path) -> None:
    run = folder / "refused"
    own: dict[str, Any] = {"batches": batches, "lr_schedule": rate}
    package.train("tiny", text, out_dir=run, callbacks=[stop_at(9)], **own, **SETTINGS)
    state = torch.Generator()

    def drawn(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(256, (4, 33), generator=state)
        return x[:, :-1], x[:, 1:]

    calls: dict[str, Callable[[], object]] = {
        "resumed without batches": lambda: package.resume(run, lr_schedule=rate, display=None),
        "resumed without the rates": lambda: package.resume(run, batches=batches, display=None),
        "resumed with other batches": lambda: package.resume(
            run, batches=lambda step: batches(step + 1), lr_schedule=rate, display=None
        ),
        "resumed with other rates": lambda: package.resume(run, batches=batches, lr_schedule=lambda step: 1e-3, display=None),
        "resumed with a list that is shorter and other": lambda: package.resume(
            run, batches=[batches(3)] * 4, lr_schedule=rate, display=None
        ),
        "begun with a function that has hidden state": lambda: package.train(
            "tiny", text, out_dir=folder / "no", batches=drawn, **SETTINGS
        ),
        "begun with lr beside a function of rates": lambda: package.train(
            "tiny", text, out_dir=folder / "no", lr_schedule=rate, lr=1e-3, **SETTINGS
        ),
        "begun with batches and no data": lambda: package.train("tiny", out_dir=folder / "no", batches=batches, **SETTINGS),
    }
    refused = []
    for name, call in calls.items():
        try:
            call()
        except TapelessError as error:
            refused.append(name)
            print(f"      {name}: error[{error.code}]: {error}", flush=True)
    by_command = tapeless("train", "resume", run)
    if by_command.code == 2 and "tapeless.resume(" in by_command.output:
        refused.append("resumed by the command")
    calls["resumed by the command"] = lambda: None
    left = sorted(set(calls) - set(refused))
    claims.check(
        "what could not be resumed exactly is refused with one line",
        bound=len(calls),
        measured=len(refused) if not left else f"{len(refused)}; not: {', '.join(left)}",
        ok=not left and not (folder / "no").exists(),
    )


def check_names(claims: Claims) -> None:
    import pytest

    tests = ["tests/test_python_api.py", "tests/test_site.py", "tests/test_lazy_import.py"]
    code = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *(str(ROOT / name) for name in tests)])
    claims.check(
        "public names: those of the reference and no others, every argument and method explained, a program with all of them "
        "passes mypy --strict",
        bound=0,
        measured=int(code),
        ok=code == 0,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    claims = Claims("python_users")
    with scratch() as folder:
        text = folder / "text.txt"
        text.write_text("every forward has its backward, and every backward has its judges\n" * 300)
        check_text(claims, folder, text)
        check_optimizers(claims)
        check_own(claims, folder, text)
        check_losses(claims, folder, text)
        check_refusals(claims, folder, text)
    check_names(claims)
    claims.finish()
