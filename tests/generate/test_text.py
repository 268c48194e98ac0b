"""A model's methods for text: a stream gives the text that generate gives, piece by piece, and can be cancelled."""

from typing import Any

import numpy as np
import pytest
import torch

from tapeless.config import ModelConfig, Sampling
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.errors import ConfigError, InputError
from tapeless.generate.engine import Engine
from tapeless.generate.text import TextStream
from tapeless.model.transformer import Transformer

SHAPE = {"vocab_size": 259, "hidden_dim": 24, "num_layers": 2, "num_heads": 4, "intermediate_dim": 40, "max_seq_len": 128}
DRAWN = Sampling(seed=3, temperature=5.0)


@pytest.fixture
def model() -> Transformer:
    model = Transformer(ModelConfig(**SHAPE), seed=1, ops="reference")
    model.tokenizer = ByteTokenizer()
    return model


def test_pieces_are_the_text(model: Transformer):
    """Drawn bytes are broken UTF-8, so most pieces are replacement characters."""
    for count in (0, 1, 2, 3, 40):
        stream = model.stream("né", max_tokens=count, sampling=DRAWN)
        pieces = list(stream)
        assert "né" + "".join(pieces) == model.generate("né", max_tokens=count, sampling=DRAWN)
        assert all(pieces)
        assert (len(stream.tokens), stream.finish_reason) == (count, "length")
        assert list(stream) == []


def test_a_prompt_that_ends_within_a_character(model: Transformer):
    prompt = list("né".encode())[:-1]
    tokens = model.stream(prompt, max_tokens=20, sampling=DRAWN)
    stream = TextStream(tokens, model.tokenizer, prompt)
    assert stream.prompt + "".join(stream) == model.tokenizer.decode([*prompt, *tokens.tokens])


def test_ids_give_ids(model: Transformer):
    prompt = torch.tensor([1, 2, 3])
    assert [1, 2, 3, *model.stream(prompt, max_tokens=9)] == model.generate(prompt, max_tokens=9)


def test_it_ends_at_the_ids_of_the_model_or_at_others(model: Transformer):
    whole = list(model.stream([5], max_tokens=9, sampling=DRAWN))
    model.eos_ids = {whole[3]}
    ended = model.stream([5], max_tokens=9, sampling=DRAWN)
    assert list(ended) == whole[: whole.index(whole[3])]
    assert ended.finish_reason == "stop"
    assert model.generate([5], max_tokens=9, sampling=DRAWN) == [5, *ended.tokens]
    assert list(model.stream([5], max_tokens=9, sampling=DRAWN, stop_ids=())) == whole


def test_it_ends_before_a_stop_string(model: Transformer):
    whole = "".join(model.stream("né", max_tokens=40, sampling=DRAWN))
    stop = whole[12:15]
    ids = model._ids("né")
    stream = TextStream(model.stream(ids, max_tokens=40, sampling=DRAWN), model.tokenizer, ids, ["not in it", stop])
    assert "".join(stream) == whole[: whole.index(stop)]
    assert stream.finish_reason == "stop"
    assert len(stream.tokens) < 40
    assert model.generate("né", max_tokens=40, sampling=DRAWN, stop=stop) == "né" + whole[: whole.index(stop)]
    assert "".join(model.stream("né", max_tokens=40, sampling=DRAWN, stop=["not in it", stop])) == whole[: whole.index(stop)]
    for wrong in (5, [5]):
        with pytest.raises(InputError, match="expected a text or several, or pass ids"):
            model.generate("a", stop=wrong)
    with pytest.raises(InputError, match="pass stop_ids"):
        model.generate(ids, stop=stop)


def test_only_ids_of_the_tokenizer_are_drawn(model: Transformer):
    assert max(model.generate([5], max_tokens=100, sampling=DRAWN)) < 256


def test_cancelled_it_ends(model: Transformer):
    stream = model.stream("né", max_tokens=50, sampling=DRAWN)
    next(stream)
    stream.cancel()
    assert stream.finish_reason == "cancelled"
    count = len(stream.tokens)
    assert len("".join(stream)) <= 1  # the replacement of a character that was not completed
    assert len(stream.tokens) == count < 50


def test_it_asks_before_every_token_whether_it_is_cancelled(model: Transformer):
    asked = []

    def third() -> bool:
        asked.append(len(stream.tokens))
        return len(asked) == 3

    ids = list("né".encode())
    stream = TextStream(model.stream(ids, max_tokens=50, sampling=DRAWN), model.tokenizer, ids, ["x" * 60], cancelled=third)
    assert len("".join(stream)) <= 3  # a stop string keeps back what may be its beginning, so there may be no piece before
    assert asked[:3] == [0, 1, 2]
    assert (stream.finish_reason, len(stream.tokens)) == ("cancelled", 2)


def test_a_text_is_enough(model: Transformer):
    model.sampling = Sampling(temperature=0)
    greedy = model.generate([5], max_tokens=200, sampling=Sampling(temperature=0))
    assert model.generate("\x05") == model.tokenizer.decode(greedy)
    assert model.generate(iter([5])) == greedy


def test_a_text_needs_a_tokenizer(model: Transformer):
    model._tokenizer = None
    with pytest.raises(InputError, match="no tokenizer"):
        model.stream("text", max_tokens=1)
    assert len(model.generate([5], max_tokens=1)) == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "5"}, "max_tokens must be an integer, got '5'"),
    ({"max_tokens": 2.5}, "max_tokens must be an integer, got 2.5"),
    ({"max_tokens": None}, "max_tokens must be an integer, got None"),
    ({"sampling": {"temperature": 0}}, "sampling must be a Sampling, got {'temperature': 0}"),
    ({"stop_ids": 3}, "stop_ids must be a collection of token ids, got 3"),
    ({"stop_ids": ["."]}, r"stop_ids must be a collection of token ids, got \['.'\]"),
    ({"prompt": 7}, "prompt must be a text or token ids, got 7"),
    ({"prompt": ["a"]}, r"prompt must be a text or token ids, got \['a'\]"),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=[str(given) for given, _ in WRONG])
def test_values_of_wrong_types(model: Transformer, given: dict[str, Any], says: str):
    for method in (model.generate, model.stream):
        with pytest.raises(ConfigError, match=says):
            method(**({"prompt": "text"} | given))


def test_an_engine_checks_them_too(model: Transformer):
    with pytest.raises(ConfigError, match="stop must be a collection of token ids"):
        Engine(model).submit([1], max_tokens=1, stop="ab")
    assert Engine(model).submit([1], max_tokens=np.int64(1), stop={np.int32(3)}).finish_reason is None
