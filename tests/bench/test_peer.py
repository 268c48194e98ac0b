"""The peer is the same model: from the same weights the same loss, and by autograd the same gradients as ours."""

import pytest
import torch

from tapeless.bench.peer import build_peer
from tapeless.bench.weights import fill, peer_names
from tapeless.config import ModelConfig, SimpleLMConfig
from tapeless.model.build import build_model

SIZES = {"vocab_size": 23, "hidden_dim": 16, "num_layers": 2, "num_heads": 4, "intermediate_dim": 20, "max_seq_len": 9}
CONFIGS = {
    "llama": {},
    "grouped": {"num_kv_heads": 2, "head_dim": 6, "rope_theta": 1e3},
    "gpt2": {"norm": "layer", "norm_bias": True, "position": "learned", "ffn": "gelu", "attn_bias": True, "ffn_bias": True},
    "post-norm": {"norm": "layer", "norm_placement": "post", "ffn": "tanh"},
    "tied": {"tie_embeddings": True, "ffn": "relu2", "norm_eps": 1e-3},
    "qk-norm": {"qk_norm": True, "num_kv_heads": 1, "ffn": "geglu"},
    "no positions": {"position": "none", "ffn": "relu", "init": "kaiming"},
    "loss": {"z_loss": 1e-2, "label_smoothing": 0.1, "logit_softcap": 5.0},
}
SIMPLE = SimpleLMConfig(vocab_size=23, hidden_dim=16, intermediate_dim=20)
CASES = {name: ModelConfig(**{**SIZES, **choices}) for name, choices in CONFIGS.items()} | {"simplelm": SIMPLE}
BOUND = {"float64": 1e-12, "float32": 2e-5}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_ours(name: str, dtype: str):
    config = CASES[name]
    tokens, targets = torch.randint(0, config.vocab_size, (2, 3, 9), generator=torch.Generator().manual_seed(1))
    ours, peer = build_model(config, seed=3, dtype=dtype), build_peer(config, getattr(torch, dtype))
    fill(peer, config, seed=3)
    loss = ours.forward(tokens, targets)
    ours.backward()
    theirs = peer(tokens, targets)
    theirs.backward()
    assert abs(theirs.item() - loss.item()) <= BOUND[dtype] * loss.item()
    for held, names in peer_names(peer, ours.grads).items():
        expected = torch.cat([ours.grads[part] for part in names])
        error = (peer.get_parameter(held).grad - expected).norm()
        assert error <= BOUND[dtype] * expected.norm() + 1e-9, held


@pytest.mark.parametrize("name", CASES)
def test_autocast_stays_near(name: str):
    """In bfloat16 both round, each in its own places."""
    config = CASES[name]
    tokens, targets = torch.randint(0, config.vocab_size, (2, 3, 9), generator=torch.Generator().manual_seed(1))
    peer = build_peer(config)
    fill(peer, config, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = peer(tokens, targets)
    loss.backward()
    expected = build_model(config, dtype="bfloat16").loss(tokens, targets).item()
    assert abs(loss.item() - expected) <= 2e-2 * expected


def test_every_choice_of_a_model_is_built():
    """A field that someone adds must find its way into the peer, or be one that a task refuses."""
    chosen = {key for choices in [SIZES, *CONFIGS.values()] for key in choices}
    assert set(ModelConfig.__dataclass_fields__) - chosen == {"dropout", "blocks"}
