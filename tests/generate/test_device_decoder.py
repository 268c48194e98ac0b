"""Sequences on the device: through the engine, in any company, as the host would run them. In Triton's interpreter; with graphs
in tests/kernels/triton/test_cuda.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("in the interpreter; test_cuda.py tests the same on a GPU", allow_module_level=True)

from tapeless.config import ModelConfig, Sampling
from tapeless.errors import NonFiniteError
from tapeless.generate.decoder import HostDecoder, Request
from tapeless.generate.device_decoder import DeviceDecoder
from tapeless.generate.engine import Engine, generate_each
from tapeless.kernels import choose
from tapeless.kernels.triton.ops import triton_ops
from tapeless.model.transformer import Transformer
from tapeless.ops.op import CapturedCalls

CONFIG = ModelConfig(
    vocab_size=31, hidden_dim=24, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_dim=20, max_seq_len=16
)
SHARED = [3, 14, 15, 9]
PROMPTS = [[*SHARED, 26, 5], [7], [*SHARED, 8]]
OTHER = [2, 20, 24, 20, 11, 5]  # with the last token of the first
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.0, repetition_penalty=1.5), Sampling(top_k=9, seed=3)]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter, of loop bounds


def capture(run: Callable[[], Any]) -> tuple[Any, CapturedCalls]:
    """Like a graph, which writes the same result in every replay."""
    result = run()

    def replay() -> None:
        again = run()
        if result is not None:
            result.copy_(again)

    return result, CapturedCalls([replay], 0)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """With the kernels for GPUs, in the interpreter. Its weights are large: what is drawn depends on the text."""
    interpreted = choose.Backend(lambda device: replace(triton_ops(), capture=capture), ("cpu",), ("float32",))
    monkeypatch.setitem(choose._BACKENDS, "triton", interpreted)
    model = Transformer(CONFIG, seed=1, ops="triton")
    for name, w in model.params.items():
        if w.dim() == 2:
            w *= 4 if name == "head.w" else 2
    return model


def run(model: Transformer, slots: int, **options: Any) -> list[list[int]]:
    """Three requests, of which one may have to wait, join and leave."""
    engine = Engine(model, slots=slots, **options)
    streams = []
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        streams.append(engine.submit(prompt, max_tokens=(5, 3, 4)[i], sampling=sampling, sample=i))
        engine.step()
    return [list(stream) for stream in streams]


def test_the_engine_takes_it_and_draws_what_the_host_draws(model: Transformer):
    found = run(model, 2)
    plain = Transformer(CONFIG, seed=1, ops="reference")
    plain.store.flat.copy_(model.store.flat)
    assert isinstance(Engine(model)._decoder, DeviceDecoder)
    assert isinstance(Engine(plain)._decoder, HostDecoder)
    assert found == run(plain, 2)
    assert len({*map(tuple, found)}) == 3


def test_equal_prompts_and_windows_that_slide(model: Transformer):
    """Three samples of one prompt, which is run once, beyond max_seq_len."""
    model.config = replace(CONFIG, max_seq_len=6)
    options: dict[str, Any] = {"max_tokens": 4, "sampling": Sampling(seed=5)}
    alone = [generate_each(model, [SHARED], first_sample=i, **options)[0] for i in range(2)]
    assert generate_each(model, [SHARED] * 2, **options) == alone
    assert alone[0] != alone[1]


def test_what_is_queued_is_read_in_order(model: Transformer):
    """Two rounds at a time; an idle row changes no slot."""
    decoder = DeviceDecoder(model, slots=4, capacity=8)
    request = Request(Sampling(temperature=0.0), 0, 9, (), 31)
    for slot in (2, 0, 1):
        decoder.start(slot, request, PROMPTS[slot], 0, 0)
    decoder.advance([0, 1, 2])
    decoder.advance([1])
    first = [decoder.collect() for _ in range(3)]
    assert [[slot for slot, _ in round] for round in first] == [[2], [0], [1]]
    assert [slot for slot, _ in decoder.collect()] == [0, 1, 2]
    assert decoder._state.positions.tolist() == [7, 3, 6, 0, 0]
    assert [slot for slot, _ in decoder.collect()] == [1]
    assert decoder._batches.keys() == {("_step", 4)}  # the second step of three rows; one row ran once


def test_a_prefix_is_copied_after_what_was_queued_before(model: Transformer):
    """The sequence in the second slot was cancelled before it was run."""
    decoder = DeviceDecoder(model, slots=2, capacity=8)
    request = Request(Sampling(temperature=0.0), 0, 9, (), 31)
    decoder.start(0, request, PROMPTS[0], 0, 0)
    expected = decoder.collect()[0][1]
    decoder.start(1, request, OTHER, 0, 0)
    decoder.copy_prefix(0, 1, 6)
    decoder.start(1, request, PROMPTS[0], 0, 6)
    other, found = (decoder.collect()[0][1] for _ in range(2))
    assert found == expected != other


def test_logits_that_are_not_finite(model: Transformer):
    decoder = DeviceDecoder(model, slots=1, capacity=8)
    model.params["final_norm.w"][3] = torch.nan
    decoder.start(0, Request(Sampling(), 0, 9, (), 31), [1, 2], 0, 0)
    with pytest.raises(NonFiniteError, match=r"final_norm.w \(24,\) holds 1 non-finite"):
        decoder.collect()
