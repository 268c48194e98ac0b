"""Sublayers: patterns of blocks, layers that differ, dx and dw apart, and what is derived from a sublayer's definition."""

from dataclasses import replace

import pytest
import torch

from tapeless.config import Lora, ModelConfig
from tapeless.errors import ConfigError
from tapeless.model.block import build_blocks
from tapeless.model.build import num_params, step_flops
from tapeless.model.memory import saved_bytes
from tapeless.model.sublayer import Context, Sublayer, register_sublayer
from tapeless.model.transformer import Transformer, transformer_specs

SMALL = ModelConfig(vocab_size=23, hidden_dim=24, num_layers=3, num_heads=4, intermediate_dim=13, max_seq_len=16)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 23, (2, 2, 7), generator=generator)
    return tokens, targets


def test_a_pattern_repeats_over_the_layers():
    config = replace(SMALL, num_layers=5, blocks="attn+ffn/ffn")
    names = [[sublayer.name for sublayer in block.sublayers] for block in build_blocks(config)]
    assert names == [
        ["blocks.0.attn", "blocks.0.ffn"],
        ["blocks.1.ffn"],
        ["blocks.2.attn", "blocks.2.ffn"],
        ["blocks.3.ffn"],
        ["blocks.4.attn", "blocks.4.ffn"],
    ]


def test_a_second_sublayer_of_a_kind_has_a_name_of_its_own():
    model = Transformer(replace(SMALL, blocks="attn+ffn+ffn"))
    assert {"blocks.0.ffn.w_up", "blocks.0.ffn2.w_up", "blocks.0.ffn2_norm.w"} <= model.params.keys()


@pytest.mark.parametrize("recompute", ["none", "cheap", "full"])
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_layers_that_differ(recompute: str, placement: str, ops: str):
    """Widths, heads and biases by layer: gradients do not depend on the policy, and decoding equals the forward."""
    blocks = (
        "attn(num_kv_heads=1,qk_norm=true)+ffn/attn(num_heads=2,num_kv_heads=2,attn_bias=true)+ffn(intermediate_dim=9,ffn=relu)"
    )
    config = replace(SMALL, blocks=blocks, norm_placement=placement)
    tokens, targets = batch()
    expected, model = (Transformer(config, ops=ops, recompute=policy) for policy in ("none", recompute))
    assert model.params["blocks.0.attn.wk"].shape == (6, 24)
    assert model.params["blocks.1.attn.wq"].shape == (12, 24)
    assert model.params["blocks.1.ffn.w_up"].shape == (9, 24)
    for each in (expected, model):
        each.forward_backward(tokens, targets, accumulate=False)
    assert torch.equal(model.store.flat_grads, expected.store.flat_grads)
    whole, kv_cache = model.logits(tokens), model.kv_cache(2, 7)
    steps = torch.cat([model.logits(tokens[:, i : i + 1], kv_cache=kv_cache) for i in range(7)], 1)
    torch.testing.assert_close(steps, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ("attn+fnn", "unknown sublayer kind 'fnn' in blocks; did you mean 'ffn'"),
        ("attn+", "cannot read '' in 'attn\\+'"),
        ("attn(num_heads)", "cannot read"),
        ("attn(heads=2)+ffn", "attn has no setting 'heads'; did you mean 'num_heads'"),
        ("attn+ffn(num_heads=2)", "ffn has no setting 'num_heads'"),
        ("attn(num_heads=0)+ffn", "num_heads must be at least 1"),
        ("attn(ffn=relu)", "no setting 'ffn'"),
        ("", "cannot read"),
    ],
)
def test_mistakes_in_a_pattern(blocks: str, says: str):
    with pytest.raises(ConfigError, match=says):
        Transformer(replace(SMALL, blocks=blocks))


@pytest.mark.parametrize("ops", ["reference", "cpu"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("lora", [None, Lora(2, 4.0, "all-linear")])
def test_dx_and_dw_can_be_computed_apart(ops: str, recompute: str, lora: Lora | None):
    """A block's backward with ctx.deferred computes dx alone; running what was deferred gives the bits of the joint one."""
    model = Transformer(SMALL, ops=ops, recompute=recompute, lora=lora)
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    dy = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2))
    block, p, g = model.blocks[1], model._p.blocks[1], model._g.blocks[1]
    results = []
    for deferred in (None, []):
        model.zero_grads()
        ctx = Context(model.ops, recompute, lora_scale=2.0, deferred=deferred)
        _, _, saved = block.forward(x, None, p, ctx)
        dx = block.backward(dy, saved, p, g, ctx)
        if deferred is not None:
            assert len(deferred) == 4
            weights = [name for name in model.grads if name.endswith(("wq", "wo", "w_up", "w_down"))]
            assert not any(model.grads[name].any() for name in weights)
            for run in deferred:
                run()
        results.append((dx, model.store.flat_grads.clone()))
    (dx, grads), (dx_apart, grads_apart) = results
    assert torch.equal(dx, dx_apart)
    assert grads.any()
    assert torch.equal(grads, grads_apart)


def test_flops_and_adapters_follow_from_the_specs():
    config = replace(SMALL, num_layers=2, blocks="attn+ffn/ffn(intermediate_dim=20)")
    attn, ffn, wide, head = 4 * 24 * 24, 3 * 13 * 24, 3 * 20 * 24, 23 * 24
    assert step_flops(config, 10, 7) == 10 * 6 * (attn + ffn + wide + head + 7 * 24)
    assert num_params(config) == sum(w.numel() for w in Transformer(config).params.values())
    adapters = {name for name in Transformer(config, lora=Lora(2, 4.0, "w_up")).params if "lora" in name}
    assert adapters == {f"blocks.{i}.ffn.w_up.lora_{x}" for i in (0, 1) for x in "ab"}


def test_saved_bytes_are_named_by_sublayer_and_follow_the_pattern():
    config = replace(SMALL, num_layers=4, blocks="attn+ffn/ffn")
    found = saved_bytes(config, 2, 7, "none", "float32")
    assert found["blocks.2.attn.attention.q"] == 2 * 7 * 24 * 4
    assert not any(name.startswith(("blocks.1.attn", "blocks.3.attn")) for name in found)
    assert {name.split(".", 2)[2] for name in found if name.startswith("blocks.0.")} == {
        name.split(".", 2)[2] for name in found if name.startswith("blocks.2.")
    }


def test_a_kind_is_registered_once():
    class Other(Sublayer):
        kind = "attn"

    with pytest.raises(ConfigError, match=r"'attn' is already registered by tapeless\.model\.attention"):
        register_sublayer(Other)


def test_every_parameter_of_a_block_belongs_to_a_sublayer():
    for spec in transformer_specs(SMALL):
        if spec.name.startswith("blocks."):
            _, _, sublayer, *_ = spec.name.split(".")
            assert sublayer.removesuffix("_norm") in ("attn", "ffn")
