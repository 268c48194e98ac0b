"""A run from a machine that is not this one (a GPU, 8-bit matmuls, 64 threads, deterministic) loads here, in every way that
reads a model, with the weights' own bits; and loading changes nothing in the process that does it."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from claim import Claims
from training import scratch, tapeless, train

import tapeless as package
from tapeless.data.files import file_sha256
from tapeless.training.run_dir import RunDir

ELSEWHERE = {"device": '"cuda"', "dtype": '"fp8"', "threads": "64", "deterministic": "true"}
ENVIRONMENT = {"cpu": "AMD EPYC 9654", "cores": 192, "threads": 64, "gpus": ["NVIDIA H100 80GB HBM3"], "host": "gpu-node-17"}
MACHINE_FLAGS = ("--device", "--dtype", "--ops", "--threads")
SMALL = ["--preset", "llama-tiny", "--max-steps", 40, "--batch-size", 8, "--seq-len", 32, "--no-verify", "--threads", 1]
PROMPT = ["--prompt", "every ", "--max-tokens", 20, "--seed", 1, "--json"]


def as_written_elsewhere(run: RunDir, other: Path) -> RunDir:
    """A copy whose config.toml and env.json say what such a machine would have written."""
    shutil.copytree(run.path, other)
    copy = RunDir(other)
    text = copy.config.read_text()
    for name, value in ELSEWHERE.items():
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        if count != 1:
            sys.exit(f"{copy.config} has {count} lines {name} = …")
    copy.config.write_text(text)
    copy.env.write_text(json.dumps({**json.loads(copy.env.read_text()), **ENVIRONMENT}))
    return copy


def process_state() -> dict[str, Any]:
    deterministic: Any = torch.utils.deterministic
    return {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_num_interop_threads()": torch.get_num_interop_threads(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.utils.deterministic.fill_uninitialized_memory": deterministic.fill_uninitialized_memory,
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.initial_seed()": torch.initial_seed(),
        "the environment": dict(os.environ),
    }


def check_load(claims: Claims, run: RunDir, other: RunDir) -> None:
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    expected = package.load(run.path).logits(tokens)
    before = process_state()
    model = package.load(other.path)
    changed = [name for name, value in process_state().items() if value != before[name]]
    claims.check(
        f"after tapeless.load: {', '.join(before)}", bound="unchanged", measured=changed or "unchanged", ok=not changed
    )
    claims.check(
        "device and dtype of the loaded model",
        bound=("cpu", "float32"),
        measured=(str(model.device), model.dtype),
        ok=(str(model.device), model.dtype) == ("cpu", "float32"),
    )
    logits = model.logits(tokens)
    gap = float((logits - expected).abs().max())
    claims.check(
        "its logits, largest difference from the unaltered run's", bound=0.0, measured=gap, ok=torch.equal(logits, expected)
    )
    changed = [name for name, value in process_state().items() if value != before[name]]
    claims.check("after a call of it, the same settings", bound="unchanged", measured=changed or "unchanged", ok=not changed)
    for dtype in ("float64", "bfloat16"):
        same = torch.equal(*(package.load(found.path, dtype=dtype).logits(tokens) for found in (run, other)))
        claims.check(
            f"tapeless.load(dtype={dtype!r}): logits", bound="equal", measured="equal" if same else "DIFFERENT", ok=same
        )


def check_threads(claims: Claims, other: RunDir) -> None:
    """threads= holds inside of the model's calls alone."""
    cores, before = os.cpu_count() or 1, torch.get_num_threads()
    wanted = 1 if before > 1 else min(2, cores)
    model, inside = package.load(other.path, ops="reference", threads=wanted), list[int]()
    linear = model.ops.linear

    def forward(*args: Any, **options: Any) -> Any:
        inside.append(torch.get_num_threads())
        return linear.forward(*args, **options)

    model.ops = replace(model.ops, linear=linear._replace(forward=forward))
    loaded = torch.get_num_threads()
    model.logits(torch.zeros(1, 8, dtype=torch.int64))
    after = torch.get_num_threads()
    claims.check(
        f"tapeless.load(threads={wanted}) in a process with {before}: after loading, inside of logits(), and after it",
        bound=(before, [wanted], before),
        measured=(loaded, sorted(set(inside)), after),
        ok=(loaded, sorted(set(inside)), after) == (before, [wanted], before),
    )


def check_commands(claims: Claims, folder: Path, run: RunDir, other: RunDir) -> None:
    for name, words in {"generate": PROMPT, "eval": ["--json"]}.items():
        ours, theirs = (tapeless(name, found.path, *words) for found in (run, other))
        same = theirs.code == 0 and said(ours.output) == said(theirs.output)
        claims.check(
            f"`{name}` of it against the unaltered run",
            bound="equal",
            measured="equal" if same else theirs.output[-200:],
            ok=same,
        )
    for number, found in enumerate((run, other)):
        done = tapeless("export", found.path, "--to", "hf", "--out", folder / f"hf-{number}")
        if done.code:
            sys.exit(done.output)
    hashes = [file_sha256(folder / f"hf-{number}" / "model.safetensors") for number in (0, 1)]
    claims.check(
        "`export --to hf` of it: model.safetensors", bound=hashes[0][:16], measured=hashes[1][:16], ok=hashes[0] == hashes[1]
    )
    for name, words in {"generate": PROMPT, "eval": ["--json"], "export": ["--to", "hf", "--out", folder / "hf-2"]}.items():
        dtype = "bfloat16" if name == "export" else "float64"  # of export it is the file's
        settings = ["--device", "cpu", "--dtype", dtype, "--ops", "reference", "--threads", 1]
        done = tapeless(name, other.path, *words, *settings)
        claims.check(f"`{name} {' '.join(map(str, settings))}`", bound="exit status 0", measured=done.code, ok=done.code == 0)
    for name in ("generate", "eval", "export", "lm-eval"):
        text = tapeless(name, "--help").output
        missing = [flag for flag in MACHINE_FLAGS if flag not in text]
        claims.check(f"`{name}` has {' '.join(MACHINE_FLAGS)}", bound="all", measured=missing or "all", ok=not missing)


def said(output: str) -> Any:
    found = json.loads(output.splitlines()[-1])
    return {key: value for key, value in found.items() if "seconds" not in key and "per_second" not in key}


if __name__ == "__main__":
    claims = Claims("load_elsewhere")
    with scratch() as folder:
        text = folder / "text.txt"
        text.write_text("every forward has its backward, and every backward has its judges\n" * 2000)
        run = RunDir(folder / "run")
        train(run, *SMALL, "--dataset-path", text)
        other = as_written_elsewhere(run, folder / "elsewhere")
        check_load(claims, run, other)
        check_threads(claims, other)
        check_commands(claims, folder, run, other)
    claims.finish()
