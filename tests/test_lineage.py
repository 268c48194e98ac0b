"""What the forebears' own tests asked, asked so that a wrong answer fails."""

import pytest
import torch

from tapeless import ModelConfig, SimpleLM, Transformer, load_preset


def sixteen_tokens(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(vocab_size, (1, 17), generator=torch.Generator().manual_seed(3))
    return text[:, :-1], text[:, 1:]


@pytest.mark.parametrize("kind", ["zig", "goml", "cllm", "simplelm"])
def test_a_step_lowers_the_loss_by_what_the_gradient_predicts(kind: str):
    """Theirs: the loss after one step differs. Here: it falls, and by lr |gradient|^2 up to second order."""
    if kind == "simplelm":
        model = SimpleLM(load_preset("simplelm"), dtype="float64")
    else:
        sizes = {
            "vocab_size": 100,
            "hidden_dim": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_dim": 64,
            "max_seq_len": 16,
        }
        family = {
            "zig": {},
            "goml": {"norm": "layer", "norm_bias": True},
            "cllm": {"norm": "layer", "norm_placement": "post", "position": "none", "ffn": "tanh", "tie_embeddings": True},
        }
        model = Transformer(ModelConfig(**sizes, **family[kind]), dtype="float64")
    tokens, targets = sixteen_tokens(model.config.vocab_size)
    before = model.forward(tokens, targets)
    model.backward()
    gradient = model.store.flat_grads
    predicted = 1e-6 * float(before)
    model.store.flat -= predicted / (gradient @ gradient) * gradient
    fallen = float(before - model.loss(tokens, targets))
    assert fallen == pytest.approx(predicted, rel=1e-3)


def test_forward_gives_the_same_logits_as_training_saw():
    """Theirs: some logit is not zero. Here: the loss of training is that of the logits which generation reads."""
    model = Transformer(load_preset("tiny"), dtype="float64")
    tokens, targets = sixteen_tokens(256)
    loss = model.forward(tokens, targets)
    logits = model.logits(tokens)
    by_hand = (logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]).mean()
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-12)
