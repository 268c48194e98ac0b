"""What needs a GPU: the library's attention, the captured step, generation, the whole set by the levels."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from contract import check_within

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from levels.kernels import kernel_levels
from tapeless.config import ModelConfig, Sampling, TrainConfig
from tapeless.generate.device_decoder import DeviceDecoder
from tapeless.generate.engine import Engine
from tapeless.kernels.triton.attention import own_backward, own_forward
from tapeless.kernels.triton.library_attention import attention
from tapeless.model.cache import KVCache
from tapeless.model.transformer import Transformer
from tapeless.ops.attention import ATTENTION
from tapeless.optim.ema import Ema, decay_at
from tapeless.training.captured_step import CapturedStep, captured_step
from tapeless.training.invariants import check_invariants
from tapeless.training.layer_stats import LayerStats
from tapeless.training.step import optimizer_of
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import TRANSFORMER_CASES, ModelCase, Setting, T, batch, build
from tapeless.verify.tolerances import KERNEL_FORWARD

CONFIG = ModelConfig(vocab_size=512, hidden_dim=128, num_layers=2, num_heads=2, intermediate_dim=256, max_seq_len=64)


@pytest.mark.parametrize("level", ["L0", "L1", "L2", "L3", "L4", "L5", "L6"])
def test_levels(level: str):
    check_within(kernel_levels(Setting("triton", "cuda"))[level]())


@pytest.mark.parametrize(
    ("B", "H", "G", "T", "D"), [(2, 4, 4, 128, 64), (1, 8, 2, 200, 64), (2, 2, 1, 65, 128), (1, 3, 3, 33, 20), (2, 2, 2, 1, 64)]
)
def test_attention_in_bfloat16(B: int, H: int, G: int, T: int, D: int):
    q, k, v = (torch.randn(B, heads, T, D, device="cuda").bfloat16() for heads in (H, G, G))
    do = torch.randn(B, T, H * D, device="cuda").bfloat16()
    found = {}
    library = attention()
    for name, (forward, backward), dtype in (
        ("truth", ATTENTION[:2], torch.float64),
        ("plain", ATTENTION[:2], q.dtype),
        ("library", library[:2], q.dtype),
        ("own", (own_forward, own_backward), q.dtype),
    ):
        o, saved = forward(q.to(dtype), k.to(dtype), v.to(dtype))
        found[name] = [o, *backward(do.to(dtype), saved)]
    for name in ("library", "own"):
        for truth, plain, ours in zip(found["truth"], found["plain"], found[name], strict=True):
            if truth.abs().max() > 1e-12:  # dq and dk of one position are zero
                assert distance(ours, truth).l2 <= 2 * KERNEL_FORWARD * distance(plain, truth).l2 + 1e-6, name


def test_an_average_follows_a_captured_step():
    """The graph knows nothing of it; what it replays has to be in the average, and an evaluation must not disturb the graph."""
    model = Transformer(CONFIG, device="cuda", dtype="bfloat16")
    train = TrainConfig(device="cuda", dtype="bfloat16")
    step = captured_step(model, optimizer_of(model, train), train)
    assert step is not None
    ema, expected = Ema(model.params, 0.6), torch.zeros_like(model.store.flat)
    tokens = torch.randint(512, (8, 64), device="cuda")
    for t in range(1, 9):
        step(tokens, tokens, lr=1e-3, step=t - 1)
        ema.update(t)
        expected.lerp_(model.store.flat, 1 - decay_at(t, 0.6))
        with ema.as_weights():
            assert model.loss(tokens, tokens).isfinite()
    assert step._captured.count == 1
    assert ema.average.equal(expected)
    assert not ema.average.equal(model.store.flat)


def test_muon_learns_in_bfloat16():
    model = Transformer(CONFIG, device="cuda", dtype="bfloat16")
    train = TrainConfig(device="cuda", dtype="bfloat16", optimizer="muon")
    optimizer = optimizer_of(model, train)
    step = captured_step(model, optimizer, train)
    assert step is not None
    tokens, targets = torch.randint(512, (2, 8, 64), device="cuda")
    losses = [step(tokens, targets, lr=5e-3, step=i).loss for i in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert step._captured.count == 1


def course(graphs: bool, documents: bool, **options: Any) -> tuple[list[float], torch.Tensor]:
    model = Transformer(CONFIG, device="cuda", dtype="bfloat16")
    train = TrainConfig(device="cuda", dtype="bfloat16", **options)
    step = captured_step(model, optimizer_of(model, train), train)
    assert isinstance(step, CapturedStep)
    if not graphs:
        model.ops = replace(model.ops, capture=None)
    losses = []
    for i in range(6):
        generator = torch.Generator().manual_seed(i)
        tokens, targets = torch.randint(512, (2, 8, 64), generator=generator)
        ids = ((torch.arange(64) + i) // 20).repeat(8, 1) if documents else None
        losses.append(step(tokens, targets, ids, lr=1e-3 * (1 + i), step=i).loss)
    assert step._captured.count == graphs
    return losses, model.store.flat.clone()


OPTIONS: list[dict[str, Any]] = [{}, {"grad_accum": 2}, *({"optimizer": name} for name in ("sgd", "adam", "muon"))]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_replay_does_what_the_calls_do(options: dict[str, Any], documents: bool):
    """Not bit for bit: the library's attention adds in any order."""
    (losses, weights), (plain_losses, plain_weights) = (course(graphs, documents, **options) for graphs in (True, False))
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert (weights - plain_weights).norm() <= 1e-3 * plain_weights.norm()


def test_a_replay_skips_a_spike_without_being_captured_again():
    """The limit is a number on the device: the same graph updates, skips, and updates again."""
    model = Transformer(CONFIG, device="cuda", dtype="bfloat16")
    train = TrainConfig(device="cuda", dtype="bfloat16")
    step = captured_step(model, optimizer_of(model, train), train)
    assert step is not None
    tokens = torch.randint(512, (8, 64), device="cuda")
    moved = []
    for i, limit in enumerate((math.inf, math.inf, 1.0, math.inf, 1.0)):
        held = [model.store.flat, model.store.compute_flat, *step.optimizer.state.values()]
        before = [x.clone() for x in held]
        result = step(tokens, tokens, lr=1e-4, step=i, loss_limit=limit)
        moved.append(not all(map(torch.equal, before, held)))
        assert result.skipped != moved[-1]
    assert moved == [True, True, False, True, False]
    assert step.optimizer.t == 3
    assert step._captured.count == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_identities_hold(dtype: str):
    model = Transformer(CONFIG, device="cuda", dtype=dtype)
    check_invariants(model, *torch.randint(512, (2, 4, 64), device="cuda"), step=0, first_sample=0)


def test_a_replay_leaves_what_a_look_at_the_layers_needs():
    """Steps that are replayed, with and without clipping: the norms add up, and the weights have moved."""
    for grad_clip in (0.0, 0.05):
        model = Transformer(CONFIG, device="cuda", dtype="bfloat16")
        train = TrainConfig(device="cuda", dtype="bfloat16", grad_clip=grad_clip)
        step, look = captured_step(model, optimizer_of(model, train), train), LayerStats(model, 1)
        assert step is not None
        for i in range(4):
            tokens, before = torch.randint(512, (8, 64), device="cuda"), model.store.flat.clone()
            look.before()
            result = step(tokens, tokens, lr=1e-3, step=i)
            found = look.after(result.grad_norm)
            assert math.hypot(*found["grad_norm"].values()) == pytest.approx(result.grad_norm, rel=1e-5)
            start, size = model.store.layout.spans["head.w"]
            old, new = (flat[start : start + size] for flat in (before, model.store.flat))
            assert found["update_ratio"]["head"] == pytest.approx(float((new - old).norm() / old.norm()), rel=0.05)
            assert found["device_memory_bytes"] > 0
        assert step._captured.count == 1


def test_shapes_have_graphs_of_their_own():
    model = Transformer(CONFIG, device="cuda", dtype="bfloat16")
    train = TrainConfig(device="cuda", dtype="bfloat16")
    step = captured_step(model, optimizer_of(model, train), train)
    assert step is not None
    for i in range(12):
        rows = (8, 4, 2)[i % 3]
        tokens = torch.randint(512, (rows, 64), device="cuda")
        assert step(tokens, tokens, lr=1e-4, step=i).loss > 0
    assert step._captured.count == 2


def test_float32_runs_on_the_own_attention():
    model = Transformer(replace(CONFIG, num_kv_heads=1), device="cuda", ops="triton")
    plain = Transformer(replace(CONFIG, num_kv_heads=1), device="cuda", ops="reference")
    tokens = torch.randint(512, (2, 64), device="cuda")
    for each in (model, plain):
        each.forward_backward(tokens, tokens)
    assert (model.store.flat_grads - plain.store.flat_grads).norm() <= 1e-5 * plain.store.flat_grads.norm()


SHAPES: list[dict[str, Any]] = [{}, {"qk_norm": True, "num_kv_heads": 1}, {"norm": "layer", "norm_placement": "post"}]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(top_k=40, seed=5), Sampling(repetition_penalty=1.2, top_p=0.9)]


def decoding(tokens: torch.Tensor, model: Transformer, kv_cache: KVCache) -> Callable[..., torch.Tensor]:
    def run(*rows: tuple[int, int]) -> torch.Tensor:  # (slot, position) of each -> (R, V)
        slots, positions = torch.tensor(rows, device="cuda").t()
        return model.decode(tokens[slots, positions], slots, positions, kv_cache, check=False)

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", TRANSFORMER_CASES, ids=lambda case: case.name)
def test_decoding_is_the_forward(case: ModelCase, dtype: str):
    model, tokens = build(case._replace(on=Setting("triton", "cuda")), dtype), batch()[0][:2].cuda()
    plain = build(case._replace(on=Setting("reference", "cuda")), "float64").logits(tokens)
    rounded = build(case._replace(on=Setting("reference", "cuda")), dtype).logits(tokens)
    run = decoding(tokens, model, model.kv_cache(2, T))
    found = run(*((slot, position) for slot in (0, 1) for position in range(T))).view(2, T, -1)
    assert distance(found, plain).l2 <= 2 * KERNEL_FORWARD * distance(rounded, plain).l2 + 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "choices", [{}, {"qk_norm": True, "num_kv_heads": 1}, {"norm": "layer", "norm_placement": "post"}], ids=str
)
def test_a_row_has_the_same_bits_in_any_company(choices: dict[str, Any], dtype: str):
    """In prompts, alone, and with other rows, beyond one split of the keys."""
    length = 600
    model = Transformer(replace(CONFIG, max_seq_len=length, **choices), device="cuda", dtype=dtype)
    tokens = torch.randint(512, (3, length), device="cuda")
    kv_cache = model.kv_cache(3, length)
    run = decoding(tokens, model, kv_cache)
    for first in range(0, length, 20):
        expected = run(*((slot, first + i) for i in range(20) for slot in range(3)))[-3:]  # 60 rows
    held = kv_cache.stacked["keys"][0].clone()
    last = length - 1
    assert run((2, last)).equal(expected[2:])
    assert run((1, last), (0, 7), (2, last), (1, 550), (0, last))[[4, 0, 2]].equal(expected)
    assert run(*((i % 3, 511 + i) for i in range(30)), *((slot, last) for slot in range(3)))[-3:].equal(expected)
    assert kv_cache.stacked["keys"][0].equal(held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_generate_what_the_calls_do(dtype: str):
    """Requests of several lengths that wait, join, leave and slide; the second engine has no graphs, and one slot."""
    found = []
    for slots in (3, 1):
        model = Transformer(CONFIG, seed=1, device="cuda", dtype=dtype)
        if slots == 1:
            model.ops = replace(model.ops, capture=None)
        engine, streams = Engine(model, slots=slots), []
        assert isinstance(engine._decoder, DeviceDecoder)
        for i in range(7):
            sampling = (Sampling(temperature=0.0), Sampling(top_k=40, seed=i), Sampling(repetition_penalty=1.2, top_p=0.9))[
                i % 3
            ]
            streams.append(engine.submit(range(1, 2 + 9 * i), max_tokens=5 + 3 * i, sampling=sampling, sample=i))
            engine.step()
        found.append([list(stream) for stream in streams])
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == [5 + 3 * i for i in range(7)]


def test_new_weights_reach_a_graph():
    model = Transformer(CONFIG, seed=1, device="cuda", dtype="bfloat16")
    engine, greedy = Engine(model, slots=1, reuse_prefixes=False), Sampling(temperature=0.0)
    before = list(engine.submit([1, 2, 3], max_tokens=8, sampling=greedy))
    model.store.flat.normal_(generator=torch.Generator("cuda").manual_seed(3))
    after = list(engine.submit([1, 2, 3], max_tokens=8, sampling=greedy))
    assert before != after
    assert after == list(Engine(model).submit([1, 2, 3], max_tokens=8, sampling=greedy))
