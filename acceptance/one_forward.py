"""Training, evaluation and generation share one forward: no token sees its future, and decoding repeats the full forward."""

import torch
from claim import Claims

from tapeless import ModelConfig, Transformer, load_preset
from tapeless.config import preset_names
from tapeless.model import transformer
from tapeless.verify.finding import distance
from tapeless.verify.tolerances import METAMORPHIC

B, T = 2, 24
SMALL_ENOUGH = 30_000_000


def tokens_for(config: ModelConfig, seed: int) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


claims = Claims("one_forward")
for name in preset_names():
    config = load_preset(name)
    if not isinstance(config, ModelConfig) or transformer.count_params(transformer.transformer_specs(config)) > SMALL_ENOUGH:
        continue
    model = Transformer(config, dtype="float32")
    tokens, targets = tokens_for(config, 0), tokens_for(config, 1)
    full = model.logits(tokens)

    changed = tokens.clone()
    changed[:, T // 2 :] = tokens_for(config, 2)[:, T // 2 :]
    other = model.logits(changed)
    past = torch.equal(other[:, : T // 2], full[:, : T // 2]) and not torch.equal(other[:, T // 2 :], full[:, T // 2 :])
    claims.check(
        f"{name}: the past does not see the future, which does change",
        bound="bit-equal",
        measured="bit-equal" if past else "different",
        ok=past,
    )

    cache = model.kv_cache(B, T)
    pieces = [model.logits(tokens[:, :5], kv_cache=cache)]
    slots = torch.arange(B)
    pieces += [model.decode(tokens[:, t], slots, torch.full((B,), t), cache)[:, None] for t in range(5, T)]
    gap = distance(torch.cat(pieces, 1), full).largest
    bound = METAMORPHIC["float32"]
    claims.check(f"{name}: kv_cache decoding equals the full forward", bound=bound, measured=f"{gap:.1e}", ok=gap <= bound)

    same = torch.equal(model.loss(tokens, targets), model.forward(tokens, targets))
    claims.check(f"{name}: loss() equals forward()", bound="bit-equal", measured="bit-equal" if same else "different", ok=same)

trunks = []
original = Transformer._trunk
Transformer._trunk = lambda self, *a, **k: trunks.append(1) or original(self, *a, **k)  # type: ignore[method-assign, func-returns-value]
model = Transformer(ModelConfig())
tokens = tokens_for(model.config, 0)
(
    model.forward(tokens, tokens),
    model.loss(tokens, tokens),
    model.logits(tokens),
    model.logits(tokens, kv_cache=model.kv_cache(B, T)),
)
claims.check(
    "training, evaluation, logits and decoding each pass through the one trunk",
    bound=4,
    measured=len(trunks),
    ok=len(trunks) == 4,
)
claims.finish()
