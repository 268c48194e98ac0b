"""Generation: cache and batch do not change the result; the window slides; samples are reproducible by seed and index."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tapeless.config import ModelConfig, Sampling, SimpleLMConfig
from tapeless.errors import ConfigError, InputError, NonFiniteError, OrderError
from tapeless.generate.decoder import HostDecoder
from tapeless.generate.engine import Engine, generate, generate_each, window_start
from tapeless.generate.sampler import sample
from tapeless.model.build import AnyModel
from tapeless.model.simple_lm import SimpleLM
from tapeless.model.transformer import Transformer

SHAPE = {"vocab_size": 31, "hidden_dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_dim": 40}
PROMPT = [3, 14, 15, 9, 26]


def sharp(model: AnyModel) -> AnyModel:
    """Larger weights: well separated logits, so that the output depends on the input."""
    for name, w in model.params.items():
        if w.dim() == 2:
            w *= 4 if name == "head.w" else 2
    return model


def transformer(max_seq_len: int, **changes: str) -> AnyModel:
    """In float64: the rounding of a cached and a full forward differs, and must not change a sample."""
    return sharp(Transformer(ModelConfig(max_seq_len=max_seq_len, **SHAPE, **changes), seed=1, dtype="float64"))


def without_cache(model: AnyModel, prompt: list[int], max_tokens: int, sampling: Sampling, index: int = 0) -> list[int]:
    """Generation by definition: a full forward over the window for every token."""
    text = list(prompt)
    window = getattr(model.config, "max_seq_len", len(prompt) + max_tokens)
    for position in range(len(prompt), len(prompt) + max_tokens):
        start = 0
        while position - start > window:
            start += max(1, window // 2)
        logits = model.logits(torch.tensor([text[start:]]))[0, -1].numpy()
        text.append(sample(logits, text, sampling, position=position, index=index))
    return text[len(prompt) :]


SAMPLINGS = [Sampling(temperature=0.0), Sampling(seed=3), Sampling(top_k=8, top_p=0.9, repetition_penalty=1.4, seed=2)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("position", ["rope", "learned", "none"])
def test_the_cache_changes_nothing(position: str, sampling: Sampling):
    model = transformer(64, position=position)
    assert generate(model, PROMPT, max_tokens=40, sampling=sampling) == [without_cache(model, PROMPT, 40, sampling)]


@pytest.mark.parametrize("max_seq_len", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_past_the_window_it_slides(max_seq_len: int, position: str):
    model = transformer(max_seq_len, position=position)
    expected = without_cache(model, PROMPT, 30, Sampling(seed=6))
    assert generate(model, PROMPT, max_tokens=30, sampling=Sampling(seed=6)) == [expected]


def test_the_window_is_never_too_long_nor_shorter_than_half():
    for window in range(1, 20):
        starts = [window_start(length, window) for length in range(1, 100)]
        assert starts == sorted(starts)
        for length, start in enumerate(starts, 1):
            seen = length - start
            assert min(length, window - window // 2 + (window > 1)) <= seen <= window


def test_sliding_warns_once():
    said: list[str] = []
    generate(transformer(8), PROMPT, max_tokens=3, on_warning=said.append)
    assert said == []
    generate(transformer(8), PROMPT, max_tokens=30, on_warning=said.append)
    assert len(said) == 1
    assert "max_seq_len = 8" in said[0]
    assert "last 5 to 8 tokens" in said[0]


class Counting:
    """A model that counts the tokens it reads."""

    def __init__(self, model: Transformer):
        self.model, self.config, self.device, self.kv_cache = model, model.config, model.device, model.kv_cache
        self.store = model.store
        self.read = 0

    def logits(self, tokens: Tensor, **options: object) -> Tensor:
        self.read += tokens.numel()
        return self.model.logits(tokens, **options)

    def decode(self, tokens: Tensor, *arguments: object, **options: object) -> Tensor:
        self.read += tokens.numel()
        return self.model.decode(tokens, *arguments, **options)


def test_each_token_is_processed_once_and_a_slide_costs_half_a_window():
    counting = Counting(transformer(32))
    generate(counting, PROMPT, max_tokens=28)
    assert counting.read == len(PROMPT) + 27
    counting = Counting(transformer(32))
    generate(counting, PROMPT, max_tokens=28 + 64)
    assert counting.read == len(PROMPT) + 27 + 64 + 4 * 16


def test_two_calls_give_the_text_of_one():
    model, sampling = transformer(8), Sampling(seed=12, repetition_penalty=1.2)
    (whole,) = generate(model, PROMPT, max_tokens=30, sampling=sampling)
    for cut in (1, 7, 20):
        (rest,) = generate(model, PROMPT + whole[:cut], max_tokens=30 - cut, sampling=sampling)
        assert whole[:cut] + rest == whole


def test_a_batch_equals_its_samples_one_by_one():
    model, sampling = transformer(16), Sampling(seed=5)
    batch = generate(model, PROMPT, max_tokens=25, sampling=sampling, num_samples=4)
    assert len({tuple(tokens) for tokens in batch}) == 4
    for i, tokens in enumerate(batch):
        assert generate(model, PROMPT, max_tokens=25, sampling=sampling, first_sample=i) == [tokens]


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_prompts_of_any_length_share_the_slots(slots: int):
    model, greedy = transformer(16), Sampling(temperature=0.0)
    prompts = [PROMPT, PROMPT[::-1], [1] * len(PROMPT), PROMPT[:2], [7] * 20, PROMPT * 3]
    alone = [generate(model, prompt, max_tokens=25, sampling=greedy)[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) == 6
    assert generate_each(model, prompts, max_tokens=25, sampling=greedy, slots=slots) == alone


def test_on_token_may_end_a_sample():
    model, sampling = transformer(16), Sampling(seed=5)
    heard = {7: 0, 8: 0, 9: 0}

    def end(sample: int, token: int) -> bool:
        heard[sample] += 1
        return heard[sample] == sample - 5

    whole = generate(model, PROMPT, max_tokens=25, sampling=sampling, num_samples=3, first_sample=7)
    ended = generate_each(model, [PROMPT] * 3, max_tokens=25, sampling=sampling, first_sample=7, on_token=end)
    assert ended == [whole[0][:2], whole[1][:3], whole[2][:4]]
    assert heard == {7: 2, 8: 3, 9: 4}


def test_equal_seeds_give_equal_samples_and_other_seeds_others():
    model = transformer(16)
    first, again, other = (
        generate(model, PROMPT, max_tokens=25, sampling=Sampling(seed=seed), num_samples=3) for seed in (7, 7, 8)
    )
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_greedy_samples_are_all_the_same():
    first, second = generate(transformer(16), PROMPT, max_tokens=20, sampling=Sampling(temperature=0.0), num_samples=2)
    assert first == second


def test_a_model_without_attention_needs_no_cache_and_no_warning():
    model = sharp(SimpleLM(SimpleLMConfig(vocab_size=31, hidden_dim=16, intermediate_dim=32), seed=2, dtype="float64"))
    said: list[str] = []
    batch = generate(model, PROMPT, max_tokens=30, sampling=Sampling(seed=1), num_samples=3, on_warning=said.append)
    assert batch == [without_cache(model, PROMPT, 30, Sampling(seed=1), index) for index in range(3)]
    assert said == []


def test_tokens_are_streamed_as_they_are_sampled():
    streamed: list[tuple[int, int]] = []
    batch = generate(
        transformer(16),
        PROMPT,
        max_tokens=9,
        num_samples=2,
        first_sample=5,
        on_token=lambda index, token: streamed.append((index, token)),
    )
    assert streamed == [(5 + row, batch[row][t]) for t in range(9) for row in range(2)]


def test_a_stop_token_ends_only_its_sample():
    model, sampling = transformer(16), Sampling(seed=5)
    free = generate(model, PROMPT, max_tokens=25, sampling=sampling, num_samples=3)
    stop = free[1][4]
    streamed: list[tuple[int, int]] = []
    stopped = generate(
        model, PROMPT, max_tokens=25, sampling=sampling, num_samples=3, stop={stop}, on_token=lambda *x: streamed.append(x)
    )
    assert stopped == [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in free]
    assert len(streamed) == sum(map(len, stopped))


def test_generation_ends_when_every_sample_has():
    counting = Counting(transformer(64))
    assert generate(counting, PROMPT, max_tokens=50, num_samples=2, stop=range(31)) == [[], []]
    assert counting.read == len(PROMPT)  # equal prompts are processed once


def test_ids_beyond_the_tokenizer_are_not_sampled():
    batch = generate(
        transformer(16), PROMPT, max_tokens=40, sampling=Sampling(repetition_penalty=1.1), num_samples=4, vocab_size=7
    )
    assert {token for tokens in batch for token in tokens} == set(range(7))


class Lagging(HostDecoder):
    """As on a GPU: the engine queues rounds before it reads the first. Counts how many are queued at most."""

    lag = 1
    most = 0

    def advance(self, slots: list[int]) -> None:
        super().advance(slots)
        Lagging.most = max(Lagging.most, len(self._ready))


@pytest.mark.parametrize("lag", [1, 3])
def test_reading_late_changes_nothing(lag: int, monkeypatch: pytest.MonkeyPatch):
    """With stops, ends asked for by a caller, slides, and more prompts than slots."""
    model, prompts = transformer(16), [PROMPT, PROMPT[:2], [7] * 20, PROMPT * 2, [1], PROMPT, [9, 9]]

    def run(slots: int, **options: Any) -> tuple[list[list[int]], dict[int, list[int]]]:
        heard: dict[int, list[int]] = {}

        def listen(sample: int, token: int) -> bool:
            heard.setdefault(sample, []).append(token)
            return len(heard[sample]) == 5 * sample + 1

        return generate_each(model, prompts, slots=slots, sampling=Sampling(seed=5), on_token=listen, **options), heard

    cases = [{"slots": slots, "max_tokens": n, "stop": stop} for slots in (1, 3, 7) for n in (1, 24) for stop in ((), {2, 11})]
    expected = [run(**case) for case in cases]
    monkeypatch.setattr(Lagging, "lag", lag)
    monkeypatch.setattr("tapeless.generate.engine.make_decoder", Lagging)
    assert [run(**case) for case in cases] == expected


def test_reading_late_draws_no_token_beyond_the_last(monkeypatch: pytest.MonkeyPatch):
    """But for the one that is in the queue when a stop is read."""
    monkeypatch.setattr("tapeless.generate.engine.make_decoder", Lagging)
    monkeypatch.setattr(Lagging, "most", 0)
    counting = Counting(transformer(64))
    (whole,) = generate(counting, PROMPT, max_tokens=20)
    assert counting.read == len(PROMPT) + 19
    assert Lagging.most == 2
    counting.read = 0
    assert generate(counting, PROMPT, max_tokens=20, stop={whole[9]}) == [whole[: whole.index(whole[9])]]
    assert counting.read == len(PROMPT) + whole.index(whole[9]) + 1


def test_a_stream_runs_the_engine_as_it_is_read():
    counting = Counting(transformer(64))
    stream = Engine(counting).submit(PROMPT, max_tokens=6, sampling=Sampling(seed=2))
    assert (stream.tokens, stream.finish_reason, counting.read) == ([], None, 0)
    first = next(stream)
    assert (stream.tokens, counting.read) == ([first], len(PROMPT))
    assert [first, *stream] == stream.tokens == generate(counting, PROMPT, max_tokens=6, sampling=Sampling(seed=2))[0]
    assert stream.finish_reason == "length"
    assert list(stream) == stream.take() == []


def test_a_stop_and_its_reason():
    engine = Engine(transformer(64))
    whole = list(engine.submit(PROMPT, max_tokens=9, sampling=Sampling(seed=2)))
    stream = engine.submit(PROMPT, max_tokens=9, sampling=Sampling(seed=2), stop={whole[4]})
    assert list(stream) == whole[: whole.index(whole[4])]
    assert stream.finish_reason == "stop"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_cancelled_stream_frees_its_slot_at_once(lag: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Lagging, "lag", lag)
    monkeypatch.setattr("tapeless.generate.engine.make_decoder", Lagging)
    engine = Engine(transformer(64), slots=2)
    streams = [engine.submit([1 + i], max_tokens=20, sample=i) for i in range(5)]
    for _ in range(3):
        engine.step()
    assert [len(stream.tokens) for stream in streams] == [3 - lag] * 2 + [0] * 3
    streams[0].cancel()
    streams[3].cancel()  # still waiting
    before = list(streams[0].tokens)
    for _ in range(2):
        engine.step()
    assert [len(stream.tokens) for stream in streams] == [3 - lag, 5 - lag, 2 - lag, 0, 0]
    assert [stream.finish_reason for stream in streams] == ["cancelled", None, None, "cancelled", None]
    assert list(streams[0]) == before
    for i in (1, 2, 4):
        assert list(streams[i]) == generate(transformer(64), [1 + i], max_tokens=20, first_sample=i)[0]
    streams[4].cancel()
    assert streams[4].finish_reason == "length"
    assert not engine.busy
    assert engine.step() == []


def test_a_step_names_the_streams_that_changed():
    engine = Engine(transformer(64), slots=2)
    a, b, c = (engine.submit([1 + i], max_tokens=2 + i) for i in range(3))
    changed = []
    while engine.busy:
        changed.append([(stream, stream.take()) for stream in engine.step()])
    assert [[stream for stream, _ in step] for step in changed] == [[a, b], [a, b], [b, c], [c], [c], [c]]
    assert all(len(new) == 1 for step in changed for _, new in step)


def test_requests_differ_in_everything():
    """Sampling, index, stops and lengths are each request's own."""
    model = transformer(64)
    settings: list[dict[str, Any]] = [
        {"max_tokens": 5, "sampling": Sampling(temperature=0.0)},
        {"max_tokens": 12, "sampling": Sampling(seed=4, top_k=5), "sample": 3},
        {"max_tokens": 9, "sampling": Sampling(seed=4, repetition_penalty=1.5), "sample": 2, "stop": {3, 4, 5}},
    ]
    engine = Engine(model, slots=3)
    streams = [engine.submit(PROMPT[i:], **each) for i, each in enumerate(settings)]
    assert [list(stream) for stream in streams] == [
        list(Engine(model).submit(PROMPT[i:], **each)) for i, each in enumerate(settings)
    ]


def test_a_request_that_does_not_fit_is_refused_and_disturbs_none():
    engine = Engine(transformer(64), capacity=20)
    stream = engine.submit(PROMPT, max_tokens=15)
    with pytest.raises(InputError, match="a text of 21 tokens does not fit into a slot of 20"):
        engine.submit(PROMPT, max_tokens=16)
    with pytest.raises(InputError, match=r"prompt \[1\] is -1, outside the vocabulary"):
        engine.submit([3, -1], max_tokens=1)
    assert len(list(stream)) == 15
    with pytest.raises(ConfigError, match="slots"):
        Engine(transformer(64), slots=0)


def test_zero_tokens():
    assert generate(transformer(16), PROMPT, max_tokens=0, num_samples=2) == [[], []]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prompt_ids": []}, InputError, "prompt is empty"),
        ({"prompt_ids": [31]}, InputError, "outside the vocabulary of 31"),
        ({"max_tokens": -1}, ConfigError, "max_tokens"),
        ({"num_samples": 0}, ConfigError, "num_samples"),
        ({"vocab_size": 32}, ConfigError, "vocab_size"),
    ],
)
def test_invalid_arguments_are_errors(changes: dict[str, object], error: type[Exception], words: str):
    arguments = {"prompt_ids": PROMPT, "max_tokens": 3} | changes
    with pytest.raises(error, match=words):
        generate(transformer(16), **arguments)


def test_a_broken_model_is_an_error():
    model = transformer(16)
    model.params["blocks.1.ffn.w_up"][0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"blocks\.1\.ffn\.w_up"):
        generate(model, PROMPT, max_tokens=3)


@pytest.mark.parametrize("slots", [1, 2])
def test_new_weights_between_sequences(slots: int):
    model = transformer(512)
    prompt = [i % 31 for i in range(300)]  # longer than the unit of reuse
    engine = Engine(model, slots=slots)
    list(engine.submit(prompt, max_tokens=3))
    model.params["blocks.0.attn.wv"].mul_(-1)
    after = [list(engine.submit(ids, max_tokens=3)) for ids in (prompt, [*prompt[:290], 7])]
    assert after == [*generate(model, prompt, max_tokens=3), *generate(model, [*prompt[:290], 7], max_tokens=3)]


def test_new_weights_within_a_sequence_are_an_error():
    model = transformer(64)
    engine = Engine(model)
    stream = engine.submit(PROMPT, max_tokens=9)
    next(stream)
    model.params["head.w"].mul_(2)
    with pytest.raises(OrderError, match="parameters were written while a sequence was running; cancel it"):
        next(stream)
    stream.cancel()
    assert list(engine.submit(PROMPT, max_tokens=3)) == generate(model, PROMPT, max_tokens=3)[0]


def test_an_error_in_a_step_ends_the_engine(monkeypatch: pytest.MonkeyPatch):
    """What its slots hold is unknown then: no later request may reuse it."""
    engine = Engine(transformer(64), slots=2)
    engine.submit(PROMPT, max_tokens=3)
    with monkeypatch.context() as patched:
        patched.setattr(HostDecoder, "_draw", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    with pytest.raises(OrderError, match="make a new one"):
        next(engine.submit(PROMPT, max_tokens=3))
