"""A model's methods `generate` and `stream`, and a stream of text.

    for piece in model.stream("Once ", max_tokens=200):
        print(piece, end="", flush=True)
Tested by: tests/generate/test_text.py."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, overload

import numpy as np

from tapeless.config import MAX_TOKENS, Sampling
from tapeless.errors import WRONG_TYPE, InputError
from tapeless.generate.engine import Engine, Stream, check_options
from tapeless.generate.stop_strings import StopStrings


class TextTokenizer(Protocol):
    """What generation and its callers need of a tokenizer (data/tokenizer.py)."""

    vocab_size: int
    special: dict[str, int]  # the ids of special tokens by name

    def encode(self, text: str) -> np.ndarray: ...  # (n,) int64
    def encode_prompt(self, text: str) -> np.ndarray: ...  # (n,) int64: with the token that begins a text, if there is one
    def decode(self, ids: Iterable[int]) -> str: ...
    def stream(self) -> Any: ...  # decodes ids as they arrive


class TextStream:
    """A stream of tokens as pieces of text: a character is returned when it is complete, and no part of a stop string."""

    def __init__(
        self,
        stream: Stream,
        tokenizer: Any,
        prompt: Iterable[int],
        stop: Sequence[str] = (),
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ):
        """prompt: the ids before the stream's, which may end within a character. stop: strings that end the new text and are
        not part of it. cancelled: polled before every token, of which many may not yet be a piece of text."""
        self._stops, self._cancelled = StopStrings(stop), cancelled
        self._stream, self._decoder = stream, tokenizer.stream()
        self.prompt = "".join(map(self._decoder.push, prompt))  # its text
        self._ended = False

    @property
    def tokens(self) -> list[int]:
        return self._stream.tokens

    @property
    def finish_reason(self) -> str | None:
        return "stop" if self._stops.found else self._stream.finish_reason

    def __iter__(self) -> "TextStream":
        return self

    def __next__(self) -> str:
        while True:
            if self._cancelled():
                self.cancel()
            token = next(self._stream, None)
            if token is None:
                break
            piece = self._stops.push(self._decoder.push(token))
            if self._stops.found:
                self.cancel()
            if piece:
                return piece
        rest = "" if self._ended else self._stops.push(self._decoder.finish()) + self._stops.finish()
        self._ended = True
        if not rest:
            raise StopIteration
        return rest

    def cancel(self) -> None:
        self._stream.cancel()


class Generates:
    """A model's methods for text. tapeless.load and tapeless.train set the tokenizer, the ids that end a text, and the sampling
    that the model's publisher recommends."""

    _tokenizer: TextTokenizer | None = None
    eos_ids: Collection[int] = ()
    sampling = Sampling()

    @property
    def tokenizer(self) -> TextTokenizer:
        """Text to token ids and back: encode, decode, vocab_size, special."""
        if self._tokenizer is None:
            raise InputError("this model has no tokenizer, so it takes token ids only; a model of tapeless.load has its run's")
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    @overload
    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = ...,
        sampling: Sampling | None = ...,
        stop: str | Sequence[str] = ...,
        stop_ids: Collection[int] | None = ...,
    ) -> TextStream: ...
    @overload
    def stream(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int = ...,
        sampling: Sampling | None = ...,
        stop_ids: Collection[int] | None = ...,
    ) -> Stream: ...
    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Collection[int] | None = None,
    ) -> TextStream | Stream:
        """The continuation while it is generated: an iterator over pieces of text if the prompt is a text, else over token ids.
        Both have cancel(), `tokens` so far and `finish_reason` (length, stop, cancelled; None while it runs).

        prompt: a text, or token ids. max_tokens: the most to add. sampling: how tokens are drawn; default model.sampling. stop:
        a text or several; the new text ends before the first of them. stop_ids: ids that end it; default model.eos_ids."""
        ids = self._ids(prompt)
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
            raise InputError(f"stop is {stop!r}; expected a text or several, or pass ids as stop_ids")
        if stop and not isinstance(prompt, str):
            raise InputError("stop is a text, and this prompt is token ids; pass stop_ids, or the prompt as text")
        ends = self.eos_ids if stop_ids is None else stop_ids
        check_options(max_tokens, sampling, stop_ids=ends)
        V = self._tokenizer.vocab_size if self._tokenizer else None
        model: Any = self
        engine = Engine(model, capacity=len(ids) + max_tokens, vocab_size=V)
        tokens = engine.submit(ids, max_tokens=max_tokens, sampling=sampling or self.sampling, stop=ends)
        return TextStream(tokens, self.tokenizer, ids, stops) if isinstance(prompt, str) else tokens

    @overload
    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = ...,
        sampling: Sampling | None = ...,
        stop: str | Sequence[str] = ...,
        stop_ids: Collection[int] | None = ...,
    ) -> str: ...
    @overload
    def generate(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int = ...,
        sampling: Sampling | None = ...,
        stop_ids: Collection[int] | None = ...,
    ) -> list[int]: ...
    def generate(
        self,
        prompt: str | Iterable[int],
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Collection[int] | None = None,
    ) -> str | list[int]:
        """The prompt and its continuation: as text if the prompt is one, else as a list of token ids. The
        arguments are those of stream()."""
        given: Any = prompt if isinstance(prompt, str) else self._ids(prompt)  # ids may be an iterator
        stream = self.stream(given, max_tokens=max_tokens, sampling=sampling, stop=stop, stop_ids=stop_ids)
        return "".join([stream.prompt, *stream]) if isinstance(stream, TextStream) else [*given, *stream]

    def _ids(self, prompt: str | Iterable[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode_prompt(prompt).tolist()
        try:
            return [int(i) for i in prompt]
        except (TypeError, ValueError):
            raise WRONG_TYPE(name="prompt", expected="a text or token ids", got=prompt) from None
