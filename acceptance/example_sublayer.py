"""A sublayer that the package does not know, written in one file outside of it, has everything that attention has: gradient
checks, training, exact resumes, estimates, decoding, reports. Through the commands with --plugin, and by an import."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import torch
from claim import HOME, Claims
from training import Done, command, environment, fingerprint, of_kind, scratch, tapeless, train

from tapeless.bench.process import Process
from tapeless.bench.process import environment as bench_environment
from tapeless.bench.task import Task
from tapeless.config import ModelConfig, TrainConfig
from tapeless.data.files import file_sha256
from tapeless.estimate.memory import MIB, memory_of
from tapeless.model.transformer import Transformer
from tapeless.plugins import load_plugin
from tapeless.training.run_dir import RunDir
from tapeless.verify.fixtures import move_off_init

PLUGIN = HOME.parent / "examples" / "gated_token_shift.py"
KIND, PATTERN, LINES = "shift", "shift+ffn/attn+ffn", 80
WITH = ["--plugin", PLUGIN]
MODEL = ["--blocks", PATTERN, "--num-layers", 2, "--hidden-dim", 64, "--num-heads", 4, "--intermediate-dim", 128]
DATA = ["--corpus", "markov", "--tokenizer", "char", "--vocab-size", 64, "--max-seq-len", 64, "--batch-size", 16]
STEPS = ["--max-steps", 300, "--lr", 4e-3, "--eval-every", 100, "--save-every", 50, "--layer-stats-every", 100]
SHOWN = ["blocks.0.ffn", "blocks.0.shift", "blocks.1.attn", "blocks.1.ffn"]
LEARNED = 0.9  # of the unigram baseline's loss, at most
DECODE, MEMORY = 1e-12, 0.10
SIZES = {"hidden_dim": 256, "num_layers": 4, "max_seq_len": 256}
ROWS, LENGTH = 8, 256
WORKER = "from tapeless.plugins import load_plugin; load_plugin({!r}); from tapeless.bench.worker import main; main()"


def last_line(done: Done) -> str:
    return (done.output.strip().splitlines() or [""])[-1]


def check_file(claims: Claims) -> None:
    count = len(PLUGIN.read_text().splitlines())
    claims.check(f"lines of {PLUGIN.name}", bound=f"at most {LINES}", measured=count, ok=count <= LINES)
    mentions = [path.name for path in (HOME.parent / "src").rglob("*.py") if PLUGIN.stem in path.read_text()]
    claims.check("files of the package that mention it", bound="none", measured=mentions or "none", ok=not mentions)


def check_gradients(claims: Claims) -> None:
    post = ["--norm-placement", "post", "--norm", "layer", "--norm-bias", "--position", "none"]
    only = "shift(width=24)+ffn"
    for name, flags in {PATTERN: [], f"{PATTERN}, post-norm": post, only: ["--blocks", only]}.items():
        done = tapeless("gradcheck", *WITH, "--blocks", PATTERN, "--num-layers", 2, *flags)
        claims.check(f"gradcheck of {name}: {last_line(done)}", bound="exit status 0", measured=done.code, ok=done.code == 0)


def check_run(claims: Claims, folder: Path) -> RunDir:
    run = RunDir(folder / "run")
    train(run, *WITH, *MODEL, *DATA, *STEPS)
    loss, unigram = of_kind(run, "eval")[-1]["val_loss"], of_kind(run, "start")[0]["baselines"]["unigram"]
    claims.check(
        f"validation loss after {STEPS[1]} steps {loss:.4f}; unigram {unigram:.4f}",
        bound=f"at most {LEARNED} of unigram",
        measured=f"{loss / unigram:.3f}",
        ok=loss <= LEARNED * unigram,
    )
    expected = f"{PLUGIN.name} sha256:{file_sha256(PLUGIN)}"
    recorded = tomllib.loads(run.config.read_text()).get("plugins")
    claims.check("config.toml records kind, file and hash", bound=expected, measured=recorded, ok=recorded == {KIND: expected})
    shown = sorted(set(re.findall(r"blocks\.\d+\.\w+", run.report.read_text())))
    claims.check("sublayers that the report shows", bound=SHOWN, measured=shown, ok=shown == SHOWN)
    for words in (["generate", run.path, "--max-tokens", 20, "--seed", 1], ["eval", run.path], ["train", "info", run.path]):
        done = tapeless(*words, *WITH)
        claims.check(f"`{words[0]}` with --plugin", bound="exit status 0", measured=done.code, ok=done.code == 0)
    return run


def check_without(claims: Claims, folder: Path, run: RunDir) -> None:
    """Without its plugin a run is refused by every command; with another version of it a resume is."""
    load = "import sys, tapeless; tapeless.load(sys.argv[1])"
    for words in (
        ["train", "resume", run.path, "--override", "max_steps=310"],
        ["generate", run.path],
        ["eval", run.path],
        ["export", run.path, "--to", "hf", "--out", folder / "hf"],
    ):
        done = tapeless(*words)
        named = done.code == 2 and PLUGIN.name in done.output and repr(KIND) in done.output
        label = " ".join(map(str, words[: 2 if words[0] == "train" else 1]))
        claims.check(f"`{label}` without the plugin names file and kind", bound="exit status 2", measured=done.code, ok=named)
    found = subprocess.run([sys.executable, "-c", load, run.path], capture_output=True, text=True, check=False).stderr
    ok = PLUGIN.name in found and "ConfigError" in found
    claims.check("tapeless.load without the plugin names it", bound="ConfigError", measured=found.splitlines()[-1][:60], ok=ok)
    altered = folder / "altered" / PLUGIN.name
    altered.parent.mkdir()
    altered.write_text(PLUGIN.read_text() + "\n# another version\n")
    done = tapeless("train", "resume", run.path, "--plugin", altered, "--override", "max_steps=310")
    ok = done.code == 2 and f"plugins.{KIND}" in done.output and PLUGIN.name in done.output
    claims.check("resume with an altered file is refused by name", bound="exit status 2", measured=done.code, ok=ok)
    done = tapeless("eval", run.path, "--plugin", altered)
    ok = done.code == 0 and "another version of its plugin" in done.output
    claims.check("eval with an altered file warns", bound="exit status 0, a warning", measured=done.code, ok=ok)


def check_nothing_runs(claims: Claims, folder: Path, run: RunDir) -> None:
    """Files in a run directory that look like its plugin, or like modules that Python or pytest load by themselves, stay text
    for every command that reads a run, in whichever directory it is started. The commands have the plugin, and so reach the
    run's end; each trap would leave a file behind."""
    commands: dict[str, list[object]] = {
        "generate": ["--max-tokens", 2, *WITH],
        "eval": WITH,
        "gradcheck": WITH,
        "report": [],  # reads no model
        "train info": WITH,
        "train resume": ["--override", "max_steps=301", *WITH],
        "export": ["--to", "hf", "--out", folder / "trap-hf", *WITH],  # status 2: no Hugging Face family has this sublayer
    }
    traps = [PLUGIN.name, f"{KIND}.py", "sitecustomize.py", "conftest.py", "tapeless.py", "torch.py", "__init__.py"]
    witness, executed, failed = folder / "executed", list[str](), list[str]()
    for name, words in commands.items():
        for where in ("elsewhere", "inside"):
            copy = RunDir(folder / f"trap-{name.replace(' ', '-')}-{where}")
            shutil.copytree(run.path, copy.path)
            for trap in traps:
                (copy.path / trap).write_text(f"open({str(witness)!r}, 'w').close()\n{PLUGIN.read_text()}")
            done = subprocess.run(
                [Path(sys.executable).parent / "tapeless", *name.split(), copy.path, *map(str, words)],
                cwd=copy.path if where == "inside" else folder,
                env=environment(1),
                capture_output=True,
                check=False,
            )
            if done.returncode != (2 if name == "export" else 0):
                failed.append(f"{name}, {where}: {done.returncode} {done.stderr.decode()[-200:]}")
            if witness.exists():
                executed.append(f"{name}, {where}")
                witness.unlink()
    claims.check(
        f"{', '.join(commands)}, started elsewhere and in the run directory: exit status 0, of export 2",
        bound="all",
        measured=failed or "all",
        ok=not failed,
    )
    claims.check(
        f"{', '.join(traps)} in the run directory, each with a side effect, during these {2 * len(commands)} commands",
        bound="none executed",
        measured=executed or "none executed",
        ok=not executed,
    )


def check_kill(claims: Claims, folder: Path) -> None:
    flags = [*WITH, *MODEL, *DATA, *STEPS, "--dropout", 0.1, "--no-verify"]
    unbroken, killed = RunDir(folder / "unbroken"), RunDir(folder / "killed")
    train(unbroken, *flags, threads=1)
    process = subprocess.Popen(
        command("train", "new", *flags, "--out-dir", killed.path),
        env=environment(1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not (killed.path / "checkpoints" / "step-00000100").is_dir():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    code = process.wait()
    done = tapeless("train", "resume", killed.path, *WITH, threads=1)
    equal = fingerprint(killed) == fingerprint(unbroken)
    claims.check(
        f"killed (status {code}), resumed (status {done.code}): weights, moments and state against the unbroken run",
        bound="equal sha256",
        measured=fingerprint(killed)["model.safetensors"][:16] + (" equal" if equal else " DIFFERENT"),
        ok=code == -signal.SIGKILL and done.code == 0 and equal,
    )


def check_import(claims: Claims, folder: Path, run: RunDir) -> None:
    """The same run from Python, where the file is imported as any module."""
    script = f"""
import sys
sys.path.insert(0, {str(PLUGIN.parent)!r})
import gated_token_shift, tapeless
model = tapeless.ModelConfig(blocks={PATTERN!r}, num_layers=2, hidden_dim=64, num_heads=4, intermediate_dim=128, vocab_size=64,
    max_seq_len=64)
result = tapeless.train(model, out_dir={str(folder / "imported")!r}, corpus="markov", tokenizer="char", batch_size=16,
    max_steps=300, lr=4e-3, eval_every=100, save_every=50, layer_stats_every=100, display=None)
print(result.reason, tapeless.load(result.path).num_params == result.model.num_params)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    imported = RunDir(folder / "imported")
    equal = fingerprint(imported) == fingerprint(run)
    claims.check(
        f"tapeless.train after `import {PLUGIN.stem}`: {done.stdout.strip()}; checkpoint against that of --plugin",
        bound="equal sha256",
        measured="equal" if equal else "DIFFERENT",
        ok=equal and done.stdout.split() == ["done", "True"],
    )


def check_decoding(claims: Claims) -> None:
    for name, options in {"pre-norm": {}, "post-norm": {"norm_placement": "post", "position": "learned"}}.items():
        config = ModelConfig(blocks=PATTERN, num_layers=4, hidden_dim=32, num_heads=4, vocab_size=64, max_seq_len=40, **options)
        model = Transformer(config, dtype="float64", ops="reference")
        move_off_init(model, seed=1)
        tokens = torch.randint(64, (3, 40), generator=torch.Generator().manual_seed(0))
        whole, cache, parts, at = model.logits(tokens), model.kv_cache(3, 40), [], 0
        for size in (7, 1, 1, 5, *[1] * 26):
            parts.append(model.logits(tokens[:, at : at + size], kv_cache=cache))
            at += size
        gap = float((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max())
        claims.check(
            f"decoding with the cache, {name}: largest difference from the full forward, float64",
            bound=DECODE,
            measured=gap,
            ok=gap <= DECODE,
        )


def check_memory(claims: Claims) -> list[dict[str, object]]:
    """As acceptance/estimate.py measures it, of a worker that has the plugin loaded."""
    rows, config = [], ModelConfig(blocks=PATTERN, **SIZES)
    worker = [sys.executable, "-c", WORKER.format(str(PLUGIN))]
    for dtype in ("float32", "bfloat16"):
        plain = TrainConfig(batch_size=ROWS, seq_len=LENGTH, dtype=dtype, lr=1e-4, verify=False)
        for policy in ("none", "full"):
            task = Task("ours", config, TrainConfig(**{**vars(plain), "recompute": policy}))
            for _ in range(2 if policy == "none" else 1):  # the first compiles what is not compiled yet
                with Process(task, bench_environment(task, None), worker) as process:
                    before = process.ask("build", task=task.as_json())["before"]
                    process.ask("first")
                    process.ask("steps", count=2)
                    above = process.ask("finish")["peak"] - before
            predicted = memory_of(config, task.train).phases["training step"]
            flags = [f"--{key.replace('_', '-')}={value}" for key, value in SIZES.items()]
            flags += ["--blocks", PATTERN, "--batch-size", ROWS, "--seq-len", LENGTH, "--dtype", dtype, "--recompute", policy]
            done = tapeless("estimate", *WITH, *flags, "--no-calibrate", "--no-verify", "--json")
            said = json.loads(done.output.splitlines()[-1])["memory"]["phases"]["training step"]
            gap = said / above - 1
            claims.check(
                f"`estimate` of {ROWS}x{LENGTH} {dtype} {policy}: peak memory {above / MIB:.0f} MiB, said {said / MIB:.0f}",
                bound=f"within {MEMORY:.0%}",
                measured=f"{gap:+.1%}",
                ok=abs(gap) <= MEMORY and said == predicted,
            )
            rows.append({"dtype": dtype, "policy": policy, "predicted": said, "measured": above})
    return rows


if __name__ == "__main__":
    claims = Claims("example_sublayer")
    check_file(claims)
    check_gradients(claims)
    load_plugin(PLUGIN)
    check_decoding(claims)
    with scratch() as folder:
        run = check_run(claims, folder)
        check_without(claims, folder, run)
        check_nothing_runs(claims, folder, run)
        check_import(claims, folder, run)
        check_kill(claims, folder)
    memory = check_memory(claims)
    claims.finish(memory=memory)
