"""A model trained here, exported, and continued by the Trainer of transformers: the losses of going on here.

Both begin with the same weights and an optimizer without memory, and see the same batches in the same order. Needs the package
accelerate, which that Trainer asks for."""

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from claim import Claims, skip
from training import scratch, tapeless, train

import tapeless as library
from tapeless.data.prepare import open_prepared
from tapeless.training.run_config import read_run_config
from tapeless.training.run_dir import RunDir

if find_spec("transformers") is None or find_spec("accelerate") is None:
    skip("needs the packages transformers and accelerate")
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
STEPS, BOUND = 20, 1e-5  # largest difference of a loss
T, B = 32, 4
SMALL = ["--num-layers", 2, "--hidden-dim", 48, "--num-heads", 4, "--max-seq-len", 64, "--seq-len", T, "--batch-size", B]
GPT2 = ["--norm", "layer", "--norm-bias", "--position", "learned", "--ffn", "gelu", "--attn-bias", "--ffn-bias"]
FAMILIES = {
    "llama": ["--num-kv-heads", 2, "--intermediate-dim", 96],
    "qwen3": ["--qk-norm", "--head-dim", 16, "--intermediate-dim", 96, "--tie-embeddings"],
    "gpt2": [*GPT2, "--tie-embeddings", "--intermediate-dim", 128],
}
RECIPE = ["--lr-schedule", "constant", "--lr", 1e-3, "--max-steps", STEPS, "--eval-windows", 2, "--sample-tokens", 2]


class Recorded(transformers.Trainer):
    """Their Trainer, with the batches in the order they come, and every loss kept."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        found = super().compute_loss(*arguments, **options)
        self.losses.append(float(found[0] if isinstance(found, tuple) else found))
        return found


def shifted(tokens: torch.Tensor, targets: torch.Tensor) -> list[dict[str, torch.Tensor]]:  # (B, T) both
    """As their loss wants it: it shifts the labels itself, so windows are one longer, and the first label counts nothing."""
    ids = torch.cat([tokens, targets[:, -1:]], 1)  # (B, T + 1)
    labels = torch.cat([torch.full_like(targets[:, :1], -100), targets], 1)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def continued_there(folder: Path, batches: list[tuple[torch.Tensor, torch.Tensor]], config: Any) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.loss_type = "ForCausalLM"
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=B,
        optim="adamw_torch",
        learning_rate=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_epsilon=config.eps,
        max_grad_norm=config.grad_clip,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Recorded(model=model, args=arguments, train_dataset=[row for batch in batches for row in shifted(*batch)])
    trainer.losses = []
    trainer.train()
    return trainer.losses


claims, table = Claims("continued_elsewhere"), {}
with scratch() as folder, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name, flags in FAMILIES.items():
        first, second = RunDir(folder / f"{name}-first"), RunDir(folder / f"{name}-second")
        train(first, *SMALL, *flags, "--max-steps", 100, "--eval-windows", 2, "--sample-tokens", 2, "--no-verify")
        done = tapeless("export", first.path, "--to", "hf", "--out", folder / name)
        if done.code:
            sys.exit(done.output)
        words = ["--init-from", first.path, "--seq-len", T, "--batch-size", B, *RECIPE]
        train(second, *words, "--no-verify", "--dtype", "float32")
        config = read_run_config(second.config).train
        trainer = library.Trainer(library.load(first.path), config, open_prepared(second.path))
        batches, here = [], []
        for _ in range(STEPS):
            batches.append(trainer.next_batch())
            here.append(trainer.step(*batches[-1]).loss)
        there = continued_there(folder / name, batches, config)
        off = max(abs(a - b) for a, b in zip(here, there, strict=True))
        table[name] = {"here": here, "there": there}
        claims.check(
            f"{name}: {STEPS} steps by transformers' Trainer, largest difference of a loss ({here[0]:.3f} to {here[-1]:.3f})",
            bound=BOUND,
            measured=f"{off:.1e}",
            ok=off < BOUND,
        )
claims.finish(losses=table, transformers=transformers.__version__)
