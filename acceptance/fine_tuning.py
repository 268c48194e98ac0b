"""Training from weights that are there: adapters beside a frozen model, frozen parts, instructions; and beside peft.

TAPELESS_PEFT_PYTHON names the interpreter of an environment that has torch, transformers and peft; without it the rows of peft
are left out, and their claims too. Sizes: python acceptance/fine_tuning.py [PRESET [STEPS]]."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from claim import Claims
from fine_tuning_worker import ALPHA, RANK, TARGETS
from safetensors.torch import save_file
from training import environment, scratch, train

import tapeless
from tapeless.config import Lora, load_preset
from tapeless.data.loader import training_batches
from tapeless.data.prepare import open_prepared
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.interop.generation import Generation
from tapeless.interop.hf_export import export_hugging_face
from tapeless.model.trained import checkpointed, plain
from tapeless.model.transformer import Transformer
from tapeless.training.checkpoint import load_checkpoint, restore
from tapeless.training.imported import write_run
from tapeless.training.run_dir import RunDir
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import PARTLY_TRAINED_CASES
from tapeless.verify.model_judges import check_model

ROWS, LENGTH = 8, 128
MERGED = 1e-5  # of logits in float32, beside the largest
SAME_LOSSES = 2e-4  # of peft's, over all steps
PEFT = os.environ.get("TAPELESS_PEFT_PYTHON")


def gradients(claims: Claims) -> None:
    for case in PARTLY_TRAINED_CASES:
        found = list(check_model(case))
        worst = max((f for f in found if f.oracle == "autograd reference"), key=lambda f: f.error)
        clean = all(f.ok for f in found)
        what = "adapters" if case.lora else "what is not frozen"
        claims.check(
            f"gradients of {what} [{case.name}], by every oracle",
            bound="clean",
            measured=f"{worst.error:.1e} by autograd",
            ok=clean,
        )


def runs(claims: Claims, folder: Path) -> None:
    """What the command does with a model, from instructions to the merged logits."""
    config = load_preset("llama-tiny")
    base = write_run(folder / "base", config, Transformer(config, seed=1).params, ByteTokenizer(), Generation(), None, []).path
    data = folder / "sums.jsonl"
    sums = [(a, b) for a in range(30) for b in range(30)]
    data.write_text("".join(json.dumps({"prompt": f"{a} + {b} =", "completion": f" {a + b}"}) + "\n" for a, b in sums))
    usual = ["--init-from", base, "--dataset-path", data, "--seq-len", 16, "--eval-windows", 8, "--sample-tokens", 2]
    usual += ["--max-steps", 30, "--weight-decay", 0.5, "--json"]

    adapted = RunDir(folder / "adapted")
    train(adapted, *usual, "--lora-rank", RANK, "--lora-targets", "all-linear", "--lr", 1e-2)
    checkpoint = load_checkpoint(adapted.checkpoints, on_warning=sys.exit)
    model = Transformer(config, lora=Lora(RANK, 2.0 * RANK, "all-linear"))
    restore(plain(model.params), tapeless.load(base).params, base)
    restore(checkpointed(model.params), checkpoint.params, checkpoint.path)
    merged, tokens = tapeless.load(adapted.path), torch.arange(256).view(8, 32)
    error = distance(merged.logits(tokens), model.logits(tokens)).largest
    moved = distance(tapeless.load(base).logits(tokens), model.logits(tokens)).largest
    claims.check("the merged model's logits equal the unmerged one's", bound=MERGED, measured=f"{error:.1e}", ok=error < MERGED)
    claims.check("and the adapters have changed them", bound="> 0.01", measured=f"{moved:.2f}", ok=moved > 0.01)

    frozen = RunDir(folder / "frozen")
    train(frozen, *usual, "--freeze", "embed*,blocks.0.*", "--lr", 1e-3)
    before, after = tapeless.load(base).params, tapeless.load(frozen.path).params
    still = {name for name in before if before[name].equal(after[name])}
    wanted = {name for name in before if name.startswith(("embed", "blocks.0."))}
    claims.check(
        "frozen parameters bit-identical, all others changed", bound=len(wanted), measured=len(still), ok=still == wanted
    )
    claims.check("prompt tokens are not targets", **prompts(open_prepared(adapted.path)))


def prompts(data: Any) -> dict[str, Any]:
    """The gradient of a batch beside the one made of its completions alone, through dlogits."""
    tokens, targets = training_batches(data, 16, 8, seed=0).batch(0)
    model = Transformer(load_preset("llama-tiny"), ops="reference", dtype="float64")
    model.forward(tokens, targets)
    model.backward()
    whole = model.store.flat_grads.clone()
    model.zero_grads()
    logits, asked = model.logits(tokens, keep=True), targets >= 0
    dlogits = torch.zeros_like(logits)
    wanted = torch.nn.functional.one_hot(targets.clamp_min(0), logits.shape[-1])
    dlogits[asked] = (logits.softmax(-1) - wanted)[asked] / asked.sum()
    model.backward(dlogits)
    error = distance(model.store.flat_grads, whole).largest
    texts = {bytes(row[row >= 0].tolist()).decode().strip() for row in targets}
    return {"bound": 1e-10, "measured": f"{error:.1e}", "ok": error < 1e-10 and all(text.isdigit() for text in texts)}


def contenders(folder: Path, preset: str, steps: int) -> dict[str, dict[str, Any]]:
    """Each way of training in a process of its own, from the same weights, with the same batches."""
    config = load_preset(preset)
    model = Transformer(config, seed=1, lora=Lora(RANK, ALPHA, TARGETS))
    export_hugging_face(folder / "hf", config, plain(model.params), ByteTokenizer(), Generation())
    save_file({name: w.clone() for name, w in checkpointed(model.params).items()}, folder / "adapters.safetensors")
    del model
    worker, found = Path(__file__).with_name("fine_tuning_worker.py"), {}
    for way in ("full", "lora", *(["peft"] if PEFT else [])):
        command = [PEFT if way == "peft" else sys.executable, str(worker), way, str(folder)]
        done = subprocess.run(
            [*map(str, command), str(steps), str(ROWS), str(LENGTH)],
            env=environment(None),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found[way] = json.loads(done.stdout.splitlines()[-1])
        print(f"      {way}: {found[way]['milliseconds']:.1f} ms, {found[way]['peak_bytes'] / 2**20:.0f} MiB", flush=True)
    return found


def beside(claims: Claims, found: dict[str, dict[str, Any]]) -> None:
    full, lora = found["full"], found["lora"]
    for other, name in ((full, "full fine-tuning"), *([(found["peft"], "peft")] if PEFT else [])):
        for key, what, unit in (("milliseconds", "a step with adapters", "ms"), ("peak_bytes", "memory with adapters", "MiB")):
            scale = 2**20 if unit == "MiB" else 1
            told = f"{lora[key] / scale:.1f} to {other[key] / scale:.1f} {unit}"
            claims.check(f"{what}, vs. {name}", bound="less", measured=told, ok=lora[key] < other[key])
    if PEFT:
        pairs = zip(lora["losses"], found["peft"]["losses"], strict=True)
        apart = max(abs(ours - theirs) for ours, theirs in pairs)
        steps = len(lora["losses"])
        claims.check(f"losses of {steps} steps, vs. peft", bound=SAME_LOSSES, measured=f"{apart:.1e}", ok=apart < SAME_LOSSES)
    else:
        print("skip  peft: TAPELESS_PEFT_PYTHON names no interpreter that has it", flush=True)


def main(preset: str = "llama-small", steps: str = "23") -> None:
    claims = Claims("fine_tuning")
    gradients(claims)
    with scratch() as folder:
        runs(claims, folder)
        found = contenders(folder, preset, int(steps))
    beside(claims, found)
    claims.finish(preset=preset, tokens=f"{ROWS}x{LENGTH}", rank=RANK, targets=TARGETS, table=found)


if __name__ == "__main__":
    main(*sys.argv[1:])
