"""One way of training an exported model further, measured in a process of its own: fine_tuning.py starts it.

python acceptance/fine_tuning_worker.py WAY FOLDER STEPS ROWS LENGTH
WAY: full, lora (ours), peft (transformers and peft, in whichever environment has them: nothing of tapeless is imported then).
FOLDER: hf/ the model, adapters.safetensors where the adapters begin. Prints one line of JSON."""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

RANK, ALPHA, TARGETS, LR, CLIP = 8, 16.0, "wq,wv", 1e-3, 1.0
THEIRS = {"wq": "self_attn.q_proj", "wv": "self_attn.v_proj"}
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
WARM_UP = 3  # steps that are not timed


def batches(steps: int, rows: int, length: int, vocab_size: int) -> list[Tensor]:  # (rows, length + 1) each
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (rows, length + 1), generator=generator) for _ in range(steps)]


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measured(make: Any, steps: int, rows: int, length: int) -> dict[str, Any]:
    """make() -> a function of a batch that takes one step, and the vocabulary."""
    before = resident("VmRSS")
    step, vocab_size, trained = make()
    seconds, losses = [], []
    for i, batch in enumerate(batches(steps, rows, length, vocab_size)):
        if i == WARM_UP:  # loading a model may need more for a moment than training it
            Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - start)
    peak = resident("VmHWM") - before
    return {"milliseconds": 1000 * median(seconds[WARM_UP:]), "peak_bytes": peak, "losses": losses, "trained": trained}


def ours(folder: Path, way: str) -> Any:
    import tapeless
    from tapeless.config import Lora, TrainConfig
    from tapeless.model.trained import checkpointed, plain
    from tapeless.model.transformer import Transformer
    from tapeless.training.checkpoint import restore
    from tapeless.training.step import optimizer_of, train_step

    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

    def make() -> Any:
        base = tapeless.load(folder / "hf")
        model = Transformer(base.config, initialized=False, lora=Lora(RANK, ALPHA, TARGETS) if way == "lora" else None)
        restore(plain(model.params), base.params, folder)
        if way == "lora":
            from safetensors.torch import load_file

            restore(checkpointed(model.params), load_file(folder / "adapters.safetensors"), folder)
        del base
        optimizer = optimizer_of(model, TrainConfig(weight_decay=DECAY, beta1=BETAS[0], beta2=BETAS[1], eps=EPS))
        taken = iter(range(10**6))

        def step(batch: Tensor) -> float:
            ids, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
            options = {"lr": LR, "grad_clip": CLIP, "grad_accum": 1, "step": next(taken), "first_sample": 0}
            return train_step(model, optimizer, ids, targets, **options).loss

        return step, model.config.vocab_size, sum(g.numel() for g in model.grads.values())

    return make


def peft(folder: Path) -> Any:
    import transformers
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    def make() -> Any:
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
        targets = [name.rpartition(".")[2] for name in THEIRS.values()]
        model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0))
        params = dict(model.named_parameters())
        for name, w in load_file(folder / "adapters.safetensors").items():
            _, layer, _, target, half = name.split(".")
            place = f"base_model.model.model.layers.{layer}.{THEIRS[target]}.lora_{half[-1].upper()}.default.weight"
            params[place].data.copy_(w)
        trained = [p for p in params.values() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
        model.train()

        def step(batch: Tensor) -> float:
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        return step, base.config.vocab_size, sum(p.numel() for p in trained)

    return make


def main(way: str, folder: str, steps: str, rows: str, length: str) -> None:
    make = peft(Path(folder)) if way == "peft" else ours(Path(folder), way)
    print(json.dumps(measured(make, int(steps), int(rows), int(length))))


if __name__ == "__main__":
    main(*sys.argv[1:])
