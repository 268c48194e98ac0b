"""The Zig forebear's own command, unchanged, learns; and its plan's 16-token sequence is overfit."""

import math
import shlex

import numpy as np
from claim import Claims
from training import library_text, load_average, scratch, smoothed, steps, train

from tapeless.config import ModelConfig, TrainConfig
from tapeless.data.prepare import Dataset
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.model.build import build_model
from tapeless.training.run_dir import RunDir
from tapeless.training.trainer import Trainer

FLAGS = (
    "--hidden-dim 64 --num-layers 2 --num-heads 2 --intermediate-dim 128 --vocab-size 256 --max-seq-len 32 "
    "--batch-size 2 --epochs 5"
)
TEXT_BYTES, LAST = 100_000, 200
SEQUENCE = list(range(1, 18))  # 16 tokens and what follows each of them

claims = Claims("zig_command")
with scratch() as folder:
    text = folder / "training_data.txt"
    text.write_text(library_text(TEXT_BYTES))
    run = RunDir(folder / "run")
    done = train(run, *shlex.split(FLAGS), "--dataset-path", text)
    losses = steps(run, "loss")
    first, last = losses[0], smoothed(losses, LAST)
    claims.check(
        f"the Zig predecessor's command, unchanged, on {text.stat().st_size:,} bytes of Python: the first loss",
        bound=f"ln 256 = {math.log(256):.2f} ± 0.1",
        measured=f"{first:.3f}",
        ok=abs(first - math.log(256)) < 0.1,
    )
    claims.check(
        f"its loss after 5 epochs, {len(losses):,} steps, mean of the last {LAST}",
        bound="under 3.0",
        measured=f"{last:.3f}",
        ok=last < 3.0,
    )

tokens = np.array(SEQUENCE, np.uint16)
data = Dataset(tokens, tokens, ByteTokenizer(), "", 1.0, "one sequence", 1)
model = build_model(ModelConfig(hidden_dim=32, num_layers=2, num_heads=2, intermediate_dim=64, max_seq_len=16))
trainer = Trainer(model, TrainConfig(batch_size=1, max_steps=200, lr=3e-3, weight_decay=0.0), data)
curve = [trainer.step(*trainer.next_batch()).loss for _ in range(trainer.total_steps)]
claims.check(
    "one sequence of 16 tokens, 2 layers of width 32, 200 steps: overfit",
    bound="loss under 0.05",
    measured=f"{curve[0]:.2f} -> {curve[-1]:.4f}",
    ok=curve[-1] < 0.05,
)
claims.finish(
    command=f"tapeless train new {FLAGS} --dataset-path training_data.txt",
    steps=len(losses),
    first_loss=round(first, 3),
    last_loss=round(last, 3),
    seconds=round(done.seconds, 1),
    load_average=load_average(),
    sequence_losses=[round(curve[i], 4) for i in (0, 49, 99, 199)],
)
