"""Preparing text: as fast as `datasets.map` with the same tokenizer on the same cores, in memory that does not grow with it.

The peer runs in a Python of its own, TAPELESS_DATASETS_PYTHON, that has `datasets` and `tokenizers`; without one that row is
left out, with the reason. Ours is the whole command: read, split, tokenize, write, check; the peer's is `map` alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from claim import Claims
from training import command, scratch, tapeless

SMALL, LARGE = 50_000_000, 200_000_000  # bytes of text
LEARNED = 5_000_000  # bytes that the tokenizer is trained on
VOCABULARY, WORDS, WORDS_PER_DOCUMENT = 8192, 50_000, 300
GROWTH = 0.10
ROUNDS = 3
CORES = len(os.sched_getaffinity(0))

PEER = """
import json, os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import datasets, tokenizers
datasets.disable_progress_bars()
source, tokenizer, processes, cache = sys.argv[1:]
backend = tokenizers.Tokenizer.from_file(tokenizer)
rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=cache)

def encode(batch):
    return {"ids": [found.ids for found in backend.encode_batch_fast(batch["text"], add_special_tokens=False)]}

start = time.monotonic()
mapped = rows.map(encode, batched=True, num_proc=int(processes), remove_columns=["text"])
seconds = time.monotonic() - start
tokens = sum(len(ids) for batch in mapped.iter(1000) for ids in batch["ids"])
print(json.dumps({"seconds": seconds, "tokens": tokens, "version": datasets.__version__}))
"""


def write_text(path: Path, size: int) -> None:
    """Documents of made-up words, whose frequencies fall as those of a language do."""
    rng = np.random.default_rng(0)
    letters = rng.choice(list("etaoinshrdlcumwfgypbvk"), (WORDS, 12))
    lengths = rng.integers(2, 12, WORDS)
    words = np.array(["".join(row[:length]) for row, length in zip(letters, lengths, strict=True)], object)
    share = 1 / np.arange(1, WORDS + 1)
    written = 0
    with open(path, "w") as file:
        while written < size:
            text = " ".join(rng.choice(words, WORDS_PER_DOCUMENT, p=share / share.sum())) + ".\n"
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text)


class Prepared(NamedTuple):
    seconds: float
    peak: int  # bytes of all its processes together
    facts: dict


def tree(root: int) -> list[int]:
    """A process and those it began."""
    found = [root]
    for pid in found:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:  # it has just ended
            continue
    return found


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def prepared(source: Path, tokenizer: Path, out: Path) -> Prepared:
    start, peak = time.monotonic(), 0
    words = command("data", "prepare", source, "--out", out, "--tokenizer", tokenizer, "--processes", CORES, "--json")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(resident, tree(process.pid))))
            time.sleep(0.05)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        sys.exit(f"tapeless data prepare ended with status {process.returncode}")
    facts = json.loads(output)
    del facts["source"]  # a path of today
    return Prepared(time.monotonic() - start, peak, facts)


def peer(python: str, source: Path, tokenizer: Path, cache: Path) -> dict:
    words = [python, "-c", PEER, str(source), str(tokenizer), str(CORES), str(cache)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return json.loads(
        subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout.splitlines()[-1]
    )


def main() -> None:
    claims, rows = Claims("data_prepare"), {}
    with scratch() as folder:
        source = {size: folder / f"{size}.jsonl" for size in (LEARNED, SMALL, LARGE)}
        for size, path in source.items():
            write_text(path, size)
        tokenizer = folder / "tokenizer.json"
        made = tapeless("tokenizer", "train", source[LEARNED], "--out", tokenizer, "--vocab-size", VOCABULARY)
        if made.code:
            sys.exit(made.output)
        for size in (SMALL, LARGE):
            rows[size] = prepared(source[size], tokenizer, folder / f"data-{size}")
        growth = rows[LARGE].peak / rows[SMALL].peak - 1
        claims.check(
            f"peak memory of all processes: {rows[LARGE].peak / 2**20:.0f} MiB for "
            f"{LARGE / 1e6:.0f} MB of text, {rows[SMALL].peak / 2**20:.0f} MiB for {SMALL / 1e6:.0f} MB",
            bound=f"within {100 * GROWTH:.0f} %",
            measured=f"{100 * growth:+.1f} %",
            ok=growth <= GROWTH,
        )
        python, theirs = os.environ.get("TAPELESS_DATASETS_PYTHON"), []
        ours = [rows[LARGE]]
        if python:
            for i in range(ROUNDS):  # by turns; `map` would take an old answer from its cache
                theirs.append(peer(python, source[LARGE], tokenizer, folder / f"cache-{i}"))
                ours.append(prepared(source[LARGE], tokenizer, folder / f"again-{i}"))
            compare(claims, ours, theirs)
        else:
            print("left out: datasets.map, since TAPELESS_DATASETS_PYTHON names no Python that has the package")
    claims.finish(
        table=[{"bytes": size, **row._asdict()} for size, row in rows.items()],
        seconds=[row.seconds for row in ours],
        peer=theirs or "left out: TAPELESS_DATASETS_PYTHON names no Python that has `datasets`",
    )


def compare(claims: Claims, ours: list[Prepared], theirs: list[dict]) -> None:
    facts, version = ours[0].facts, theirs[0]["version"]
    ends = facts["documents"]
    claims.check(
        f"{LARGE / 1e6:.0f} MB: the tokens of `map` of datasets {version}, and one for the end of each document",
        bound=f"{theirs[0]['tokens'] + ends:,}",
        measured=f"{facts['training_tokens'] + facts['validation_tokens']:,}",
        ok=facts["training_tokens"] + facts["validation_tokens"] == theirs[0]["tokens"] + ends,
    )
    speed, peers = (
        LARGE / 1e6 / median(times) for times in ([row.seconds for row in ours], [row["seconds"] for row in theirs])
    )
    claims.check(
        f"{LARGE / 1e6:.0f} MB on {CORES} cores, the whole command against `map` alone, which reaches {peers:.1f} MB/s",
        bound="at least as fast",
        measured=f"{speed:.1f} MB/s, {speed / peers:.2f} times",
        ok=speed >= peers,
    )


if __name__ == "__main__":
    main()
