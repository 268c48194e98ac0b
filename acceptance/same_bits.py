"""A refactoring changes no bit: runs of an older checkout and of this one end with the same weights and moments.

    python acceptance/same_bits.py --old PATH [NAME …]      PATH: a checkout of the code before; or in $TAPELESS_OLD
    python acceptance/same_bits.py --old PATH --cache FILE  what the old code ended with is kept there, and not trained again
    python acceptance/same_bits.py --old PATH --new PATH    the old code against itself: whether the method is any good

Every run is a command in a process of its own, and the same words in both trees; what it is asked is a checkpoint's bytes."""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from claim import HOME, Claims, skip

STEPS, BASE_STEPS = 200, 20
FILES = ("model.safetensors", "optim.safetensors")
COMMON = ["--no-verify", "--report-to", "none", "--eval-every", 0, "--sample-every", 0, "--save-every", STEPS, "--seed", 7]
DTYPES = ("float32", "bfloat16")
BASE = "base"  # the run that adapters stand beside
CONFIG = "gpt2.toml"
GPT2 = """[model]
vocab_size = 256
hidden_dim = 64
num_layers = 2
num_heads = 4
intermediate_dim = 256
max_seq_len = 64
norm = "layer"
norm_bias = true
position = "learned"
ffn = "gelu"
ffn_bias = true
attn_bias = true
tie_embeddings = true
dropout = 0.1
"""


def settings(**values: object) -> list[str]:
    """`--set` of each; model__dropout is model.dropout."""
    return [word for name, value in values.items() for word in ("--set", f"{name.replace('__', '.')}={value}")]


CLLM = settings(model__num_layers=2, model__hidden_dim=128, model__num_heads=4, model__intermediate_dim=512)
LOSSES = settings(model__ffn="geglu", model__z_loss=1e-3, model__label_smoothing=0.1, model__logit_softcap=30.0)
CARE = settings(train__ema_decay=0.9, train__document_attention="true")
RUNS: dict[str, list[Any]] = {
    "llama": ["--preset", "llama-tiny"],
    "gpt2, dropout": ["--config", CONFIG],
    "qwen3, recompute full": ["--preset", "qwen3-tiny", "--seq-len", 64, "--recompute", "full"],
    "cllm, recompute cheap": ["--preset", "cllm", *CLLM, "--recompute", "cheap"],
    "lora": ["--init-from", BASE, "--lora-rank", 4, "--lora-targets", "all-linear"],
    "muon, grad-accum 2": ["--preset", "llama-tiny", "--optimizer", "muon", "--batch-size", 4, "--grad-accum", 2],
    "ops reference": ["--preset", "llama-tiny", "--ops", "reference"],
    "losses, average, documents": ["--preset", "llama-tiny", *LOSSES, *CARE],
    "simplelm": ["--preset", "simplelm", "--batch-size", 4],
}


@dataclass(frozen=True)
class Tree:
    """A checkout, and where its runs go. All words are relative to that, so that they are the same in every tree."""

    source: Path  # its src/
    folder: Path
    threads: int

    def python(self, *words: object) -> subprocess.CompletedProcess[str]:
        behind = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(self.source), *([behind] if behind else [])])
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(self.threads)},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def imported(self) -> str:
        """Where the package comes from here, whatever is installed."""
        return self.python("-c", "import tapeless; print(tapeless.__file__)").stdout.strip()

    def digest(self) -> str:
        files = sorted(path for path in self.source.rglob("*") if path.suffix in (".py", ".toml"))
        named = (str(path.relative_to(self.source)).encode() + b"\0" + path.read_bytes() for path in files)
        return hashlib.sha256(b"\0".join(named)).hexdigest()[:16]

    def train(self, name: str, words: list[Any]) -> str:
        """A run; what it said where it failed."""
        done = self.python("-m", "tapeless", "train", "new", "--out-dir", name, "--threads", self.threads, *COMMON, *words)
        return "" if done.returncode == 0 else (done.stdout.strip().splitlines() or [f"status {done.returncode}"])[-1]

    def outcome(self, name: str, words: list[Any]) -> dict[str, Any]:
        """The hashes that a run ends with, and its losses on the way: {"error": …} where it failed."""
        (self.folder / CONFIG).write_text(GPT2)
        if BASE in words and not (self.folder / BASE).exists():
            failed = self.train(BASE, ["--preset", "llama-tiny", "--max-steps", BASE_STEPS])
            if failed:
                return {"error": f"the run to begin with: {failed}"}
        failed = self.train(name, words)
        return {"error": failed} if failed else ending(self.folder / name)


def ending(run: Path) -> dict[str, Any]:
    checkpoints = run / "checkpoints"
    latest = checkpoints / (checkpoints / "latest").read_text().strip()
    contents = {name: (latest / name).read_bytes() for name in FILES}
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
        "tensors": {name: tensors(content) for name, content in contents.items()},
        "losses": [event["loss"] for event in events if event.get("event") == "step"],
    }


def tensors(content: bytes) -> dict[str, str]:
    """Name -> dtype, shape and hash of each tensor of a safetensors file, whatever else its header says."""
    begin = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, about in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            first, last = (begin + offset for offset in about["data_offsets"])
            found[name] = f"{about['dtype']} {about['shape']} {hashlib.sha256(content[first:last]).hexdigest()[:16]}"
    return found


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What is not the same; empty where all is. Files that differ in their headers alone hold the same."""
    for whose, result in (("old", old), ("new", new)):
        if "error" in result:
            return f"the {whose} run failed: {result['error']}"
    wrong = []
    for name in FILES:
        before, after = old["tensors"][name], new["tensors"][name]
        off = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
        if off:
            wrong.append(f"{name}: {len(off)} of {len(before)} tensors, {off[0]} among them")
    at = next((step for step, a, b in zip(count(1), old["losses"], new["losses"], strict=False) if a != b), None)
    if wrong and at:
        wrong.append(f"the losses part at step {at}")
    return "; ".join(wrong)


def equal_words(old: dict[str, Any], new: dict[str, Any]) -> str:
    headers = [name for name in FILES if old["files"][name] != new["files"][name]]
    return "equal bytes" if not headers else f"equal tensors, other headers in {', '.join(headers)}"


class Cache:
    """What the old code ended with, by its sources, the words of the run and the libraries."""

    def __init__(self, file: Path | None, tree: Tree):
        self.file, self.tree = file, tree
        self.known: dict[str, Any] = json.loads(file.read_text()) if file and file.is_file() else {}
        libraries = " ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "numba") if find_spec(name))
        self.where = f"{tree.digest()} | {libraries} | python {sys.version.split()[0]} | threads {tree.threads}"

    def outcome(self, name: str, words: list[Any]) -> dict[str, Any]:
        read = f"{GPT2 if CONFIG in words else ''}{BASE_STEPS if BASE in words else ''}"
        key = f"{self.where} | {' '.join(map(str, [*COMMON, *words]))} | {hashlib.sha256(read.encode()).hexdigest()[:8]}"
        if key not in self.known:
            found = self.tree.outcome(name, words)
            if self.file is None or "error" in found:
                return found
            self.known[key] = found
            self.file.write_text(json.dumps(self.known, indent=1) + "\n")
        return self.known[key]


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"those whose names begin so, of: {'; '.join(RUNS)}")
    parser.add_argument("--old", default=os.environ.get("TAPELESS_OLD"), metavar="PATH", help="a checkout of the old code")
    parser.add_argument("--new", default=str(HOME.parent), metavar="PATH", help="what to compare with (default: this tree)")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="JSON that keeps what the old code ended with")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of every run (default 1)")
    return parser.parse_args()


def main() -> None:
    args = asked()
    if not args.old:
        skip("needs an older checkout to compare with: --old PATH, or TAPELESS_OLD in the environment")
    claims, hashes = Claims("same_bits"), {}
    with TemporaryDirectory(prefix="tapeless-") as folder:
        old, new = (
            Tree(Path(path).resolve() / "src", Path(folder) / which, args.threads)
            for which, path in (("old", args.old), ("new", args.new))
        )
        for tree in (old, new):
            tree.folder.mkdir()
            there = tree.imported()
            expected = tree.source / "tapeless" / "__init__.py"
            claims.check("the package comes from the tree", bound=str(expected), measured=there, ok=there == str(expected))
        kept = Cache(args.cache, old)
        for name, words in RUNS.items():
            if args.names and not name.startswith(tuple(args.names)):
                continue
            for dtype in DTYPES:
                whole = [*words, "--dtype", dtype, "--max-steps", STEPS]
                place = f"{name} {dtype}".replace(",", "").replace(" ", "-")
                before, after = kept.outcome(place, whole), new.outcome(place, whole)
                off = difference(before, after)
                hashes[f"{name}, {dtype}"] = after.get("files")
                claims.check(
                    f"{name}, {dtype}: weights and moments after {STEPS} steps",
                    bound="equal bytes",
                    measured=off or equal_words(before, after),
                    ok=not off,
                )
    if new.source != HOME.parent / "src" or args.names:
        sys.exit(0 if claims.ok else 1)  # a try of the method, or a part of it: nothing is stored
    claims.finish(steps=STEPS, threads=args.threads, hashes=hashes)


if __name__ == "__main__":
    main()
