"""GGUF files of models trained here, loaded by llama.cpp itself: the same tokens, the same greedy text, near-equal logits.

Needs a Python with the package llama-cpp-python: this one, or the one that LLAMA_CPP_PYTHON names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from claim import HOME, Claims, skip
from training import library_text, scratch, tapeless, train

import tapeless as library
from tapeless.config import Sampling
from tapeless.data.tokenizer import Tokenizer, load_tokenizer
from tapeless.generate.engine import generate
from tapeless.training.run_dir import RunDir

PYTHON = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
NEW_TOKENS, CONTEXT = 64, 128
# Largest difference of a logit, divided by the spread (standard deviation) of the logits.
BOUNDS = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-2, "q8_0": 5e-2}
GELU = 1e-3  # in float32: llama.cpp looks GELU up in a table of float16
SMALL = ["--num-layers", 2, "--hidden-dim", 64, "--num-heads", 4, "--max-seq-len", CONTEXT, "--batch-size", 4, "--no-verify"]
GPT2 = ["--norm", "layer", "--norm-bias", "--position", "learned", "--ffn", "gelu", "--attn-bias", "--ffn-bias"]
BPE = ["--tokenizer", "bpe", "--vocab-size", 600]
FAMILIES = {
    "llama": ["--num-kv-heads", 2, "--intermediate-dim", 160, *BPE],
    "llama, tied, biases": ["--attn-bias", "--ffn-bias", "--tie-embeddings", "--intermediate-dim", 96, *BPE],
    "llama, padded vocabulary": ["--intermediate-dim", 96, "--tokenizer", "bytes", "--vocab-size", 320],
    "qwen3": ["--qk-norm", "--num-kv-heads", 2, "--head-dim", 32, "--intermediate-dim", 96, *BPE],
    "gpt2": [*GPT2, "--tie-embeddings", "--intermediate-dim", 128, *BPE],
}
TEXTS = [
    "Hello world! It's 12345 o'clock; they'll say \"we've won\".\n\n\tdef f(x):\n        return x**2  # twice\r\n",
    "   leading, trailing and      inner spaces   \n \n  \n",
    "Größe, naïve café, Ωμέγα, Привет мир, שלום, مرحبا, हिन्दी, 日本語テキスト, 한국어",
    "🙂 👩‍👩‍👧 e\u0301 \u00a0 \u2003 \u200b \ufeff \u00ad ½ Ⅷ ٣ ²",
    "".join(map(chr, [*range(1, 32), 127, *range(128, 160)])),
    "".join(chr(c) for c in (*range(32, 127), *range(161, 1024, 7), 0x7FF, 0x800, 0xFFFD, 0x10000, 0x10FFFF)),
]


def trained(run: RunDir, text: Path, steps: int, flags: list[Any]) -> None:
    train(run, *SMALL, *flags, "--dataset-path", text, "--max-steps", steps, "--eval-windows", 4, "--sample-tokens", 4)


def export(run: RunDir, dtype: str) -> Path:
    out = run.path / f"{dtype}.gguf"
    done = tapeless("export", run.path, "--to", "gguf", "--dtype", dtype, "--out", out)
    if done.code:
        sys.exit(done.output)
    return out


def by_llama_cpp(file: Path, prompt: list[int]) -> tuple[dict[str, Any], np.ndarray]:
    """What it says, and its logits (n, V) behind each token of the prompt."""
    logits = file.with_suffix(".npy")
    task = {"model": str(file), "texts": TEXTS, "prompt": prompt, "new_tokens": NEW_TOKENS, "context": CONTEXT}
    done = subprocess.run(
        [PYTHON, str(HOME / "gguf_worker.py")],
        input=json.dumps(task | {"logits": str(logits)}),
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if done.returncode:
        sys.exit(f"{done.stderr[-2000:]}\nllama.cpp could not be asked; LLAMA_CPP_PYTHON names a Python that has it")
    return json.loads(done.stdout.splitlines()[-1]), np.load(logits)


def first_tokens(tokenizer: Tokenizer, text: str, count: int = 32) -> list[int]:
    return [int(i) for i in tokenizer.encode(text)[:count]]


def is_there() -> bool:
    return subprocess.run([PYTHON, "-c", "import llama_cpp"], capture_output=True, check=False).returncode == 0


if not is_there():
    skip("no package llama-cpp-python here; LLAMA_CPP_PYTHON names a Python that has it")
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
claims, table = Claims("gguf_files"), {}
with scratch() as folder:
    text = folder / "text.txt"
    text.write_text(library_text(300_000))
    for name, flags in FAMILIES.items():
        run = RunDir(folder / name.replace(" ", "-").replace(",", ""))
        trained(run, text, steps, flags)
        model, tokenizer = library.load(run.path), load_tokenizer(run.tokenizer)
        prompt = first_tokens(tokenizer, library_text(400_000)[350_000:])
        ours = model.logits(torch.tensor([prompt]))[0].numpy()  # (n, V)
        (greedy,) = generate(
            model, prompt, max_tokens=NEW_TOKENS, sampling=Sampling(temperature=0.0), vocab_size=tokenizer.vocab_size
        )
        files = {dtype: by_llama_cpp(export(run, dtype), prompt) for dtype in BOUNDS}
        said, _ = files["float32"]
        same = [list(map(int, tokenizer.encode(t))) == tokens for t, tokens in zip(TEXTS, said["tokens"], strict=True)]
        ends = not set(said["ends"]) & {i for tokens in said["tokens"] for i in tokens}
        claims.check(
            f"{name} in llama.cpp: tokens of {len(TEXTS)} texts with every class of bytes, none of which ends a text",
            bound="equal",
            measured=f"{sum(same)} equal, the ends are {said['ends']}",
            ok=all(same) and ends,
        )
        claims.check(
            f"{name} in llama.cpp: greedy continuation of {NEW_TOKENS} tokens in F32",
            bound="equal",
            measured="equal" if said["greedy"] == greedy else f"{said['greedy']} and not {greedy}",
            ok=said["greedy"] == greedy,
        )
        bounds = BOUNDS | ({"float32": GELU} if name == "gpt2" else {})
        off = {
            dtype: float(np.abs(theirs[:, : ours.shape[1]] - ours).max() / ours.std()) for dtype, (_, theirs) in files.items()
        }
        table[name] = off
        claims.check(
            f"{name} in llama.cpp: largest logit difference relative to the logits' spread, in {', '.join(BOUNDS)}",
            bound=", ".join(f"{bound:.0e}" for bound in bounds.values()),
            measured=", ".join(f"{distance:.1e}" for distance in off.values()),
            ok=all(off[dtype] < bound for dtype, bound in bounds.items()),
        )
    version = said["llama_cpp"]
claims.finish(logits=table, llama_cpp_python=version)
