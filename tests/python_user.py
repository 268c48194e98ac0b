"""Every public name, as a program that is checked with `mypy --strict` (test_python_api.py); it is not run."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import tapeless


def on_event(event: dict[str, object]) -> str | None:
    return tapeless.STOP if event["event"] == "eval" else None


def batches(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(step))
    return x[:, :-1], x[:, 1:]


def pairs() -> Iterator[tuple[Tensor, Tensor]]:
    yield batches(0)


def rate(step: int) -> float:
    return 1e-3 / (1 + step)


print(tapeless.__version__)
shape = tapeless.ModelConfig(hidden_dim=64, num_layers=2)
config = tapeless.TrainConfig(max_steps=10)
result: tapeless.TrainResult = tapeless.train((shape, config), "my.txt", callbacks=[on_event], batches=batches)
result = tapeless.train("tiny", Path("my.txt"), batches=pairs(), lr_schedule="linear", max_steps=10)
result = tapeless.resume(result.path, batches=batches, lr_schedule=rate)
loss: float | None = result.val_loss
events: list[dict[str, object]] = result.events()

model = tapeless.Transformer(tapeless.load_preset("tiny"), seed=0)
small = tapeless.SimpleLM(tapeless.load_preset("simplelm"))
smaller = tapeless.SimpleLM(tapeless.SimpleLMConfig(hidden_dim=32))
trainer = tapeless.Trainer(model, config, tapeless.prepare(config, 256, Path("data")), batches=[batches(0)], lr_schedule=rate)
metrics = trainer.step(*trainer.next_batch())
print(metrics.loss, metrics.lr, trainer.run(display=None), trainer.evaluate(), trainer.sample())

loaded = tapeless.load("runs/tiny", device="cpu")
text: str = loaded.generate("The ", max_tokens=20, sampling=tapeless.Sampling(top_k=40), stop="\n")
ids: list[int] = loaded.generate(loaded.tokenizer.encode("The "), stop_ids=[0])
stream = loaded.stream("The ", stop=["\n", "."])
for piece in stream:
    print(piece.upper(), stream.tokens, stream.finish_reason)
    stream.cancel()
number: int = next(model.stream([1, 2, 3]))
engine = tapeless.Engine(model, slots=2)
request = engine.submit([1, 2, 3], max_tokens=5)
while engine.busy:
    print([each.take() for each in engine.step()], request.finish_reason)

opt = tapeless.optim.AdamW(model.params, model.grads, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)
model.forward(*batches(0))
model.backward()
opt.step()
opt.step(5e-4)
tapeless.optim.SGD(model.params, model.grads, momentum=0.9, nesterov=True).step()
tapeless.optim.Adam(model.params, model.grads, eps=1e-6).step()
tapeless.optim.Muon(model.params, model.grads, momentum=0.95).step()
tapeless.optim.make_optimizer(model.params, model.grads, config, decay=["head.w"]).step()

op: tapeless.Op = tapeless.REFERENCE.linear
ops: tapeless.OpSet = tapeless.REFERENCE
tapeless.register_ops("mine", ops, devices=["cpu"])
branch = tapeless.residual(tapeless.layer("mix", op, w=(32, 32), b=(32,)))
chain = tapeless.Chain(tapeless.layer("in", op, w=(32, 16), b=None), branch)
chain.backward(chain.forward(torch.randn(2, 16)))
print(tapeless.saved_bytes(shape, 2, 32, "none", "float32"))
try:
    tapeless.load("nowhere")
except tapeless.TapelessError as error:
    print(error.code)
