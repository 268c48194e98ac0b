"""The logits of a sequence have the same bits alone, among others that join and leave, in any slot, with and without reuse."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeless.config import Lora, ModelConfig, Sampling
from tapeless.generate import decoder
from tapeless.generate.decoder import HostDecoder, Request
from tapeless.generate.engine import Engine, Stream
from tapeless.model.transformer import Transformer

SHAPE: dict[str, Any] = {"vocab_size": 67, "hidden_dim": 40, "num_layers": 2, "num_heads": 5, "intermediate_dim": 72}
CHUNK = 128  # shorter than the real one, so that short prompts have several
DRAWN = Sampling(seed=3)
TEXT = np.random.default_rng(0).integers(67, size=400).tolist()
PROMPTS = [TEXT[:300], TEXT[:280], [5], TEXT[:300], TEXT[100:140], TEXT[:128], [*TEXT[:257], 1, 2, 3], TEXT[:128]]
Rows = dict[tuple[int, int], bytes]  # (sample, position) -> logits


def transformer(ops: str, dtype: str = "float32", lora: Lora | None = None, **changes: Any) -> Transformer:
    model = Transformer(ModelConfig(**{**SHAPE, "max_seq_len": 512, **changes}), seed=1, ops=ops, dtype=dtype, lora=lora)
    for name, w in model.params.items():
        if name.endswith("lora_b"):  # zero at first: an adapter without effect
            w += 0.1
    return model


@pytest.fixture(autouse=True)
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "CHUNK", CHUNK)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The logits that every token was drawn from."""
    seen: Rows = {}
    draw = decoder.sample

    def recording(logits: np.ndarray, *arguments: Any, **options: Any) -> int:
        at = options["index"], options["position"]
        assert seen.setdefault(at, logits.tobytes()) == logits.tobytes(), f"other logits of sample {at[0]} at {at[1]}"
        return draw(logits, *arguments, **options)

    monkeypatch.setattr(decoder, "sample", recording)
    return seen


def alone(model: Transformer, max_tokens: int) -> dict[int, list[int]]:
    return {
        i: list(
            Engine(model, capacity=len(prompt) + max_tokens).submit(prompt, max_tokens=max_tokens, sampling=DRAWN, sample=i)
        )
        for i, prompt in enumerate(PROMPTS)
    }


def together(model: Transformer, max_tokens: int, order: Iterable[int], **options: Any) -> dict[int, list[int]]:
    """Joining and leaving: a request every second step, and between them some that are cancelled again."""
    engine = Engine(model, slots=3, **options)
    streams: dict[int, Stream] = {}
    for i in order:
        streams[i] = engine.submit(PROMPTS[i], max_tokens=max_tokens, sampling=DRAWN, sample=i)
        visitor = engine.submit(TEXT[i:200], max_tokens=9, sampling=DRAWN, sample=1000 + i)
        for _ in range(2):
            engine.step()
        visitor.cancel()
    return {i: list(streams[i]) for i in range(len(PROMPTS))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_a_sequence_has_the_same_logits_in_any_company(ops: str, dtype: str, rows: Rows):
    """`rows` compares them bit for bit whenever a token is drawn again."""
    model, order = transformer(ops, dtype), range(len(PROMPTS))
    expected = alone(model, 12)
    assert len(rows) == 12 * len(PROMPTS)
    assert together(model, 12, order) == expected
    assert together(model, 12, order, reuse_prefixes=False) == expected
    assert together(model, 12, reversed(order)) == expected


def test_other_logits_are_noticed(rows: Rows):
    alone(transformer("reference"), 2)
    with pytest.raises(AssertionError, match="other logits of sample 0 at 300"):
        alone(transformer("reference", rope_theta=9999.0), 2)


@pytest.mark.parametrize(
    "changes", [{"max_seq_len": 290}, {"max_seq_len": 290, "position": "learned"}, {"lora": Lora(rank=2)}], ids=str
)
def test_also_when_windows_slide_and_with_adapters(changes: dict[str, Any], rows: Rows):
    model = transformer("cpu", **changes)
    assert together(model, 12, range(len(PROMPTS))) == alone(model, 12)


class Counting(HostDecoder):
    """Counts the tokens that starts run."""

    run = 0

    def start(self, slot: int, request: Request, ids: list[int], first: int, reused: int) -> None:
        self.run += len(ids) - first - reused
        super().start(slot, request, ids, first, reused)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapeless.generate.engine.make_decoder", Counting)


def tokens_run(model: Any, prompts: Sequence[list[int]], slots: int, **options: Any) -> list[int]:
    """By each prompt, one after the other; the first two run at the same time if there are slots."""
    engine, found = Engine(model, slots=slots, **options), []
    counting: Any = engine._decoder
    for prompt in prompts:
        before = counting.run
        engine.submit(prompt, max_tokens=2)
        engine.step()
        found.append(counting.run - before)
    return found


@pytest.mark.usefixtures("counted")
def test_whole_passes_and_equal_prompts_are_reused():
    model, tail = transformer("reference"), [1, 2, 3]
    assert tokens_run(model, [TEXT[:300]] * 2, 2) == [300, 0]  # from a running sequence
    assert tokens_run(model, [TEXT[:300], TEXT[:300] + tail], 2) == [300, 303 - 2 * CHUNK]
    assert tokens_run(model, [TEXT[:300], TEXT[:200] + tail], 2) == [300, 203 - CHUNK]
    assert tokens_run(model, [TEXT[:300], TEXT[:CHUNK]], 2) == [300, CHUNK]  # the logits after it are not known
    assert tokens_run(model, [TEXT[:300], TEXT[:90]], 2) == [300, 90]
    assert tokens_run(model, [TEXT[:300]] * 2, 2, reuse_prefixes=False) == [300, 300]


@pytest.mark.usefixtures("counted")
def test_a_free_slot_still_holds_what_its_last_sequence_began_with():
    engine = Engine(transformer("reference"), slots=1)
    counting: Any = engine._decoder
    for prompt, run in [(TEXT[:300], 300), (TEXT[:300], 0), (TEXT[:260], 4), (TEXT[:300], 44), ([7] * 9, 9), (TEXT[:300], 300)]:
        before = counting.run
        list(engine.submit(prompt, max_tokens=5))
        assert counting.run - before == run


@pytest.mark.usefixtures("counted")
def test_a_state_without_positions_is_not_reused(monkeypatch: pytest.MonkeyPatch, rows: Rows):
    """A sublayer that remembers the last token only: its state at an earlier token is gone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import gated_token_shift  # noqa: F401

    model = transformer("reference", blocks="shift+ffn/attn+ffn")
    assert tokens_run(model, [TEXT[:300]] * 2, 2) == [300, 300]
    rows.clear()
    assert together(model, 6, range(len(PROMPTS))) == alone(model, 6)
