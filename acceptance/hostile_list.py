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
PLAIN = r"(?!INTERNAL)\w+"  # any code but that of a bug
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

    # 3, 10: a run that is not what it was
    for name, old, edited in (("rope_theta", "rope_theta = 10000.0", "rope_theta = 500.0"), ("seed", "seed = 0", "seed = 9")):
        shutil.copytree(run, folder / "edited")
        config = folder / "edited/config.toml"
        config.write_text(config.read_text().replace(f"\n{old}\n", f"\n{edited}\n"))
        found = tapeless("train", "resume", "edited")
        check("3", f"{name} edited in config.toml: refused", found, one_line(found, "CHANGED|EDITED"))
        shutil.rmtree(folder / "edited")
    shutil.copytree(run, folder / "elsewhere")
    found = tapeless("train", "resume", "elsewhere", "--max-steps", "6", NUMBA_OPT="1", NUMBA_CACHE_DIR=str(caches))
    check("10", "resumed with NUMBA_OPT=1: announced", found, found[0] == 0 and "the last bits may differ" in found[2])

    # 4, 9: what a training has open
    for name, change in {
        "rewritten": lambda path: path.write_bytes(path.read_bytes()[:64] + bytes(path.stat().st_size - 64)),
        "cut off": lambda path: os.truncate(path, 100),
    }.items():
        assert tapeless("data", "prepare", text, "--out", "source")[0] == 0
        words = ["train", "new", *TINY, "--dataset-path", "source", "--max-steps", "100000", "--save-every", "50"]
        command = [sys.executable, "-m", "tapeless", *map(str, words), "--out-dir", "linked"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not has_lines(folder / "linked/metrics.jsonl", 20)():
            time.sleep(0.05)
        change(folder / "source/train.bin")
        found = (0, "", process.communicate(timeout=300)[1])
        found = (process.returncode, "", "\n".join(line for line in found[2].splitlines() if " …" not in line))
        ok = one_line(found, "ALTERED_DATA|TRUNCATED_DATA")
        check("4", f"the tokens of a running training {name} in place: an error", found, ok)
        shutil.rmtree(folder / "source")
        shutil.rmtree(folder / "linked")
    for name, change in {
        "removed": shutil.rmtree,
        "renamed": lambda path: path.rename(path.with_name("new-name")),
        "without metrics.jsonl": lambda path: (path / "metrics.jsonl").unlink(),
    }.items():
        ready = has_lines(folder / "gone/metrics.jsonl", 20)

        def now(change: Callable[[Path], object] = change, ready: Callable[[], bool] = ready) -> bool:
            if ready():
                change(folder / "gone")
                return True
            return False

        status, said, seconds, errors = signalled([*long, "gone"], signal.SIGTERM, now)
        left = folder / ("new-name" if name == "renamed" else "gone")
        ok = status == 75 and whole(left) and "warning: " in errors and (left / "metrics.jsonl").stat().st_size > 0
        check("9", f"the directory of a running training {name}: a warning, a checkpoint, its lines", (status, "", errors), ok)
        shutil.rmtree(left)

    # 7, 14 and "not tried": models
    small = ["--hidden-dim", "16", "--num-layers", "1", "--num-heads", "2", "--intermediate-dim", "24", "--max-seq-len", "8"]
    assert tapeless("train", "new", *small, *TINY[2:], "--dataset-path", text, "--max-steps", "2", "--out-dir", "base")[0] == 0
    assert tapeless("export", "base", "--to", "hf", "--out", "hf")[0] == 0
    adapt = ["--init-from", "hf", "--lora-rank", "2", "--tokenizer", "bytes", "--dataset-path", text, "--max-steps", "2"]
    assert tapeless("train", "new", *adapt, *TINY[2:], "--out-dir", "adapted")[0] == 0
    (folder / "adapted").rename(folder / "moved")
    shutil.move(folder / "hf", folder / "hf-moved")
    found = tapeless("generate", "moved", "--max-tokens", "4")
    check("7", "a LoRA run and its Hugging Face base moved", found, found[0] == 0)
    model = folder / "hf-moved/model.safetensors"
    good, config = model.read_bytes(), json.loads((folder / "hf-moved/config.json").read_text())
    model.write_bytes(good[:-4] + b"\x00\x00\xc0\x7f")
    found = tapeless("import", "hf-moved", "--out", "imported")
    check("not tried", "NaN in a tensor file", found, one_line(found, "UNTRUSTED_FILE"))
    model.write_bytes(good)
    (folder / "hf-moved/config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e300}))
    found = tapeless("import", "hf-moved", "--out", "imported")
    check("14", "rms_norm_eps 1e300 in an import", found, one_line(found, "OUT_OF_RANGE|UNTRUSTED_FILE|CONFIG"))
    (folder / "hf-moved/config.json").write_text(json.dumps(config))
    assert tapeless("export", "base", "--to", "gguf", "--out", "model.gguf")[0] == 0
    for words in (["import", "model.gguf", "--out", "imported"], ["data", "info", "model.gguf"], ["generate", "model.gguf"]):
        found = tapeless(*words)
        ok = one_line(found, PLAIN)
        check("not tried", f"a GGUF file given to `{' '.join(words[:2])}`", found, ok)

    # "not tried": full and read-only disks, as file systems of their own
    disk = folder / "disk"
    disk.mkdir()
    makers = {
        "train new": [*new, "--out-dir"],
        "data prepare": ["data", "prepare", text, "--out"],
        "export": ["export", "base", "--to", "hf", "--out"],
        "import": ["import", "hf-moved", "--out"],
    }
    for state, options in (("full", "size=16k"), ("read-only", "ro")):
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=False, capture_output=True).returncode:
            print(f"skip  a {state} disk: only root may mount one; the campaign fails its calls", flush=True)
            continue
        try:
            for name, words in makers.items():
                found = tapeless(*words, disk / "out")
                ok = one_line(found, "WRITE|DISK_FULL|DISK|CONFIG|FAILED") and not (disk / "out").exists()
                check("not tried", f"a {state} disk under {name}: one line, nothing left", found, ok)
        finally:
            subprocess.run(["umount", disk], check=True)

    # "not tried": clocks, sources that change, no more processes
    clock = "import itertools, sys, time; t = itertools.cycle([4.1e9, -1e10, 0.0]); time.time = lambda: next(t)"
    program = f"{clock}; from tapeless.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, new), "--out-dir", "clock"], capture_output=True, text=True, check=False
    )
    ok = done.returncode == 0 and (folder / "clock/checkpoints/step-00000004/model.safetensors").read_bytes() == same
    check("not tried", "a clock that jumps back and forth: same bits", (done.returncode, "", done.stderr), ok)
    growing = folder / "growing.txt"
    growing.write_bytes(text.read_bytes() * 200)
    command = [sys.executable, "-m", "tapeless", "data", "prepare", str(growing), "--out", "grown"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        with open(growing, "ab") as file:
            file.write(b"another line\n" * 100)
        time.sleep(0.02)
    found = (process.returncode, *process.communicate())
    found = (found[0], found[1], "\n".join(line for line in found[2].splitlines() if " …" not in line))
    ok = tapeless("data", "info", "grown")[0] == 0 if found[0] == 0 else one_line(found, "DATA|ALTERED_DATA")
    check("not tried", "a source that grows while it is prepared: a whole data set, or one line", found, ok)
    if shutil.which("setpriv") and os.geteuid() == 0:
        caps = "+dac_override,+dac_read_search"  # root itself has no limit of processes
        user = f"setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps={caps} --ambient-caps={caps}"
        for limit in (1, 4, 16):
            environment = {"OPENBLAS_NUM_THREADS": "1", "HOME": str(folder)}
            shell = f'{user} bash -c "ulimit -u {limit}; {{}}"'
            found = tapeless(*new, "--out-dir", f"few-{limit}", shell=shell, **environment)
            check("not tried", f"`ulimit -u {limit}`: trained, or one line", found, found[0] == 0 or one_line(found, "FAILED"))

    # Files that are none, and a report without env.json
    for kind, make in {"a pipe": os.mkfifo, "a link to /dev/zero": lambda path: Path(path).symlink_to("/dev/zero")}.items():
        given = folder / "given.toml"
        make(given)
        for words in (
            ["data", "info", given],
            ["data", "prepare", given, "--out", "never"],
            ["train", "new", "--config", given],
            ["train", "new", *TINY, "--tokenizer", given, "--dataset-path", text],
            ["generate", given],
        ):
            found = tapeless(*words, shell="ulimit -v 6000000; timeout 30 {}")
            check(
                "added",
                f"{kind} given to `{' '.join(map(str, words[:3])).replace(str(given), '')}`",
                found,
                one_line(found, PLAIN),
            )
        given.unlink()
        for name in ("checkpoints/latest", "checkpoints/step-00000004/MANIFEST.json", "tokenizer.json"):
            shutil.copytree(run, folder / "piped")
            (folder / "piped" / name).unlink()
            make(folder / "piped" / name)
            found = tapeless(
                "generate", "piped", "--max-tokens", "4", "--no-fallback", shell="ulimit -v 6000000; timeout 30 {}"
            )
            check("added", f"{kind} instead of {name} of a run", found, one_line(found, PLAIN))
            shutil.rmtree(folder / "piped")
    shutil.copytree(run, folder / "bare")
    (folder / "bare/env.json").write_text("{")
    found = tapeless("report", "bare")
    said = "the report leaves out the environment" in found[2]
    check("added", "a report of a run with a damaged env.json: written, with a warning", found, found[0] == 0 and said)
claims.finish()
