"""Parameters: where they lie, how they begin, and that writing into them is seen."""

import math
from dataclasses import replace

import pytest
import torch

from tapeless.config import ModelConfig, load_preset
from tapeless.errors import ConfigError
from tapeless.model.build import build_model
from tapeless.model.init import initial_values, param_seed
from tapeless.model.params import ALIGNMENT, DTYPES, FlatLayout, ParamSpec, count_params
from tapeless.model.sublayer import Context
from tapeless.model.transformer import Transformer, transformer_specs
from tapeless.ops.reference import REFERENCE
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import TRANSFORMER_CASES, ModelCase, batch, build, data_of, gradients, move_off_init
from tapeless.verify.tolerances import METAMORPHIC

CASES = [pytest.param(case, id=case.name) for case in TRANSFORMER_CASES]
COUNTS = {
    "tiny": 132_224,
    "small": 21_133_824,
    "cllm": 19_215_872,
    "simplelm": 98_688,
    "gpt2": 124_439_808,
}


@pytest.mark.parametrize("case", CASES)
def test_matrices_read_together_are_neighbours(case: ModelCase):
    layout = build(case).store.layout
    names = list(layout.spans)
    for i, name in enumerate(names):
        offset, _ = layout.spans[name]
        if layout.specs[name].joined:
            assert offset == sum(layout.spans[names[i - 1]])
        else:
            assert offset % ALIGNMENT == 0
    joined = {name.rpartition(".")[2] for name in names if layout.specs[name].joined}
    expected = {"wk", "wv"} | ({"bk", "bv"} if case.config.attn_bias else set())
    if case.config.ffn in ("swiglu", "geglu"):
        expected |= {"w_up"} | ({"b_up"} if case.config.ffn_bias else set())
    assert joined == expected


@pytest.mark.parametrize("case", CASES)
def test_fused_matrices_are_views(case: ModelCase):
    model = build(case)
    flat, layout = model.store.flat, model.store.layout
    qkv = layout.joined(flat, *(f"blocks.1.attn.w{x}" for x in "qkv"))
    parts = [model.params[f"blocks.1.attn.w{x}"] for x in "qkv"]
    assert torch.equal(qkv, torch.cat(parts))
    assert qkv.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    qkv[0, 0] = 7.0
    assert parts[0][0, 0] == 7.0
    assert layout.joined(flat, "no.such", "nor.this") is None


def test_joining_what_lies_apart_is_refused():
    layout = FlatLayout(transformer_specs(ModelConfig()))
    with pytest.raises(ConfigError, match=r"embed\.w, head\.w are not adjacent"):
        layout.joined(torch.zeros(layout.numel), "embed.w", "head.w")


@pytest.mark.parametrize("case", CASES)
def test_gaps_stay_zero_and_parts_cover_everything(case: ModelCase):
    model = build(case)
    gradients(model, data_of(case))
    layout = model.store.layout
    gap = torch.ones(layout.numel, dtype=torch.bool)
    for offset, size in layout.spans.values():
        gap[offset : offset + size] = False
    assert gap.any()
    assert not model.store.flat[gap].any()
    assert not model.store.flat_grads[gap].any()
    assert torch.equal(torch.cat(list(layout.parts(model.store.flat).values())), model.store.flat)


@pytest.mark.parametrize("case", CASES)
def test_parts_are_handed_over_complete_and_once(case: ModelCase):
    model, data = build(case), data_of(case)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.forward(data.tokens, data.targets, step=0)
    model.backward(on_grads_ready=lambda part: seen.append((part, part.clone())))
    assert [part.data_ptr() for part, _ in seen] == sorted((part.data_ptr() for part, _ in seen), reverse=True)
    assert sum(part.numel() for part, _ in seen) == model.store.layout.numel
    assert all(torch.equal(part, then) for part, then in seen)


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_counts_of_presets(name: str, count: int):
    config = load_preset(name)
    if isinstance(config, ModelConfig):
        assert count_params(transformer_specs(config)) == count
    else:
        assert build_model(config).num_params == count


def test_who_only_evaluates_has_no_gradients():
    model = Transformer(ModelConfig(max_seq_len=8))
    tokens = torch.randint(256, (2, 8))
    model.loss(tokens, tokens)
    kv_cache = model.kv_cache(2, 9)
    model.logits(tokens, kv_cache=kv_cache)
    model.decode(tokens[:, 0], torch.arange(2), torch.full((2,), 7), kv_cache)
    assert "flat_grads" not in vars(model.store)
    model.forward_backward(tokens, tokens)
    assert vars(model.store)["flat_grads"].any()


def test_tensor_parallel_halves_add_up_to_the_whole():
    """Each rank holds half of the heads and half of the middle, cut along shard_axis; outputs are summed over ranks. What is
    not cut is on every rank, so the biases that end a sublayer count once."""
    whole = ModelConfig(
        hidden_dim=24, num_layers=1, num_kv_heads=2, head_dim=6, intermediate_dim=14, attn_bias=True, ffn_bias=True
    )
    half = replace(whole, num_heads=2, num_kv_heads=1, intermediate_dim=7)
    model = Transformer(whole, dtype="float64")
    move_off_init(model, 1)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def sublayers(config: ModelConfig, rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        part = Transformer(config, dtype="float64")
        for name, spec in part.store.layout.specs.items():
            w = model.params[name]
            if rank is not None and name.startswith("blocks.") and spec.shard_axis is not None:
                w = w.chunk(2, spec.shard_axis)[rank]
            elif rank == 1 and name.endswith(("attn.bo", "ffn.b_down")):
                w = torch.zeros_like(w)
            part.params[name].copy_(w)
        block, ctx = part.blocks[0], Context(REFERENCE, "none")
        attn, ffn = (
            sublayer.forward(x, p.sublayer, ctx)[0]
            for sublayer, p in zip(block.sublayers, block.views(part.store.layout, part.store.flat), strict=True)
        )
        return attn, ffn

    for full, first, second in zip(sublayers(whole, None), sublayers(half, 0), sublayers(half, 1), strict=True):
        assert distance(first + second, full).largest <= METAMORPHIC["float64"]
        assert distance(first, full).largest > 0.1


@pytest.mark.parametrize(
    ("scheme", "std"), [("scaled-normal", 0.02), ("kaiming", math.sqrt(2 / 300)), ("xavier", math.sqrt(2 / 700))]
)
def test_statistics_of_the_initialisers(scheme: str, std: float):
    w = initial_values(ParamSpec("w", (400, 300), "linear", True, None), scheme, 8, seed=0)
    assert abs(float(w.mean())) < 4 * std / math.sqrt(w.numel())
    assert float(w.std()) == pytest.approx(std, rel=0.02)
    if scheme == "xavier":
        assert float(w.abs().max()) <= math.sqrt(6 / 700)
    ending = initial_values(ParamSpec("w", (400, 300), "residual", True, None), scheme, 8, seed=0)
    assert float(ending.std()) == pytest.approx(std / 4 if scheme == "scaled-normal" else std, rel=0.02)
    embedding = initial_values(ParamSpec("w", (400, 300), "embedding", True, None), scheme, 8, seed=0)
    assert float(embedding.std()) == pytest.approx(0.02, rel=0.02)


def test_norms_begin_at_one_and_biases_at_zero():
    model = Transformer(TRANSFORMER_CASES[1].config)
    for name, spec in model.store.layout.specs.items():
        if len(spec.shape) == 1:
            assert (model.params[name] == (1.0 if spec.init == "ones" else 0.0)).all(), name
            assert not spec.decay
        else:
            assert spec.decay


def test_every_parameter_has_a_seed_of_its_own():
    model = Transformer(ModelConfig(hidden_dim=24, num_layers=2, head_dim=6))
    assert not torch.equal(model.params["blocks.0.attn.wq"], model.params["blocks.1.attn.wq"])
    assert not torch.equal(model.params["blocks.0.attn.wq"], model.params["blocks.0.attn.wk"])
    deeper = Transformer(ModelConfig(hidden_dim=24, num_layers=3, head_dim=6))
    assert torch.equal(deeper.params["blocks.1.attn.wq"], model.params["blocks.1.attn.wq"])
    assert param_seed(0, "a") != param_seed(1, "a")
    other = Transformer(ModelConfig(hidden_dim=24, num_layers=2, head_dim=6), seed=1)
    assert not torch.equal(other.params["embed.w"], model.params["embed.w"])


@pytest.mark.parametrize("dtype", sorted(DTYPES.keys() - {"fp8"}))  # which takes a GPU, and has bfloat16's weights
def test_the_same_values_in_every_dtype(dtype: str):
    config = TRANSFORMER_CASES[0].config
    reference, model = Transformer(config, dtype="float32"), Transformer(config, dtype=dtype)
    for name, w in model.params.items():
        assert torch.equal(w.to(torch.complex128), reference.params[name].to(torch.complex128)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writing_is_seen_by_the_next_forward(dtype: str):
    case = TRANSFORMER_CASES[0]
    model, (tokens, targets) = build(case, dtype), batch()
    before = model.loss(tokens, targets)
    assert torch.equal(model.loss(tokens, targets), before)
    original = model.params["head.w"].clone()
    model.params["head.w"].mul_(1.5)
    assert not torch.equal(model.loss(tokens, targets), before)
    model.store.flat.mul_(1.0)
    model.params["head.w"][:] = original
    assert torch.equal(model.loss(tokens, targets), before)
    with torch.no_grad():
        model.store.flat.zero_()
    assert float(model.loss(tokens, targets)) == pytest.approx(math.log(23), rel=1e-6)


def test_a_writer_that_torch_does_not_count_is_seen_too():
    """Fused optimizers write without raising the count of writes; a bfloat16 model must not go on with its old copy."""
    model = Transformer(ModelConfig(), dtype="bfloat16")
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    before = model.loss(tokens, tokens)
    model.params["embed.w"].numpy()[:] *= 3
    assert not torch.equal(model.loss(tokens, tokens), before)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_initial_values_do_not_depend_on_torchs_defaults(default):
    expected = Transformer(ModelConfig(), seed=3).store.flat
    torch.set_default_dtype(default)
    try:
        found = Transformer(ModelConfig(), seed=3).store.flat
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
