"""CLLM's model on CLLM's terms: batch 4, length 32, 26 epochs of 9 batches, real text of 611 ids; and, beside the figures it
stated and never measured, the times, the saved activations and the gradients of ours."""

import math
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from claim import Claims
from training import load_average, scratch, steps, train

from tapeless.config import load_preset
from tapeless.data.bpe import train_bpe
from tapeless.data.corpora import stdlib_docs
from tapeless.model.memory import saved_bytes
from tapeless.model.transformer import Transformer
from tapeless.optim import AdamW
from tapeless.training.run_dir import RunDir
from tapeless.training.step import train_step

B, T, V, EPOCHS, BATCHES = 4, 32, 611, 26, 9
TOKENS = (B * BATCHES + 1) * T + T // 2  # in the training part: 9 batches of windows in every epoch
REPEATS = 30
STATED = {"forward": "10-20", "backward": "15-25", "step": "25-45"}  # milliseconds


def write_text(folder: Path) -> tuple[Path, Path]:
    """A tokenizer of 611 ids for the library's English, and a piece of that English whose first nine tenths are TOKENS long."""
    english = "\n".join(stdlib_docs().values())
    tokenizer = train_bpe([english[:500_000]], V)
    tokenizer.save(folder / "tokenizer.json")
    piece = tokenizer.decode(tokenizer.encode(english[100_000:120_000])[:TOKENS])
    (folder / "text.txt").write_text(english[100_000 : 100_000 + len(piece) * 10 // 9 + 1])
    return folder / "text.txt", folder / "tokenizer.json"


def milliseconds() -> dict[str, float]:
    """Median times of a forward, a backward, and a whole training step."""
    model = Transformer(load_preset("cllm"))
    optimizer = AdamW(model.params, model.grads)
    tokens, targets = torch.randint(0, V, (2, B, T), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = defaultdict(list)
    for i in range(REPEATS):
        start = time.perf_counter()
        model.forward(tokens, targets)
        between = time.perf_counter()
        model.backward()
        end = time.perf_counter()
        train_step(model, optimizer, tokens, targets, lr=1e-4, grad_clip=1.0, grad_accum=1, step=i, first_sample=0)
        times["forward"].append(between - start)
        times["backward"].append(end - between)
        times["step"].append(time.perf_counter() - end)
    return {name: round(1000 * statistics.median(seconds), 1) for name, seconds in times.items()}


def by_activation() -> dict[str, int]:
    """Saved bytes of all layers together, by the name of the activation."""
    sums: dict[str, int] = defaultdict(int)
    for name, size in saved_bytes(load_preset("cllm"), B, T, "none", "float32").items():
        sums[name.split(".", 2)[2] if name.startswith("blocks.") else name] += size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def gradient_bytes() -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for name, dw in Transformer(load_preset("cllm")).grads.items():
        parts = name.split(".")
        sums[f"{parts[1]} {parts[2].removesuffix('_norm')}" if parts[0] == "blocks" else parts[0]] += dw.nbytes
    return dict(sums)


claims = Claims("cllm_training")
with scratch() as folder:
    text, tokenizer = write_text(folder)
    run = RunDir(folder / "run")
    flags = ["--preset", "cllm", "--batch-size", B, "--epochs", EPOCHS, "--eval-every", 0]
    done = train(run, *flags, "--dataset-path", text, "--tokenizer", tokenizer)
    losses = steps(run, "loss")
claims.check(
    f"{EPOCHS} epochs of {BATCHES} batches, batch {B}, length {T}",
    bound=f"{EPOCHS * BATCHES} steps",
    measured=f"{len(losses)} steps",
    ok=len(losses) == EPOCHS * BATCHES,
)
claims.check(
    "the first loss",
    bound=f"ln 611 = {math.log(V):.2f} ± 0.25",
    measured=f"{losses[0]:.3f}",
    ok=abs(losses[0] - math.log(V)) < 0.25,
)
last = sum(losses[-BATCHES:]) / BATCHES
claims.check("the loss in the last epoch", bound="under 3.25", measured=f"{last:.3f}", ok=last < 3.25)

times, activations, gradients = milliseconds(), by_activation(), gradient_bytes()
for name, stated in STATED.items():
    print(f"      {name}: {times[name]} ms, stated {stated} ms")
print(f"      saved activations: {sum(activations.values()) / 1e6:.1f} MB, stated 8.4 MB; by name:")
for name, size in activations.items():
    print(f"        {name:<16} {size / 1e6:6.2f} MB")
layer = gradients["0 attn"], gradients["0 ffn"]
print(
    f"      gradients of a layer: attention {layer[0] / 1e6:.1f} MB, feed-forward {layer[1] / 1e6:.1f} MB, stated 18 and 12 MB"
)
print(f"      all gradients: {sum(gradients.values()) / 1e6:.1f} MB, stated 180 MB for 6 layers")
claims.finish(
    first_loss=round(losses[0], 3),
    last_epoch_loss=round(last, 3),
    losses_by_epoch=[round(sum(losses[i : i + BATCHES]) / BATCHES, 3) for i in range(0, len(losses), BATCHES)],
    milliseconds=times,
    stated_milliseconds=STATED,
    saved_bytes=activations,
    gradient_bytes=gradients,
    threads=torch.get_num_threads(),
    seconds=round(done.seconds, 1),
    load_average=load_average(),
)
