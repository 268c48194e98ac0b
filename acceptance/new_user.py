"""The first hour of a stranger: what is typed wrong gets the hint that helps, no command is silent for long, and nothing that a
command does silently is left unsaid.

Names of other tools are those of nanoGPT, LitGPT, the Trainer of transformers and torchtitan. tests/cli/test_other_names.py and
the tests named there run parts of this quickly."""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from claim import Claims
from training import load_average, scratch

from tapeless.cli.main import main
from tapeless.estimate.calibrate import CAP
from tapeless.training import threads

NEW = "train new"
# what is typed, and what the error must say
MISTAKES = [
    # nanoGPT
    (f"{NEW} --max_iters=100", "--max-steps"),
    (f"{NEW} --n_layer=6", "--num-layers"),
    (f"{NEW} --n_embd=384", "--hidden-dim"),
    (f"{NEW} --block_size=256", "--max-seq-len"),
    (f"{NEW} --eval_iters=20", "--eval-windows"),
    (f"{NEW} --lr_decay_iters=2000", "--max-steps"),
    (f"{NEW} --gradient_accumulation_steps=4", "--grad-accum"),
    (f"{NEW} --wandb_log=True", "--report-to"),
    (f"{NEW} --compile=False", "compiled kernels already"),
    ("generate runs/mine --start=Hello", "--prompt"),
    ("generate runs/mine --max_new_tokens=10", "--max-tokens"),
    # LitGPT
    (f"{NEW} --train.max_steps 10", "--max-steps"),
    (f"{NEW} --train.micro_batch_size 4", "--batch-size"),
    (f"{NEW} --train.global_batch_size 64", "--grad-accum"),
    (f"{NEW} --eval.interval 100", "--eval-every"),
    (f"{NEW} --train.lr_warmup_steps 10", "--warmup-steps"),
    (f"{NEW} --precision bf16-mixed", "--dtype"),
    (f"{NEW} --initial_checkpoint_dir x", "--init-from"),
    (f"{NEW} --lora_r 8", "--lora-rank"),
    (f"{NEW} --devices 4", "one device"),
    # the Trainer of transformers
    (f"{NEW} --per_device_train_batch_size 8", "--batch-size"),
    (f"{NEW} --num_train_epochs 3", "--epochs"),
    (f"{NEW} --lr_scheduler_type cosine", "--lr-schedule"),
    (f"{NEW} --save_total_limit 2", "--keep-last"),
    (f"{NEW} --logging_steps 10", "--log-every"),
    (f"{NEW} --bf16", "--dtype bfloat16"),
    (f"{NEW} --fp16", "float16 is not supported"),
    (f"{NEW} --gradient_checkpointing", "--recompute"),
    (f"{NEW} --resume_from_checkpoint x", "tapeless train resume"),
    (f"{NEW} --adam_beta2 0.95", "--beta2"),
    # torchtitan
    (f"{NEW} --training.local_batch_size 8", "--batch-size"),
    (f"{NEW} --training.seq_len 512", "--seq-len"),
    (f"{NEW} --optimizer.lr 1e-3", "--lr"),
    (f"{NEW} --checkpoint.interval 100", "--save-every"),
    (f"{NEW} --parallelism.tensor_parallel_degree 2", "one device"),
    (f"{NEW} --activation_checkpoint.mode full", "--recompute"),
    (f"{NEW} --metrics.log_freq 10", "--log-every"),
    # whoever
    (f"{NEW} --learning-rat 1e-3", "--learning-rate"),
    (f"{NEW} --quiet", "keeps the terminal free"),
    (f"{NEW} my.txt", "--dataset-path my.txt"),
    (f"{NEW} tiny", "--preset tiny"),
    (f"{NEW} --prompt x", "a flag of `tapeless generate`"),
    (f"{NEW} --seq-len 4096", "--max-seq-len 4096"),
    (f"{NEW} --lr 0", "error[OUT_OF_RANGE]: lr must be"),
    (f"{NEW} --set train.learning_rate=1", "did you mean 'lr'?"),
    ("train resume runs/mine --override learning_rate=1", "did you mean 'lr'?"),
    ("train my.txt", "tapeless train new"),
    ("resume runs/mine", "tapeless train resume"),
    ("sample runs/mine", "tapeless generate"),
    ("generate mine", "such as runs/mine"),
    ("generate", "such as runs/mine"),
    ("generate runs/mine --interactive", "tapeless chat RUN"),
    ("generate runs/mine --learning-rate 1", "a flag of `tapeless train new`"),
    ("data prepare my.txt other.txt --out x", "a pattern in quotes"),
    ("bench --presett tiny", "--preset"),
]
LEAST = len(MISTAKES) - 2
QUIET = ["--eval-windows", "2", "--sample-tokens", "4", "--no-verify", "--report-to", "none"]
SHAPE = ["--hidden-dim", "16", "--num-layers", "1", "--num-heads", "2", "--intermediate-dim", "24", "--max-seq-len", "16"]
SILENCE = 1.0  # seconds
COLD = [  # each without compiled kernels, from its start to its end
    "train new --preset qwen3-tiny --dataset-path my.txt --out-dir runs/cold --max-steps 12",
    "generate runs/cold --prompt The --max-tokens 20",
    "chat runs/cold --once Hello --max-tokens 10",
    "eval runs/cold",
    "export runs/cold --to hf",
    "gradcheck --preset tiny",
    "bench --preset llama-tiny --contenders ours,eager --dtypes float32 --rounds 2 --turn 0.2",
]


def said(words: list[str]) -> tuple[int, str]:
    """The exit status and all output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main(words)
        except SystemExit as end:  # --help
            status = int(end.code or 0)
    return status, " ".join(out.getvalue().split())


def gaps(words: list[str], environment: dict[str, str], *, until: str = "", limit: float = 600) -> tuple[float, float, str]:
    """The longest silence of a command in a terminal, from its start to a line that contains `until`, by default to its end;
    when that came, and its output."""
    command = [sys.executable, "-m", "tapeless", *words]
    ours, terminal = pty.openpty()
    begin = last = time.monotonic()
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, **environment})
    os.close(terminal)
    longest, output = 0.0, b""
    while not (until and until.encode() in output) and last - begin < limit:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the command has ended
            piece = b""
        now = time.monotonic()
        longest, last, output = max(longest, now - last), now, output + piece
        if not piece:
            break
    process.kill()
    process.wait()
    os.close(ours)
    return longest, last - begin, output.decode(errors="replace")


def check_mistakes(claims: Claims) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for words, hint in MISTAKES:
        status, text = said(words.split())
        rows.append({"typed": words, "hint": hint, "said": text, "ok": status == 2 and hint in text})
        if not rows[-1]["ok"]:
            print(f"      {words}: {text}")
    found = sum(bool(row["ok"]) for row in rows)
    what = f"{len(rows)} mistakes of a stranger, 37 of them flags of four other tools: exit 2 and the hint that helps"
    claims.check(what, bound=f"{LEAST} of them at least", measured=f"{found}", ok=found >= LEAST)
    return rows


def check_words(claims: Claims, what: str, words: list[str], *expected: str, status: int = 0) -> str:
    got, text = said(words)
    missing = [word for word in expected if word not in text]
    measured = "said" if not missing and got == status else f"status {got}, missing {missing}: {text[-400:]}"
    claims.check(f"{what}: `tapeless {' '.join(words)}`", bound=" / ".join(expected), measured=measured, ok=measured == "said")
    return text


def check_items(claims: Claims, folder: Path) -> None:
    usual = [*SHAPE, *QUIET, "--dataset-path", "my.txt"]
    run = ["--out-dir", "runs/first", "--max-steps", "10", "--eval-every", "5"]
    check_words(claims, "a run says what it can be exported to", ["train", "new", *usual, *run], "export hf (Llama", ", gguf")
    bpe = ["train", "new", *usual, "--tokenizer", "bpe", "--max-steps", "1"]
    check_words(claims, "the vocabulary of a new BPE", bpe, "vocabulary 4,096 ids, the default of a new BPE", "bpe, ")
    said(["data", "prepare", "my.txt", "--out", "prepared", "--tokenizer", "bpe", "--vocab-size", "300"])
    prepared = ["train", "new", *SHAPE, *QUIET, "--dataset-path", "prepared", "--max-steps", "1"]
    check_words(claims, "that of prepared data", prepared, "vocabulary 300 ids, that of the tokenizer of prepared")
    check_words(
        claims,
        "accepted names of flags, and 1e1 for 10",
        ["train", "new", *SHAPE, *QUIET, "--data", "my.txt", "--learning-rate", "1e-3", "--steps", "1e1", "--batch", "2"],
        "10 of 2 x 16",
        "lr 0.001",
    )
    check_words(claims, "a finished run, resumed", ["train", "resume", "runs/first"], "all 10 steps are done", "as before")
    longer = ["train", "resume", "runs/first", "--max-steps", "40"]
    check_words(claims, "a jump of the learning rate", longer, "the learning rate rises from 2.00e-04 to", "--lr-schedule wsd")
    resumed = ["train", "resume", "runs/first", "--max-steps", "44", "--lr", "1e-3", "--batch", "4"]
    check_words(claims, "overrides as flags", resumed, "44 of 4 x 16", "lr 0.001")
    said(["train", "new", *usual, "--out-dir", "runs/second", "--max-steps", "10", "--lr", "1e-3"])
    said(["report", "runs/first", "runs/second", "--out", "both.html"])
    page = Path("both.html").read_text()
    table = re.findall(r"differences.*?</table>", page, re.S)[0]
    ok = "0.002, from step 41 on 0.001" in table and '"resumes":[{"step":10' in page
    claims.check(
        "a comparison has every value of an overridden setting, and resumes are marked", bound="yes", measured=ok, ok=ok
    )
    diverged = ["train", "new", *usual, "--out-dir", "runs/nan", "--max-steps", "20", "--lr", "1e30", "--grad-clip", "0"]
    words = ("there is no checkpoint yet", "tapeless train resume runs/nan --lr 5e+29")
    check_words(claims, "divergence before the first checkpoint", diverged, *words, status=4)
    for name in ("text/a.txt", "text/b.png", "text/c.PNG"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy("my.txt", name)
    skipped = ["train", "new", *SHAPE, *QUIET, "--dataset-path", "text", "--max-steps", "1"]
    check_words(claims, "skipped files", skipped, "(2 files skipped: 2 .png)")
    check_words(claims, "lengths are labelled", ["data", "info", "text"], "shortest ", ", median ", ", longest ")
    widest = max(map(len, run_info().splitlines()))
    claims.check("`tapeless train info` wraps its text under its label", bound="100 columns", measured=widest, ok=widest <= 100)
    text = help_lines()
    claims.check("`tapeless train new --help`", bound="45 lines of 100 columns", measured=len(text), ok=len(text) <= 45)


def check_packages(claims: Claims) -> None:
    """What an optional package is named as, if it is missing."""
    before = sys.modules.get("tokenizers")
    sys.modules["tokenizers"] = None  # type: ignore[assignment]
    bpe = ["train", "new", *SHAPE, *QUIET, "--dataset-path", "my.txt", "--tokenizer", "bpe", "--max-steps", "1"]
    check_words(claims, "an extra that is missing", bpe, "pip install 'tapeless[bpe]'", status=2)
    sys.modules.pop("tokenizers")
    if before is not None:
        sys.modules["tokenizers"] = before


def check_threads(claims: Claims) -> None:
    """With twice as many busy processes as cores."""
    cores = os.cpu_count() or 1
    torch.set_num_threads(max(2, cores))  # whatever the environment says
    threads.load_average = lambda: 2.0 * cores  # that of the last minute has not risen yet
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        time.sleep(1)
        found = [threads.slower_threads("cpu") for _ in range(5)]
    finally:
        for process in others:
            process.kill()
    warned = [text for text in found if text]
    measured = f"{len(warned)} of 5: {warned[0] if warned else ''}"
    claims.check(
        "a busy machine: a warning that all threads are slower than one", bound="yes", measured=measured, ok=bool(warned)
    )


def run_info() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["train", "info", "runs/first"])
    return "\n".join(line for line in out.getvalue().splitlines() if "#" not in line)  # commands are not wrapped


def help_lines() -> list[str]:
    os.environ["COLUMNS"] = "100"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["train", "new", "--help"])
    return out.getvalue().splitlines()


def check_silence(claims: Claims, folder: Path) -> dict[str, object]:
    silent = {}
    for i, command in enumerate(COLD):
        longest, total, output = gaps(command.split(), {"NUMBA_CACHE_DIR": str(folder / f"cache-{i}")})
        kernels = len(set(re.findall(r"compiling CPU kernel (\d+)", output)))
        silent[command] = round(longest, 2)
        claims.check(
            f"no compiled kernels yet: `tapeless {command}`, {total:.0f} s, {kernels} kernels named",
            bound=f"silent for at most {SILENCE} s",
            measured=f"{longest:.2f} s at load {load_average()}",
            ok=longest <= SILENCE and "error[" not in output,
        )
    words = ["estimate", "--preset", "llama-1b", "--batch-size", "16", "--max-steps", "100"]
    _, verdict, _ = gaps(words, {}, until="--skip-resource-check")
    _, total, _ = gaps(words, {}, until="\ntime ")
    claims.check("`tapeless estimate` of llama-1b: the verdict", bound="10 s", measured=f"{verdict:.1f} s", ok=verdict <= 10)
    bound = 4 * CAP
    claims.check("and its time, measured with few layers", bound=f"{bound:.0f} s", measured=f"{total:.1f} s", ok=total <= bound)
    return {"silent": silent, "verdict": verdict, "estimate": total}


if __name__ == "__main__":
    claims = Claims("new_user")
    with scratch() as folder, contextlib.chdir(folder):
        from pydoc_data.topics import topics

        Path("my.txt").write_text("\n\n".join(topics.values())[:100_000])
        said(["train", "new", *SHAPE, *QUIET, "--dataset-path", "my.txt", "--max-steps", "1", "--out-dir", "runs/mine"])
        mistakes = check_mistakes(claims)
        check_items(claims, folder)
        check_packages(claims)
        check_threads(claims)
        silence = check_silence(claims, folder)
    claims.finish(mistakes=json.loads(json.dumps(mistakes)), seconds=silence)
