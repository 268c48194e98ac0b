"""What a hostile tester found, as commands again: each ends with a result or one line of error, as promised.

python acceptance/hostile_list.py        minutes, since some claims compile kernels into caches of their own"""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from claim import Claims
from training import scratch

TINY = ["--preset", "tiny", "--no-verify", "--eval-every", "0", "--sample-every", "0"]
LATEST = "checkpoints/latest"
claims = Claims("hostile_list")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the commands below would inherit that it is ignored


def tapeless(*words: object, shell: str = "", **environment: str) -> tuple[int, str, str]:
    """Status, stdout, stderr without what was waited for. shell: redirections and limits."""
    command = " ".join([sys.executable, "-m tapeless", *(f"'{word}'" for word in words)])
    line = shell.format(command) if "{}" in shell else f"{command} {shell}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1", **environment}, check=False
    )
    errors = [text for text in done.stderr.decode(errors="replace").splitlines() if " …" not in text and "\\u2026" not in text]
    return done.returncode, done.stdout.decode(errors="replace"), "\n".join(errors)


def one_line(found: tuple[int, str, str], code: str) -> bool:
    """Exactly one line of error, with this code; no traceback."""
    status, _, errors = found
    last = errors.splitlines()[-1:] or [""]
    return status in (1, 2) and bool(re.match(rf"error\[({code})\]", last[0])) and "Traceback" not in errors


def check(entry: str, claim: str, found: tuple[int, str, str], ok: bool) -> None:
    last = (found[2] or found[1]).splitlines()[-1:] or [""]
    claims.check(f"{entry}: {claim}", bound="as claimed", measured=f"exit {found[0]}; {last[0][:300]}", ok=ok)


def whole(run: Path) -> bool:
    return (run / LATEST).is_file() and (run / "checkpoints" / (run / LATEST).read_text().strip()).is_dir()


def signalled(
    words: Sequence[object], number: int, ready: Callable[[], bool], *, ignored: bool = False
) -> tuple[int, float | None, float, str]:
    """Status, seconds until the acknowledgement, seconds until the end, stderr."""
    command = [*(["nohup"] if ignored else []), sys.executable, "-m", "tapeless", *map(str, words)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not ready() and process.poll() is None:
        time.sleep(0.05)
    began, said, lines = time.monotonic(), None, []
    process.send_signal(number)
    assert process.stderr is not None
    for line in process.stderr:
        if " received: " in line and said is None:
            said = time.monotonic() - began
        lines += [] if " …" in line else [line]
    return process.wait(), said, time.monotonic() - began, "".join(lines)


def has_lines(file: Path, count: int) -> Callable[[], bool]:
    return lambda: file.is_file() and file.read_bytes().count(b"\n") >= count


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


with scratch() as folder:
    os.chdir(folder)
    text = folder / "text.txt"
    text.write_text("".join(f"line {n}: the quick brown fox jumps over the lazy dog {n * n}.\n" for n in range(2000)))
    new = ["train", "new", *TINY, "--dataset-path", text, "--max-steps", "4"]
    run = folder / "run"
    assert tapeless(*new, "--out-dir", run)[0] == 0

    # 1, 5: the kernel cache
    short = [*new, "--sample-tokens", "0"]
    cache = folder / "file"
    cache.write_text("")
    found = tapeless(*short, "--out-dir", "in-memory", NUMBA_CACHE_DIR=str(cache))
    same = (run / "checkpoints/step-00000004/model.safetensors").read_bytes()
    ok = found[0] == 0 and found[2].count("cannot be cached") == 1
    ok = ok and (folder / "in-memory/checkpoints/step-00000004/model.safetensors").read_bytes() == same
    check("1", "a cache that cannot be written: compiled in memory, one warning, same bits", found, ok)
    caches = folder / "cache"
    racing = [
        subprocess.Popen(
            [sys.executable, "-m", "tapeless", *map(str, short), "--out-dir", f"cold-{n}"],
            env=os.environ | {"NUMBA_CACHE_DIR": str(caches), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for n in range(3)
    ]
    statuses = [process.wait() for process in racing]
    models = {(folder / f"cold-{n}/checkpoints/step-00000004/model.safetensors").read_bytes() for n in range(3)}
    check("not tried", "three cold trainings at once on an empty cache: same bits", (max(statuses), "", ""), models == {same})
    for n, file in enumerate(sorted(caches.glob("*/*.kernel"))):
        content = bytearray(file.read_bytes())
        content[(n * 7919) % len(content)] ^= 1 << (n % 8)
        file.write_bytes(content)
    found = tapeless(*short, "--out-dir", "healed", NUMBA_CACHE_DIR=str(caches))
    ok = found[0] == 0 and "is damaged" in found[2] and "it is compiled again" in found[2]
    ok = ok and (folder / "healed/checkpoints/step-00000004/model.safetensors").read_bytes() == same
    check("5", "a flipped bit in each cached kernel: compiled again with a line each, same bits", found, ok)

    # 2, 12: output
    for encoding in ("latin-1:strict", "ascii:strict"):
        found = tapeless(*new, "--out-dir", f"encoded-{encoding[:3]}", PYTHONIOENCODING=encoding)
        check("2", f"samples on a stdout of {encoding}", found, found[0] == 0 and whole(folder / f"encoded-{encoding[:3]}"))
    found = tapeless("generate", run, "--max-tokens", "20", "--prompt", "жü", PYTHONIOENCODING="latin-1:strict")
    check("2", "generate on a stdout of latin-1", found, found[0] == 0)
    for name, shell in {"full": ">/dev/full", "closed": ">&- 2>&-", "pipe": "| head -1; exit ${{PIPESTATUS[0]}}"}.items():
        found = tapeless(*new, "--out-dir", f"out-{name}", shell=shell.replace("{{", "{").replace("}}", "}"))
        said = name == "closed" or found[2].count("stdout cannot be written") == 1
        check(
            "12",
            f"training with stdout {name}: continues, one warning",
            found,
            found[0] == 0 and said and whole(folder / f"out-{name}"),
        )
    for words in (
        ["train", "info", run],
        ["generate", run, "--max-tokens", "5"],
        ["eval", run],
        ["report", run],
        ["data", "info", text],
    ):
        found = tapeless(*words, shell=">/dev/full")
        check("12", f"`{' '.join(map(str, words[:2]))} > /dev/full`", found, one_line(found, "WRITE") and found[0] == 1)

    # 6: tokenizers of others
    if find_spec("tokenizers"):
        from tapeless.data.bpe import train_bpe

        spec = train_bpe(["the quick brown fox " * 50], 290).spec
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}
        empty = {"type": "Replace", "pattern": {"String": ""}, "content": "b" * 4096}
        split = {"type": "Split", "pattern": {"Regex": "(a|aa|aaa)+$"}, "behavior": "Isolated", "invert": False}
        hostile = {
            "chained replacements": {"normalizer": {"type": "Sequence", "normalizers": [step] * 8}},
            "an empty pattern": {"normalizer": {"type": "Sequence", "normalizers": [empty] * 4}},
            "a pattern that backtracks": {
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}
            },
        }
        (folder / "a.txt").write_text(("a" * 40 + "b\n") * 500)
        for name, change in hostile.items():
            (folder / "tokenizer.json").write_text(json.dumps(spec | change))
            began = time.monotonic()
            found = tapeless("tokenizer", "info", folder / "tokenizer.json", "--text", folder / "a.txt")
            seconds = time.monotonic() - began
            check("6", f"a tokenizer with {name}, {seconds:.0f} s", found, one_line(found, "DATA") and seconds < 30)

    # 8, 11, 14: signals
    fifo = folder / "fifo.txt"
    os.mkfifo(fifo)
    for name, words in {
        "train new": ["train", "new", *TINY, "--val-path", fifo, "--dataset-path", text, "--out-dir", "blocked"]
    }.items():
        status, said, seconds, errors = signalled(words, signal.SIGTERM, after(5))
        ok = status in (130, 2) and not (folder / "blocked").exists()
        claims.check(
            f"11: {name} with a FIFO, SIGTERM",
            bound="acknowledged in 1 s, nothing left",
            measured=f"exit {status}, {said} s, {seconds:.1f} s; {errors[-120:]}",
            ok=ok,
        )
    long = ["train", "new", *TINY, "--dataset-path", text, "--max-steps", "100000", "--out-dir"]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        name = f"stop-{number.name}"
        status, said, seconds, errors = signalled([*long, name], number, has_lines(folder / name / "metrics.jsonl", 20))
        ok = status == 75 and said is not None and said < 1 and whole(folder / name)
        claims.check(
            f"14: {number.name} during training",
            bound="acknowledged in 1 s, exit 75, a checkpoint",
            measured=f"exit {status}, acknowledged in {said} s, ended in {seconds:.1f} s",
            ok=ok,
        )
    status, said, seconds, errors = signalled([*new, "--out-dir", "nohup"], signal.SIGHUP, after(4), ignored=True)
    claims.check(
        "14: nohup, SIGHUP",
        bound="exit 0, not acknowledged",
        measured=f"exit {status}, {said}",
        ok=status == 0 and said is None,
    )
    for words, out in ((["data", "prepare", text, "--out"], "prepared"), ([*new, "--out-dir"], "made")):
        killed = False
        process = subprocess.Popen(
            [sys.executable, "-m", "tapeless", *map(str, words), out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not killed:
            if (folder / out / ".unfinished").exists():
                process.kill()
                killed = True
        process.wait()
        found = tapeless(*words, out)
        check("8", f"`{words[0]} {words[1]}` killed while it prepares, and repeated", found, killed and found[0] == 0)

    # 12: INTERNAL
    (folder / "big.jsonl").write_text('{"text": ' + "1" * 5000 + "}\n")
    (folder / "big.toml").write_text("[model]\nnum_layers = " + "1" * 5000 + "\n")
    (folder / "deep.jsonl").write_text("[" * 100_000)
    (folder / os.fsdecode(b"name\xff.txt")).write_bytes(text.read_bytes())
    for name, words, code in (
        ("an integer of 5,000 digits in JSONL", ["data", "info", "big.jsonl"], "NOT_JSON"),
        ("an integer of 5,000 digits in TOML", ["train", "new", "--config", "big.toml"], "CONFIG"),
        ("JSONL nested deeply", ["data", "info", "deep.jsonl"], "BAD_RECORD"),
        ("--sample-tokens 99999999999", [*new, "--sample-tokens", "99999999999"], "OUT_OF_RANGE"),
        ("--num-layers 100000000", [*new, "--num-layers", "100000000"], "OUT_OF_RANGE"),
    ):
        began = time.monotonic()
        found = tapeless(*words)
        check("12, 14", name, found, one_line(found, code) and time.monotonic() - began < 10)
    found = tapeless(*new[:-4], "--dataset-path", os.fsdecode(b"name\xff.txt"))
    check("12", "a file name that is not UTF-8", found, one_line(found, "CONFIG"))
    found = tapeless(*new, "--out-dir", "interpreted", NUMBA_DISABLE_JIT="1")
    check("12", "NUMBA_DISABLE_JIT=1: the reference ops", found, found[0] == 0)
    assert tapeless("data", "prepare", text, "--out", "good")[0] == 0
    for name, change in {
        "a list for a number": {"num_documents": [1]},
        "NaN": {"bytes_per_token": float("nan")},
        "a huge integer": {"bytes_per_token": 10**400},
        "nested": None,
    }.items():
        shutil.copytree(folder / "good", folder / "bad")
        record = json.loads((folder / "good/data.json").read_text())
        (folder / "bad/data.json").write_text("[" * 100_000 if change is None else json.dumps(record | change))
        found = tapeless("data", "info", "bad")
        check("12", f"data.json with {name}", found, one_line(found, "DATA"))
        shutil.rmtree(folder / "bad")
    shutil.copytree(run, folder / "eventless")
    metrics = folder / "eventless/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"floor": null, ', ""))
    found = tapeless("report", "eventless")
    check("12", "an event without `floor` in a report", found, one_line(found, "DATA"))

    # 13: names and keys
    title = "\x1b]0;title\x07"
    (folder / "keys.jsonl").write_text(json.dumps({f"a\n{title}": "b"}) + "\n")
    found = tapeless("data", "info", "keys.jsonl")
    check(
        "13", "a key with a newline and an escape sequence", found, one_line(found, "NO_TEXT_FIELD") and "\x1b" not in found[2]
    )
    (folder / "titles.txt").write_text(f"{title} text\n" * 200)
    assert tapeless("data", "prepare", "titles.txt", "--out", "titles")[0] == 0
    found = tapeless("data", "sample", "titles")
    check(
        "13",
        "data sample of text with escape sequences",
        found,
        found[0] == 0 and "\x1b" not in found[1] and "\x07" not in found[1],
    )

    # Not tried
    with gzip.open(folder / "bomb.txt.gz", "wb") as file:
        for _ in range(400):
            file.write(b"a " * (1 << 19))
    found = tapeless("data", "info", "bomb.txt.gz")
    check("not tried", "400 MB in a gz of 400 kB", found, one_line(found, "EXPANDS"))
    with open(folder / "line.jsonl", "wb") as file:
        file.write(b'{"text": "')
        for _ in range(200):
            file.write(b"a" * (1 << 20))
    found = tapeless("data", "info", "line.jsonl", shell="ulimit -v 6000000; {}")
    check("not tried", "a JSONL line of 200 MB", found, one_line(found, "LONG_LINE"))
    if find_spec("zstandard"):
        import zstandard

        packed = zstandard.ZstdCompressor().compress(b"a " * (400 << 19))
        (folder / "bomb.txt.zst").write_bytes(packed)
        found = tapeless("data", "info", "bomb.txt.zst")
        check("not tried", f"400 MB in a zst of {len(packed) >> 10} kB", found, one_line(found, "EXPANDS"))
    if find_spec("pyarrow"):
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        parquet.write_table(arrow.table({"text": ["a" * (1 << 20)] * 400}), folder / "bomb.parquet")
        size = (folder / "bomb.parquet").stat().st_size >> 10
        found = tapeless("data", "info", "bomb.parquet")
        check("not tried", f"400 MB of text in a Parquet file of {size} kB", found, one_line(found, "EXPANDS"))
claims.finish()
