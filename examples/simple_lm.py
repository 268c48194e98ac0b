"""SimpleLM on a repeating sequence of bytes: the gradient of one batch, a few plain SGD steps, the loss before and after.

The model sees one byte and predicts the next. In the pattern below every byte has exactly one follower, so the best
possible loss is 0, and a model that knows nothing has ln 256 = 5.545.

    python examples/simple_lm.py"""

import math

import torch

from tapeless import SimpleLM, load_preset

PATTERN = b"gradient "  # no byte stands in it twice
STEPS, LR = 20, 0.5


def main() -> int:
    text = torch.tensor(list(PATTERN * 40))
    tokens, targets = text[:-1].view(1, -1), text[1:].view(1, -1)  # (1, T), (1, T)
    model = SimpleLM(load_preset("simplelm"), seed=0)
    print(f"SimpleLM, {model.num_params:,} parameters; a uniform guess has loss {math.log(256):.3f}")

    before = model.forward(tokens, targets)
    model.backward()
    print("\ngradient of the first batch")
    for name, grad in model.grads.items():
        print(f"  {name:10}{tuple(grad.shape)!s:12}norm {grad.norm():.4f}")

    for _ in range(STEPS):
        model.zero_grads()
        model.forward(tokens, targets)
        model.backward()
        model.store.flat -= LR * model.store.flat_grads

    after = model.loss(tokens, targets)
    print(f"\n{STEPS} steps of plain SGD: loss {before.item():.4f} -> {after.item():.4f}")
    return 0 if after < 0.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
