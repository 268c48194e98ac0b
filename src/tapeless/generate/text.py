"""A model's methods `generate` and `stream`, and a stream of text.

    for piece in model.stream("Once ", max_tokens=200):
        print(piece, end="", flush=True)
Tested by: tests/generate/test_text.py."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from tapeless.config import Sampling
from tapeless.errors import InputError
from tapeless.generate.engine import Engine, Stream
from tapeless.generate.stop_strings import StopStrings


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
    """A model's methods for text. tapeless.load sets the tokenizer, and the ids that end a text."""

    tokenizer: Any = None
    eos_ids: Collection[int] = ()

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop: Collection[int] | None = None,
    ) -> Any:
        """The continuation while it is generated: an iterator over pieces of text if the prompt is one, else over token ids.
        Both have cancel(), `tokens` so far and `finish_reason` (length, stop, cancelled; None while it runs). stop: ids that
        end it, by default the model's own."""
        ids = self._ids(prompt)
        V = self.tokenizer.vocab_size if self.tokenizer else None
        model: Any = self
        engine = Engine(model, capacity=len(ids) + max_tokens, vocab_size=V)
        stop = self.eos_ids if stop is None else stop
        tokens = engine.submit(ids, max_tokens=max_tokens, sampling=sampling, stop=stop)
        return TextStream(tokens, self.tokenizer, ids) if isinstance(prompt, str) else tokens

    def generate(self, prompt: str | Iterable[int], *, max_tokens: int, sampling: Sampling | None = None) -> Any:
        """The prompt and its continuation: as text if the prompt is one, else as a list of token ids."""
        ids = self._ids(prompt)
        ids += self.stream(ids, max_tokens=max_tokens, sampling=sampling)
        return self.tokenizer.decode(ids) if isinstance(prompt, str) else ids

    def _ids(self, prompt: str | Iterable[int]) -> list[int]:
        if isinstance(prompt, str) and self.tokenizer is None:
            raise InputError("this model has no tokenizer, so it cannot continue a text; pass token ids")
        return [int(i) for i in (self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt)]
